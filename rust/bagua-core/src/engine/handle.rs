//! The outcome of a job that may still be running.

use std::sync::atomic::Ordering;
use std::sync::{PoisonError, Weak};
use std::time::Duration;

use super::completion::{CompletionThread, PendingCallback};
use crate::error::{Error, Result};
use crate::group::OwnerProcess;
use crate::sync::{Arc, AtomicBool, Condvar, Instant, Mutex, MutexGuard, fence, spin_loop};
use crate::wait::{Waited, wait_once};

/// How long a waiter spins before it sleeps. Sleeping and waking cost about 5 us. With few cores, a training thread
/// that spins longer takes time away from the communication thread.
const SPIN: Duration = Duration::from_micros(20);

/// Lets a thread that waits for a job make progress on it.
pub(super) trait Driver: Send + Sync {
    /// Makes progress until `done` returns true, for at most `limit`. Calls `sleep` if the progress ends before, or if
    /// another thread is already making it.
    fn drive(&self, done: &dyn Fn() -> bool, limit: Duration, sleep: &mut dyn FnMut());
}

/// The outcome of a job, now or later. Cheap to clone; every clone gets the same result.
///
/// # Examples
/// ```
/// use bagua_core::engine::Handle;
///
/// let handle = Handle::completed(Ok(()));
/// handle.on_done(|result| assert!(result.is_ok()))?;
/// handle.wait(None)?;
/// # Ok::<(), bagua_core::error::Error>(())
/// ```
#[derive(Clone)]
pub struct Handle {
    outcome: Arc<Outcome>,
}

struct Outcome {
    state: Mutex<JobOutcome>,
    /// True if `state.result` is set. A spinning waiter reads this flag instead of locking `state`.
    done: AtomicBool,
    /// True if a wait or a callback got the result. The next call then does not have to report an error in it.
    seen: AtomicBool,
    ready: Condvar,
    /// World rank for error texts.
    rank: usize,
    /// The process whose thread will set the result.
    owner: OwnerProcess,
    /// Makes progress on the threads that wait. `None` if only the job's own thread does.
    driver: Option<Weak<dyn Driver>>,
}

struct JobOutcome {
    /// Set once, by the thread that ran or dropped the job.
    result: Option<Result<()>>,
    callbacks: Vec<PendingCallback>,
}

impl Handle {
    /// Creates the handle of a job that is not done. Timeouts name the world rank `rank`.
    pub(super) fn pending(rank: usize) -> Handle {
        Handle::new(rank, None, None)
    }

    /// Creates the handle of a job that is not done, like [`Handle::pending`]. Threads that wait for the job make
    /// progress on it.
    pub(super) fn driven(rank: usize, driver: Weak<dyn Driver>) -> Handle {
        Handle::new(rank, None, Some(driver))
    }

    /// Creates the handle of an operation that is already done.
    pub fn completed(result: Result<()>) -> Handle {
        // The rank only matters to timeouts, and waits for this handle return at once.
        Handle::new(0, Some(result), None)
    }

    fn new(rank: usize, result: Option<Result<()>>, driver: Option<Weak<dyn Driver>>) -> Handle {
        Handle {
            outcome: Arc::new(Outcome {
                done: AtomicBool::new(result.is_some()),
                state: Mutex::new(JobOutcome { result, callbacks: Vec::new() }),
                seen: AtomicBool::new(false),
                ready: Condvar::new(),
                rank,
                owner: OwnerProcess::current(),
                driver,
            }),
        }
    }

    /// Blocks until the job is done, for at most `timeout` (`None`: until the operation's own deadline ends it). A
    /// `Timeout` error whose `after` equals `timeout` means that the job is still running.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        wait_once(timeout, |limit| self.wait_for(limit), |after| self.timed_out(after))
    }

    /// Blocks until the job is done, for at most `limit`. For a message, this thread makes progress meanwhile.
    pub fn wait_for(&self, limit: Duration) -> Waited<()> {
        let start = Instant::now();
        let driver = self.outcome.driver.as_ref().and_then(Weak::upgrade).filter(|_| self.outcome.owner.is_current());
        let Some(driver) = driver else {
            while !self.is_completed() && start.elapsed() < SPIN.min(limit) {
                spin_loop();
            }
            return self.sleep_for(start, limit);
        };
        let mut waited = None;
        driver.drive(&|| self.is_completed(), limit, &mut || waited = Some(self.sleep_for(start, limit)));
        waited.unwrap_or_else(|| self.sleep_for(start, limit))
    }

    fn sleep_for(&self, start: Instant, limit: Duration) -> Waited<()> {
        if !self.outcome.owner.is_current() {
            return Waited::Done(self.outcome.result_before_fork());
        }
        let mut state = self.outcome.state();
        loop {
            if let Some(result) = &state.result {
                self.outcome.seen.store(true, Ordering::Release);
                return Waited::Done(result.clone());
            }
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Waited::Pending;
            }
            state = self.outcome.ready.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the error of a wait whose timeout passed.
    pub fn timed_out(&self, after: Duration) -> Error {
        timed_out(after, self.outcome.rank)
    }

    /// Returns true if the job is done, with or without an error.
    pub fn is_completed(&self) -> bool {
        self.outcome.done.load(Ordering::Acquire)
    }

    /// Calls `callback` with the result, exactly once.
    ///
    /// If the job is already done, the callback runs now, on this thread, and a panic in it reaches the caller.
    /// Otherwise it runs when the job is done, on the process's completion thread, where a panic harms nothing else.
    /// That thread runs callbacks one after another, those of one handle in the order in which they were added. It is
    /// never a communication thread, so a callback may block and use groups: only other callbacks wait for it.
    ///
    /// An error that a callback gets counts as reported, like one that a wait returns.
    ///
    /// # Errors
    /// `System` if the thread cannot be started, or in a forked child if the parent's job was not done at the fork. The
    /// callback is then dropped.
    pub fn on_done(&self, callback: impl FnOnce(&Result<()>) + Send + 'static) -> Result<()> {
        if let Some((callback, result)) = self.add_callback(callback)? {
            callback(&result);
        }
        Ok(())
    }

    /// Adds a callback like [`Handle::on_done`]. If the job is already done, returns the callback with the result, for
    /// the caller to call. Returns the errors of [`Handle::on_done`].
    pub fn add_callback<F>(&self, callback: F) -> Result<Option<(F, Result<()>)>>
    where
        F: FnOnce(&Result<()>) + Send + 'static,
    {
        if !self.outcome.owner.is_current() {
            if !self.is_completed() {
                return Err(forked());
            }
            return Ok(Some((callback, self.outcome.result_before_fork())));
        }
        self.outcome.add_callback(callback, |callback| CompletionThread::of_process().add(Box::new(callback)))
    }

    /// Sets the result, wakes all waiters and hands the callbacks to their thread. Must be called once.
    pub(super) fn finish(&self, result: Result<()>) {
        self.outcome.finish(result);
    }

    /// Returns the job's error if nobody has read it and nobody can any more, because this is its last handle.
    pub(super) fn lost_error(&self) -> Option<Error> {
        if Arc::strong_count(&self.outcome) > 1 {
            return None;
        }
        // The count alone orders nothing. Another thread may have read the result before it dropped its handle. Without
        // this fence, the processor could load `seen` before the count and report the error twice.
        fence(Ordering::Acquire);
        if self.outcome.seen.load(Ordering::Relaxed) {
            return None;
        }
        self.outcome.state().result.clone()?.err()
    }

    /// Returns true if the result was reported, so that this handle need not be kept.
    pub(super) fn was_seen(&self) -> bool {
        self.outcome.seen.load(Ordering::Acquire)
    }
}

impl Outcome {
    fn state(&self) -> MutexGuard<'_, JobOutcome> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers the callback if the job is not done. Otherwise returns it with the result.
    fn add_callback<F>(
        &self,
        callback: F,
        register: impl FnOnce(F) -> Result<PendingCallback>,
    ) -> Result<Option<(F, Result<()>)>> {
        let mut state = self.state();
        if let Some(result) = &state.result {
            self.seen.store(true, Ordering::Release);
            return Ok(Some((callback, result.clone())));
        }
        state.callbacks.push(register(callback)?);
        Ok(None)
    }

    fn finish(&self, result: Result<()>) {
        let callbacks = self.set_result(result.clone());
        if !callbacks.is_empty() {
            CompletionThread::run_callbacks(callbacks, &result);
        }
    }

    /// Sets the result and wakes all waiters. Returns the callbacks, which the caller must run.
    fn set_result(&self, result: Result<()>) -> Vec<PendingCallback> {
        let mut state = self.state();
        state.result = Some(result);
        let callbacks = std::mem::take(&mut state.callbacks);
        if !callbacks.is_empty() {
            self.seen.store(true, Ordering::Release);
        }
        // Set under the lock, so that a thread that has read the result also reads `is_completed` as true.
        self.done.store(true, Ordering::Release);
        drop(state);
        self.ready.notify_all();
        callbacks
    }

    /// Returns the result in a forked child: an error unless the job was done at the fork. A thread of the parent may
    /// have held the lock then.
    fn result_before_fork(&self) -> Result<()> {
        self.state.try_lock().ok().and_then(|state| state.result.clone()).unwrap_or_else(|| Err(forked()))
    }
}

impl Drop for Outcome {
    /// Calls the remaining callbacks with an error, because nothing can finish the job any more.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.owner.is_current() && !state.callbacks.is_empty() {
            self.finish(Err(Error::Aborted("the operation was dropped before it ran".to_owned())));
        }
    }
}

/// Returns the error of a wait for the communication thread whose timeout passed.
pub(super) fn timed_out(after: Duration, noticed_by: usize) -> Error {
    Error::Timeout { after, missing: vec![], noticed_by, progress: None }
}

pub(super) fn forked() -> Error {
    Error::other("the group was created before this process was forked; a forked process must create its own group")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use super::super::completion::wait_for_callbacks;
    use super::*;
    use crate::wait::wait_in_slices;

    fn in_slices<E>(
        handle: &Handle,
        timeout: Option<Duration>,
        slice: Duration,
        between: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Result<()>, E> {
        wait_in_slices(timeout, slice, |limit| handle.wait_for(limit), between, |after| handle.timed_out(after))
    }

    /// Possible results of a job, including a timeout of the job itself.
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
                let waited = in_slices(&handle, timeout, Duration::ZERO, end_third);
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
                    let waited = in_slices(handle, None, Duration::ZERO, || Ok::<(), ()>(()));
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
            let waited = in_slices(&handle, Some(limit), Duration::from_secs(60), || Ok::<(), ()>(()));
            assert_eq!(waited, Ok(Err(timeout(limit))));
        }
        assert_eq!(in_slices(&handle, None, Duration::ZERO, || Err("Ctrl-C")), Err("Ctrl-C"));
        handle.finish(Ok(()));
        assert_eq!(handle.wait(Some(Duration::ZERO)), Ok(()));
        assert_eq!(in_slices(&handle, Some(Duration::ZERO), Duration::ZERO, || Err("Ctrl-C")), Ok(Ok(())));
    }

    #[test]
    fn a_callback_is_called_exactly_once_at_whatever_moment_the_job_ends() {
        for outcome in outcomes() {
            let handles: Vec<Handle> = (0..30_000).map(|_| Handle::pending(0)).collect();
            let calls: Arc<Vec<AtomicUsize>> = Arc::new(handles.iter().map(|_| AtomicUsize::new(0)).collect());
            std::thread::scope(|scope| {
                scope.spawn(|| handles.iter().for_each(|handle| handle.finish(outcome.clone())));
                for (job, handle) in handles.iter().enumerate() {
                    let (calls, expected) = (calls.clone(), outcome.clone());
                    let count = move |result: &Result<()>| {
                        assert_eq!(*result, expected);
                        calls[job].fetch_add(1, Ordering::Relaxed);
                    };
                    handle.on_done(count).unwrap();
                }
            });
            assert_eq!(wait_for_callbacks(Duration::from_secs(60)), Waited::Done(Ok(())));
            assert!(calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn callbacks_of_a_pending_job_run_in_order_and_those_of_a_done_one_at_once_on_the_caller() {
        let handle = Handle::pending(0);
        let (sender, calls) = mpsc::channel();
        let note = |number: usize| {
            let sender = sender.clone();
            move |result: &Result<()>| sender.send((number, result.clone(), std::thread::current().id())).unwrap()
        };
        (0..5).for_each(|number| handle.on_done(note(number)).unwrap());
        assert!(calls.try_recv().is_err(), "the job is pending");
        let failed = Err(Error::Aborted("by a peer".to_owned()));
        handle.finish(failed.clone());
        for expected in 0..5 {
            let (number, result, thread) = calls.recv().unwrap();
            assert_eq!((number, &result), (expected, &failed));
            assert_ne!(thread, std::thread::current().id());
        }
        handle.on_done(note(5)).unwrap();
        assert_eq!(calls.try_recv().unwrap(), (5, failed.clone(), std::thread::current().id()));
        let (callback, result) = handle.add_callback(note(6)).unwrap().expect("the job is done");
        assert!(calls.try_recv().is_err(), "the caller has it");
        callback(&result);
        assert_eq!(calls.try_recv().unwrap(), (6, failed, std::thread::current().id()));
        Handle::completed(Ok(())).on_done(note(7)).unwrap();
        assert_eq!(calls.try_recv().unwrap(), (7, Ok(()), std::thread::current().id()));
    }

    #[test]
    fn a_job_that_is_dropped_before_it_ran_calls_its_callbacks_with_an_error() {
        let handle = Handle::pending(0);
        let (sender, calls) = mpsc::channel();
        handle.on_done(move |result| sender.send(result.clone()).unwrap()).unwrap();
        drop(handle);
        assert!(matches!(calls.recv().unwrap(), Err(Error::Aborted(_))));
    }
}
