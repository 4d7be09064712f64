//! The thread that watches a communicator's running operations, and aborts the communicator if anything fails.
//!
//! NCCL's calls return before their work is done, and the caller may never wait for the result. While work is running,
//! the thread therefore checks the group's health, the communicator's error and the deadlines every 10 ms. The first
//! failure poisons the group. The thread then aborts the communicator: this call may block, but it ends this rank's
//! work no matter what the other ranks do.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use bagua_core::error::{Error, Progress, Result};
use bagua_core::health::{GroupHealth, LEAVING, LEFT};
use bagua_core::request::OpContext;
use bagua_core::types::Fingerprint;
use bagua_core::wait::{Deadline, lock, wait_on, wait_on_for};
use nccl_sys::{Functions, ncclComm, ncclComm_t, ncclResult_t};

use super::Nccl;
use crate::context::Context;
use crate::event::Event;

const PERIOD: Duration = Duration::from_millis(10);

/// Time after which the thread polls the event of work that nobody waits for.
const UNASKED: Duration = Duration::from_secs(1);

/// How long work that nobody waits for may take after its deadline, because a device may start it late.
const GRACE: Duration = Duration::from_millis(500);

/// How long work may take after another rank has left in order. That rank waits less long for its own part.
const AFTER_LEAVING: Duration = Duration::from_secs(5);

/// How long an error that another rank may have caused waits for its cause, as in `GroupHealth::attribute_disconnect`.
const CAUSE_GRACE: Duration = Duration::from_millis(400);

/// How long an NCCL call that does not wait for anything may take.
const CALL: Duration = Duration::from_secs(1);

#[derive(Clone, Copy)]
pub(super) struct Handle(pub(super) ncclComm_t);

// SAFETY: any thread may use a communicator, but only one at a time.
unsafe impl Send for Handle {}

/// An operation that is not known to be done.
struct Running {
    number: u64,
    /// Event recorded after the operation's work, once the work is on the stream.
    event: Arc<Event>,
    on_stream: bool,
    deadline: Deadline,
    fingerprint: Fingerprint,
    label: String,
    /// Cell for a failure after the call has returned.
    failure: Arc<OnceLock<Error>>,
    looked: Instant,
    /// Time of the first check after the deadline.
    late: Option<Instant>,
}

impl Running {
    fn is_done(&self) -> bool {
        self.on_stream && matches!(self.event.is_reached(), Ok(true))
    }
}

#[derive(Default)]
struct WatchedOperations {
    /// Operations that may still run, in the order of their calls, which is the order of the stream.
    running: Vec<Running>,
    next: u64,
    /// The reason for aborting the communicator.
    doomed: Option<Error>,
    /// True once the communicator was ended in order, so that nothing is left to watch.
    stopped: bool,
    /// True once the library has destroyed the communicator, so that its work has ended.
    ended: bool,
}

/// The state that the thread of operations and the watching thread share.
pub(super) struct Watched {
    pub(super) nccl: Arc<Nccl>,
    pub(super) context: Arc<Context>,
    pub(super) health: Arc<GroupHealth>,
    /// Handle of the communicator. `None` once it is ended. Locked from a call until the call is no longer in progress.
    pub(super) handle: Mutex<Option<Handle>>,
    /// Pointer to the same communicator, for an abort while a call does not return.
    pub(super) raw: AtomicPtr<ncclComm>,
    state: Mutex<WatchedOperations>,
    changed: Condvar,
}

impl Watched {
    pub(super) fn new(nccl: &Arc<Nccl>, context: &Arc<Context>, health: Arc<GroupHealth>) -> Watched {
        Watched {
            nccl: Arc::clone(nccl),
            context: Arc::clone(context),
            health,
            handle: Mutex::new(None),
            raw: AtomicPtr::new(ptr::null_mut()),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(super) fn functions(&self) -> &Functions {
        self.nccl.functions().expect("a library without them was rejected before")
    }

    /// Adds an operation, and releases what earlier operations keep if they are done.
    pub(super) fn watch_operation(
        &self,
        cx: &OpContext<'_>,
        event: &Arc<Event>,
        failure: &Arc<OnceLock<Error>>,
    ) -> u64 {
        let mut state = lock(&self.state);
        // If other work is running, the thread checks periodically. Waking it would cost more than the operation.
        let was_idle = state.running.is_empty();
        let done = state.running.iter().take_while(|running| running.is_done()).count();
        state.running.drain(..done);
        let number = state.next;
        state.next += 1;
        state.running.push(Running {
            number,
            event: Arc::clone(event),
            on_stream: false,
            deadline: cx.deadline,
            fingerprint: cx.fingerprint,
            label: cx.label.to_owned(),
            failure: Arc::clone(failure),
            looked: Instant::now(),
            late: None,
        });
        drop(state);
        if was_idle {
            self.changed.notify_all();
        }
        number
    }

    /// Notes that an operation's event was recorded after its work.
    pub(super) fn on_stream(&self, number: u64) {
        if let Some(running) = lock(&self.state).running.iter_mut().find(|running| running.number == number) {
            running.on_stream = true;
        }
    }

    /// Returns the reason why the communicator cannot be used any more.
    pub(super) fn cause(&self) -> Option<Error> {
        lock(&self.state).doomed.clone()
    }

    /// Poisons the group, and makes the thread abort the communicator. Returns the group's first failure.
    pub(super) fn doom(&self, error: Error) -> Error {
        let cause = self.health.fail(self.caused(error));
        lock(&self.state).doomed.get_or_insert_with(|| cause.clone());
        self.changed.notify_all();
        cause
    }

    /// Blocks until the communicator is aborted or ended, for at most `limit`. Returns true if it is.
    pub(super) fn wait_until_ended(&self, limit: Duration) -> bool {
        let start = Instant::now();
        let mut state = lock(&self.state);
        while !state.ended {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            state = wait_on_for(&self.changed, state, left);
        }
        true
    }

    /// Ends the thread after the communicator was destroyed in order.
    pub(super) fn stop(&self) {
        let mut state = lock(&self.state);
        (state.stopped, state.ended) = (true, true);
        state.running.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the failure of the group. Leaving the group in order is not a failure.
    pub(super) fn failure(&self) -> Option<Error> {
        self.health.cause().filter(|cause| !matches!(cause, Error::Aborted(text) if text == LEAVING))
    }

    /// Waits for the cause of an error that may follow from another rank's end, which may become known here only later.
    fn caused(&self, error: Error) -> Error {
        let remote = [ncclResult_t::REMOTE_ERROR.0, ncclResult_t::SYSTEM_ERROR.0];
        let follows = matches!(&error, Error::Device(failure)
            if failure.api.starts_with("nccl") && remote.contains(&failure.code));
        let until = Instant::now() + CAUSE_GRACE;
        while follows && self.failure().is_none() && Instant::now() < until {
            std::thread::sleep(PERIOD);
        }
        error
    }

    /// Checks until the communicator is stopped or aborted. This is the thread's main function.
    pub(super) fn watch(&self) {
        loop {
            let mut state = lock(&self.state);
            while !state.stopped && state.doomed.is_none() && state.running.is_empty() {
                state = wait_on(&self.changed, state);
            }
            if state.stopped {
                return;
            }
            if state.doomed.is_none() {
                state = wait_on_for(&self.changed, state, PERIOD);
            }
            drop(state);
            if let Err(cause) = self.check_all() {
                return self.abort(&cause);
            }
        }
    }

    /// Returns the group's first failure if anything has failed.
    fn check_all(&self) -> Result<()> {
        if let Some(cause) = self.cause().or_else(|| self.failure()) {
            return Err(cause);
        }
        self.check_communicator().map_err(|error| self.doom(error))?;
        self.check_operations(&mut lock(&self.state)).map_err(|error| self.doom_later(error))
    }

    /// Poisons the group with an error that this rank found itself. Returns the group's first failure.
    fn doom_later(&self, error: Error) -> Error {
        self.health.fail(error)
    }

    /// Checks the communicator's own error. While a call is in progress, the calling thread does so.
    fn check_communicator(&self) -> Result<()> {
        let handle = match self.handle.try_lock() {
            Ok(handle) => handle,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let Some(Handle(communicator)) = *handle else { return Ok(()) };
        let api = "ncclCommGetAsyncError";
        let mut found = ncclResult_t::SUCCESS;
        // SAFETY: the communicator exists, and because of the lock no other thread uses it.
        let result = unsafe { (self.functions().comm_get_async_error)(communicator, &raw mut found) };
        for each in [result, found] {
            if each != ncclResult_t::SUCCESS && each != ncclResult_t::IN_PROGRESS {
                return Err(self.nccl.failure(self.context.device(), api, each));
            }
        }
        Ok(())
    }

    /// Checks deadlines, and looks for ranks that have left.
    fn check_operations(&self, state: &mut MutexGuard<'_, WatchedOperations>) -> Result<()> {
        let now = Instant::now();
        let departed = (0..self.health.size()).find(|rank| self.health.has_departed(*rank));
        let mut error = None;
        // If the first operation is not done, the later ones are not done either.
        while let Some(running) = state.running.first_mut() {
            let late = running.deadline.passed() || departed.is_some();
            if !running.on_stream || !(late || now - running.looked >= UNASKED) {
                break;
            }
            running.looked = now;
            if running.is_done() {
                state.running.remove(0);
                continue;
            }
            let since = late.then(|| now - *running.late.get_or_insert(now));
            if running.deadline.passed() && since.is_some_and(|since| since >= GRACE) {
                error = Some(self.health.timed_out(running.deadline.limit(), &[], self.progress(running)));
            } else if let Some(rank) = departed.filter(|_| since.is_some_and(|since| since >= AFTER_LEAVING)) {
                error = Some(self.health.peer_lost(rank, LEFT).during(self.progress(running)));
            }
            break;
        }
        error.map_or(Ok(()), Err)
    }

    fn progress(&self, running: &Running) -> Progress {
        let what = format!("{} by NCCL on cuda:{}", running.fingerprint, self.context.device());
        Progress { what, label: running.label.clone(), done: 0, total: 0 }
    }

    /// Aborts the communicator and its work. Operations that are not done fail.
    fn abort(&self, cause: &Error) {
        for running in lock(&self.state).running.drain(..) {
            if !running.is_done() {
                let _ = running.failure.set(cause.clone());
            }
        }
        let start = Instant::now();
        let communicator = loop {
            match self.handle.try_lock() {
                Ok(mut handle) => break handle.take().map_or(ptr::null_mut(), |handle| handle.0),
                // A call does not return. NCCL allows an abort meanwhile.
                Err(_) if start.elapsed() >= CALL => break self.raw.load(Ordering::Acquire),
                Err(_) => std::thread::sleep(PERIOD / 10),
            }
        };
        self.raw.store(ptr::null_mut(), Ordering::Release);
        // At the end of the process, the driver may already be shut down.
        if !communicator.is_null()
            && let Ok(_entered) = self.context.enter()
        {
            // SAFETY: the communicator exists, and no other thread can get it any more.
            unsafe { (self.functions().comm_abort)(communicator) };
        }
        let mut state = lock(&self.state);
        state.doomed.get_or_insert_with(|| cause.clone());
        state.ended = true;
        drop(state);
        self.changed.notify_all();
    }
}
