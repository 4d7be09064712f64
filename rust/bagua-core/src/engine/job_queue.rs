//! The queue between the threads that submit jobs and the thread that runs them.
//!
//! Invariants:
//!
//! 1. A job that was accepted is handed out once: by [`Jobs::next`] in the order of submission, or by [`Jobs::stop`].
//! 2. A stopped queue accepts no job and starts no thread, and its thread is handed out once.
//! 3. A wait for submitted jobs ends when all of them are settled, or when the queue is stopped and drained.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::Result;
use crate::sync::{Arc, AtomicBool, AtomicU64, Condvar, Instant, Mutex, MutexGuard};

/// A queue of jobs of type `J` for a thread whose handle is a `T`.
pub(super) struct Jobs<J, T> {
    state: Mutex<QueuedJobs<J>>,
    /// Number of jobs submitted and not settled. Changed under the lock of `state`, read without it on fast paths.
    pending: AtomicU64,
    /// Set once, under the lock of `state`. A job that consists of several operations checks it between them.
    stopping: Arc<AtomicBool>,
    work: Condvar,
    settled: Condvar,
    /// Set from the thread's start until it is joined.
    thread: Mutex<Option<T>>,
}

struct QueuedJobs<J> {
    jobs: VecDeque<J>,
    submitted: u64,
    settled: u64,
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

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Returns the flag that [`Jobs::is_stopping`] reads, for use in a job.
    pub(super) fn stopping(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stopping)
    }

    pub(super) fn is_busy(&self) -> bool {
        self.pending.load(Ordering::Acquire) > 0
    }

    /// Starts the thread unless it runs already or the queue was stopped.
    pub(super) fn start(&self, spawn: impl FnOnce() -> Result<T>) -> Result<()> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        // A caller that stops the queue sets `stopping` before it locks `thread`. If `stopping` is false here, that
        // caller will find this thread and join it.
        if thread.is_none() && !self.is_stopping() {
            *thread = Some(spawn()?);
        }
        Ok(())
    }

    /// Takes the thread, to be joined. Returns `None` if it never started or was already taken.
    pub(super) fn take_thread(&self) -> Option<T> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Drops the handle of the parent's thread without joining it. Called in a forked child. Does nothing if another
    /// thread held the lock at the fork.
    pub(super) fn forget_thread(&self) {
        if let Ok(mut thread) = self.thread.try_lock() {
            std::mem::forget(thread.take());
        }
    }

    /// Adds the job that `job` creates. Returns false if the queue was stopped.
    pub(super) fn push(&self, job: impl FnOnce() -> J) -> bool {
        let mut state = self.state();
        // Checked under the lock, because `stop` empties the queue only once.
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

    /// Blocks until there is a job for the thread, and returns it; `name` gives its name. Returns `None` after a stop.
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

    /// Settles the job that [`Jobs::next`] handed out last.
    pub(super) fn settle(&self) {
        let mut state = self.state();
        state.running = None;
        self.count_settled(state);
    }

    pub(super) fn settle_dropped(&self) {
        self.count_settled(self.state());
    }

    fn count_settled(&self, mut state: MutexGuard<'_, QueuedJobs<J>>) {
        state.settled += 1;
        self.pending.fetch_sub(1, Ordering::Release);
        drop(state);
        self.settled.notify_all();
    }

    pub(super) fn submitted(&self) -> u64 {
        self.state().submitted
    }

    /// Blocks until the first `jobs` submitted jobs are settled, for at most `limit`. Returns true if they are.
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

    /// Stops accepting jobs, and returns the waiting ones, which the caller must settle.
    pub(super) fn stop(&self) -> Vec<J> {
        let mut state = self.state();
        self.stopping.store(true, Ordering::Release);
        let dropped = state.jobs.drain(..).collect();
        drop(state);
        self.work.notify_all();
        dropped
    }

    /// Blocks until the thread is idle, for at most `limit`. Returns the name of the job that is still running, if any.
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
