//! A lane with a queue of jobs and a communication thread that starts with the first of them.

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

/// How long a running operation may go on after `shutdown` before the group is poisoned to end it.
const GRACE: Duration = Duration::from_secs(1);

/// How long it may then still take. Waits of a lane see a poisoned group within [`crate::wait::SLICE`]; only a callback that does
/// not return takes longer, and its thread is left behind rather than hang the process.
const PATIENCE: Duration = Duration::from_secs(5);

/// The first and the longest pause before a thread looks again whether another thread has left the lane.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// A job for a communication thread.
pub type Job = Box<dyn FnOnce(&mut Lanes) -> Result<()> + Send + 'static>;

/// See the module.
pub struct LaneWorker {
    shared: Arc<WorkerShared>,
    /// Keeps the completion thread until `shutdown`.
    registration: Mutex<Option<WorkerRegistration>>,
}

/// What the callers and the communication thread share.
struct WorkerShared {
    /// For error texts and the thread's name.
    name: String,
    /// The process that may use this: threads do not survive a fork.
    owner: OwnerProcess,
    health: Arc<GroupHealth>,
    /// Records what is queued; `None` as in the lane.
    recorder: Option<LaneRecorder>,
    /// Held for one job at a time, by the thread or by `run`.
    lanes: Mutex<Lanes>,
    /// What the thread runs, and the thread from the first `submit` to `shutdown`.
    jobs: Jobs<Entry, JoinHandle<()>>,
    /// Handles of failed jobs whose result was not read.
    failed: Mutex<Vec<Handle>>,
    /// Mirror of `!failed.is_empty()`, for calls that need no lock while nothing has failed.
    failures: AtomicBool,
}

struct Entry {
    what: String,
    /// Any error of this job poisons the group, even one that nothing was sent for.
    fatal: bool,
    job: Job,
    handle: Handle,
    /// The record of its first operation.
    ticket: Option<Ticket>,
}

impl LaneWorker {
    /// A worker over lanes. `health` is that of their group.
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

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The group's state of failure.
    pub fn health(&self) -> &GroupHealth {
        &self.shared.health
    }

    /// World rank of this process.
    pub(super) fn world_rank(&self) -> usize {
        self.shared.health.world_rank(self.shared.health.rank())
    }

    pub(super) fn stopping(&self) -> sync::Arc<sync::AtomicBool> {
        self.shared.jobs.stopping()
    }

    /// Ok, or why no further call can succeed. Takes no lock.
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
    /// While nothing is pending this is one lock and no thread change. An error of an earlier job whose handle was dropped,
    /// because its handle is gone, is returned here instead, and the job does not run.
    pub fn run<T>(&self, job: impl FnOnce(&mut Lanes) -> Result<T>) -> Result<T> {
        self.check()?;
        if self.shared.jobs.is_busy() {
            let (submitted, mut settled) = (self.shared.jobs.submitted(), false);
            // In slices, between which a caller that is told to give up fails the group, and so the jobs.
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

    /// Hands a job to the communication thread. `what` says what it is, for error texts.
    pub fn submit(&self, what: &str, job: Job) -> Result<Handle> {
        self.enqueue(what, &Announced::job("a job"), false, job)
    }

    /// As `submit`, for an operation on the global lane, which `op` describes to the flight recorder.
    pub fn submit_op(
        &self,
        op: &Announced<'_>,
        job: impl FnOnce(&mut Lane) -> Result<()> + Send + 'static,
    ) -> Result<Handle> {
        self.enqueue("an asynchronous operation", op, false, Box::new(move |lanes| job(&mut lanes.global)))
    }

    /// As `submit`, for a job whose every error poisons the group.
    pub(super) fn submit_fatal(&self, what: &str, op: &Announced<'_>, job: Job) -> Result<Handle> {
        self.enqueue(what, op, true, job)
    }

    fn enqueue(&self, what: &str, op: &Announced<'_>, fatal: bool, job: Job) -> Result<Handle> {
        self.check()?;
        self.start()?;
        self.shared.take_lost_error()?;
        let handle = Handle::pending(self.world_rank());
        let entry = || {
            let ticket = self.shared.recorder.as_ref().and_then(|recorder| recorder.queue(op));
            Entry { what: what.to_owned(), fatal, job, handle: handle.clone(), ticket }
        };
        if self.shared.jobs.push(entry) { Ok(handle) } else { Err(self.shared.aborted()) }
    }

    /// Starts the thread if it does not run yet.
    pub(super) fn start(&self) -> Result<()> {
        self.shared.jobs.start(|| {
            let shared = self.shared.clone();
            let name = format!("bagua-{}", self.shared.name.replace('\0', ""));
            let spawned = std::thread::Builder::new().name(name).spawn(move || shared.work());
            spawned.map_err(|error| Error::system("cannot start a communication thread", error))
        })
    }

    /// Ends the thread: what is queued fails with `Aborted`. What is running may end by itself for a second; then the group is
    /// poisoned with `Aborted`, which ends every wait of a lane. A callback that still does not return keeps its thread, which
    /// is left behind. Idempotent; drop does the same. Waits: call it without the GIL.
    pub fn shutdown(&self) {
        if self.is_foreign() {
            // The thread is the parent's; so are the streams that dropping the lane would close.
            self.shared.jobs.forget_thread();
            return;
        }
        for entry in self.shared.jobs.stop() {
            let Entry { job, handle, ticket, .. } = entry;
            // First the job, so that the memory it holds is back when the waiter wakes.
            drop(job);
            let error = self.shared.health.cause().unwrap_or_else(|| self.shared.aborted());
            self.shared.record_end(ticket, &Err(error.clone()));
            handle.finish(Err(error));
            self.shared.jobs.settle_dropped();
        }
        drop(lock(&self.registration).take());
        let Some(thread) = self.shared.jobs.take_thread() else { return };
        if thread.thread().id() == std::thread::current().id() {
            // A job ended its own worker; the thread ends when the job returns.
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
        // The thread catches the panics of jobs, and there is nothing to do about one of its own here.
        let _ = thread.join();
    }

    /// Ok unless this is a forked child.
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
        // A job's panic poisons the group, which says more than a poisoned lock.
        lock(&self.lanes)
    }

    /// As `lane`, for a thread that may hold what the lane's user needs to come to its end.
    fn free_lanes(&self) -> MutexGuard<'_, Lanes> {
        let mut pause = PAUSES.0;
        loop {
            match self.lanes.try_lock() {
                Ok(lanes) => return lanes,
                Err(TryLockError::Poisoned(lanes)) => return lanes.into_inner(),
                // In slices, as in `run`. A mutex has no wait of limited length.
                Err(TryLockError::WouldBlock) => blocking_wait(|| std::thread::sleep(pause)),
            }
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    fn aborted(&self) -> Error {
        Error::Aborted(format!("{} was shut down", self.name))
    }

    /// The thread.
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
                // A job that had no operation, such as a callback, is one itself.
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
        // Its result has no handle left.
        let _ = catch_unwind(AssertUnwindSafe(|| self.lanes().end()));
    }

    /// Records that the thread takes a job; the first operation of the job takes over the ticket.
    fn record_start(&self, ticket: Option<Ticket>) {
        if let (Some(recorder), Some(ticket)) = (&self.recorder, ticket) {
            recorder.start(ticket);
        }
    }

    /// Records the end of a job whose ticket no operation has taken over.
    fn record_end(&self, ticket: Option<Ticket>, result: &Result<()>) {
        if let (Some(recorder), Some(ticket)) = (&self.recorder, ticket) {
            let own = self.health.world_rank(self.health.rank());
            recorder.finish(ticket, result.as_ref().err().map(|error| (error, own)));
        }
    }

    /// Runs a job's body; a panic and every error that a peer may be waiting on poison the group.
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
        // The lane's own copy of the first cause also says what was being done.
        let same = std::mem::discriminant(&first) == std::mem::discriminant(&error);
        Err(if same { error } else { first })
    }

    /// Returns, as an error, the first failure whose handle is gone unseen.
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

/// What a panic said.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned())
}
