//! The communication thread, the queue of buckets, and handles.
//!
//! From below: a [`Handle`] is the outcome of a job; a [`LaneWorker`] is a lane with a queue of jobs and a thread; a [`Messenger`] moves
//! messages beside the lanes, and `device_messages` those of memory on devices; a [`Communicator`] is a group with one worker for its verbs and one messenger; an [`Engine`] is a worker with a schedule of buckets. The completion
//! thread runs the callbacks of handles.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Program order.** What one thread submits and runs on a worker happens in that order.
//! 2. **No error is lost.** It reaches the handle and its callbacks; without a handle and a callback, the worker's next call; if it
//!    concerns a bucket, the next `wait`. The group's first cause wins over its consequences.
//! 3. **No waiter is left behind**, and no callback. A job ends by its result, its panic (a `System` error), or the end of the
//!    worker (`Aborted`).
//! 4. **Marking never waits for communication.** A bucket's memory travels to the thread by value, and its lock is held for
//!    moments only.
//! 5. **A forked child owns nothing here.** Its calls are errors, and its drops neither join nor close anything.

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

/// A group's messages, and its main lane, shared by blocking calls (on the calling thread) and asynchronous ones (on a communication thread that
/// starts with the first of them), in program order.
pub struct Communicator {
    /// Sends and receives messages, from the first of them. The first fields go before the group does.
    messenger: OnceLock<Arc<Messenger>>,
    /// Those of memory on devices, from the first of them.
    devices: OnceLock<DeviceMessages>,
    /// Held while the messenger is made.
    making: Mutex<()>,
    worker: LaneWorker,
    group: Group,
    /// Read once when the lane was opened, so that reading it never waits for a running operation.
    transports: (&'static str, Vec<&'static str>),
}

impl Communicator {
    /// Opens the group's main lane. Collective.
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

    /// The group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Name of the collective and of the transport towards each rank.
    pub fn transports(&self) -> (&'static str, Vec<&'static str>) {
        self.transports.clone()
    }

    /// See [`LaneWorker::run`].
    pub fn run<T>(&self, job: impl FnOnce(&mut Lane) -> Result<T>) -> Result<T> {
        self.worker.run(|lanes| job(&mut lanes.global))
    }

    /// Its communication thread, on the lane.
    pub fn worker(&self) -> &LaneWorker {
        &self.worker
    }

    /// The communicator of the ranks that are left; this one's group is left. See [`Group::shrink`].
    ///
    /// # Errors
    /// As [`Group::shrink`].
    pub fn shrink(&self, timeout: Option<Duration>, quorum: Quorum) -> Result<View<Communicator>> {
        let open = |group: &Group| {
            let opened = Communicator::new(group.clone())?;
            opened.run(carry_data)?;
            Ok(opened)
        };
        self.group.shrink(timeout, quorum, open, |opened| opened.run(|lane| lane.barrier(&Options::default())))
    }

    /// Starts to send and to receive messages, beside the operations of the main lane: see [`Messenger::post`]. Their memory is all on the
    /// host, or all on one device, which copies behind what was marked there.
    ///
    /// # Errors
    /// As [`Messenger::post`], but `UnsupportedType` for memory in several places.
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
            let text = "the arrays of one call must all be on the host, or on one device";
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

    /// Ends the thread of the messages and that of the verbs: see [`LaneWorker::shutdown`].
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
