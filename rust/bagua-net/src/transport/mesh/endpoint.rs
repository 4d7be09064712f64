//! The streams to one peer, which carry frames in both directions.
//!
//! With several streams, a message is divided into chunks, and the next chunk goes to the first stream with room. So a
//! slow stream delays only its current chunk. The header of every chunk is checked before its bytes are received into
//! the caller's memory.

use std::time::{Duration, Instant};

use super::chunk_lengths::{self, Pace};
use super::frame_handler::Frames;
use super::open_on_demand::{Batch, Opened};
use crate::transport::frame::{BadFrame, Header, LEN};
use crate::transport::{Broken, Readiness, Transport};

/// Time that one of several streams may be broken, at a chunk boundary, while the other streams receive nothing. Until
/// then, the other streams may still deliver bytes that the peer sent before it closed all of them. Longer than a round
/// trip around the world.
const LINGER: Duration = Duration::from_secs(1);

/// Maximum number of bytes sent on a stream before the rank receives again. Alternating at this size keeps few bytes in
/// flight between two ranks, and those in the cache. Filling the sockets first took 1.3 times as long (16 MiB in each
/// direction on one machine).
const SEND_QUANTUM: usize = 256 << 10;

/// Maximum number of bytes received from one peer before it is the next peer's turn.
const RECV_QUANTUM: u64 = 4 << 20;

/// Numbers of bytes sent and received.
#[derive(Default)]
pub struct ByteCounts {
    /// Bytes of bodies sent.
    pub sent: u64,
    /// Bytes of bodies received.
    pub received: u64,
    /// Bytes of headers and bodies sent through sockets.
    pub wire_sent: u64,
    /// Bytes of headers and bodies received from sockets.
    pub wire_received: u64,
}

/// The reason why no more frames come from a peer.
pub enum PeerFault {
    /// The stream to the peer ended or broke.
    Lost(Broken),
    /// The peer runs a different operation, which the text names, or sent an unexpected message.
    Mismatch(String),
    /// The peer sent bytes that are not a header.
    Unreadable(BadFrame),
}

/// A frame and the number of its bytes moved so far. For a frame that is sent, the number includes the header.
#[derive(Clone, Copy)]
struct Moving {
    frame: Header,
    moved: usize,
}

struct Stream {
    link: Box<dyn Transport>,
    /// Frame that is being sent.
    out: Option<Moving>,
    /// Header of the frame that is being sent.
    out_head: [u8; LEN],
    /// Frame whose bytes are being received.
    into: Option<Moving>,
    /// Header of the next frame, as far as it has arrived. A complete header stays here until its message is admitted.
    in_head: [u8; LEN],
    in_head_len: usize,
    /// Number of bytes sent on this stream since [`Endpoint::begin`].
    carried: u64,
    /// Error of `recv`, and the last time that it occurred or any stream of this peer received bytes.
    broken: Option<(Broken, Instant)>,
}

impl Stream {
    fn new(link: Box<dyn Transport>) -> Stream {
        Stream {
            link,
            out: None,
            out_head: [0; LEN],
            into: None,
            in_head: [0; LEN],
            in_head_len: 0,
            carried: 0,
            broken: None,
        }
    }
}

/// The streams to one peer.
pub struct Endpoint {
    peer: usize,
    /// Streams to the peer. Empty for this rank's own index, and before the streams are opened.
    streams: Vec<Stream>,
    /// Number of batches of streams that were requested.
    batches: usize,
    /// True while streams that were requested are not open.
    opening: bool,
    /// Frame whose chunks are being handed to streams, and the number of bytes handed out.
    current: Option<Moving>,
    /// Error of `send`. Receiving continues, because the peer's last messages may explain the error.
    send_broken: Option<Broken>,
}

impl Endpoint {
    /// Creates the endpoint for the peer with this index, with all its streams or none.
    pub fn new(peer: usize, links: Vec<Box<dyn Transport>>) -> Endpoint {
        let streams: Vec<Stream> = links.into_iter().map(Stream::new).collect();
        let batches = if streams.is_empty() { 0 } else { Batch::Others as usize + 1 };
        Endpoint { peer, streams, batches, opening: false, current: None, send_broken: None }
    }

    /// Returns the batches, up to the wanted one, that were not requested before. The caller requests them.
    pub(super) fn ask_for(&mut self, wanted: impl FnOnce() -> Batch) -> &'static [Batch] {
        const ALL: [Batch; 2] = [Batch::First, Batch::Others];
        let asked = self.batches;
        if asked < ALL.len() {
            self.batches = asked.max(wanted() as usize + 1);
        }
        self.opening |= self.batches > asked;
        &ALL[asked..self.batches]
    }

    /// Adds streams that have been opened, and restarts the comparison of the speed of all streams.
    pub(super) fn add(&mut self, opened: Opened) {
        self.opening = !opened.all;
        if !opened.streams.is_empty() {
            self.streams.extend(opened.streams.into_iter().map(Stream::new));
            self.streams.iter_mut().for_each(|stream| stream.carried = 0);
        }
    }

    /// Starts a run: forgets the speed of each stream.
    pub fn begin(&mut self) {
        self.send_broken = None;
        self.streams.iter_mut().for_each(|stream| stream.carried = 0);
    }

    pub(super) fn count(&self) -> usize {
        self.streams.len()
    }

    /// True if there are streams and they are sockets.
    pub(super) fn is_wire(&self) -> bool {
        self.streams.first().is_some_and(|stream| stream.link.is_wire())
    }

    /// Returns the name of the transport, or `None` without a stream.
    pub fn name(&self) -> Option<&'static str> {
        self.streams.first().map(|stream| stream.link.name())
    }

    /// Returns for each stream to wait for: how to wait, and if the wait is for bytes to receive or for room to send.
    pub fn waits(&self, frames: &dyn Frames) -> impl Iterator<Item = (Readiness<'_>, bool, bool)> {
        let (expects, following) = (frames.expects(self.peer), frames.following(self.peer));
        self.streams.iter().filter_map(move |stream| {
            let waits_for_room = stream.into.is_none() && stream.in_head_len == LEN;
            let recv = expects && stream.broken.is_none() && !waits_for_room;
            let send = self.send_broken.is_none() && (stream.out.is_some() || self.offer(stream, following).is_some());
            (recv || send).then(|| (stream.link.readiness(), recv, send))
        })
    }

    /// Returns the length of the next chunk of the current frame if `stream` sends it. Assumes that the following
    /// frames are as long.
    fn offer(&self, stream: &Stream, following: usize) -> Option<usize> {
        let Moving { frame, moved } = self.current.as_ref()?;
        let len = frame.length as usize;
        let best = self.streams.iter().map(|stream| stream.carried).max().unwrap_or(0);
        let after = following.saturating_mul(len);
        // A message that is long enough for several streams is divided even while they are opening.
        let streams = self.streams.len() + usize::from(self.opening);
        chunk_lengths::next_len(len - moved, after, streams, Pace { own: stream.carried, best })
    }

    /// True while a frame has been started but not sent completely.
    pub fn is_sending(&self) -> bool {
        self.current.is_some() || self.streams.iter().any(|stream| stream.out.is_some())
    }

    /// Drops the current frame if it has a body and no stream has started it. Returns true if another frame with a body
    /// is partly sent.
    pub fn drop_unsent(&mut self) -> bool {
        self.current = self.current.filter(|current| current.frame.length == 0);
        self.streams.iter().filter_map(|stream| stream.out).any(|out| out.frame.length > 0)
    }

    /// Returns the error of a stream that cannot move any more bytes.
    pub fn broken(&self) -> Option<&Broken> {
        let received = || self.streams.iter().find_map(|stream| stream.broken.as_ref());
        self.send_broken.as_ref().or_else(|| received().map(|(broken, _)| broken))
    }

    /// Makes the endpoint fail from now on.
    pub fn close(&mut self, how: &str) {
        self.send_broken = Some(Broken::new(how));
        let broken = (Broken::new(how), Instant::now());
        self.streams.iter_mut().for_each(|stream| stream.broken = Some(broken.clone()));
    }

    /// Makes progress in both directions. Returns true if bytes moved.
    ///
    /// # Errors
    /// The reason why no more frames come from the peer.
    pub fn step(&mut self, frames: &mut dyn Frames, counts: &mut ByteCounts) -> Result<bool, PeerFault> {
        let sent = self.send(frames, counts);
        let received = self.recv(frames, counts)?;
        match &self.send_broken {
            Some(broken) if !frames.expects(self.peer) => Err(PeerFault::Lost(broken.clone())),
            _ => Ok(sent || received),
        }
    }

    /// Sends as much as there is room for, up to a quantum per stream. Returns true if bytes moved.
    pub fn send(&mut self, frames: &mut dyn Frames, counts: &mut ByteCounts) -> bool {
        let mut any = false;
        for at in 0..self.streams.len() {
            let limit = counts.sent + SEND_QUANTUM as u64;
            while counts.sent < limit && self.send_broken.is_none() && self.send_by(at, frames, counts, &mut any) {}
        }
        any
    }

    /// Sends bytes on one stream. Returns false if the stream has no room or no chunk to send.
    fn send_by(&mut self, at: usize, frames: &mut dyn Frames, counts: &mut ByteCounts, any: &mut bool) -> bool {
        let out = if let Some(out) = self.streams[at].out {
            out
        } else {
            if self.current.is_none() {
                self.current = frames.next(self.peer).map(|frame| Moving { frame, moved: 0 });
            }
            let offer = self.offer(&self.streams[at], frames.following(self.peer));
            let (Some(current), Some(len)) = (&self.current, offer) else { return false };
            let offset = current.frame.offset + current.moved as u64;
            let frame = Header { offset, length: len as u64, ..current.frame };
            self.streams[at].out_head = frame.encode();
            Moving { frame, moved: 0 }
        };
        let Header { message, offset, length, .. } = out.frame;
        let (from, len) = (offset as usize, length as usize);
        let stream = &mut self.streams[at];
        let sent_head = out.moved.min(LEN);
        let head_left = &stream.out_head[sent_head..];
        let body = if len == 0 { &[][..] } else { &frames.outgoing(self.peer, message)[from..from + len] };
        let body = &body[out.moved - sent_head..];
        let body = &body[..body.len().min(SEND_QUANTUM)];
        let count = match stream.link.send(head_left, body) {
            Ok(count) => count,
            Err(broken) => {
                self.send_broken = Some(broken);
                return false;
            }
        };
        if count == 0 {
            // The stream has no room, so the chunk is not started. The first stream with room will send it.
            return false;
        }
        *any = true;
        if out.moved == 0
            && let Some(current) = &mut self.current
        {
            current.moved += len;
            if current.moved as u64 == current.frame.length {
                self.current = None;
            }
        }
        stream.carried += count as u64;
        let has_room = count == head_left.len() + body.len();
        counts.sent += (count - count.min(head_left.len())) as u64;
        counts.wire_sent += if stream.link.is_wire() { count as u64 } else { 0 };
        let moved = out.moved + count;
        let whole = moved == LEN + len;
        stream.out = (!whole).then_some(Moving { moved, ..out });
        if whole {
            frames.sent(self.peer, &out.frame);
        }
        has_room
    }

    /// Receives the bytes that have arrived, up to a quantum. Returns true if bytes moved.
    ///
    /// # Errors
    /// The reason why no more frames come from the peer.
    pub fn recv(&mut self, frames: &mut dyn Frames, counts: &mut ByteCounts) -> Result<bool, PeerFault> {
        let mut any = false;
        let limit = counts.received + RECV_QUANTUM;
        for at in 0..self.streams.len() {
            while counts.received < limit && frames.expects(self.peer) && self.recv_by(at, frames, counts, &mut any)? {}
        }
        if any {
            let broken = self.streams.iter_mut().filter_map(|stream| stream.broken.as_mut());
            broken.for_each(|(_, since)| *since = Instant::now());
        }
        if any || !frames.expects(self.peer) {
            return Ok(any);
        }
        // A stream that broke within a chunk cannot deliver the rest of it. If it broke between chunks, the other
        // streams may still deliver the messages.
        let broken = self.streams.iter().filter_map(|stream| {
            let (broken, since) = stream.broken.as_ref()?;
            let within_chunk = stream.into.is_some() || stream.in_head_len > 0;
            Some((broken, within_chunk || since.elapsed() > LINGER))
        });
        let broken: Vec<_> = broken.collect();
        match broken.iter().find(|(_, is_final)| *is_final || broken.len() == self.streams.len()) {
            Some((broken, _)) => Err(PeerFault::Lost((*broken).clone())),
            None => Ok(false),
        }
    }

    /// Receives bytes on one stream. Returns false if it has none now.
    fn recv_by(
        &mut self,
        at: usize,
        frames: &mut dyn Frames,
        counts: &mut ByteCounts,
        any: &mut bool,
    ) -> Result<bool, PeerFault> {
        let stream = &mut self.streams[at];
        if stream.into.is_none() && stream.in_head_len == LEN {
            let frame = Header::decode(&stream.in_head).map_err(PeerFault::Unreadable)?;
            if !frames.begin(self.peer, &frame).map_err(PeerFault::Mismatch)? {
                return Ok(false);
            }
            stream.in_head_len = 0;
            *any = true;
            if frame.length == 0 {
                frames.came(self.peer, frame.message, 0);
                return Ok(true);
            }
            stream.into = Some(Moving { frame, moved: 0 });
        }
        if stream.broken.is_some() {
            return Ok(false);
        }
        let into = match &stream.into {
            None => &mut stream.in_head[stream.in_head_len..],
            Some(Moving { frame, moved }) => {
                let at = frame.offset as usize;
                &mut frames.incoming(self.peer, frame.message)[at + moved..at + frame.length as usize]
            }
        };
        let wanted = into.len();
        let count = match stream.link.recv(into) {
            Ok(count) => count,
            Err(broken) => {
                stream.broken = Some((broken, Instant::now()));
                return Ok(false);
            }
        };
        *any |= count > 0;
        counts.wire_received += if stream.link.is_wire() { count as u64 } else { 0 };
        match &mut stream.into {
            None => stream.in_head_len += count,
            Some(Moving { frame, moved }) => {
                *moved += count;
                counts.received += count as u64;
                let message = frame.message;
                if count == wanted {
                    stream.into = None;
                }
                frames.came(self.peer, message, count);
            }
        }
        Ok(count == wanted)
    }

    /// Receives and drops the bytes that have arrived.
    pub fn discard(&mut self) {
        let mut dropped = [0; 4096];
        for stream in &mut self.streams {
            while stream.broken.is_none() {
                match stream.link.recv(&mut dropped) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(broken) => stream.broken = Some((broken, Instant::now())),
                }
            }
        }
    }
}
