//! A lane with a queue of jobs, and a communication thread that starts with the first job.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::completion::{CompletionThread, WorkerRegistration};
use super::handle::{Handle, forked};
use super::job_queue::Jobs;
use crate::error::{Error, Result};
use crate::group::{Lane, Lanes, OwnerProcess};
use crate::health::GroupHealth;
use crate::recorder::{Announced, LaneRecorder, Ticket};
use crate::sync;
use crate::wait::{SLICE, blocking_wait, lock};

/// How long a running operation may continue after `shutdown` before the group is poisoned to end it.
const GRACE: Duration = Duration::from_secs(1);

/// How long the operation may then still take. Waits on a lane see a poisoned group within [`crate::wait::SLICE`]. Only
/// a callback that does not return takes longer. Its thread is left behind, so that the process does not hang.
const PATIENCE: Duration = Duration::from_secs(5);

/// The first and the longest pause between two attempts to take the lane from another thread.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// A job for a communication thread.
pub type Job = Box<dyn FnOnce(&mut Lanes) -> Result<()> + Send + 'static>;

/// A lane with a queue of jobs, and a communication thread that starts with the first job.
pub struct LaneWorker {
    shared: Arc<WorkerShared>,
    /// Keeps the completion thread running until `shutdown`.
    registration: Mutex<Option<WorkerRegistration>>,
}

struct WorkerShared {
    name: String,
    /// The only process that may use the worker, because threads do not survive a fork.
    owner: OwnerProcess,
    health: Arc<GroupHealth>,
    /// Records queued operations. `None` if the lane records nothing.
    recorder: Option<LaneRecorder>,
    /// Locked for one job at a time, by the thread or by [`LaneWorker::run`].
    lanes: Mutex<Lanes>,
    /// The queued jobs, and the thread's handle between the first `submit` and `shutdown`.
    jobs: Jobs<Entry, JoinHandle<()>>,
    /// Handles of failed jobs whose result nobody has read.
    failed: Mutex<Vec<Handle>>,
    /// Mirror of `!failed.is_empty()`, so that calls take no lock as long as nothing has failed.
    failures: AtomicBool,
}

struct Entry {
    what: String,
    /// True if every error of the job poisons the group, even an error before anything was sent.
    fatal: bool,
    job: Job,
    handle: Handle,
    /// The flight record of the job's first operation.
    ticket: Option<Ticket>,
}

impl LaneWorker {
    /// Creates a worker on these lanes. `health` is the failure state of their group.
    pub fn over(lanes: impl Into<Lanes>, health: Arc<GroupHealth>, name: &str) -> LaneWorker {
        let lanes = lanes.into();
        LaneWorker {
            shared: Arc::new(WorkerShared {
                name: name.to_owned(),
                owner: OwnerProcess::current(),
                health,
                recorder: lanes.global.recorder(),
                lanes: Mutex::new(lanes),
                jobs: Jobs::new(),
                failed: Mutex::default(),
                failures: AtomicBool::new(false),
            }),
            registration: Mutex::new(Some(CompletionThread::of_process().add_worker())),
        }
    }

    /// Returns the worker's name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the group's failure state.
    pub fn health(&self) -> &GroupHealth {
        &self.shared.health
    }

    pub(super) fn world_rank(&self) -> usize {
        self.shared.health.world_rank(self.shared.health.rank())
    }

    pub(super) fn stopping(&self) -> sync::Arc<sync::AtomicBool> {
        self.shared.jobs.stopping()
    }

    /// Returns the reason why no further call can succeed, if there is one. Takes no lock.
    pub fn check(&self) -> Result<()> {
        self.check_process()?;
        self.shared.health.check()?;
        if self.shared.jobs.is_stopping() {
            return Err(self.shared.aborted());
        }
        Ok(())
    }

    /// Runs a job on this thread, after everything that was submitted before.
    ///
    /// If nothing is pending, this costs one lock and no thread switch. If an earlier job failed and all its handles
    /// were dropped before anyone read the error, this call returns that error and does not run `job`.
    pub fn run<T>(&self, job: impl FnOnce(&mut Lanes) -> Result<T>) -> Result<T> {
        self.check()?;
        if self.shared.jobs.is_busy() {
            let (submitted, mut settled) = (self.shared.jobs.submitted(), false);
            // Waits in slices. Between them, a caller that is told to stop can fail the group and so end the jobs.
            while !settled {
                blocking_wait(|| settled = self.shared.jobs.wait_settled(submitted, SLICE));
            }
            self.shared.take_lost_error()?;
            self.check()?;
        } else {
            self.shared.take_lost_error()?;
        }
        let mut lanes = self.shared.free_lanes();
        self.shared.guarded(false, || job(&mut lanes))
    }

    /// Hands a job to the communication thread. `what` describes the job in error texts.
    pub fn submit(&self, what: &str, job: Job) -> Result<Handle> {
        self.enqueue(what, &Announced::job("a job"), false, job)
    }

    /// Hands an operation on the global lane to the communication thread. `op` describes it to the flight recorder.
    pub fn submit_op(
        &self,
        op: &Announced<'_>,
        job: impl FnOnce(&mut Lane) -> Result<()> + Send + 'static,
    ) -> Result<Handle> {
        self.enqueue("an asynchronous operation", op, false, Box::new(move |lanes| job(&mut lanes.global)))
    }

    /// Hands a job to the communication thread. Every error of the job poisons the group.
    pub(super) fn submit_fatal(&self, what: &str, op: &Announced<'_>, job: Job) -> Result<Handle> {
        self.enqueue(what, op, true, job)
    }

    fn enqueue(&self, what: &str, op: &Announced<'_>, fatal: bool, job: Job) -> Result<Handle> {
        self.check()?;
        self.start()?;
        self.shared.take_lost_error()?;
        let handle = Handle::pending(self.world_rank());
        let entry = || {
            let ticket = self.shared.recorder.as_ref().map(|recorder| recorder.queue(op));
            Entry { what: what.to_owned(), fatal, job, handle: handle.clone(), ticket }
        };
        if self.shared.jobs.push(entry) { Ok(handle) } else { Err(self.shared.aborted()) }
    }

    pub(super) fn start(&self) -> Result<()> {
        self.shared.jobs.start(|| {
            let shared = self.shared.clone();
            let name = format!("bagua-{}", self.shared.name.replace('\0', ""));
            let spawned = std::thread::Builder::new().name(name).spawn(move || shared.work());
            spawned.map_err(|error| Error::system("cannot start a communication thread", error))
        })
    }

    /// Ends the thread. Dropping the worker does the same. Further calls do nothing.
    ///
    /// Queued jobs fail with `Aborted`. A running job gets one second to end by itself. Then the group is poisoned with
    /// `Aborted`, which ends every wait on a lane. If a callback still does not return, its thread is left behind.
    /// Blocks, so it must be called without the GIL.
    pub fn shutdown(&self) {
        if self.is_foreign() {
            // A forked child: the parent owns the thread, and the streams that dropping the lane would close.
            self.shared.jobs.forget_thread();
            return;
        }
        for entry in self.shared.jobs.stop() {
            let Entry { job, handle, ticket, .. } = entry;
            // The job comes first, so that the memory it holds is returned before the waiter wakes.
            drop(job);
            let error = self.shared.health.cause().unwrap_or_else(|| self.shared.aborted());
            self.shared.record_end(ticket, &Err(error.clone()));
            handle.finish(Err(error));
            self.shared.jobs.settle_dropped();
        }
        drop(lock(&self.registration).take());
        let Some(thread) = self.shared.jobs.take_thread() else { return };
        if thread.thread().id() == std::thread::current().id() {
            // A job shut down its own worker. The thread ends when the job returns.
            return;
        }
        if let Some(what) = self.shared.jobs.still_running(GRACE) {
            let text = format!("{} was shut down while {what} was running", self.shared.name);
            // The waiter of that job gets the cause from the lane.
            let _ = self.shared.health.fail(Error::Aborted(text));
            if self.shared.jobs.still_running(PATIENCE).is_some() {
                return;
            }
        }
        // The thread catches the panics of jobs, and nothing can be done here about a panic of its own.
        let _ = thread.join();
    }

    pub(super) fn check_process(&self) -> Result<()> {
        if self.is_foreign() { Err(forked()) } else { Ok(()) }
    }

    fn is_foreign(&self) -> bool {
        !self.shared.owner.is_current()
    }
}

impl Drop for LaneWorker {
    fn drop(&mut self) {
        self.shutdown();
        if self.is_foreign() {
            std::mem::forget(self.shared.clone());
        }
    }
}

impl WorkerShared {
    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        // If a job panics, it poisons the group, whose error says more than a poisoned lock.
        lock(&self.lanes)
    }

    /// Locks the lanes like `lanes`, but gives up the interpreter's lock while it waits, because the job that holds the
    /// lanes may need it.
    fn free_lanes(&self) -> MutexGuard<'_, Lanes> {
        let mut pause = PAUSES.0;
        loop {
            match self.lanes.try_lock() {
                Ok(lanes) => return lanes,
                Err(TryLockError::Poisoned(lanes)) => return lanes.into_inner(),
                // Waits in slices, as `run` does. A mutex has no wait of limited length.
                Err(TryLockError::WouldBlock) => blocking_wait(|| std::thread::sleep(pause)),
            }
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    fn aborted(&self) -> Error {
        Error::Aborted(format!("{} was shut down", self.name))
    }

    /// Runs jobs until the queue is stopped. This is the thread's main function.
    fn work(&self) {
        while let Some(Entry { fatal, job, handle, ticket, .. }) =
            self.jobs.next(|entry| std::mem::take(&mut entry.what))
        {
            let result = {
                let mut lanes = self.lanes();
                lanes.expect(ticket);
                let checked = self.health.check();
                if checked.is_ok() {
                    self.record_start(ticket);
                }
                let result = checked.and_then(|()| self.guarded(fatal, || job(&mut lanes)));
                // A job without an operation, such as a callback, has its own record.
                self.record_end(lanes.expect(None), &result);
                result
            };
            let failed = result.is_err();
            handle.finish(result);
            let mut unread = lock(&self.failed);
            unread.retain(|handle| !handle.was_seen());
            if failed {
                unread.push(handle);
            }
            self.failures.store(!unread.is_empty(), Ordering::Release);
            drop(unread);
            self.jobs.settle();
        }
        // No handle is left for the result.
        let _ = catch_unwind(AssertUnwindSafe(|| self.lanes().end()));
    }

    fn record_start(&self, ticket: Option<Ticket>) {
        if let (Some(recorder), Some(ticket)) = (&self.recorder, ticket) {
            recorder.start(ticket);
        }
    }

    fn record_end(&self, ticket: Option<Ticket>, result: &Result<()>) {
        if let (Some(recorder), Some(ticket)) = (&self.recorder, ticket) {
            let own = self.health.world_rank(self.health.rank());
            recorder.finish(ticket, result.as_ref().err().map(|error| (error, own)));
        }
    }

    /// Runs a job's body. A panic poisons the group, and so does every error that may leave a peer waiting.
    fn guarded<T>(&self, fatal: bool, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let error = match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error,
            Err(panic) => {
                return Err(self.health.fail(Error::other(format!(
                    "an operation of {} panicked: {}",
                    self.name,
                    text_of(&*panic)
                ))));
            }
        };
        let harmless = error.is_argument() && !fatal || matches!(error, Error::Aborted(_));
        if harmless {
            return Err(error);
        }
        let first = self.health.fail(error.clone());
        // The lane's own copy of the first cause also says which operation was running.
        let same = std::mem::discriminant(&first) == std::mem::discriminant(&error);
        Err(if same { error } else { first })
    }

    /// Returns the error of the first failed job that nobody can read any more, because its handles are gone.
    fn take_lost_error(&self) -> Result<()> {
        if !self.failures.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut failed = lock(&self.failed);
        let mut lost = None;
        failed.retain(|handle| match handle.lost_error() {
            Some(error) => {
                lost.get_or_insert(error);
                false
            }
            None => !handle.was_seen(),
        });
        self.failures.store(!failed.is_empty(), Ordering::Release);
        lost.map_or(Ok(()), Err)
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned())
}
