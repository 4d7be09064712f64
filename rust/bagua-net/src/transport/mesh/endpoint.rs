//! The transfers to and from one peer: the messages in both directions, and the progress of the streams with them.
//!
//! With several streams a message is divided into chunks, and the next chunk goes to the first stream with room, so that a slow stream
//! delays no more than its current chunk. The header of every received chunk is checked before its bytes are read into the caller's
//! memory.

use std::time::{Duration, Instant};

use super::chunk::{self, Chunk, Pace, head_len};
use super::plan::Plan;
use crate::transport::frame::Header;
use crate::transport::{Broken, Readiness, Transport};

/// How long one of several streams may be broken, between two chunks, while the others receive nothing: they may still carry bytes that
/// the peer sent before it closed all streams.
const LINGER: Duration = Duration::from_millis(200);

/// The most bytes sent on a stream before the rank receives again. Alternating at this size keeps few bytes in flight between two ranks,
/// and these in the cache; filling the sockets first took 1.3 times as long (16 MiB in each direction on one machine).
const SEND_QUANTUM: usize = 256 << 10;

/// In [`Endpoint::missing`]: a message of which nothing has arrived.
const UNSEEN: usize = usize::MAX;
/// In [`Endpoint::missing`]: a message that has arrived completely.
const COMPLETE: usize = usize::MAX - 1;

/// Bytes sent and received by one run.
#[derive(Default)]
pub(super) struct ByteCounts {
    /// Bodies only.
    pub sent: u64,
    /// Bodies only.
    pub received: u64,
    /// Headers and bodies sent through sockets.
    pub wire_sent: u64,
    /// Headers and bodies received from sockets.
    pub wire_received: u64,
}

/// Why a run failed with a peer.
pub(super) enum PeerFault {
    /// The stream to it ended or broke.
    Lost(Broken),
    /// It runs another operation, which the text names.
    Mismatch(String),
}

/// A chunk that is being sent or received.
#[derive(Clone, Copy)]
struct Span {
    /// Number of the message in this run.
    number: usize,
    /// Offset of the chunk in the message.
    from: usize,
    /// Bytes of the chunk.
    len: usize,
    /// Bytes sent or received so far; for a sent chunk including its header.
    moved: usize,
}

/// One of the streams to a peer.
struct Stream {
    link: Box<dyn Transport>,
    /// The chunk that is being sent.
    out: Option<Span>,
    /// The header of that chunk.
    out_head: [u8; chunk::LEN],
    /// The chunk that is being received.
    into: Option<Span>,
    /// The header of the next chunk, as far as it has arrived. A complete header stays here until its message is admitted.
    in_head: [u8; chunk::LEN],
    /// Bytes of that header that have arrived.
    in_head_len: usize,
    /// Bytes sent on this stream in this run.
    carried: u64,
    /// The error of `recv`, and when it occurred.
    broken: Option<(Broken, Instant)>,
}

/// The message of which streams take the next chunks.
struct Current {
    number: usize,
    /// Offset of the next chunk.
    at: usize,
    /// Bytes of the message.
    len: usize,
}

/// The transfers to and from one peer.
pub(super) struct Endpoint {
    /// Index of the peer.
    peer: usize,
    /// Empty for this rank's own index.
    streams: Vec<Stream>,
    /// Number of messages of earlier runs, sent and received.
    before: (u64, u64),
    /// Number of messages to the peer that are not started.
    to_begin: usize,
    /// The message that is being divided into chunks.
    current: Option<Current>,
    /// By number of a started message to the peer: bytes of its body that are in no completely sent chunk.
    unsent: Vec<usize>,
    /// By number of a message from the peer: missing bytes, [`UNSEEN`] or [`COMPLETE`].
    missing: Vec<usize>,
    /// Number of messages from the peer that are not complete.
    to_arrive: usize,
    /// The error of `send`. Receiving continues, because the peer's last messages may explain it.
    send_broken: Option<Broken>,
}

impl Endpoint {
    pub fn new(peer: usize, links: Vec<Box<dyn Transport>>) -> Endpoint {
        let stream = |link| Stream {
            link,
            out: None,
            out_head: [0; chunk::LEN],
            into: None,
            in_head: [0; chunk::LEN],
            in_head_len: 0,
            carried: 0,
            broken: None,
        };
        Endpoint {
            peer,
            streams: links.into_iter().map(stream).collect(),
            before: (0, 0),
            to_begin: 0,
            current: None,
            unsent: Vec::new(),
            missing: Vec::new(),
            to_arrive: 0,
            send_broken: None,
        }
    }

    /// Starts a run.
    pub fn begin(&mut self, plan: &dyn Plan) {
        let (sends, recvs) = plan.counts(self.peer);
        self.to_begin = sends;
        self.to_arrive = recvs;
        self.unsent.clear();
        self.unsent.resize(sends, 0);
        self.missing.clear();
        self.missing.resize(recvs, UNSEEN);
        self.send_broken = None;
        self.streams.iter_mut().for_each(|stream| stream.carried = 0);
    }

    /// Ends a run in which all messages were sent and received.
    pub fn end(&mut self, plan: &dyn Plan) {
        let (sends, recvs) = plan.counts(self.peer);
        self.before.0 += sends as u64;
        self.before.1 += recvs as u64;
    }

    /// Name of the transport; `None` for this rank's own index.
    pub fn name(&self) -> Option<&'static str> {
        self.streams.first().map(|stream| stream.link.name())
    }

    /// How to wait for each stream, whether for bytes to receive, and whether for room to send.
    pub fn waits(&self) -> impl Iterator<Item = (Readiness<'_>, bool, bool)> {
        let head = head_len(self.streams.len());
        let sends = self.send_broken.is_none();
        self.streams.iter().filter_map(move |stream| {
            let waits_for_room = stream.into.is_none() && stream.in_head_len == head;
            let recv = self.to_arrive > 0 && stream.broken.is_none() && !waits_for_room;
            let send = sends && (stream.out.is_some() || self.offer(stream).is_some());
            (recv || send).then(|| (stream.link.readiness(), recv, send))
        })
    }

    /// Length of the chunk of the current message that a stream would send next.
    fn offer(&self, stream: &Stream) -> Option<usize> {
        let current = self.current.as_ref()?;
        let best = self.streams.iter().map(|stream| stream.carried).max().unwrap_or(0);
        // Assumes that the following messages are as long as this one.
        let after = self.to_begin.saturating_mul(current.len);
        chunk::next_len(current.len - current.at, after, self.streams.len(), Pace { own: stream.carried, best })
    }

    pub fn wants_to_recv(&self) -> bool {
        self.to_arrive > 0
    }

    fn has_sent(&self) -> bool {
        self.to_begin == 0 && self.current.is_none() && self.streams.iter().all(|stream| stream.out.is_none())
    }

    pub fn is_done(&self) -> bool {
        self.to_arrive == 0 && self.has_sent()
    }

    /// Makes progress in both directions; true when bytes moved.
    pub fn step(&mut self, plan: &mut dyn Plan, counts: &mut ByteCounts) -> Result<bool, PeerFault> {
        let sent = self.send(plan, counts);
        let received = self.recv(plan, counts)?;
        match &self.send_broken {
            Some(broken) if self.to_arrive == 0 => Err(PeerFault::Lost(broken.clone())),
            _ => Ok(sent || received),
        }
    }

    fn send(&mut self, plan: &mut dyn Plan, counts: &mut ByteCounts) -> bool {
        let mut any = false;
        for at in 0..self.streams.len() {
            let limit = counts.sent + SEND_QUANTUM as u64;
            while counts.sent < limit && self.send_broken.is_none() && self.send_by(at, plan, counts, &mut any) {}
        }
        any
    }

    /// Sends bytes on one stream; false when it has no room or no chunk to send.
    fn send_by(&mut self, at: usize, plan: &mut dyn Plan, counts: &mut ByteCounts, any: &mut bool) -> bool {
        let streams = self.streams.len();
        let head = head_len(streams);
        let span = if let Some(span) = self.streams[at].out {
            span
        } else {
            if self.current.is_none() && self.to_begin > 0 {
                self.current = plan.next(self.peer).map(|number| {
                    self.to_begin -= 1;
                    let len = plan.outgoing(self.peer, number).1.len();
                    self.unsent[number] = len;
                    Current { number, at: 0, len }
                });
            }
            let (Some(current), Some(len)) = (&self.current, self.offer(&self.streams[at])) else { return false };
            let span = Span { number: current.number, from: current.at, len, moved: 0 };
            let part = plan.part(span.number);
            let fingerprint = plan.outgoing(self.peer, span.number).0;
            let message = self.before.0 + span.number as u64;
            let header = Header { fingerprint, part, body: current.len as u64 };
            self.streams[at].out_head =
                Chunk { header, message, offset: span.from as u64, length: span.len as u64 }.encode();
            span
        };
        let stream = &mut self.streams[at];
        let sent_head = span.moved.min(head);
        let head_left = &stream.out_head[sent_head..head];
        let body = &plan.outgoing(self.peer, span.number).1[span.from..span.from + span.len];
        let body = &body[span.moved - sent_head..];
        let body = &body[..body.len().min(SEND_QUANTUM)];
        let count = match stream.link.send(head_left, body) {
            Ok(count) => count,
            Err(broken) => {
                self.send_broken = Some(broken);
                return false;
            }
        };
        if count == 0 {
            // The chunk is not started: the first stream with room will send it.
            return false;
        }
        *any = true;
        if span.moved == 0
            && let Some(current) = &mut self.current
        {
            current.at += span.len;
            if current.at == current.len {
                self.current = None;
            }
        }
        stream.carried += count as u64;
        let has_room = count == head_left.len() + body.len();
        counts.sent += (count - count.min(head_left.len())) as u64;
        counts.wire_sent += if stream.link.is_wire() { count as u64 } else { 0 };
        let moved = span.moved + count;
        let whole = moved == head + span.len;
        stream.out = (!whole).then_some(Span { moved, ..span });
        if whole {
            self.unsent[span.number] -= span.len;
            if self.unsent[span.number] == 0 {
                plan.sent(self.peer, span.number);
            }
        }
        has_room
    }

    fn recv(&mut self, plan: &mut dyn Plan, counts: &mut ByteCounts) -> Result<bool, PeerFault> {
        let mut any = false;
        for at in 0..self.streams.len() {
            while self.to_arrive > 0 && self.recv_by(at, plan, counts, &mut any)? {}
        }
        if any || self.to_arrive == 0 {
            return Ok(any);
        }
        // A stream that broke within a chunk cannot deliver the rest of it; otherwise the other streams may deliver the messages.
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

    /// Receives bytes on one stream; false when there are none now.
    fn recv_by(
        &mut self,
        at: usize,
        plan: &mut dyn Plan,
        counts: &mut ByteCounts,
        any: &mut bool,
    ) -> Result<bool, PeerFault> {
        let head = head_len(self.streams.len());
        let stream = &mut self.streams[at];
        if stream.into.is_none() && stream.in_head_len == head {
            let Some(span) = check_header(&stream.in_head[..head], self.peer, plan, self.before.1, &self.missing)
                .map_err(PeerFault::Mismatch)?
            else {
                return Ok(false);
            };
            stream.in_head_len = 0;
            let missing = &mut self.missing[span.number];
            if *missing == UNSEEN {
                *missing = plan.expected(self.peer, span.number).1;
            }
            stream.into = Some(span);
            *any = true;
        }
        if stream.broken.is_some() {
            return Ok(false);
        }
        let Some(span) = &mut stream.into else {
            let into = &mut stream.in_head[stream.in_head_len..head];
            let wanted = into.len();
            let count = match stream.link.recv(into) {
                Ok(count) => count,
                Err(broken) => {
                    stream.broken = Some((broken, Instant::now()));
                    return Ok(false);
                }
            };
            stream.in_head_len += count;
            *any |= count > 0;
            counts.wire_received += if stream.link.is_wire() { count as u64 } else { 0 };
            return Ok(count == wanted);
        };
        let mut full = true;
        if span.moved < span.len {
            let into = &mut plan.incoming(self.peer, span.number)[span.from + span.moved..span.from + span.len];
            let wanted = into.len();
            let count = match stream.link.recv(into) {
                Ok(count) => count,
                Err(broken) => {
                    stream.broken = Some((broken, Instant::now()));
                    return Ok(false);
                }
            };
            full = count == wanted;
            span.moved += count;
            self.missing[span.number] -= count;
            *any |= count > 0;
            counts.received += count as u64;
            counts.wire_received += if stream.link.is_wire() { count as u64 } else { 0 };
        }
        if span.moved == span.len {
            let number = span.number;
            stream.into = None;
            if self.missing[number] == 0 {
                self.missing[number] = COMPLETE;
                self.to_arrive -= 1;
                plan.arrived(self.peer, number);
            }
        }
        Ok(full)
    }
}

/// Compares a header with the expected message and returns the chunk that follows it, `None` while its message is not admitted. The
/// error names the peer's operation.
fn check_header(
    head: &[u8],
    peer: usize,
    plan: &dyn Plan,
    before: u64,
    missing: &[usize],
) -> Result<Option<Span>, String> {
    let theirs = Chunk::decode(head).map_err(|bad| bad.to_string())?;
    let Header { fingerprint, part, body } = theirs.header;
    let next = || missing.iter().position(|missing| *missing == UNSEEN).unwrap_or(missing.len());
    let number = match theirs.message {
        // A single stream.
        u64::MAX => plan.number(part, next()),
        // Several streams: a chunk of a later run waits for that run, while other streams deliver the rest of this one.
        message if message >= before.saturating_add(missing.len() as u64) => return Ok(None),
        message => usize::try_from(message.wrapping_sub(before)).unwrap_or(usize::MAX),
    };
    // An unknown number is compared with the first incomplete message of this run.
    let known = missing.get(number).copied();
    let waiting = || missing.iter().position(|missing| *missing != COMPLETE).unwrap_or(0);
    let nearest = if known.is_some() { number } else { waiting() };
    let (expected, len) = plan.expected(peer, nearest);
    if fingerprint != expected {
        return Err(fingerprint.to_string());
    }
    if known.is_none() || part != plan.part(number) {
        return Err(format!("{fingerprint} in step {part} instead of {}", plan.part(nearest)));
    }
    if body != len as u64 {
        return Err(format!("{fingerprint} with {body} bytes instead of {len}"));
    }
    let left = match missing[number] {
        UNSEEN => len as u64,
        COMPLETE => return Err(format!("{fingerprint} in step {part} twice")),
        left => left as u64,
    };
    if !theirs.fits() || theirs.length > left {
        let Chunk { offset, length, .. } = theirs;
        return Err(format!("{fingerprint} with {length} bytes at {offset} of {len}"));
    }
    if !plan.admits(peer, number) {
        return Ok(None);
    }
    // Both are at most `len`, which is a usize.
    Ok(Some(Span { number, from: theirs.offset as usize, len: theirs.length as usize, moved: 0 }))
}
