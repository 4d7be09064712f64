//! Messages of memory on devices. They travel through host memory, and a separate thread copies between the two.
//!
//! A receive is posted at once, and copied to the device when the message has arrived. A send is posted when its bytes
//! are on the host, and after all earlier sends to the same rank. No copy starts before the device is ready for it. The
//! thread therefore waits only for copies, never for work of a device that may itself wait for a message.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::handle::Handle;
use super::messages::{Message, Messenger, Posted, Senders};
use crate::error::{Error, Progress, Result};
use crate::group::OwnerProcess;
use crate::memory::{Device, HostMemory, Region};
use crate::wait::{Deadline, lock, wait_on};

/// The first and the longest pause between two checks of running copies.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// The messages of one call, which end together.
struct Transfer {
    handle: Handle,
    /// The device that the memory of all messages is on. `None` for the host.
    device: Option<Arc<dyn Device>>,
    deadline: Deadline,
    sends: Vec<Message>,
    sent: Option<Handle>,
    /// Destinations on the device, each with the host memory that receives its bytes first.
    receives: Vec<(Region, Arc<HostMemory>)>,
    /// Handle of the receives into host memory, once they are posted.
    received: Option<Handle>,
    /// Held until the call has ended.
    keep: Box<dyn Any + Send>,
}

/// New transfers for the thread.
#[derive(Default)]
struct Queue {
    new: Vec<Transfer>,
    /// Number of messages to send that are not posted yet.
    unsent: usize,
    stopping: bool,
}

struct DeviceMessageQueue {
    messenger: Arc<Messenger>,
    queue: Mutex<Queue>,
    bell: Condvar,
}

pub(super) struct DeviceMessages {
    shared: Arc<DeviceMessageQueue>,
    owner: OwnerProcess,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DeviceMessages {
    pub(super) fn over(messenger: Arc<Messenger>) -> DeviceMessages {
        let shared = Arc::new(DeviceMessageQueue { messenger, queue: Mutex::default(), bell: Condvar::new() });
        DeviceMessages { shared, owner: OwnerProcess::current(), thread: Mutex::default() }
    }

    /// Returns true if sends wait to be posted. Later sends must not overtake them.
    pub(super) fn has_unsent(&self) -> bool {
        lock(&self.shared.queue).unsent > 0
    }

    /// Posts messages like [`Messenger::post`]. Their memory is all on one device, or on the host if the messages must
    /// not overtake messages from a device.
    pub(super) fn post(
        &self,
        sends: Vec<Message>,
        receives: Vec<Message>,
        timeout: Option<Duration>,
        keep: Box<dyn Any + Send>,
    ) -> Result<Posted> {
        let messenger = &self.shared.messenger;
        messenger.check(&sends, &receives)?;
        let limit = timeout.unwrap_or(messenger.timeout());
        let device = sends.iter().chain(&receives).find_map(|message| message.data.device()).cloned();
        let mut transfer = Transfer {
            handle: messenger.pending(),
            device,
            deadline: Deadline::after(limit),
            sends,
            sent: None,
            receives: Vec::new(),
            received: None,
            keep,
        };
        let mut senders: Senders = Arc::new([]);
        if !receives.is_empty() {
            let mut posted = Vec::with_capacity(receives.len());
            for Message { peer, tag, data } in receives {
                if data.device().is_none() {
                    posted.push(Message { peer, tag, data });
                    continue;
                }
                let mut memory = HostMemory::new(data.len());
                posted.push(Message { peer, tag, data: Region::in_memory(&mut memory, data.count(), data.dtype())? });
                transfer.receives.push((data, memory));
            }
            let begun = messenger.post(Vec::new(), posted, Some(limit), Box::new(()))?;
            senders = begun.senders;
            transfer.received = Some(begun.handle);
        }
        let handle = transfer.handle.clone();
        let mut queue = lock(&self.shared.queue);
        if queue.stopping {
            return Err(aborted());
        }
        self.start()?;
        queue.unsent += transfer.sends.len();
        queue.new.push(transfer);
        drop(queue);
        self.shared.bell.notify_all();
        Ok(Posted { handle, senders })
    }

    fn start(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new().name("bagua-copies".to_owned()).spawn(move || shared.work());
            *thread = Some(spawned.map_err(|error| Error::system("cannot start the thread of messages", error))?);
        }
        Ok(())
    }

    /// Ends the thread, before the messenger's. Unfinished calls fail with `Aborted`. Dropping does the same. Further
    /// calls do nothing.
    pub(super) fn shutdown(&self) {
        if !self.owner.is_current() {
            // The thread belongs to the parent.
            if let Ok(mut thread) = self.thread.try_lock() {
                std::mem::forget(thread.take());
            }
            return;
        }
        lock(&self.shared.queue).stopping = true;
        self.shared.bell.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }
}

impl Drop for DeviceMessages {
    fn drop(&mut self) {
        self.shutdown();
        if !self.owner.is_current() {
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

fn aborted() -> Error {
    Error::Aborted("the group's messages were shut down".to_owned())
}

impl DeviceMessageQueue {
    /// Advances transfers until the queue stops. This is the thread's main function.
    fn work(&self) {
        let mut transfers: Vec<Transfer> = Vec::new();
        let mut pause = PAUSES.0;
        loop {
            let mut queue = lock(&self.queue);
            while transfers.is_empty() && queue.new.is_empty() && !queue.stopping {
                queue = wait_on(&self.bell, queue);
            }
            let stopping = queue.stopping;
            if !queue.new.is_empty() {
                transfers.append(&mut queue.new);
                pause = PAUSES.0;
            }
            drop(queue);
            if stopping {
                let error = self.messenger.health().cause().unwrap_or_else(aborted);
                transfers.drain(..).for_each(|transfer| self.end(transfer, Err(error.clone())));
                return;
            }
            if self.advance(&mut transfers) {
                pause = PAUSES.0;
                continue;
            }
            // Waits for the handle instead of sleeping if there is one, because it may be done before the pause ends.
            match transfers.iter().find_map(Transfer::awaited) {
                Some(handle) => _ = handle.wait_for(pause),
                None => std::thread::sleep(pause),
            }
            pause = PAUSES.1.min(pause * 2);
        }
    }

    fn advance(&self, transfers: &mut Vec<Transfer>) -> bool {
        let mut moved = false;
        // Ranks to which earlier transfers still have messages to send.
        let mut waiting: Vec<Option<usize>> = Vec::new();
        let mut at = 0;
        while at < transfers.len() {
            let transfer = &mut transfers[at];
            let before = (transfer.sends.len(), transfer.receives.len());
            let ended = self.step(transfer, &waiting);
            let unsent = before.0 - transfer.sends.len();
            lock(&self.queue).unsent -= unsent;
            moved |= before != (transfer.sends.len(), transfer.receives.len());
            match ended {
                Ok(false) => {
                    waiting.extend(transfer.sends.iter().map(|message| message.peer));
                    at += 1;
                }
                ended => {
                    moved = true;
                    self.end(transfers.remove(at), ended.map(|_| ()));
                }
            }
        }
        moved
    }

    /// Does what can be done for a transfer now. Returns true if it is done.
    fn step(&self, transfer: &mut Transfer, waiting: &[Option<usize>]) -> Result<bool> {
        let health = self.messenger.health();
        health.check()?;
        let mut ready = None;
        let mut is_ready = |device: Option<&Arc<dyn Device>>| -> Result<bool> {
            Ok(*ready.insert(match (ready, device) {
                (Some(known), _) => known,
                (None, Some(device)) => device.is_ready()?,
                (None, None) => true,
            }))
        };
        let device = transfer.device.as_ref();
        let first = !transfer.sends.iter().any(|message| waiting.contains(&message.peer));
        if !transfer.sends.is_empty() && first && is_ready(device)? {
            let mut posted = Vec::with_capacity(transfer.sends.len());
            for Message { peer, tag, data } in std::mem::take(&mut transfer.sends) {
                posted.push(Message { peer, tag, data: on_the_host(data)? });
            }
            let left = transfer.deadline.left();
            transfer.sent = Some(self.messenger.post(posted, Vec::new(), Some(left), Box::new(()))?.handle);
        }
        let received = outcome(transfer.received.as_ref())?;
        if received && !transfer.receives.is_empty() && is_ready(device)? {
            for (region, memory) in &mut transfer.receives {
                // The messenger releases the memory shortly after the handle is done.
                let Some(bytes) = HostMemory::bytes(memory) else { return Ok(false) };
                region.buffer_mut().copy_from(bytes)?;
            }
            transfer.receives.clear();
        }
        let sent = outcome(transfer.sent.as_ref())? && transfer.sends.is_empty();
        if sent && received && transfer.receives.is_empty() {
            return Ok(true);
        }
        // The messenger checks the deadlines of messages that it was given.
        if transfer.deadline.passed() && ready == Some(false) {
            let what = format!("messages of {}", device.map_or("", |device| device.name()));
            let progress = Progress { what, label: String::new(), done: 0, total: 0 };
            return Err(health.timed_out(transfer.deadline.limit(), &[], progress));
        }
        Ok(false)
    }

    fn end(&self, transfer: Transfer, result: Result<()>) {
        let Transfer { handle, sends, receives, keep, .. } = transfer;
        lock(&self.queue).unsent -= sends.len();
        let result = result.map_err(|error| match error {
            Error::Aborted(_) => error,
            error => self.messenger.health().fail(error),
        });
        drop((sends, receives, keep));
        handle.finish(result);
    }
}

impl Transfer {
    /// Returns the handle of a posted part that is not done.
    fn awaited(&self) -> Option<&Handle> {
        [&self.received, &self.sent].into_iter().flatten().find(|handle| !handle.is_completed())
    }
}

/// Returns true if the posted part is done, or its error.
fn outcome(handle: Option<&Handle>) -> Result<bool> {
    match handle {
        Some(handle) if handle.is_completed() => handle.wait(None).map(|()| true),
        Some(_) => Ok(false),
        None => Ok(true),
    }
}

fn on_the_host(data: Region) -> Result<Region> {
    if data.device().is_none() {
        return Ok(data);
    }
    let mut memory = HostMemory::new(data.len());
    if let Some(bytes) = HostMemory::bytes(&mut memory) {
        data.buffer().copy_to(bytes)?;
    }
    Region::in_memory(&mut memory, data.count(), data.dtype())
}
