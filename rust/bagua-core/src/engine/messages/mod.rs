//! The messages of a group: send, recv and exchange, beside its collectives and without an order among the two.
//!
//! A message goes to the first posted receive that names its sender (or any source) and its tag. Messages of one sender and tag match in
//! order; those of different tags do not wait for each other. All posted messages progress together, on a thread that waits for one of them,
//! else on one thread per group that starts with the first of them. They use no lane, so a message neither waits for a collective nor
//! keeps one waiting.
//!
//! ```text
//! sender    Eager, bytes   (up to 64 KiB)      or Offer                 Data, bytes …
//! receiver                 Ready                        Ready
//! ```
//!
//! As in MPI, the bytes of a long message come only when their receive is posted, and go straight to its memory; short messages are sent
//! at once and kept by the receiver, at most 1 MiB from each sender.
//!
//! | file | what it is |
//! |---|---|
//! | `matching` | which receive gets which message |
//! | `posted` | the messages that are not done, and their frames |
//! | `streams` | where streams come from |
//! | `turns` | who makes progress: a caller that waits, or the thread |
//! | `progress` | what that is; [`Endpoint`](crate::transport::Endpoint) moves the bytes, as for collectives |

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

/// What a call of [`Messenger::post`] started.
#[derive(Clone)]
pub struct Posted {
    /// Done when all messages of the call are: those to send when their bytes may be changed.
    pub handle: Handle,
    /// Who sent each received message, in the order of the receives; complete when the handle is done.
    pub senders: Senders,
}

/// See the module.
pub struct Messenger {
    shared: Arc<MessengerShared>,
    /// The process that may use this.
    owner: OwnerProcess,
    /// Deadline of messages that bring none.
    timeout: Duration,
    /// Incarnation of the group, and what records the messages.
    recorder: Option<LaneRecorder>,
    /// Messages posted, for error texts.
    posted: AtomicUsize,
    thread: Mutex<Option<JoinHandle<()>>>,
    stopped: AtomicBool,
    /// Keeps the completion thread until `shutdown`.
    registration: Mutex<Option<WorkerRegistration>>,
    /// Wakes the thread when the group fails.
    _failure: Subscription,
}

impl Messenger {
    /// The messages of a group. Not collective; nothing is opened before the first message.
    ///
    /// # Errors
    /// `System` when the process may not have another descriptor.
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

    /// Starts to send and to receive some messages, which are one call: they have one handle, and one deadline (`None`: the group's).
    /// `keep` is held until the call has ended. Messages to one rank with one tag arrive in the order given.
    ///
    /// # Errors
    /// `InvalidArgument` for a peer that is this rank or none of the group, and `UnsupportedType` for memory that is not the host's, before
    /// anything is sent; otherwise the group's first cause.
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
        let running = self.recorder.as_ref().and_then(|recorder| recorder.begin(None, &says, total, ""));
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

    /// Refuses what cannot be posted, wherever its memory is.
    ///
    /// # Errors
    /// `InvalidArgument` as [`Messenger::post`]; the group's first cause.
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
            return Err(Error::InvalidArgument("a send without a destination rank".to_owned()));
        }
        Ok(())
    }

    /// The handle of a call that is not done.
    pub(super) fn pending(&self) -> Handle {
        let health = &self.shared.health;
        Handle::pending(health.world_rank(health.rank()))
    }

    /// Deadline of messages that bring none.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The group's state of failure.
    pub(super) fn health(&self) -> &GroupHealth {
        &self.shared.health
    }

    /// What a call says of itself.
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

    /// Starts the thread if it does not run yet.
    fn start(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() && !self.stopped.load(Ordering::Acquire) {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new().name("bagua-messages".to_owned()).spawn(move || shared.work());
            *thread = Some(spawned.map_err(|error| Error::system("cannot start the thread of messages", error))?);
        }
        Ok(())
    }

    /// Ends the thread: what is not done fails with `Aborted`. Waits for a moment until the peers have taken what was sent. Idempotent;
    /// drop does the same. Waits: call it without the GIL.
    pub fn shutdown(&self) {
        if !self.owner.is_current() {
            // The thread is the parent's.
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
            // It has no panic of its own.
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

/// Refuses a peer that is no other rank of the group.
fn check_peer(peer: usize, rank: usize, size: usize) -> Result<()> {
    if peer >= size {
        return Err(Error::InvalidArgument(format!("rank {peer} is not among the {size} of the group")));
    }
    if peer == rank {
        return Err(Error::InvalidArgument(format!("rank {rank} cannot send to or receive from itself")));
    }
    Ok(())
}
