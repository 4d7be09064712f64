//! Waiting: locks, deadlines, futexes, and doorbells that a peer in another thread or process can ring.

use std::cell::Cell;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sync::{AtomicU32, Instant, futex};

/// The longest time that a wait sleeps before it checks the group's failure state ([`crate::health::GroupHealth`]) and
/// its deadline again. After an abort, every wait therefore ends within this time even if nobody wakes it.
pub const SLICE: Duration = Duration::from_millis(20);

/// Up to this number of ranks per processor, every rank checks once per [`SLICE`]. With more ranks, checks are rarer.
const CROWD: usize = 32;

/// The longest slice as a multiple of [`SLICE`].
const LONGEST: usize = 16;

/// Returns the slice for a host with this number of ranks. If many ranks share a processor, the slice is longer than
/// [`SLICE`], so that checking for failures takes only a few percent of the processor's time.
pub fn slice_among(ranks: usize) -> Duration {
    slice_on(ranks, processors())
}

/// Returns the number of processors that this process may use. Computed once, because it takes reading several files.
pub fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn slice_on(ranks: usize, processors: usize) -> Duration {
    SLICE * ranks.div_ceil(CROWD * processors).clamp(1, LONGEST) as u32
}

/// Locks a mutex, even if a thread panicked while holding it. Callers keep their data valid between any two statements.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on a condition variable until it is notified. May return early. Accepts a poisoned mutex, as [`lock`] does.
pub fn wait_on<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits on a condition variable like [`wait_on`], for at most `timeout`.
pub fn wait_on_for<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>, timeout: Duration) -> MutexGuard<'a, T> {
    changed.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0
}

/// The time by which an operation must be done.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    /// Creates a deadline this far in the future.
    pub fn after(limit: Duration) -> Deadline {
        Deadline { start: Instant::now(), limit }
    }

    /// Returns the duration that the deadline was created with.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Returns the time left, or zero once the deadline has passed.
    pub fn left(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    /// True once the deadline has passed.
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }
}

/// The outcome of a wait of limited length.
#[derive(Debug, PartialEq)]
#[must_use]
pub enum Waited<T> {
    /// The operation is done, with this result.
    Done(Result<T>),
    /// The operation was not done at the end of the wait. Nothing failed.
    Pending,
}

/// Returns the length of the next slice of a wait that has lasted for `lasted` so far: an eighth of that time, but at
/// least `slice` and at most four times `slice`.
pub fn lengthened(slice: Duration, lasted: Duration) -> Duration {
    slice.max(lasted / 8).min(slice.saturating_mul(4))
}

/// Waits for an operation for at most `timeout` (`None`: until it is done), in slices that grow with the time waited.
///
/// Calls `between` after each slice, and therefore also before it returns a timeout. An error from `between` ends the
/// wait but leaves the operation running. `wait` must wait for at most its argument. `timed_out` creates the error if
/// `timeout` passes, and is called in no other case. The result is that of a single wait of length `timeout`.
pub fn wait_in_slices<T, E>(
    timeout: Option<Duration>,
    slice: Duration,
    mut wait: impl FnMut(Duration) -> Waited<T>,
    mut between: impl FnMut() -> std::result::Result<(), E>,
    timed_out: impl FnOnce(Duration) -> Error,
) -> std::result::Result<Result<T>, E> {
    let start = Instant::now();
    loop {
        let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
        let slice = lengthened(slice, start.elapsed());
        match wait(left.map_or(slice, |left| left.min(slice))) {
            Waited::Done(result) => return Ok(result),
            Waited::Pending => between()?,
        }
        if let (Some(limit), Some(left)) = (timeout, left)
            && left <= slice
        {
            return Ok(Err(timed_out(limit)));
        }
    }
}

/// Waits for an operation like [`wait_in_slices`], but in a single wait of at most `timeout` (`None`: until the
/// operation is done).
pub fn wait_once<T>(
    timeout: Option<Duration>,
    wait: impl FnMut(Duration) -> Waited<T>,
    timed_out: impl FnOnce(Duration) -> Error,
) -> Result<T> {
    match wait_in_slices(timeout, Duration::MAX, wait, || Ok::<(), Infallible>(()), timed_out) {
        Ok(result) => result,
        Err(never) => match never {},
    }
}

/// A wrapper around a blocking wait. The wrapper must call its argument exactly once.
pub type BlockingHook = fn(&mut (dyn FnMut() + Send));

thread_local! {
    /// The hook of this thread. Without a hook, blocking waits run directly.
    static BLOCKING_HOOK: Cell<Option<BlockingHook>> = const { Cell::new(None) };
}

/// Runs `work`, and runs every blocking wait inside `work` on this thread through `hook`.
///
/// A caller that holds an interpreter's lock can thus keep it throughout a short operation, while its hook releases the
/// lock only around a wait.
pub fn with_blocking_hook<T>(hook: BlockingHook, work: impl FnOnce() -> T) -> T {
    struct Restore(Option<BlockingHook>);
    impl Drop for Restore {
        fn drop(&mut self) {
            BLOCKING_HOOK.set(self.0);
        }
    }
    let _restore = Restore(BLOCKING_HOOK.replace(Some(hook)));
    work()
}

/// Runs a wait that may take longer than a spin through this thread's hook.
pub fn blocking_wait(mut wait: impl FnMut() + Send) {
    match BLOCKING_HOOK.get() {
        None => wait(),
        Some(hook) => hook(&mut wait),
    }
}

/// Sleeps while `*word == seen`, for at most `timeout`. May return early. Works across processes on shared memory.
pub fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    // After every outcome (woken, changed, timed out, interrupted), the caller checks its condition again.
    blocking_wait(|| futex::wait(word, seen, timeout));
}

/// Wakes every thread that waits on `word`, in every process.
pub fn futex_wake(word: &AtomicU32) {
    futex::wake(word);
}

/// The two words of a doorbell. Threads share them in an `Arc`, processes in an arena.
pub trait BellWords: Send + Sync {
    /// Returns the counter of rings and the number of sleeping threads.
    fn words(&self) -> (&AtomicU32, &AtomicU32);
}

/// The words of a doorbell between threads of one process.
#[derive(Debug, Default)]
pub struct ThreadBell {
    rings: AtomicU32,
    sleepers: AtomicU32,
}

impl BellWords for ThreadBell {
    fn words(&self) -> (&AtomicU32, &AtomicU32) {
        (&self.rings, &self.sleepers)
    }
}

/// A counter that peers increase after every change that the doorbell's owner may be waiting for.
///
/// The owner reads [`Doorbell::rings`], looks for work, and if there is none calls [`Doorbell::wait`] with the value it
/// read. A ring in between makes the wait return at once, so no ring is missed.
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use bagua_net::wait::Doorbell;
///
/// let bell = Doorbell::local();
/// let seen = bell.rings();
/// bell.ring();
/// // The ring came after the reading, so the wait returns at once.
/// bell.wait(seen, Duration::from_secs(60));
/// assert_ne!(bell.rings(), seen);
/// ```
#[derive(Clone)]
pub struct Doorbell {
    words: Arc<dyn BellWords>,
}

impl Doorbell {
    /// Creates a doorbell on these words.
    pub fn new(words: Arc<dyn BellWords>) -> Doorbell {
        Doorbell { words }
    }

    /// Creates a doorbell for threads of this process.
    pub fn local() -> Doorbell {
        Doorbell::new(Arc::new(ThreadBell::default()))
    }

    /// Returns the number of rings so far (modulo 2^32).
    #[inline]
    pub fn rings(&self) -> u32 {
        self.words.words().0.load(Ordering::Acquire)
    }

    /// Increases the counter and wakes all sleeping threads. Makes no system call if no thread sleeps.
    #[inline]
    pub fn ring(&self) {
        let (rings, sleepers) = self.words.words();
        rings.fetch_add(1, Ordering::SeqCst);
        if sleepers.load(Ordering::SeqCst) > 0 {
            futex_wake(rings);
        }
    }

    /// Sleeps until the counter differs from `seen`, for at most `timeout`. May return early.
    pub fn wait(&self, seen: u32, timeout: Duration) {
        let (rings, sleepers) = self.words.words();
        sleepers.fetch_add(1, Ordering::SeqCst);
        if rings.load(Ordering::SeqCst) == seen {
            futex_wait(rings, seen, timeout);
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, model))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_look_less_often_the_more_of_them_share_a_processor() {
        for (ranks, processors, slices) in
            [(1, 2, 1), (64, 2, 1), (65, 2, 2), (256, 2, 4), (1024, 2, 16), (1024, 64, 1)]
        {
            assert_eq!(slice_on(ranks, processors), SLICE * slices, "{ranks} ranks on {processors} processors");
        }
        assert_eq!(slice_on(1 << 20, 1), SLICE * LONGEST as u32);
    }

    #[test]
    fn a_ring_between_the_check_and_the_wait_is_not_missed() {
        let bell = Doorbell::local();
        let seen = bell.rings();
        bell.ring();
        let start = Instant::now();
        bell.wait(seen, Duration::from_secs(60));
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_ring_from_another_thread_wakes_a_sleeping_thread() {
        let bell = Doorbell::local();
        let seen = bell.rings();
        let ringer = {
            let bell = bell.clone();
            std::thread::spawn(move || bell.ring())
        };
        while bell.rings() == seen {
            bell.wait(seen, Duration::from_secs(60));
        }
        ringer.join().unwrap();
        assert_eq!(bell.rings(), seen.wrapping_add(1));
    }

    #[test]
    fn the_blocking_hook_wraps_blocking_waits_and_ends_with_the_work() {
        thread_local!(static CALLS: Cell<u32> = const { Cell::new(0) });
        let word = AtomicU32::new(7);
        let wait = || futex_wait(&word, 7, Duration::from_millis(1));
        with_blocking_hook(
            |wait| {
                CALLS.set(CALLS.get() + 1);
                wait();
            },
            || {
                assert_eq!(CALLS.get(), 0);
                wait();
                wait();
            },
        );
        assert_eq!(CALLS.get(), 2);
        wait();
        assert_eq!(CALLS.get(), 2, "the hook outlived the work");
    }

    const LONG: Duration = Duration::from_secs(60);

    fn never_times_out(_: Duration) -> Error {
        panic!("no timeout passed")
    }

    #[test]
    fn an_operation_that_is_done_between_two_slices_returns_its_result() {
        for timeout in [None, Some(LONG)] {
            for result in [Ok(7), Err(Error::Aborted("by a peer".to_owned()))] {
                let (done, waits) = (Cell::new(false), Cell::new(0));
                let wait = |limit| {
                    assert_eq!(limit, Duration::ZERO);
                    waits.set(waits.get() + 1);
                    if done.get() { Waited::Done(result.clone()) } else { Waited::Pending }
                };
                let between = || {
                    done.set(waits.get() == 3);
                    Ok::<(), ()>(())
                };
                let waited = wait_in_slices(timeout, Duration::ZERO, wait, between, never_times_out);
                assert_eq!((waited, waits.get()), (Ok(result.clone()), 4));
            }
        }
    }

    #[test]
    fn a_timeout_of_the_operation_is_returned_as_it_is() {
        let own = Error::Timeout { after: LONG, missing: vec![1], noticed_by: 0, progress: None };
        let wait = |_| Waited::<()>::Done(Err(own.clone()));
        let between = || Ok::<(), ()>(());
        let waited = wait_in_slices(Some(Duration::ZERO), Duration::ZERO, wait, between, never_times_out);
        assert_eq!(waited, Ok(Err(own.clone())));
        assert_eq!(wait_once(None, wait, never_times_out), Err(own.clone()));
    }

    #[test]
    fn a_timeout_that_passes_ends_the_wait_after_what_runs_between_slices() {
        let timed_out = |after| Error::Timeout { after, missing: vec![], noticed_by: 3, progress: None };
        for timeout in [Duration::ZERO, Duration::from_millis(1)] {
            let ran = Cell::new(0);
            let between = || {
                ran.set(ran.get() + 1);
                Ok::<(), ()>(())
            };
            let wait = |_| Waited::<()>::Pending;
            let waited = wait_in_slices(Some(timeout), Duration::ZERO, wait, between, timed_out);
            assert_eq!(waited, Ok(Err(timed_out(timeout))));
            assert!(ran.get() > 0);
            assert_eq!(wait_once(Some(timeout), wait, timed_out), Err(timed_out(timeout)));
        }
    }

    #[test]
    fn an_error_between_two_slices_ends_the_wait() {
        for timeout in [None, Some(LONG), Some(Duration::ZERO)] {
            let wait = |_| Waited::<()>::Pending;
            let waited = wait_in_slices(timeout, Duration::ZERO, wait, || Err("Ctrl-C"), never_times_out);
            assert_eq!(waited, Err("Ctrl-C"));
        }
    }

    #[test]
    fn a_poisoned_mutex_can_be_locked_and_waited_on() {
        let pair = (Mutex::new(1), Condvar::new());
        let panicked = std::thread::scope(|scope| {
            let poison = scope.spawn(|| {
                let _guard = pair.0.lock().unwrap();
                panic!("expected");
            });
            poison.join().is_err()
        });
        assert!(panicked && pair.0.is_poisoned());
        *lock(&pair.0) += 1;
        assert_eq!(*wait_on_for(&pair.1, lock(&pair.0), Duration::from_millis(1)), 2);
        std::thread::scope(|scope| {
            let mut guard = lock(&pair.0);
            scope.spawn(|| {
                *lock(&pair.0) = 3;
                pair.1.notify_all();
            });
            while *guard != 3 {
                guard = wait_on(&pair.1, guard);
            }
        });
    }

    #[test]
    fn a_deadline_passes_and_returns_its_limit() {
        let deadline = Deadline::after(Duration::ZERO);
        assert!(deadline.passed());
        assert!(!Deadline::after(Duration::from_secs(60)).passed());
        assert_eq!(Deadline::after(Duration::from_secs(60)).limit(), Duration::from_secs(60));
    }
}
