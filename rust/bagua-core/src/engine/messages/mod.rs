//! The messages of a group: send, recv and exchange. They are independent of its collectives and not ordered with them.
//!
//! A message goes to the first posted receive that names its sender (or any source) and its tag. Messages with the same
//! sender and tag match in order. Messages with different tags do not wait for each other. All posted messages progress
//! together: on a thread that waits for one of them, or else on one thread per group, which starts with the first
//! message. Messages use no lane, so they neither wait for a collective nor delay one.
//!
//! ```text
//! sender    Eager, bytes   (up to 64 KiB)      or Offer                 Data, bytes …
//! receiver                 Ready                        Ready
//! ```
//!
//! Like MPI, this module sends the bytes of a long message only after its receive is posted. They go straight to the
//! receive's memory. Short messages are sent at once. The receiver keeps them until their receive is posted, at most
//! 1 MiB from each sender.
//!
//! | file | what it holds |
//! |---|---|
//! | `matching` | which receive gets which message |
//! | `posted` | the messages that are not done, and their frames |
//! | `streams` | where streams come from |
//! | `turns` | who makes progress: a caller that waits, or the thread |
//! | `progress` | what progress is; [`Endpoint`](crate::transport::Endpoint) moves the bytes, as for collectives |

mod matching;
mod posted;
mod progress;
mod streams;
#[cfg(test)]
mod tests;
mod turns;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use self::posted::Call;
pub use self::posted::{NO_RANK, Senders};
use self::progress::{Event, MessengerShared};
pub use self::streams::Message;
use self::streams::Streams;
use super::completion::{CompletionThread, WorkerRegistration};
use super::handle::{Handle, forked};
use crate::error::{Error, Result};
use crate::group::{Group, OwnerProcess, flight_recorder};
use crate::health::{GroupHealth, Subscription};
use crate::recorder::LaneRecorder;
use crate::stats::Stats;
use crate::types::{DType, Fingerprint, Kind};
use crate::wait::{Deadline, lock};

/// The result of [`Messenger::post`].
#[derive(Clone)]
pub struct Posted {
    /// Done when all messages of the call are done. A send is done when its bytes may be changed.
    pub handle: Handle,
    /// Group rank of the sender of each received message, in the order of the receives. Complete when the handle is.
    pub senders: Senders,
}

/// Sends and receives the messages of a group: see the module.
pub struct Messenger {
    shared: Arc<MessengerShared>,
    owner: OwnerProcess,
    timeout: Duration,
    /// Records the messages. `None` in tests.
    recorder: Option<LaneRecorder>,
    posted: AtomicUsize,
    thread: Mutex<Option<JoinHandle<()>>>,
    stopped: AtomicBool,
    /// Keeps the completion thread running until `shutdown`.
    registration: Mutex<Option<WorkerRegistration>>,
    /// Wakes the thread when the group fails.
    _failure: Subscription,
}

impl Messenger {
    /// Creates the messenger of a group. Not collective. Opens no stream before the first message.
    ///
    /// # Errors
    /// `System` if the process may not open another descriptor.
    pub fn new(group: &Group) -> Result<Messenger> {
        let streams = Box::new(group.message_streams());
        let recorder = flight_recorder().lane(&format!("{}, messages", group.name()), 0);
        Messenger::over(streams, group.health(), group.stats(), group.timeout(), Some(recorder))
    }

    fn over(
        streams: Box<dyn Streams>,
        health: &Arc<GroupHealth>,
        stats: &Arc<Stats>,
        timeout: Duration,
        recorder: Option<LaneRecorder>,
    ) -> Result<Messenger> {
        let shared = Arc::new(MessengerShared::new(streams, health, stats, recorder.clone())?);
        let woken = Arc::downgrade(&shared);
        let wake = move || _ = woken.upgrade().inspect(|shared| shared.wake());
        let failure = health.subscribe({
            let wake = wake.clone();
            move |_| wake()
        });
        shared.streams.watch(Arc::new(wake));
        Ok(Messenger {
            shared,
            owner: OwnerProcess::current(),
            timeout,
            recorder,
            posted: AtomicUsize::new(0),
            thread: Mutex::new(None),
            stopped: AtomicBool::new(false),
            registration: Mutex::new(Some(CompletionThread::of_process().add_worker())),
            _failure: failure,
        })
    }

    /// Starts to send and receive the messages of one call, which share one handle and one deadline (`timeout`; `None`:
    /// the group's).
    ///
    /// Holds `keep` until the call has ended. Messages to one rank with one tag arrive in the order given.
    ///
    /// # Errors
    /// `InvalidArgument` if a peer is this rank or not in the group, and `UnsupportedType` if memory is not on the
    /// host. In both cases nothing is sent. Otherwise the group's first failure.
    pub fn post(
        &self,
        sends: Vec<Message>,
        receives: Vec<Message>,
        timeout: Option<Duration>,
        keep: Box<dyn Any + Send>,
    ) -> Result<Posted> {
        self.check(&sends, &receives)?;
        for message in sends.iter().chain(&receives) {
            message.data.as_host()?;
        }
        self.start()?;
        let total: usize = sends.iter().chain(&receives).map(|message| message.data.len()).sum();
        let says = self.says(&sends, &receives);
        let counters = self.shared.stats.of(says.kind);
        counters.calls.fetch_add(1, Ordering::Relaxed);
        counters.payload_bytes.fetch_add(total as u64, Ordering::Relaxed);
        let running = self.recorder.as_ref().map(|recorder| recorder.begin(None, &says, total, ""));
        let health = &self.shared.health;
        let shared: Weak<MessengerShared> = Arc::downgrade(&self.shared);
        let handle = Handle::driven(health.world_rank(health.rank()), shared);
        let senders: Senders = receives.iter().map(|_| AtomicUsize::new(NO_RANK)).collect();
        let call = Call {
            handle: handle.clone(),
            says,
            running,
            deadline: Deadline::after(timeout.unwrap_or(self.timeout)),
            senders: Arc::clone(&senders),
            total,
            done: 0,
            left: sends.len() + receives.len(),
            keep,
        };
        self.shared.add(call, sends, receives)?;
        Ok(Posted { handle, senders })
    }

    /// Checks the messages of a call, whether their memory is on the host or on a device. Fails with `InvalidArgument`
    /// for the same arguments as [`Messenger::post`], or else with the group's first failure.
    pub(super) fn check(&self, sends: &[Message], receives: &[Message]) -> Result<()> {
        if !self.owner.is_current() {
            return Err(forked());
        }
        let health = &self.shared.health;
        health.check()?;
        for peer in sends.iter().chain(receives).filter_map(|message| message.peer) {
            check_peer(peer, health.rank(), health.size())?;
        }
        if sends.iter().any(|message| message.peer.is_none()) {
            return Err(Error::InvalidArgument("a send needs a destination rank".to_owned()));
        }
        Ok(())
    }

    pub(super) fn pending(&self) -> Handle {
        let health = &self.shared.health;
        Handle::pending(health.world_rank(health.rank()))
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(super) fn health(&self) -> &GroupHealth {
        &self.shared.health
    }

    /// Returns the description of a call, for error texts and the flight recorder.
    fn says(&self, sends: &[Message], receives: &[Message]) -> Fingerprint {
        let nth = self.posted.fetch_add(1, Ordering::Relaxed);
        let all = || sends.iter().chain(receives);
        let first = all().next();
        let dtype = first.map_or(DType::U8, |message| message.data.dtype());
        let kind = if all().count() == 1 { Kind::Send } else { Kind::Exchange };
        let count = all().map(|message| message.data.count()).sum();
        let tag = first.map_or(0, |message| message.tag);
        Fingerprint { seq: nth as u64, tag, ..Fingerprint::new(kind, dtype, count) }
    }

    fn start(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() && !self.stopped.load(Ordering::Acquire) {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new().name("bagua-messages".to_owned()).spawn(move || shared.work());
            *thread = Some(spawned.map_err(|error| Error::system("cannot start the thread of messages", error))?);
        }
        Ok(())
    }

    /// Ends the thread. Unfinished calls fail with `Aborted`. Dropping does the same. Further calls do nothing.
    ///
    /// Waits a moment until the peers have taken what was sent, so it must be called without the GIL.
    pub fn shutdown(&self) {
        if !self.owner.is_current() {
            // The thread belongs to the parent.
            if let Ok(mut thread) = self.thread.try_lock() {
                std::mem::forget(thread.take());
            }
            return;
        }
        if self.stopped.swap(true, Ordering::AcqRel) {
            return;
        }
        self.shared.streams.unwatch();
        self.shared.send(Event::Stop);
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
        drop(lock(&self.registration).take());
    }
}

impl Drop for Messenger {
    fn drop(&mut self) {
        self.shutdown();
        if !self.owner.is_current() {
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

fn check_peer(peer: usize, rank: usize, size: usize) -> Result<()> {
    if peer >= size {
        return Err(Error::InvalidArgument(format!("rank {peer} is not in the group, which has {size} ranks")));
    }
    if peer == rank {
        return Err(Error::InvalidArgument(format!("rank {rank} cannot send to or receive from itself")));
    }
    Ok(())
}
