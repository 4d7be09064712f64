//! Runs a model.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

#[cfg(test)]
mod tests;

/// Preemptions of a model of two threads, where `LOOM_MAX_PREEMPTIONS` does not say another number.
const PREEMPTIONS: usize = 2;

/// How many executions loom runs between two looks at the clock, where `LOOM_MAX_DURATION` is set.
const UNTIMED: usize = 500;

/// Runs `model` once for every order of its threads' steps and every value that its loads may return, with at most two
/// preemptions (or `LOOM_MAX_PREEMPTIONS`), and prints how many there were.
pub fn explore(model: impl Fn() + Send + Sync + 'static) {
    explore_with(false, 0, model);
}

/// The same, but `Acquire` loads return the latest value only: for models that are too large for all of them. Where every word that
/// is so loaded counts upwards, an older value is what the thread would have seen earlier, and no other behaviour is lost. What is not
/// ordered by the words that were loaded is found as in [`explore`].
pub fn explore_latest(model: impl Fn() + Send + Sync + 'static) {
    explore_with(true, 0, model);
}

/// As [`explore_latest`], with one preemption fewer: for three ranks, which have many more orders than two.
pub fn explore_three(model: impl Fn() + Send + Sync + 'static) {
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
