//! A job that may still be running, and its result.

use std::sync::atomic::Ordering;
use std::sync::{PoisonError, Weak};
use std::time::Duration;

use super::completion::{CompletionThread, PendingCallback};
use crate::error::{Error, Result};
use crate::group::OwnerProcess;
use crate::sync::{Arc, AtomicBool, Condvar, Instant, Mutex, MutexGuard, fence, spin_loop};
use crate::wait::{Waited, wait_once};

/// How long a waiter spins before it sleeps. A sleep and a wake cost about 5 us; a training thread that spins for longer takes
/// the time from the communication thread where cores are few.
const SPIN: Duration = Duration::from_micros(20);

/// What a thread that waits for a job can do for it meanwhile.
pub(super) trait Driver: Send + Sync {
    /// Makes progress until `done`, at most for `limit`; calls `sleep` if it ends before, or another thread makes progress already.
    fn drive(&self, done: &dyn Fn() -> bool, limit: Duration, sleep: &mut dyn FnMut());
}

/// The outcome of a job, now or later. Cheap to clone; every clone gets the same result.
#[derive(Clone)]
pub struct Handle {
    outcome: Arc<Outcome>,
}

struct Outcome {
    state: Mutex<JobOutcome>,
    /// Mirror of `state.result.is_some()` for the spin.
    done: AtomicBool,
    /// The result was returned by a wait or is given to a callback, so an error in it need not reach the next call.
    seen: AtomicBool,
    /// Wakes the waiters.
    ready: Condvar,
    /// World rank for error texts.
    rank: usize,
    /// The process whose thread will set the result.
    owner: OwnerProcess,
    /// Makes progress on the threads that wait, where there is such.
    driver: Option<Weak<dyn Driver>>,
}

/// The result of a job, and what is called with it.
struct JobOutcome {
    /// Set once, by the thread that ran or dropped the job.
    result: Option<Result<()>>,
    /// Empty once there is a result.
    callbacks: Vec<PendingCallback>,
}

impl Handle {
    /// A job that is not done. `rank` is the world rank that a timeout names.
    pub(super) fn pending(rank: usize) -> Handle {
        Handle::new(rank, None, None)
    }

    /// As [`Handle::pending`], of a job that threads may drive while they wait for it.
    pub(super) fn driven(rank: usize, driver: Weak<dyn Driver>) -> Handle {
        Handle::new(rank, None, Some(driver))
    }

    /// The handle of an operation that had nothing to wait for, with its result.
    pub fn completed(result: Result<()>) -> Handle {
        // No wait for it times out, so no text names the rank.
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

    /// Waits until the job is done, at most `timeout` (`None`: until the operation's own deadline ends it). `Timeout` with `after`
    /// equal to `timeout` leaves the job running.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        wait_once(timeout, |limit| self.wait_for(limit), |after| self.timed_out(after))
    }

    /// Waits until the job is done, at most `limit`. A message makes progress on this thread meanwhile.
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

    /// Waits until the job is done, at most until `limit` after the start.
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

    /// The error of a wait whose timeout passed.
    pub fn timed_out(&self, after: Duration) -> Error {
        timed_out(after, self.outcome.rank)
    }

    /// True when it is done, well or not.
    pub fn is_completed(&self) -> bool {
        self.outcome.done.load(Ordering::Acquire)
    }

    /// Calls `callback` with the result, exactly once: now, on this thread, when the job is done already; otherwise when it is done,
    /// on a thread of the process that runs callbacks one after another, those of one handle in the order in which they were added.
    /// That thread is never a communication thread: a callback may block and use groups, and only other callbacks wait for it.
    /// A callback that panics there harms nothing else; one that panics now does so in the caller.
    ///
    /// An error that a callback gets counts as reported, as one that a wait returns.
    ///
    /// # Errors
    /// `System` when the thread cannot be started, and in a forked child, where the job of a parent never ends: the callback is
    /// dropped then.
    pub fn on_done(&self, callback: impl FnOnce(&Result<()>) + Send + 'static) -> Result<()> {
        if let Some((callback, result)) = self.add_callback(callback)? {
            callback(&result);
        }
        Ok(())
    }

    /// As [`Handle::on_done`], but returns the callback with the result when the job is done already: the caller calls it.
    ///
    /// # Errors
    /// See [`Handle::on_done`].
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

    /// Sets the result, wakes all waiters and hands the callbacks to their thread. Called once.
    pub(super) fn finish(&self, result: Result<()>) {
        self.outcome.finish(result);
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
        self.outcome.state().result.clone()?.err()
    }

    /// True when there is nothing to keep it for: it was seen.
    pub(super) fn was_seen(&self) -> bool {
        self.outcome.seen.load(Ordering::Acquire)
    }
}

impl Outcome {
    fn state(&self) -> MutexGuard<'_, JobOutcome> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what `register` makes of the callback until the job is done, or returns the callback with the result.
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

    /// Sets the result, wakes all waiters and hands the callbacks to their thread. Called once.
    fn finish(&self, result: Result<()>) {
        let callbacks = self.set_result(result.clone());
        if !callbacks.is_empty() {
            CompletionThread::run_callbacks(callbacks, &result);
        }
    }

    /// Sets the result and wakes all waiters. Returns the callbacks, which the caller must have called.
    fn set_result(&self, result: Result<()>) -> Vec<PendingCallback> {
        let mut state = self.state();
        state.result = Some(result);
        let callbacks = std::mem::take(&mut state.callbacks);
        if !callbacks.is_empty() {
            self.seen.store(true, Ordering::Release);
        }
        // Under the lock: a thread that has read the result also reads `is_completed` as true.
        self.done.store(true, Ordering::Release);
        drop(state);
        self.ready.notify_all();
        callbacks
    }

    /// The result in a forked child: an error unless the job was done at the fork. A thread of the parent may have held the lock then.
    fn result_before_fork(&self) -> Result<()> {
        self.state.try_lock().ok().and_then(|state| state.result.clone()).unwrap_or_else(|| Err(forked()))
    }
}

impl Drop for Outcome {
    /// Nothing can finish the job any more: its callbacks get an error, so that each of them is called.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.owner.is_current() && !state.callbacks.is_empty() {
            self.finish(Err(Error::Aborted("the operation was dropped before it ran".to_owned())));
        }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use super::super::completion::wait_for_callbacks;
    use super::*;
    use crate::wait::wait_in_slices;

    /// As [`Handle::wait`], in slices.
    fn in_slices<E>(
        handle: &Handle,
        timeout: Option<Duration>,
        slice: Duration,
        between: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Result<()>, E> {
        wait_in_slices(timeout, slice, |limit| handle.wait_for(limit), between, |after| handle.timed_out(after))
    }

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
