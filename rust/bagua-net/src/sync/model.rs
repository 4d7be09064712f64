//! Runner of the models.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Preemptions in a model of two threads, unless `LOOM_MAX_PREEMPTIONS` is set.
const PREEMPTIONS: usize = 2;

/// Number of executions between two readings of the clock, used by loom if `LOOM_MAX_DURATION` is set.
const UNTIMED: usize = 500;

/// Runs `model` once for every interleaving of its threads and every value that their loads may return, with at most
/// two preemptions (or `LOOM_MAX_PREEMPTIONS`). Prints the number of executions.
pub fn explore(model: impl Fn() + Send + Sync + 'static) {
    explore_with(false, 0, model);
}

/// Explores a model like [`explore`], but `Acquire` loads return only the latest value. For models that are too large
/// for [`explore`].
///
/// If every word loaded with `Acquire` only counts upwards, this loses no behaviour: an older value is what the thread
/// would have seen by loading earlier. Accesses that these loads do not order are still found to be unordered.
pub fn explore_latest(model: impl Fn() + Send + Sync + 'static) {
    explore_with(true, 0, model);
}

/// Explores a model like [`explore_latest`], with one preemption fewer. For three ranks, which have many more
/// interleavings than two.
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
    // When loom gives up, it does so before the last execution of an interval.
    let cut_off = builder.max_duration.is_some_and(|most| took >= most) && (runs + 1).is_multiple_of(UNTIMED);
    if cut_off {
        // eprintln would not do: the test harness captures its output.
        let _ = writeln!(std::io::stderr(), "INCOMPLETE, LOOM_MAX_DURATION is over: {text}");
    } else {
        println!("{text}");
    }
}
