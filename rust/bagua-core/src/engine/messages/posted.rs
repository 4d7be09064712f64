//! Posted sends and receives of a messenger and their progress, and the queue of unexpected messages.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::super::handle::Handle;
use super::frame::{Frame, FrameKind};
use super::matching::{Arrived, Matching, Posted};
use super::stream::{PostedMessages as Sink, Replies, Target};
use crate::error::{Error, Progress, Result};
use crate::memory::Region;
use crate::recorder::Running;
use crate::types::Fingerprint;
use crate::wait::Deadline;

/// The longest message that is sent before the receiver has asked for it. Above, the copy that the receiver may have to keep costs more
/// than waiting for its answer.
pub(super) const EAGER: usize = 16 << 10;

/// The most bytes of such messages that a receiver has to keep for one sender.
const CREDIT: usize = 1 << 20;

/// What an eager message counts at least, so that empty ones are limited too.
const LEAST: usize = 64;

/// Group rank of the sender of each message that a call receives, in the order of its receives; [`NO_RANK`] while it has not come.
pub type Senders = Arc<[AtomicUsize]>;

/// No rank.
pub const NO_RANK: usize = usize::MAX;

/// One call: some messages that end together.
pub(super) struct Call {
    pub(super) handle: Handle,
    /// What the call says of itself.
    pub(super) says: Fingerprint,
    /// Its record.
    pub(super) running: Option<Running>,
    pub(super) deadline: Deadline,
    pub(super) senders: Senders,
    /// Bytes of all its messages.
    pub(super) total: usize,
    /// Bytes of those that are done.
    pub(super) done: usize,
    /// Messages that are not done.
    pub(super) left: usize,
    /// Held until the call has ended.
    pub(super) keep: Box<dyn Any + Send>,
}

impl Call {
    pub(super) fn progress(&self) -> Progress {
        let (done, total) = (self.done as u64, self.total as u64);
        Progress { what: self.says.to_string(), label: String::new(), done, total }
    }
}

/// A message to send.
struct Sending {
    call: u64,
    to: usize,
    region: Region,
}

/// A receive.
struct Receiving {
    call: u64,
    /// Which of the call's receives it is.
    nth: usize,
    region: Region,
    /// Bytes that have come.
    filled: usize,
    /// The sender; `None` while any would do and none has been matched.
    from: Option<usize>,
    /// The sender's number of its message, when the sender waits for an answer before it sends the bytes.
    offered: Option<u64>,
}

/// A message without a receive.
#[derive(Clone, Copy, Debug)]
enum Waiting {
    /// Its bytes are with the sender.
    Offered(Frame),
    /// Its bytes are here, or arriving.
    Kept(u64),
}

/// The bytes of an eager message.
struct Kept {
    frame: Frame,
    bytes: Vec<u8>,
    filled: usize,
    /// The receive that took the message before all its bytes were here.
    taken_by: Option<u64>,
}

/// See the module.
pub(super) struct PostedMessages {
    /// World rank of each group rank, for error texts.
    world_ranks: Vec<usize>,
    /// This rank in the group.
    rank: usize,
    next: u64,
    calls: HashMap<u64, Call>,
    sends: HashMap<u64, Sending>,
    receives: HashMap<u64, Receiving>,
    matching: Matching<Waiting>,
    kept: HashMap<u64, Kept>,
    /// The receive of each message whose sender got the request for its bytes.
    incoming: HashMap<(usize, u64), u64>,
    /// Bytes of eager messages that each rank has not matched yet, and those of each such message.
    unmatched: (Vec<usize>, HashMap<(usize, u64), usize>),
    /// Calls that have ended and whose handles do not know it yet.
    ended: Vec<(Call, Result<()>)>,
}

impl PostedMessages {
    pub(super) fn new(rank: usize, world_ranks: Vec<usize>) -> PostedMessages {
        let size = world_ranks.len();
        PostedMessages {
            world_ranks,
            rank,
            next: 0,
            calls: HashMap::new(),
            sends: HashMap::new(),
            receives: HashMap::new(),
            matching: Matching::default(),
            kept: HashMap::new(),
            incoming: HashMap::new(),
            unmatched: (vec![0; size], HashMap::new()),
            ended: Vec::new(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A call begins. One without messages has ended at once.
    pub(super) fn begin_call(&mut self, call: Call) -> u64 {
        let number = self.number();
        if call.left == 0 {
            self.ended.push((call, Ok(())));
        } else {
            self.calls.insert(number, call);
        }
        number
    }

    /// Adds a message to send, and returns the frame that announces it.
    pub(super) fn send(&mut self, call: u64, to: usize, tag: u32, region: Region) -> Frame {
        let id = self.number();
        let (len, dtype) = (region.len(), region.dtype());
        self.sends.insert(id, Sending { call, to, region });
        let counts = len.max(LEAST);
        let eager = len <= EAGER && self.unmatched.0[to] + counts <= CREDIT;
        let (kind, body) = if eager {
            self.unmatched.0[to] += counts;
            self.unmatched.1.insert((to, id), counts);
            (FrameKind::Eager, len as u64)
        } else {
            (FrameKind::Offer, 0)
        };
        Frame { kind, dtype, tag, id, total: len as u64, body }
    }

    /// Adds a receive. When its message has been announced, that is the frame to answer its sender, with the sender's rank.
    ///
    /// # Errors
    /// What differs between the message and the receive.
    pub(super) fn receive(
        &mut self,
        call: u64,
        nth: usize,
        from: Option<usize>,
        tag: u32,
        region: Region,
    ) -> Result<Option<(usize, Frame)>> {
        let number = self.number();
        self.receives.insert(number, Receiving { call, nth, region, filled: 0, from, offered: None });
        let Some(Arrived { from, message, .. }) = self.matching.post(Posted { receive: number, from, tag }) else {
            return Ok(None);
        };
        match message {
            Waiting::Offered(frame) => self.matched(number, from, &frame).map(|ready| Some((from, ready))),
            Waiting::Kept(key) => {
                let Some(kept) = self.kept.get_mut(&key) else { return Ok(None) };
                kept.taken_by = Some(number);
                let (frame, whole) = (kept.frame, kept.filled == kept.bytes.len());
                let ready = self.matched(number, from, &frame)?;
                if whole {
                    self.hand_over(key);
                }
                Ok(Some((from, ready)))
            }
        }
    }

    /// A receive gets this message: the frame for its sender.
    ///
    /// # Errors
    /// What differs between the two.
    fn matched(&mut self, number: u64, from: usize, frame: &Frame) -> Result<Frame> {
        let Some(receiving) = self.receives.get_mut(&number) else {
            return Err(Error::Mismatch("a receive twice".to_owned()));
        };
        let region = &receiving.region;
        if frame.total != region.len() as u64 || frame.dtype != region.dtype() {
            let elements = frame.total / frame.dtype.size() as u64;
            return Err(Error::Mismatch(format!(
                "rank {} receives {} elements of {} (tag {}) from rank {}, which sends {elements} elements of {}",
                self.world_ranks[self.rank],
                region.count(),
                region.dtype().name(),
                frame.tag,
                self.world_ranks[from],
                frame.dtype.name()
            )));
        }
        receiving.from = Some(from);
        if let Some(call) = self.calls.get(&receiving.call) {
            call.senders[receiving.nth].store(from, Ordering::Release);
        }
        if frame.kind == FrameKind::Offer {
            receiving.offered = Some(frame.id);
            self.incoming.insert((from, frame.id), number);
        }
        if frame.total == 0 {
            self.received(number);
        }
        Ok(Frame { kind: FrameKind::Ready, body: 0, ..*frame })
    }

    /// Copies a message that was kept into the memory of the receive that took it.
    fn hand_over(&mut self, key: u64) {
        let Some(kept) = self.kept.remove(&key) else { return };
        let Some(number) = kept.taken_by else { return };
        if let Some(receiving) = self.receives.get_mut(&number) {
            receiving.filled = kept.bytes.len();
            if let Ok(into) = receiving.region.as_host_mut() {
                into.copy_from_slice(&kept.bytes);
            }
            self.received(number);
        }
    }

    /// A receive has all its bytes.
    fn received(&mut self, number: u64) {
        let Some(receiving) = self.receives.remove(&number) else { return };
        if let (Some(from), Some(id)) = (receiving.from, receiving.offered) {
            self.incoming.remove(&(from, id));
        }
        self.part_done(receiving.call, receiving.region);
    }

    fn part_done(&mut self, call: u64, region: Region) {
        let Some(entry) = self.calls.get_mut(&call) else { return };
        entry.done += region.len();
        entry.left -= 1;
        drop(region);
        if entry.left == 0
            && let Some(call) = self.calls.remove(&call)
        {
            self.ended.push((call, Ok(())));
        }
    }

    /// The calls that have ended since the last call of this.
    pub(super) fn take_ended(&mut self) -> Vec<(Call, Result<()>)> {
        std::mem::take(&mut self.ended)
    }

    /// True when a message has come that no receive has taken.
    #[cfg(all(test, not(model)))]
    pub(super) fn keeps_messages(&self) -> bool {
        !self.kept.is_empty()
    }

    /// True while a call has not ended.
    pub(super) fn is_busy(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Ends every call with an error, and forgets every message.
    pub(super) fn fail(&mut self, error: &Error) {
        self.matching.clear();
        self.sends.clear();
        self.receives.clear();
        self.kept.clear();
        self.incoming.clear();
        for (_, call) in self.calls.drain() {
            let error = error.clone().during(call.progress());
            self.ended.push((call, Err(error)));
        }
    }

    /// The first call whose deadline has passed: its limit, the group ranks that it waits for, and how far it has come.
    pub(super) fn overdue(&self) -> Option<(Duration, Vec<usize>, Progress)> {
        let (number, call) = self.calls.iter().find(|(_, call)| call.deadline.passed())?;
        let mut missing: Vec<usize> = self.waited_for(|call| call == *number).flatten().collect();
        if missing.is_empty() {
            missing = (0..self.world_ranks.len()).filter(|rank| *rank != self.rank).collect();
        }
        missing.sort_unstable();
        missing.dedup();
        Some((call.deadline.limit(), missing, call.progress()))
    }

    /// The peers of the messages of some calls; `None` for a receive from any source.
    fn waited_for(&self, of: impl Fn(u64) -> bool + Copy) -> impl Iterator<Item = Option<usize>> {
        let sends = self.sends.values().filter(move |message| of(message.call)).map(|message| Some(message.to));
        sends.chain(self.receives.values().filter(move |message| of(message.call)).map(|message| message.from))
    }

    /// True when a message to this rank is not sent.
    pub(super) fn sends_to(&self, peer: usize) -> bool {
        self.sends.values().any(|message| message.to == peer)
    }

    /// True when a receive needs this rank: it names the rank, or the rank's message has begun to come, or all other ranks are gone too.
    pub(super) fn receives_from(&self, peer: usize, gone: impl Fn(usize) -> bool) -> bool {
        let ranks = 0..self.world_ranks.len();
        let all_gone = || ranks.clone().all(|rank| rank == self.rank || rank == peer || gone(rank));
        self.receives.values().any(|message| match message.from {
            Some(from) => from == peer,
            None => all_gone(),
        })
    }

    /// How far the call that needs this rank has come.
    pub(super) fn progress_with(&self, peer: usize) -> Option<Progress> {
        let send = self.sends.values().find(|message| message.to == peer).map(|message| message.call);
        let of = |message: &&Receiving| message.from.is_none_or(|from| from == peer);
        let call = send.or_else(|| self.receives.values().find(of).map(|message| message.call))?;
        Some(self.calls.get(&call)?.progress())
    }
}

impl Sink for PostedMessages {
    fn outgoing(&self, id: u64) -> &[u8] {
        // Checked to be host memory when it was posted.
        self.sends.get(&id).and_then(|message| message.region.as_host().ok()).unwrap_or_default()
    }

    fn sent(&mut self, id: u64) {
        if let Some(message) = self.sends.remove(&id) {
            self.part_done(message.call, message.region);
        }
    }

    fn begin(&mut self, peer: usize, frame: Frame, replies: &mut Replies<'_>) -> Result<Option<Target>> {
        let Frame { kind, tag, id, total, body, .. } = frame;
        let rank = self.world_ranks[peer];
        let unexpected = |what: &str| Err(Error::Mismatch(format!("rank {rank} sent {what}")));
        match kind {
            FrameKind::Offer | FrameKind::Eager => {
                let eager = kind == FrameKind::Eager;
                if eager && (body != total || body > EAGER as u64) {
                    return unexpected("an eager message of a wrong length");
                }
                if let Some(number) = self.matching.take(peer, tag) {
                    let ready = self.matched(number, peer, &frame)?;
                    replies.frame(ready);
                    return Ok((eager && total > 0).then_some(Target::Receive(number)));
                }
                if !eager {
                    self.matching.keep(Arrived { from: peer, tag, message: Waiting::Offered(frame) });
                    return Ok(None);
                }
                let key = self.number();
                let kept = Kept { frame, bytes: vec![0; total as usize], filled: 0, taken_by: None };
                self.kept.insert(key, kept);
                self.matching.keep(Arrived { from: peer, tag, message: Waiting::Kept(key) });
                Ok(Some(Target::Kept(key)))
            }
            FrameKind::Data => {
                let Some(number) = self.incoming.get(&(peer, id)).copied() else {
                    return unexpected("bytes of a message that was not asked for");
                };
                let missing = self.receives.get(&number).map_or(0, |message| message.region.len() - message.filled);
                if body == 0 || body > missing as u64 {
                    return unexpected("more bytes than its message has");
                }
                Ok(Some(Target::Receive(number)))
            }
            FrameKind::Ready => {
                if let Some(counts) = self.unmatched.1.remove(&(peer, id)) {
                    self.unmatched.0[peer] -= counts;
                } else if self.sends.get(&id).is_none_or(|message| message.to != peer) {
                    return unexpected("an answer to a message that it was not sent");
                } else if total == 0 {
                    self.sent(id);
                } else {
                    replies.data(frame);
                }
                Ok(None)
            }
            FrameKind::End => Ok(None),
        }
    }

    fn place(&mut self, target: Target, len: usize) -> &mut [u8] {
        let (bytes, from) = match target {
            Target::Receive(number) => {
                let Some(message) = self.receives.get_mut(&number) else { return &mut [] };
                let filled = message.filled;
                (message.region.as_host_mut().unwrap_or_default(), filled)
            }
            Target::Kept(key) => {
                let Some(kept) = self.kept.get_mut(&key) else { return &mut [] };
                (kept.bytes.as_mut_slice(), kept.filled)
            }
        };
        bytes.get_mut(from..from + len).unwrap_or_default()
    }

    fn came(&mut self, target: Target, count: usize) {
        match target {
            Target::Receive(number) => {
                let Some(message) = self.receives.get_mut(&number) else { return };
                message.filled += count;
                if message.filled == message.region.len() {
                    self.received(number);
                }
            }
            Target::Kept(key) => {
                let Some(kept) = self.kept.get_mut(&key) else { return };
                kept.filled += count;
                if kept.filled == kept.bytes.len() && kept.taken_by.is_some() {
                    self.hand_over(key);
                }
            }
        }
    }
}
