//! Runs a model, and tries what the models build on: this room's own stand-ins for what loom does not have.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

use loom::thread;

use super::{AtomicU32, futex};

/// Preemptions of a model of two threads, where `LOOM_MAX_PREEMPTIONS` does not say another number.
const PREEMPTIONS: usize = 2;

/// How many executions loom runs between two looks at the clock, where `LOOM_MAX_DURATION` is set.
const UNTIMED: usize = 500;

/// Runs `model` once for every order of its threads' steps and every value that its loads may return, with at most two
/// preemptions (or `LOOM_MAX_PREEMPTIONS`), and prints how many there were.
pub(crate) fn explore(model: impl Fn() + Send + Sync + 'static) {
    explore_with(false, 0, model);
}

/// The same, but `Acquire` loads return the latest value only: for models that are too large for all of them. Where every word that
/// is so loaded counts upwards, an older value is what the thread would have seen earlier, and no other behaviour is lost. What is not
/// ordered by the words that were loaded is found as in [`explore`].
pub(crate) fn explore_latest(model: impl Fn() + Send + Sync + 'static) {
    explore_with(true, 0, model);
}

/// As [`explore_latest`], with one preemption fewer: for three ranks, which have many more orders than two.
pub(crate) fn explore_three(model: impl Fn() + Send + Sync + 'static) {
    explore_with(true, 1, model);
}

fn explore_with(latest: bool, fewer: usize, model: impl Fn() + Send + Sync + 'static) {
    super::loom::LATEST.set(latest);
    let mut builder = loom::model::Builder::new();
    let preemptions = builder.preemption_bound.unwrap_or(PREEMPTIONS).saturating_sub(fewer);
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = builder.max_branches.max(10_000);
    builder.checkpoint_interval = UNTIMED;
    let runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&runs);
    let begun = Instant::now();
    builder.check(move || {
        counter.fetch_add(1, Relaxed);
        super::loom::prepare();
        model();
    });
    let (runs, took) = (runs.load(Relaxed), begun.elapsed());
    let thread = std::thread::current();
    let text = format!(
        "{} executions with at most {preemptions} preemptions in {:.1} s: {}",
        runs,
        took.as_secs_f64(),
        thread.name().unwrap_or("a model")
    );
    // Where loom gives up it does so before the last execution of an interval.
    let cut_off = builder.max_duration.is_some_and(|most| took >= most) && (runs + 1).is_multiple_of(UNTIMED);
    if cut_off {
        // Not by eprintln: the test harness would keep it to itself.
        let _ = writeln!(std::io::stderr(), "INCOMPLETE, LOOM_MAX_DURATION is over: {text}");
    } else {
        println!("{text}");
    }
}

/// Two threads that each write one word and then load the other: true when loom found an order in which neither saw the other's write.
fn neither_sees_the_other(writes: [Ordering; 2], loads: [Ordering; 2]) -> bool {
    let found = Arc::new(AtomicUsize::new(0));
    let neither = Arc::clone(&found);
    explore(move || {
        let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let side = |me: usize| {
            let words = Arc::clone(&words);
            move || {
                words[me].fetch_add(1, writes[me]);
                words[1 - me].load(loads[me])
            }
        };
        let other = thread::spawn(side(1));
        let seen = side(0)() + other.join().unwrap();
        neither.fetch_add(usize::from(seen == 0), Relaxed);
    });
    found.load(Relaxed) > 0
}

#[test]
fn sequential_consistency_needs_all_four_accesses() {
    assert!(!neither_sees_the_other([SeqCst; 2], [SeqCst; 2]));
    assert!(neither_sees_the_other([SeqCst, Release], [SeqCst; 2]));
    assert!(neither_sees_the_other([Relaxed, SeqCst], [SeqCst; 2]));
    assert!(neither_sees_the_other([SeqCst; 2], [SeqCst, Acquire]));
    assert!(neither_sees_the_other([SeqCst; 2], [Relaxed, SeqCst]));
}

#[test]
fn a_futex_does_not_sleep_on_a_word_that_has_changed() {
    explore(|| {
        let word = Arc::new(AtomicU32::new(0));
        let waker = {
            let word = Arc::clone(&word);
            thread::spawn(move || {
                word.fetch_add(1, Relaxed);
                futex::wake(&word);
            })
        };
        while word.load(Relaxed) == 0 {
            futex::wait(&word, 0, Duration::ZERO);
        }
        waker.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_futex_that_is_woken_without_a_change_of_its_word_may_miss_it() {
    explore(|| {
        let (word, flag) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let waker = {
            let (word, flag) = (Arc::clone(&word), Arc::clone(&flag));
            thread::spawn(move || {
                flag.store(1, Release);
                futex::wake(&word);
            })
        };
        while flag.load(Acquire) == 0 {
            futex::wait(&word, 0, Duration::ZERO);
        }
        waker.join().unwrap();
    });
}

/// One thread writes shared memory and then sets a word with `store`, the other reads the memory when it has seen that with `load`.
fn hand_over(store: Ordering, load: Ordering) {
    static MEMORY: [u8; 256] = [0; 256];
    explore(move || {
        let word = Arc::new(AtomicU32::new(0));
        let writer = {
            let word = Arc::clone(&word);
            thread::spawn(move || {
                super::writes(&MEMORY[..100]);
                word.store(1, store);
            })
        };
        if word.load(load) == 1 {
            super::reads(&MEMORY[50..]);
        }
        writer.join().unwrap();
    });
}

#[test]
fn shared_memory_may_be_handed_over() {
    hand_over(Release, Acquire);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn shared_memory_that_is_handed_over_without_release_is_found() {
    hand_over(Relaxed, Acquire);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn shared_memory_that_is_handed_over_without_acquire_is_found() {
    hand_over(Release, Relaxed);
}
