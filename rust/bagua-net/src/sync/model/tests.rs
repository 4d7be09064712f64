//! Tests of the replacements for what loom does not have, on which the models depend.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;

use loom::thread;

use super::super::{AtomicU32, futex};
use super::explore;

/// Runs two threads that each write one word and then load the other. True if loom found an order in which neither saw
/// the other's write.
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

/// One thread writes shared memory and then sets a word with `store`. The other reads the memory after it saw the word
/// with `load`.
fn hand_over(store: Ordering, load: Ordering) {
    static MEMORY: [u8; 256] = [0; 256];
    explore(move || {
        let word = Arc::new(AtomicU32::new(0));
        let writer = {
            let word = Arc::clone(&word);
            thread::spawn(move || {
                super::super::writes(&MEMORY[..100]);
                word.store(1, store);
            })
        };
        if word.load(load) == 1 {
            super::super::reads(&MEMORY[50..]);
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
