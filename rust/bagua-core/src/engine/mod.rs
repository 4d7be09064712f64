//! The communication thread, the queue of buckets, and handles.
//!
//! From bottom to top:
//!
//! - A [`Handle`] is the outcome of a job. The completion thread runs the callbacks of handles.
//! - A [`LaneWorker`] is a lane with a queue of jobs and a thread.
//! - A [`Messenger`] moves messages independently of the lanes; `device_messages` does so for memory on devices.
//! - A [`Communicator`] is a group with one worker for its collectives and one messenger.
//! - An [`Engine`] is a worker with a schedule of buckets.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Program order.** Jobs that one thread submits to or runs on a worker happen in that order.
//! 2. **No error is lost.** An error reaches the handle and its callbacks. If a job has neither, the worker's next call
//!    returns its error. The next `wait` also returns errors of buckets. If a failure causes further errors, callers
//!    get the group's first failure.
//! 3. **No waiter is left behind**, and no callback. A job ends with its result, with a panic (a `System` error), or
//!    with the end of the worker (`Aborted`).
//! 4. **Marking never waits for communication.** A bucket's memory is moved to the thread by value, and its lock is
//!    held only for moments.
//! 5. **A forked child owns nothing here.** Its calls return errors, and its drops neither join nor close anything.

mod bucket_queue;
mod completion;
mod device_messages;
mod handle;
mod job_queue;
mod messages;
mod worker;

use device_messages::DeviceMessages;

pub use bucket_queue::{Engine, SharedBucket};
pub use completion::wait_for_callbacks;
pub use handle::Handle;
pub use messages::{Message, Messenger, NO_RANK, Posted, Senders};
pub use worker::{Job, LaneWorker};

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::group::{Group, Lane, Lanes, Options, Quorum, View, carry_data};
use crate::memory::same_place;
use crate::wait::lock;

/// A group's messages and main lane. Blocking calls run on the calling thread, and asynchronous ones on a communication
/// thread that starts with the first of them. Both happen in program order.
pub struct Communicator {
    /// Moves messages on the host. Created by the first message. The messengers and the worker are declared before the
    /// group so that they are dropped first.
    messenger: OnceLock<Arc<Messenger>>,
    /// Moves messages of memory on devices. Created by the first such message.
    devices: OnceLock<DeviceMessages>,
    /// A lock for the thread that creates the messenger.
    making: Mutex<()>,
    worker: LaneWorker,
    group: Group,
    /// Name of the collective, and name of the transport to each rank. Read once when the lane was opened, because
    /// reading them later would wait for a running operation.
    transports: (&'static str, Vec<&'static str>),
}

impl Communicator {
    /// Opens the group's main lane. Collective: all ranks must call it.
    pub fn new(group: Group) -> Result<Communicator> {
        let lanes = Lanes::of(&group)?;
        let transports = (lanes.global.collective(), lanes.global.transports());
        let worker = LaneWorker::over(lanes, group.health().clone(), group.name());
        Ok(Communicator {
            messenger: OnceLock::new(),
            devices: OnceLock::new(),
            making: Mutex::new(()),
            worker,
            group,
            transports,
        })
    }

    /// Returns the group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Returns the name of the collective, and the name of the transport to each rank.
    pub fn transports(&self) -> (&'static str, Vec<&'static str>) {
        self.transports.clone()
    }

    /// Runs a job on this thread: see [`LaneWorker::run`].
    pub fn run<T>(&self, job: impl FnOnce(&mut Lane) -> Result<T>) -> Result<T> {
        self.worker.run(|lanes| job(&mut lanes.global))
    }

    /// Returns the worker, whose communication thread runs jobs on the main lane.
    pub fn worker(&self) -> &LaneWorker {
        &self.worker
    }

    /// Leaves this group and returns a communicator of the surviving ranks: see [`Group::shrink`]. Returns the errors
    /// of [`Group::shrink`].
    pub fn shrink(&self, timeout: Option<Duration>, quorum: Quorum) -> Result<View<Communicator>> {
        let open = |group: &Group| {
            let opened = Communicator::new(group.clone())?;
            opened.run(carry_data)?;
            Ok(opened)
        };
        self.group.shrink(timeout, quorum, open, |opened| opened.run(|lane| lane.barrier(&Options::default())))
    }

    /// Starts to send and receive messages, independently of the main lane: see [`Messenger::post`]. The memory of all
    /// messages must be on the host or on one device. A device copies it after the work that was marked there.
    ///
    /// # Errors
    /// The errors of [`Messenger::post`], and `UnsupportedType` if the memory is in several places.
    pub fn post(
        &self,
        sends: Vec<Message>,
        receives: Vec<Message>,
        timeout: Option<Duration>,
        keep: Box<dyn Any + Send>,
    ) -> Result<Posted> {
        self.worker.check()?;
        let messenger = self.messenger()?;
        let mut places = sends.iter().chain(&receives).map(|message| message.data.device());
        if let Some(first) = places.next()
            && places.any(|place| !same_place(place, first))
        {
            let text = "the arrays of one call must all be on the host or all on one device";
            return Err(Error::UnsupportedType(text.to_owned()));
        }
        let on_device = sends.iter().chain(&receives).any(|message| message.data.device().is_some());
        if on_device || self.devices.get().is_some_and(DeviceMessages::has_unsent) {
            let devices = self.devices.get_or_init(|| DeviceMessages::over(Arc::clone(messenger)));
            return devices.post(sends, receives, timeout, keep);
        }
        messenger.post(sends, receives, timeout, keep)
    }

    fn messenger(&self) -> Result<&Arc<Messenger>> {
        if let Some(messenger) = self.messenger.get() {
            return Ok(messenger);
        }
        let _making = lock(&self.making);
        if let Some(messenger) = self.messenger.get() {
            return Ok(messenger);
        }
        let messenger = Arc::new(Messenger::new(&self.group)?);
        Ok(self.messenger.get_or_init(|| messenger))
    }

    /// Ends the threads of the messages and of the collectives: see [`LaneWorker::shutdown`].
    pub fn shutdown(&self) {
        if let Some(devices) = self.devices.get() {
            devices.shutdown();
        }
        if let Some(messenger) = self.messenger.get() {
            messenger.shutdown();
        }
        self.worker.shutdown();
    }
}
