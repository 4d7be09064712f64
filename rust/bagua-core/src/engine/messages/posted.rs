//! The posted sends and receives of a messenger, their progress, messages without a receive, and the frames of all.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::super::handle::Handle;
use super::matching::{Arrived, Matching, Posted};
use crate::error::{Error, Progress, Result};
use crate::memory::Region;
use crate::recorder::Running;
use crate::transport::Frames;
use crate::transport::frame::{FrameKind, Header};
use crate::types::{DType, Fingerprint, Kind};
use crate::wait::Deadline;

/// Maximum size in bytes of a message that is sent before the receiver asks for it. For longer messages, the copy that
/// the receiver may have to keep costs more than the wait for its answer.
pub(super) const EAGER: usize = 64 << 10;

/// Maximum number of bytes of a long message in one frame. Limits how long a message delays others on its stream.
const CHUNK: u64 = 1 << 20;

/// Maximum number of bytes of eager messages that a receiver keeps for one sender.
const CREDIT: usize = 1 << 20;

/// Minimum number of bytes that an eager message counts, so that the number of empty ones is limited too.
const LEAST: usize = 64;

/// Group rank of the sender of each message that a call receives, in the order of its receives. [`NO_RANK`] until the
/// message has been matched.
pub type Senders = Arc<[AtomicUsize]>;

/// A value that is not a rank.
pub const NO_RANK: usize = usize::MAX;

/// The messages of one call, which end together.
pub(super) struct Call {
    pub(super) handle: Handle,
    /// Description of the call, for error texts.
    pub(super) says: Fingerprint,
    pub(super) running: Option<Running>,
    pub(super) deadline: Deadline,
    pub(super) senders: Senders,
    pub(super) total: usize,
    /// Number of bytes of the messages that are done.
    pub(super) done: usize,
    /// Number of messages that are not done.
    pub(super) left: usize,
    pub(super) keep: Box<dyn Any + Send>,
}

impl Call {
    pub(super) fn progress(&self) -> Progress {
        let (done, total) = (self.done as u64, self.total as u64);
        Progress { what: self.says.to_string(), label: String::new(), done, total }
    }
}

/// One of the two streams between this rank and a peer. Messages go from the rank that opened the stream to the other,
/// and answers go back. The index is that of the stream's [`Endpoint`](crate::transport::Endpoint).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerStream {
    pub(super) peer: usize,
    /// True if the peer opened the stream.
    pub(super) inbound: bool,
}

impl PeerStream {
    pub(super) fn index(self) -> usize {
        2 * self.peer + usize::from(self.inbound)
    }

    fn at(index: usize) -> PeerStream {
        PeerStream { peer: index / 2, inbound: index % 2 == 1 }
    }
}

struct Sending {
    call: u64,
    to: usize,
    region: Region,
}

struct Receiving {
    call: u64,
    nth: usize,
    region: Region,
    filled: usize,
    /// The sender. `None` if any sender will do and none has been matched.
    from: Option<usize>,
}

/// The bytes of an eager message without a receive.
struct Kept {
    bytes: Vec<u8>,
    filled: usize,
    /// The receive that took the message before all its bytes had arrived.
    taken_by: Option<u64>,
}

pub(super) struct PostedMessages {
    /// World rank of each group rank, for error texts.
    world_ranks: Vec<usize>,
    rank: usize,
    next: u64,
    calls: HashMap<u64, Call>,
    sends: HashMap<u64, Sending>,
    receives: HashMap<u64, Receiving>,
    /// Matches receives with arrived messages. A message is represented by the header that announced it.
    matching: Matching<Header>,
    /// Eager messages without a receive, by sender and number.
    kept: HashMap<(usize, u64), Kept>,
    /// The receive that a message's bytes go to, by sender and number of the message.
    arriving: HashMap<(usize, u64), u64>,
    /// Number of bytes of eager messages that the receiver has not matched yet, by rank; and the size of each of them,
    /// by rank and number.
    unmatched: (Vec<usize>, HashMap<(usize, u64), usize>),
    /// Frames to send, by stream.
    frames: Vec<VecDeque<Header>>,
    /// True if the peer said that it sends no more messages, by stream.
    has_ended: Vec<bool>,
    /// Calls that have ended but whose handles have not been told yet.
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
            arriving: HashMap::new(),
            unmatched: (vec![0; size], HashMap::new()),
            frames: (0..2 * size).map(|_| VecDeque::new()).collect(),
            has_ended: vec![false; 2 * size],
            ended: Vec::new(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn push(&mut self, peer: usize, inbound: bool, frame: Header) {
        self.frames[PeerStream { peer, inbound }.index()].push_back(frame);
    }

    /// Adds a call. A call without messages ends at once.
    pub(super) fn begin_call(&mut self, call: Call) -> u64 {
        let number = self.number();
        if call.left == 0 {
            self.ended.push((call, Ok(())));
        } else {
            self.calls.insert(number, call);
        }
        number
    }

    pub(super) fn send(&mut self, call: u64, to: usize, tag: u32, region: Region) {
        let id = self.number();
        let len = region.len();
        let fingerprint = Fingerprint { tag, ..Fingerprint::new(Kind::Send, region.dtype(), region.count()) };
        self.sends.insert(id, Sending { call, to, region });
        let counts = len.max(LEAST);
        let announces = Header::whole(fingerprint, 0, len, id);
        let eager = len <= EAGER && self.unmatched.0[to] + counts <= CREDIT;
        if eager {
            self.unmatched.0[to] += counts;
            self.unmatched.1.insert((to, id), counts);
        }
        let (frame, length) = if eager { (FrameKind::Eager, len as u64) } else { (FrameKind::Offer, 0) };
        self.push(to, false, Header { frame, length, ..announces });
    }

    /// Adds a receive. Answers the sender of a message that was already announced. Returns how the two differ.
    pub(super) fn receive(
        &mut self,
        call: u64,
        nth: usize,
        from: Option<usize>,
        tag: u32,
        region: Region,
    ) -> std::result::Result<(), String> {
        let number = self.number();
        self.receives.insert(number, Receiving { call, nth, region, filled: 0, from });
        let Some(Arrived { from, message, .. }) = self.matching.post(Posted { receive: number, from, tag }) else {
            return Ok(());
        };
        self.matched(number, from, &message)?;
        let key = (from, message.message);
        match self.kept.get_mut(&key) {
            Some(kept) => {
                kept.taken_by = Some(number);
                if kept.filled == kept.bytes.len() {
                    self.hand_over(key);
                }
            }
            None => self.awaits_bytes(key, number, &message),
        }
        Ok(())
    }

    /// Assigns a message to a receive, and answers the sender. Returns how the two differ, if they do.
    fn matched(&mut self, number: u64, from: usize, frame: &Header) -> std::result::Result<(), String> {
        let Some(receiving) = self.receives.get_mut(&number) else {
            return Err("a receive was matched twice".to_owned());
        };
        let region = &receiving.region;
        let Fingerprint { dtype, tag, .. } = frame.fingerprint;
        if frame.body != region.len() as u64 || dtype != region.dtype() {
            let elements = frame.body / dtype.size() as u64;
            return Err(format!(
                "rank {} receives {} elements of {} (tag {tag}) from rank {}, which sends {elements} elements of {}",
                self.world_ranks[self.rank],
                region.count(),
                region.dtype().name(),
                self.world_ranks[from],
                dtype.name()
            ));
        }
        receiving.from = Some(from);
        if let Some(call) = self.calls.get(&receiving.call) {
            call.senders[receiving.nth].store(from, Ordering::Release);
        }
        if frame.body == 0 {
            self.received(number);
        }
        self.push(from, true, Header { frame: FrameKind::Ready, offset: 0, length: 0, ..*frame });
        Ok(())
    }

    /// Directs the bytes of a message to this receive when they arrive.
    fn awaits_bytes(&mut self, key: (usize, u64), number: u64, message: &Header) {
        if message.body > 0 {
            self.arriving.insert(key, number);
        }
    }

    /// Copies a kept message to the memory of the receive that took it.
    fn hand_over(&mut self, key: (usize, u64)) {
        let Some(kept) = self.kept.remove(&key) else { return };
        let Some(number) = kept.taken_by else { return };
        if let Some(receiving) = self.receives.get_mut(&number) {
            if let Ok(into) = receiving.region.as_host_mut() {
                into.copy_from_slice(&kept.bytes);
            }
            self.received(number);
        }
    }

    /// Ends a receive that has all its bytes.
    fn received(&mut self, number: u64) {
        let Some(receiving) = self.receives.remove(&number) else { return };
        self.part_done(receiving.call, receiving.region);
    }

    /// Ends a send whose bytes were all handed to the stream.
    fn all_sent(&mut self, id: u64) {
        if let Some(message) = self.sends.remove(&id) {
            self.part_done(message.call, message.region);
        }
    }

    fn data(message: &Header, offset: u64) -> Header {
        Header { frame: FrameKind::Data, offset, length: CHUNK.min(message.body - offset), ..*message }
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

    /// Returns the calls that have ended since this was last called.
    pub(super) fn take_ended(&mut self) -> Vec<(Call, Result<()>)> {
        std::mem::take(&mut self.ended)
    }

    #[cfg(test)]
    pub(super) fn keeps_messages(&self) -> bool {
        !self.kept.is_empty()
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Returns true if the peer said on this stream that it sends no more messages.
    pub(super) fn has_ended(&self, stream: PeerStream) -> bool {
        self.has_ended[stream.index()]
    }

    pub(super) fn has_frames(&self, stream: PeerStream) -> bool {
        !self.frames[stream.index()].is_empty()
    }

    /// Tells the peer on this stream that this rank sends no more messages.
    pub(super) fn say_end(&mut self, stream: PeerStream) {
        let nothing = Header::whole(Fingerprint::new(Kind::Send, DType::U8, 0), 0, 0, 0);
        self.push(stream.peer, stream.inbound, Header { frame: FrameKind::End, ..nothing });
    }

    /// Ends every call with an error, and forgets every message.
    pub(super) fn fail(&mut self, error: &Error) {
        self.matching.clear();
        self.sends.clear();
        self.receives.clear();
        self.kept.clear();
        self.arriving.clear();
        // The memory of unsent messages is gone, so frames with bytes cannot be sent.
        self.frames.iter_mut().for_each(|frames| frames.retain(|frame| frame.length == 0));
        for (_, call) in self.calls.drain() {
            let error = error.clone().during(call.progress());
            self.ended.push((call, Err(error)));
        }
    }

    /// Returns the first call whose deadline has passed: its timeout, the ranks that it waits for, and its progress.
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

    /// Returns the peers of the messages of some calls; `None` stands for a receive from any source.
    fn waited_for(&self, of: impl Fn(u64) -> bool + Copy) -> impl Iterator<Item = Option<usize>> {
        let sends = self.sends.values().filter(move |message| of(message.call)).map(|message| Some(message.to));
        sends.chain(self.receives.values().filter(move |message| of(message.call)).map(|message| message.from))
    }

    /// Returns true if a message to this rank has not been sent.
    pub(super) fn sends_to(&self, peer: usize) -> bool {
        self.sends.values().any(|message| message.to == peer)
    }

    /// Returns true if a receive needs this rank: the receive names the rank, the rank's message is arriving, or all
    /// other ranks have left.
    pub(super) fn receives_from(&self, peer: usize, gone: impl Fn(usize) -> bool) -> bool {
        let ranks = 0..self.world_ranks.len();
        let all_gone = || ranks.clone().all(|rank| rank == self.rank || rank == peer || gone(rank));
        self.receives.values().any(|message| match message.from {
            Some(from) => from == peer,
            None => all_gone(),
        })
    }

    /// Returns the progress of the call that needs this rank.
    pub(super) fn progress_with(&self, peer: usize) -> Option<Progress> {
        let send = self.sends.values().find(|message| message.to == peer).map(|message| message.call);
        let of = |message: &&Receiving| message.from.is_none_or(|from| from == peer);
        let call = send.or_else(|| self.receives.values().find(of).map(|message| message.call))?;
        Some(self.calls.get(&call)?.progress())
    }
}

impl Frames for PostedMessages {
    fn next(&mut self, stream: usize) -> Option<Header> {
        self.frames[stream].pop_front()
    }

    fn following(&self, stream: usize) -> usize {
        self.frames[stream].len()
    }

    fn outgoing(&self, _stream: usize, message: u64) -> &[u8] {
        // The memory was checked to be on the host when the message was posted.
        self.sends.get(&message).and_then(|message| message.region.as_host().ok()).unwrap_or_default()
    }

    fn sent(&mut self, stream: usize, frame: &Header) {
        let end = frame.offset + frame.length;
        match frame.frame {
            FrameKind::Eager | FrameKind::Data if end == frame.body => self.all_sent(frame.message),
            // Queued behind the other messages of the stream.
            FrameKind::Data => self.frames[stream].push_back(PostedMessages::data(frame, end)),
            FrameKind::Eager | FrameKind::Offer | FrameKind::Ready | FrameKind::End => {}
        }
    }

    fn expects(&self, _stream: usize) -> bool {
        true
    }

    fn begin(&mut self, stream: usize, frame: &Header) -> std::result::Result<bool, String> {
        let PeerStream { peer, .. } = PeerStream::at(stream);
        let Header { fingerprint: Fingerprint { kind, tag, .. }, message, body, offset, length, .. } = *frame;
        let key = (peer, message);
        let rank = self.world_ranks[peer];
        let unexpected = |what: &str| Err(format!("rank {rank} sent {what}"));
        if kind != Kind::Send {
            return unexpected("a frame of a collective operation among its messages");
        }
        if length > 0 && !matches!(frame.frame, FrameKind::Eager | FrameKind::Data) {
            return unexpected("bytes after a header that has none");
        }
        match frame.frame {
            FrameKind::Offer | FrameKind::Eager => {
                let eager = frame.frame == FrameKind::Eager;
                if eager && (offset != 0 || length != body || body > EAGER as u64) {
                    return unexpected("an eager message of a wrong length");
                }
                if let Some(number) = self.matching.take(peer, tag) {
                    self.matched(number, peer, frame)?;
                    self.awaits_bytes(key, number, frame);
                } else {
                    if eager {
                        self.kept.insert(key, Kept { bytes: vec![0; length as usize], filled: 0, taken_by: None });
                    }
                    self.matching.keep(Arrived { from: peer, tag, message: *frame });
                }
            }
            FrameKind::Data => {
                let receiving = self.arriving.get(&key).and_then(|number| self.receives.get(number));
                let Some(receiving) = receiving else {
                    return unexpected("bytes of a message that was not asked for");
                };
                let (len, filled) = (receiving.region.len() as u64, receiving.filled as u64);
                if body != len || offset != filled || !frame.fits() {
                    return unexpected("more bytes than its message has");
                }
            }
            FrameKind::Ready => {
                if let Some(counts) = self.unmatched.1.remove(&key) {
                    self.unmatched.0[peer] -= counts;
                } else if self
                    .sends
                    .get(&message)
                    .is_none_or(|sending| sending.to != peer || sending.region.len() as u64 != body)
                {
                    return unexpected("an answer to a message that it was not sent");
                } else if body == 0 {
                    self.all_sent(message);
                } else {
                    self.frames[stream].push_back(PostedMessages::data(frame, 0));
                }
            }
            FrameKind::End => self.has_ended[stream] = true,
        }
        Ok(true)
    }

    fn incoming(&mut self, stream: usize, message: u64) -> &mut [u8] {
        let key = (PeerStream::at(stream).peer, message);
        let receiving = self.arriving.get(&key).and_then(|number| self.receives.get_mut(number));
        match receiving {
            Some(receiving) => receiving.region.as_host_mut().unwrap_or_default(),
            None => self.kept.get_mut(&key).map(|kept| kept.bytes.as_mut_slice()).unwrap_or_default(),
        }
    }

    fn came(&mut self, stream: usize, message: u64, count: usize) {
        let key = (PeerStream::at(stream).peer, message);
        if let Some(kept) = self.kept.get_mut(&key) {
            kept.filled += count;
            if kept.filled == kept.bytes.len() && kept.taken_by.is_some() {
                self.hand_over(key);
            }
        } else if count > 0
            && let Some(number) = self.arriving.get(&key).copied()
            && let Some(receiving) = self.receives.get_mut(&number)
        {
            receiving.filled += count;
            if receiving.filled == receiving.region.len() {
                self.arriving.remove(&key);
                self.received(number);
            }
        }
    }
}
