//! The queue between those who submit jobs and the thread that runs them.
//!
//! Invariants:
//!
//! 1. A job that was taken is handed out once: by [`Jobs::next`], in the order of submission, or by [`Jobs::stop`].
//! 2. A stopped queue takes no job and starts no thread, and its thread is handed out once.
//! 3. A wait for what was submitted ends when all of it was settled, or when the queue was stopped and drained.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::Result;
use crate::sync::{Arc, AtomicBool, AtomicU64, Condvar, Instant, Mutex, MutexGuard};

/// Jobs of type `J` for a thread whose handle is a `T`.
pub(super) struct Jobs<J, T> {
    state: Mutex<QueuedJobs<J>>,
    /// Jobs submitted and not settled; changed under `state`, read without it on fast paths.
    pending: AtomicU64,
    /// Set once, under `state`; a job that consists of several operations looks at it between them.
    stopping: Arc<AtomicBool>,
    /// Wakes the thread.
    work: Condvar,
    /// Wakes those who wait for jobs to be settled.
    settled: Condvar,
    /// The thread, from its start until it is joined.
    thread: Mutex<Option<T>>,
}

/// Jobs that wait, and how many came and went.
struct QueuedJobs<J> {
    jobs: VecDeque<J>,
    /// Jobs submitted so far.
    submitted: u64,
    /// Jobs settled so far.
    settled: u64,
    /// What the thread runs.
    running: Option<String>,
}

impl<J, T> Jobs<J, T> {
    pub(super) fn new() -> Jobs<J, T> {
        Jobs {
            state: Mutex::new(QueuedJobs { jobs: VecDeque::new(), submitted: 0, settled: 0, running: None }),
            pending: AtomicU64::new(0),
            stopping: Arc::new(AtomicBool::new(false)),
            work: Condvar::new(),
            settled: Condvar::new(),
            thread: Mutex::new(None),
        }
    }

    fn state(&self) -> MutexGuard<'_, QueuedJobs<J>> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the queue was stopped.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// What [`Jobs::is_stopping`] reads, for a job.
    pub(super) fn stopping(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stopping)
    }

    /// Whether a job was submitted and not settled.
    pub(super) fn is_busy(&self) -> bool {
        self.pending.load(Ordering::Acquire) > 0
    }

    /// Starts the thread unless it was started, or the queue was stopped.
    pub(super) fn start(&self, spawn: impl FnOnce() -> Result<T>) -> Result<()> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        // `stop` comes before `take_thread`: who sees false here is waited for there.
        if thread.is_none() && !self.is_stopping() {
            *thread = Some(spawn()?);
        }
        Ok(())
    }

    /// The thread, to be joined; `None` when there is none, or no more.
    pub(super) fn take_thread(&self) -> Option<T> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// In a forked child, where the thread is the parent's: gives up its handle, if no other thread had the lock at the fork.
    pub(super) fn forget_thread(&self) {
        if let Ok(mut thread) = self.thread.try_lock() {
            std::mem::forget(thread.take());
        }
    }

    /// Adds what `job` makes, unless the queue was stopped; whether it did.
    pub(super) fn push(&self, job: impl FnOnce() -> J) -> bool {
        let mut state = self.state();
        // Under the lock: `stop` empties the queue once.
        if self.is_stopping() {
            return false;
        }
        state.jobs.push_back(job());
        state.submitted += 1;
        self.pending.fetch_add(1, Ordering::Release);
        drop(state);
        self.work.notify_one();
        true
    }

    /// The thread's next job, which `name` names; waits for one. `None` when the queue was stopped.
    pub(super) fn next(&self, name: impl Fn(&mut J) -> String) -> Option<J> {
        let mut state = self.state();
        loop {
            if let Some(mut job) = state.jobs.pop_front() {
                state.running = Some(name(&mut job));
                return Some(job);
            }
            if self.is_stopping() {
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The job that [`Jobs::next`] handed out last is done.
    pub(super) fn settle(&self) {
        let mut state = self.state();
        state.running = None;
        self.count_settled(state);
    }

    /// A job that [`Jobs::stop`] handed out is done with.
    pub(super) fn settle_dropped(&self) {
        self.count_settled(self.state());
    }

    fn count_settled(&self, mut state: MutexGuard<'_, QueuedJobs<J>>) {
        state.settled += 1;
        self.pending.fetch_sub(1, Ordering::Release);
        drop(state);
        self.settled.notify_all();
    }

    /// Number of jobs submitted so far.
    pub(super) fn submitted(&self) -> u64 {
        self.state().submitted
    }

    /// Waits until the first `jobs` of all submitted jobs were settled, at most `limit`; whether they were.
    pub(super) fn wait_settled(&self, jobs: u64, limit: Duration) -> bool {
        let start = Instant::now();
        let mut state = self.state();
        while state.settled < jobs {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            state = self.settled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// From now on nothing is taken; hands out what waits, to be settled by the caller.
    pub(super) fn stop(&self) -> Vec<J> {
        let mut state = self.state();
        self.stopping.store(true, Ordering::Release);
        let dropped = state.jobs.drain(..).collect();
        drop(state);
        self.work.notify_all();
        dropped
    }

    /// Waits until the thread runs nothing, at most `limit`; what it runs, if it still does.
    pub(super) fn still_running(&self, limit: Duration) -> Option<String> {
        let start = Instant::now();
        let mut state = self.state();
        while state.running.is_some() {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            state = self.settled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.running.clone()
    }
}
