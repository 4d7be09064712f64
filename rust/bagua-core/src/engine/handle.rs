//! A job that may still be running, and its result.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::group::OwnerProcess;
use crate::sync::{Arc, AtomicBool, Condvar, Instant, Mutex, fence, spin_loop};
use crate::wait::{Waited, wait_in_slices, wait_once};

/// How long a waiter spins before it sleeps. A sleep and a wake cost about 5 us; a training thread that spins for longer takes
/// the time from the communication thread where cores are few.
const SPIN: Duration = Duration::from_micros(20);

/// The outcome of a job, now or later. Cheap to clone; every clone gets the same result.
#[derive(Clone)]
pub struct Handle {
    outcome: Arc<Outcome>,
}

struct Outcome {
    /// Set once, by the thread that ran or dropped the job.
    result: Mutex<Option<Result<()>>>,
    /// Mirror of `result.is_some()` for the spin.
    done: AtomicBool,
    /// Somebody has seen the result, so an error in it need not reach the next call.
    seen: AtomicBool,
    /// Wakes the waiters.
    ready: Condvar,
    /// World rank for error texts.
    rank: usize,
    /// The process whose thread will set the result.
    owner: OwnerProcess,
}

impl Handle {
    /// A job that is not done. `rank` is the world rank that a timeout names.
    pub(super) fn pending(rank: usize) -> Handle {
        Handle {
            outcome: Arc::new(Outcome {
                result: Mutex::new(None),
                done: AtomicBool::new(false),
                seen: AtomicBool::new(false),
                ready: Condvar::new(),
                rank,
                owner: OwnerProcess::current(),
            }),
        }
    }

    /// Waits until the job is done, at most `timeout` (`None`: until the operation's own deadline ends it). `Timeout` with `after`
    /// equal to `timeout` leaves the job running.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        wait_once(timeout, |limit| self.wait_for(limit), |after| self.timed_out(after))
    }

    /// As [`Handle::wait`], in slices: see [`wait_in_slices`].
    pub fn wait_in_slices<E>(
        &self,
        timeout: Option<Duration>,
        slice: Duration,
        between: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Result<()>, E> {
        wait_in_slices(timeout, slice, |limit| self.wait_for(limit), between, |after| self.timed_out(after))
    }

    /// Waits until the job is done, at most `limit`.
    pub fn wait_for(&self, limit: Duration) -> Waited<()> {
        let start = Instant::now();
        while !self.is_completed() && start.elapsed() < SPIN.min(limit) {
            spin_loop();
        }
        if !self.is_completed() && !self.outcome.owner.is_current() {
            return Waited::Done(Err(forked()));
        }
        let mut result = self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = &*result {
                self.outcome.seen.store(true, Ordering::Release);
                return Waited::Done(result.clone());
            }
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Waited::Pending;
            }
            result = self.outcome.ready.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The error of a wait whose timeout passed.
    fn timed_out(&self, after: Duration) -> Error {
        timed_out(after, self.outcome.rank)
    }

    /// True when it is done, well or not.
    pub fn is_completed(&self) -> bool {
        self.outcome.done.load(Ordering::Acquire)
    }

    /// Sets the result and wakes all waiters. Called once.
    pub(super) fn finish(&self, result: Result<()>) {
        let mut place = self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Some(result);
        // Under the lock: a thread that has read the result also reads `is_completed` as true.
        self.outcome.done.store(true, Ordering::Release);
        drop(place);
        self.outcome.ready.notify_all();
    }

    /// The error that was not read and, because this is the last handle of the job, cannot be read any more.
    pub(super) fn lost_error(&self) -> Option<Error> {
        if Arc::strong_count(&self.outcome) > 1 {
            return None;
        }
        // Counting orders nothing by itself. Whoever dropped the other handles may have seen the result before, on another thread; a
        // processor that looked at `seen` first would report the error twice.
        fence(Ordering::Acquire);
        if self.outcome.seen.load(Ordering::Relaxed) {
            return None;
        }
        self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner).clone()?.err()
    }

    /// True when there is nothing to keep it for: it was seen.
    pub(super) fn was_seen(&self) -> bool {
        self.outcome.seen.load(Ordering::Acquire)
    }
}

/// The error of a wait for the communication thread whose timeout passed.
pub(super) fn timed_out(after: Duration, noticed_by: usize) -> Error {
    Error::Timeout { after, missing: vec![], noticed_by, progress: None }
}

/// What every call in a forked child gets.
pub(super) fn forked() -> Error {
    Error::other("this process was forked from the one that built the group; build a group of its own")
}

#[cfg(all(test, model))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    /// What a job may end with; a timeout of the job among it.
    fn outcomes() -> Vec<Result<()>> {
        let own = Error::Timeout { after: Duration::ZERO, missing: vec![1], noticed_by: 0, progress: None };
        vec![Ok(()), Err(own), Err(Error::Aborted("by a peer".to_owned()))]
    }

    #[test]
    fn a_waiter_that_gets_the_result_sees_the_job_completed() {
        let handles: Vec<Handle> = (0..100_000).map(|_| Handle::pending(0)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| handles.iter().for_each(|handle| handle.finish(Ok(()))));
            for (job, handle) in handles.iter().enumerate() {
                while handle.wait_for(Duration::ZERO) == Waited::Pending {}
                assert!(handle.is_completed(), "job {job}");
            }
        });
    }

    #[test]
    fn a_job_that_ends_between_two_slices_gives_its_result_to_the_waiter() {
        for outcome in outcomes() {
            for timeout in [None, Some(Duration::from_secs(60))] {
                let handle = Handle::pending(0);
                let mut slices = 0;
                let end_third = || {
                    slices += 1;
                    if slices == 3 {
                        handle.finish(outcome.clone());
                    }
                    Ok::<(), ()>(())
                };
                let waited = handle.wait_in_slices(timeout, Duration::ZERO, end_third);
                assert_eq!((waited, slices), (Ok(outcome.clone()), 3));
            }
        }
    }

    #[test]
    fn a_job_that_ends_at_any_moment_of_a_wait_in_slices_gives_its_result_to_the_waiter() {
        for outcome in outcomes() {
            let handles: Vec<Handle> = (0..30_000).map(|_| Handle::pending(0)).collect();
            std::thread::scope(|scope| {
                scope.spawn(|| handles.iter().for_each(|handle| handle.finish(outcome.clone())));
                for (job, handle) in handles.iter().enumerate() {
                    let waited = handle.wait_in_slices(None, Duration::ZERO, || Ok::<(), ()>(()));
                    assert_eq!(waited, Ok(outcome.clone()), "job {job}");
                }
            });
        }
    }

    #[test]
    fn a_timeout_is_an_error_only_while_the_job_is_pending() {
        let handle = Handle::pending(5);
        let timeout = |after| Error::Timeout { after, missing: vec![], noticed_by: 5, progress: None };
        for limit in [Duration::ZERO, Duration::from_millis(1)] {
            assert_eq!(handle.wait(Some(limit)), Err(timeout(limit)));
            let waited = handle.wait_in_slices(Some(limit), Duration::from_secs(60), || Ok::<(), ()>(()));
            assert_eq!(waited, Ok(Err(timeout(limit))));
        }
        assert_eq!(handle.wait_in_slices(None, Duration::ZERO, || Err("Ctrl-C")), Err("Ctrl-C"));
        handle.finish(Ok(()));
        assert_eq!(handle.wait(Some(Duration::ZERO)), Ok(()));
        assert_eq!(handle.wait_in_slices(Some(Duration::ZERO), Duration::ZERO, || Err("Ctrl-C")), Ok(Ok(())));
    }
}
