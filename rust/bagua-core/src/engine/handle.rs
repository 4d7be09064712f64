//! The outcome of a job, now or later.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::group::OwnerProcess;
use crate::sync::{Arc, AtomicBool, Condvar, Instant, Mutex, fence, spin_loop};

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

    /// Waits until the job is done, at most `timeout` (`None`: until its own deadline ends it). `Timeout` leaves the job running.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let start = Instant::now();
        while !self.is_completed() && start.elapsed() < SPIN.min(timeout.unwrap_or(SPIN)) {
            spin_loop();
        }
        if !self.is_completed() && !self.outcome.owner.is_current() {
            return Err(forked());
        }
        let mut result = self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = &*result {
                self.outcome.seen.store(true, Ordering::Release);
                return result.clone();
            }
            result = match timeout {
                None => self.outcome.ready.wait(result).unwrap_or_else(PoisonError::into_inner),
                Some(limit) => {
                    let left = limit.saturating_sub(start.elapsed());
                    if left.is_zero() {
                        let noticed_by = self.outcome.rank;
                        return Err(Error::Timeout { after: limit, missing: vec![], noticed_by, progress: None });
                    }
                    self.outcome.ready.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// True when it is done, well or not.
    pub fn is_completed(&self) -> bool {
        self.outcome.done.load(Ordering::Acquire)
    }

    /// Sets the result and wakes everybody. Called once.
    pub(super) fn finish(&self, result: Result<()>) {
        let mut place = self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Some(result);
        // Under the lock: whoever has seen the result counts this job as completed.
        self.outcome.done.store(true, Ordering::Release);
        drop(place);
        self.outcome.ready.notify_all();
    }

    /// The error that nobody saw and, because this is the last handle of the job, nobody can see any more.
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

/// What every call in a forked child gets.
pub(super) fn forked() -> Error {
    Error::System("this process was forked from the one that built the group; build a group of its own".into())
}

#[cfg(all(test, model))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_seen_the_result_sees_the_job_completed() {
        let handles: Vec<Handle> = (0..100_000).map(|_| Handle::pending(0)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| handles.iter().for_each(|handle| handle.finish(Ok(()))));
            for (job, handle) in handles.iter().enumerate() {
                while handle.wait(Some(Duration::ZERO)).is_err() {}
                assert!(handle.is_completed(), "job {job}");
            }
        });
    }
}
