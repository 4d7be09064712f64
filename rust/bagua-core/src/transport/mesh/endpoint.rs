//! What is under way with one peer: the messages in each direction, and how far the streams to it have come with them.
//!
//! With several streams a message is cut into chunks, and whichever stream has room takes the next one, so that a slow stream
//! holds up no more than the chunk that it has begun. What arrives is checked chunk by chunk, before a byte of it is read into
//! the caller's memory.

use std::time::{Duration, Instant};

use super::chunk::{self, Chunk, Pace, head_len};
use super::plan::Plan;
use crate::transport::frame::Header;
use crate::transport::{Broken, Readiness, Transport};

/// How long one of several streams may be broken, between two chunks, while the others bring nothing: they may still carry
/// what the peer sent before it closed them all.
const LINGER: Duration = Duration::from_millis(200);

/// Bytes that a stream is given before the rank receives again. Two ranks that take turns so keep few bytes between them, which
/// are in the cache when they are received; filling the sockets first took 1.3 times as long (16 MiB each way on one machine).
const TURN: usize = 256 << 10;

/// A message from the peer of which nothing has arrived, and one of which everything has.
const UNSEEN: usize = usize::MAX;
const COMPLETE: usize = usize::MAX - 1;

/// Bytes moved by one run.
#[derive(Default)]
pub(super) struct ByteCounts {
    /// Bodies only.
    pub sent: u64,
    /// Bodies only.
    pub received: u64,
    /// Headers and bodies over links that are wires.
    pub wire_sent: u64,
    /// Headers and bodies over links that are wires.
    pub wire_received: u64,
}

/// Why a run cannot go on with a peer.
pub(super) enum PeerFault {
    /// Its stream ended or broke.
    Lost(Broken),
    /// It does something else: the text says what.
    Mismatch(String),
}

/// Bytes of a message, and how many of them have moved.
#[derive(Clone, Copy)]
struct Span {
    /// Number of the message in this run.
    number: usize,
    /// Where the chunk begins in it.
    from: usize,
    /// Bytes of the chunk.
    len: usize,
    /// Bytes that have moved; when sending, those of the header among them.
    moved: usize,
}

/// One of the streams to a peer.
struct Stream {
    link: Box<dyn Transport>,
    /// The chunk that it is in the middle of sending.
    out: Option<Span>,
    /// That chunk's header.
    out_head: [u8; chunk::LEN],
    /// The chunk that it is in the middle of receiving.
    into: Option<Span>,
    /// As much as has arrived of the next chunk's header. A complete one stays here until its message is admitted.
    in_head: [u8; chunk::LEN],
    /// How much that is.
    in_headed: usize,
    /// Bytes that it has carried to the peer in this run.
    carried: u64,
    /// Receiving failed, and since when.
    broken: Option<(Broken, Instant)>,
}

/// A message that is being cut.
struct Cut {
    number: usize,
    /// Where the next chunk begins.
    at: usize,
    len: usize,
}

/// The messages to and from one peer.
pub(super) struct Endpoint {
    /// Index of the peer.
    peer: usize,
    /// None for the own index.
    streams: Vec<Stream>,
    /// Messages of earlier runs, sent and received.
    before: (u64, u64),
    /// Messages to the peer that were not begun.
    to_begin: usize,
    /// The message of which streams take chunks.
    cut: Option<Cut>,
    /// By number of a message to the peer that was begun: bytes that were not handed over.
    unsent: Vec<usize>,
    /// By number of a message from the peer: bytes that are missing, or [`UNSEEN`], or [`COMPLETE`].
    missing: Vec<usize>,
    /// Messages from the peer that are not complete.
    to_arrive: usize,
    /// Sending failed. What the peer sent before may still explain it, so receiving goes on.
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
            in_headed: 0,
            carried: 0,
            broken: None,
        };
        Endpoint {
            peer,
            streams: links.into_iter().map(stream).collect(),
            before: (0, 0),
            to_begin: 0,
            cut: None,
            unsent: Vec::new(),
            missing: Vec::new(),
            to_arrive: 0,
            send_broken: None,
        }
    }

    /// Begins a run.
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

    /// Ends a run of which everything was moved.
    pub fn end(&mut self, plan: &dyn Plan) {
        let (sends, recvs) = plan.counts(self.peer);
        self.before.0 += sends as u64;
        self.before.1 += recvs as u64;
    }

    /// Name of the transport; `None` for the own index.
    pub fn name(&self) -> Option<&'static str> {
        self.streams.first().map(|stream| stream.link.name())
    }

    /// What to sleep on: for each stream, and whether for bytes that come and for room to send.
    pub fn waits(&self) -> impl Iterator<Item = (Readiness<'_>, bool, bool)> {
        let head = head_len(self.streams.len());
        let sends = self.send_broken.is_none();
        self.streams.iter().filter_map(move |stream| {
            let waits_for_room = stream.into.is_none() && stream.in_headed == head;
            let recv = self.to_arrive > 0 && stream.broken.is_none() && !waits_for_room;
            let send = sends && (stream.out.is_some() || self.offer(stream).is_some());
            (recv || send).then(|| (stream.link.readiness(), recv, send))
        })
    }

    /// How much of the message that is being cut a stream would take, if it has room.
    fn offer(&self, stream: &Stream) -> Option<usize> {
        let cut = self.cut.as_ref()?;
        let best = self.streams.iter().map(|stream| stream.carried).max().unwrap_or(0);
        // Those that come after it are mostly as long.
        let after = self.to_begin.saturating_mul(cut.len);
        chunk::next_len(cut.len - cut.at, after, self.streams.len(), Pace { own: stream.carried, best })
    }

    pub fn wants_to_recv(&self) -> bool {
        self.to_arrive > 0
    }

    fn has_sent(&self) -> bool {
        self.to_begin == 0 && self.cut.is_none() && self.streams.iter().all(|stream| stream.out.is_none())
    }

    pub fn is_done(&self) -> bool {
        self.to_arrive == 0 && self.has_sent()
    }

    /// Moves what can be moved now in both directions; true when anything did.
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
            let turn = counts.sent + TURN as u64;
            while counts.sent < turn && self.send_broken.is_none() && self.send_by(at, plan, counts, &mut any) {}
        }
        any
    }

    /// Sends some bytes by one stream; false when it has no room, or nothing to do.
    fn send_by(&mut self, at: usize, plan: &mut dyn Plan, counts: &mut ByteCounts, any: &mut bool) -> bool {
        let streams = self.streams.len();
        let head = head_len(streams);
        let span = if let Some(span) = self.streams[at].out {
            span
        } else {
            if self.cut.is_none() && self.to_begin > 0 {
                self.cut = plan.next(self.peer).map(|number| {
                    self.to_begin -= 1;
                    let len = plan.outgoing(self.peer, number).1.len();
                    self.unsent[number] = len;
                    Cut { number, at: 0, len }
                });
            }
            let (Some(cut), Some(len)) = (&self.cut, self.offer(&self.streams[at])) else { return false };
            let span = Span { number: cut.number, from: cut.at, len, moved: 0 };
            let part = plan.part(span.number);
            let fingerprint = plan.outgoing(self.peer, span.number).0;
            let message = self.before.0 + span.number as u64;
            let header = Header { fingerprint, part, body: cut.len as u64 };
            self.streams[at].out_head =
                Chunk { header, message, offset: span.from as u64, length: span.len as u64 }.encode();
            span
        };
        let stream = &mut self.streams[at];
        let sent_head = span.moved.min(head);
        let head_left = &stream.out_head[sent_head..head];
        let body = &plan.outgoing(self.peer, span.number).1[span.from..span.from + span.len];
        let body = &body[span.moved - sent_head..];
        let body = &body[..body.len().min(TURN)];
        let count = match stream.link.send(head_left, body) {
            Ok(count) => count,
            Err(broken) => {
                self.send_broken = Some(broken);
                return false;
            }
        };
        if count == 0 {
            // A chunk that was not begun is left to whichever stream has room first.
            return false;
        }
        *any = true;
        if span.moved == 0
            && let Some(cut) = &mut self.cut
        {
            cut.at += span.len;
            if cut.at == cut.len {
                self.cut = None;
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
        // In the middle of a chunk a broken stream will never bring the rest; otherwise the others may.
        let broken = self.streams.iter().filter_map(|stream| {
            let (broken, since) = stream.broken.as_ref()?;
            let in_chunk = stream.into.is_some() || stream.in_headed > 0;
            Some((broken, in_chunk || since.elapsed() > LINGER))
        });
        let broken: Vec<_> = broken.collect();
        match broken.iter().find(|(_, hopeless)| *hopeless || broken.len() == self.streams.len()) {
            Some((broken, _)) => Err(PeerFault::Lost((*broken).clone())),
            None => Ok(false),
        }
    }

    /// Receives some bytes by one stream; false when there are none now.
    fn recv_by(
        &mut self,
        at: usize,
        plan: &mut dyn Plan,
        counts: &mut ByteCounts,
        any: &mut bool,
    ) -> Result<bool, PeerFault> {
        let head = head_len(self.streams.len());
        let stream = &mut self.streams[at];
        if stream.into.is_none() && stream.in_headed == head {
            let Some(span) = place(&stream.in_head[..head], self.peer, plan, self.before.1, &self.missing)
                .map_err(PeerFault::Mismatch)?
            else {
                return Ok(false);
            };
            stream.in_headed = 0;
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
            let into = &mut stream.in_head[stream.in_headed..head];
            let wanted = into.len();
            let count = match stream.link.recv(into) {
                Ok(count) => count,
                Err(broken) => {
                    stream.broken = Some((broken, Instant::now()));
                    return Ok(false);
                }
            };
            stream.in_headed += count;
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

/// Compares a header with what the message must be: the span that follows it, `None` while that is not admitted. The error says
/// what the peer does.
fn place(head: &[u8], peer: usize, plan: &dyn Plan, before: u64, missing: &[usize]) -> Result<Option<Span>, String> {
    let theirs = Chunk::decode(head).map_err(|bad| bad.to_string())?;
    let Header { fingerprint, part, body } = theirs.header;
    let next = || missing.iter().position(|missing| *missing == UNSEEN).unwrap_or(missing.len());
    let number = match theirs.message {
        // One stream.
        u64::MAX => plan.number(part, next()),
        // Several: what belongs to a later run waits here for it, behind what another stream still has to bring.
        message if message >= before.saturating_add(missing.len() as u64) => return Ok(None),
        message => usize::try_from(message.wrapping_sub(before)).unwrap_or(usize::MAX),
    };
    // What any message of this run says is what it is compared with where the number says nothing.
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
        COMPLETE => return Err(format!("{fingerprint} in step {part} once more")),
        left => left as u64,
    };
    if !theirs.fits() || theirs.length > left {
        let Chunk { offset, length, .. } = theirs;
        return Err(format!("{fingerprint} with {length} bytes at {offset} of {len}"));
    }
    if !plan.admits(peer, number) {
        return Ok(None);
    }
    // Within `len`, which is a length in memory.
    Ok(Some(Span { number, from: theirs.offset as usize, len: theirs.length as usize, moved: 0 }))
}
