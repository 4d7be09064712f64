//! The completion thread runs the callbacks of handles, so that no communication thread has to.
//!
//! There is one per process. It starts with the first callback that has to wait for its job. It ends when no callback
//! is left and every worker of the process is shut down or dropped; a later callback starts it again. Callbacks run one
//! after another: those of one handle in the order in which they were added, those of several handles in the order in
//! which their jobs ended. A callback may block, take an interpreter's lock, or use a group: only other callbacks wait
//! for it.
//!
//! A communication thread holds the lock of the queue only for moments, and no callback runs under a lock. A forked
//! child starts with an empty queue: the callbacks of the parent's handles run only in the parent.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::group::{OwnerProcess, PerProcess};
use crate::wait::{Waited, lock, wait_on, wait_on_for};

pub(super) type Callback = Box<dyn FnOnce(&Result<()>) + Send>;

static COMPLETION: PerProcess<CompletionThread> = PerProcess::new();

#[derive(Default)]
pub(super) struct CompletionThread {
    state: Mutex<CallbackQueue>,
    work: Condvar,
    /// Wakes threads that wait for callbacks to return or for the completion thread to end.
    changed: Condvar,
}

#[derive(Default)]
struct CallbackQueue {
    /// Callbacks whose jobs are done, in order.
    ready: VecDeque<(PendingCallback, Result<()>)>,
    /// Number of callbacks that have not returned: they wait for their jobs, are ready, or are running.
    callbacks: usize,
    workers: usize,
    thread: Option<ThreadId>,
}

impl CompletionThread {
    pub(super) fn of_process() -> &'static CompletionThread {
        COMPLETION.get()
    }

    /// Counts a worker. The thread does not end before the returned registration is dropped.
    pub(super) fn add_worker(&'static self) -> WorkerRegistration {
        self.state().workers += 1;
        WorkerRegistration { completion: self, owner: OwnerProcess::current() }
    }

    /// Counts a callback, and starts the thread if it does not run. The callback runs after
    /// [`CompletionThread::run_callbacks`]. If the thread cannot be started, the callback is dropped.
    pub(super) fn add(&'static self, callback: Callback) -> Result<PendingCallback> {
        let mut state = self.state();
        if state.thread.is_none() {
            // The new thread first waits for the lock, so it finds its own id in the state.
            let thread = std::thread::Builder::new().name("bagua-callbacks".to_owned()).spawn(move || self.run());
            let thread = thread.map_err(|error| Error::system("cannot start the completion thread", error))?;
            state.thread = Some(thread.thread().id());
        }
        state.callbacks += 1;
        Ok(PendingCallback { callback, completion: self })
    }

    /// Hands the callbacks of one handle to the thread. Never waits for a callback.
    pub(super) fn run_callbacks(callbacks: Vec<PendingCallback>, result: &Result<()>) {
        let Some(completion) = callbacks.first().map(|first| first.completion) else { return };
        let mut state = completion.state();
        state.ready.extend(callbacks.into_iter().map(|pending| (pending, result.clone())));
        drop(state);
        completion.work.notify_one();
    }

    fn wait_until_idle(&self, limit: Duration) -> Waited<()> {
        let start = Instant::now();
        let mut state = self.state();
        while state.callbacks > 0 {
            if state.thread == Some(std::thread::current().id()) {
                let text = "a callback of a handle cannot wait for all callbacks, because it is one of them";
                return Waited::Done(Err(Error::InvalidArgument(text.to_owned())));
            }
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Waited::Pending;
            }
            state = wait_on_for(&self.changed, state, left);
        }
        Waited::Done(Ok(()))
    }

    /// Runs callbacks until no callback and no worker is left. This is the thread's main function.
    fn run(&self) {
        let mut state = self.state();
        loop {
            if let Some((pending, result)) = state.ready.pop_front() {
                drop(state);
                // The panic hook has reported a panic, and there is no caller to return it to.
                let _ = catch_unwind(AssertUnwindSafe(|| (pending.callback)(&result)));
                drop(result);
                state = self.state();
                state.callbacks -= 1;
                self.changed.notify_all();
            } else if state.callbacks == 0 && state.workers == 0 {
                state.thread = None;
                self.changed.notify_all();
                return;
            } else {
                state = wait_on(&self.work, state);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, CallbackQueue> {
        lock(&self.state)
    }
}

/// Blocks until every callback that was given to a handle of this process has returned, for at most `limit`.
///
/// Call it at the end of a program, after the groups were left: pending jobs then end soon. Returns an error if it is
/// called by a callback.
pub fn wait_for_callbacks(limit: Duration) -> Waited<()> {
    CompletionThread::of_process().wait_until_idle(limit)
}

#[must_use = "a callback that is not pushed keeps the completion thread"]
pub(super) struct PendingCallback {
    callback: Callback,
    completion: &'static CompletionThread,
}

/// Keeps the completion thread running for a worker that is not shut down.
pub(super) struct WorkerRegistration {
    completion: &'static CompletionThread,
    owner: OwnerProcess,
}

impl Drop for WorkerRegistration {
    fn drop(&mut self) {
        // In a forked child, the lock belongs to the parent.
        if self.owner.is_current() {
            self.completion.state().workers -= 1;
            self.completion.work.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const IDLE: Waited<()> = Waited::Done(Ok(()));

    fn queue() -> &'static CompletionThread {
        Box::leak(Box::default())
    }

    fn wait_for_the_end_of(queue: &CompletionThread) {
        let mut state = queue.state();
        while state.thread.is_some() {
            state = queue.changed.wait(state).unwrap();
        }
    }

    fn run(callback: PendingCallback) {
        CompletionThread::run_callbacks(vec![callback], &Ok(()));
    }

    #[test]
    fn the_thread_starts_with_the_first_callback_and_ends_with_the_last_worker_and_callback() {
        let queue = queue();
        let workers = [queue.add_worker(), queue.add_worker()];
        assert!(queue.state().thread.is_none(), "no callback yet");
        let [first, second] = [queue.add(Box::new(|_| ())).unwrap(), queue.add(Box::new(|_| ())).unwrap()];
        let thread = queue.state().thread.expect("a callback waits for its job");
        run(first);
        drop(workers);
        assert_eq!(queue.wait_until_idle(Duration::ZERO), Waited::Pending);
        assert_eq!(queue.state().thread, Some(thread), "the second callback waits for its job");
        run(second);
        assert_eq!(queue.wait_until_idle(LONG), IDLE);
        wait_for_the_end_of(queue);
        run(queue.add(Box::new(|_| ())).unwrap());
        assert_eq!(queue.wait_until_idle(LONG), IDLE, "a callback starts the thread again");
        wait_for_the_end_of(queue);
    }

    #[test]
    fn a_worker_keeps_the_thread_between_callbacks() {
        let queue = queue();
        let worker = queue.add_worker();
        run(queue.add(Box::new(|_| ())).unwrap());
        let thread = queue.state().thread;
        assert!(thread.is_some());
        assert_eq!(queue.wait_until_idle(LONG), IDLE);
        run(queue.add(Box::new(|_| ())).unwrap());
        assert_eq!(queue.wait_until_idle(LONG), IDLE);
        assert_eq!(queue.state().thread, thread);
        drop(worker);
        wait_for_the_end_of(queue);
    }

    #[test]
    fn a_callback_that_panics_harms_no_other() {
        let queue = queue();
        let (sender, ran) = mpsc::channel();
        let panics = queue.add(Box::new(|_| panic!("expected in this test"))).unwrap();
        let thread = queue.state().thread;
        let next = queue.add(Box::new(move |_| sender.send(std::thread::current().id()).unwrap())).unwrap();
        CompletionThread::run_callbacks(vec![panics, next], &Ok(()));
        assert_eq!(Some(ran.recv().unwrap()), thread);
        assert_eq!(queue.wait_until_idle(LONG), IDLE);
    }

    #[test]
    fn a_callback_that_waits_for_all_callbacks_gets_an_error() {
        let queue = queue();
        let (sender, idle) = mpsc::channel();
        run(queue.add(Box::new(move |_| sender.send(queue.wait_until_idle(LONG)).unwrap())).unwrap());
        assert!(matches!(idle.recv().unwrap(), Waited::Done(Err(Error::InvalidArgument(_)))));
        assert_eq!(queue.wait_until_idle(LONG), IDLE);
    }
}
