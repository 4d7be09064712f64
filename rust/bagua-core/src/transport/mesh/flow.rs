//! What is under way with one peer: the messages in each direction, in order, and how far the current one has come.

use crate::transport::frame::{self, Header};
use crate::transport::{Broken, Incoming, Outgoing, Transport};

/// Bytes moved by one exchange.
#[derive(Default)]
pub(super) struct Tally {
    /// Bodies only.
    pub sent: u64,
    /// Bodies only.
    pub received: u64,
    /// Headers and bodies over links that are wires.
    pub wire_sent: u64,
    /// Headers and bodies over links that are wires.
    pub wire_received: u64,
}

/// Why an exchange with a peer cannot go on.
pub(super) enum Trouble {
    /// Its stream ended or broke.
    Lost(Broken),
    /// It does something else: the text says what.
    Mismatch(String),
}

/// One direction's queue. Invariant: `moved` is below the size of message `queue[at]`, header included.
#[derive(Default)]
struct Lineup {
    /// Indices into the caller's messages.
    queue: Vec<usize>,
    /// Position in `queue` of the current message.
    at: usize,
    /// Bytes of it that have moved, header included.
    moved: usize,
}

impl Lineup {
    fn clear(&mut self) {
        self.queue.clear();
        (self.at, self.moved) = (0, 0);
    }

    fn current(&self) -> Option<usize> {
        self.queue.get(self.at).copied()
    }

    /// Records `count` more bytes of the current message, which has `body` bytes; true when that completes it.
    fn advance(&mut self, count: usize, body: usize) -> bool {
        self.moved += count;
        let complete = self.moved == frame::LEN + body;
        if complete {
            self.at += 1;
            self.moved = 0;
        }
        complete
    }
}

/// The messages to and from one peer.
pub(super) struct Flow {
    outgoing: Lineup,
    incoming: Lineup,
    /// Header of the current outgoing message.
    out_head: [u8; frame::LEN],
    /// As much of the current incoming message's header as has arrived.
    in_head: [u8; frame::LEN],
    /// Sending failed. What the peer sent before may still explain it, so receiving goes on.
    send_broken: Option<Broken>,
}

impl Flow {
    pub fn new() -> Flow {
        Flow {
            outgoing: Lineup::default(),
            incoming: Lineup::default(),
            out_head: [0; frame::LEN],
            in_head: [0; frame::LEN],
            send_broken: None,
        }
    }

    /// Forgets the last exchange.
    pub fn clear(&mut self) {
        self.outgoing.clear();
        self.incoming.clear();
        self.send_broken = None;
    }

    pub fn queue_send(&mut self, message: usize) {
        self.outgoing.queue.push(message);
    }

    pub fn queue_recv(&mut self, message: usize) {
        self.incoming.queue.push(message);
    }

    pub fn wants_to_send(&self) -> bool {
        self.send_broken.is_none() && self.outgoing.current().is_some()
    }

    pub fn wants_to_recv(&self) -> bool {
        self.incoming.current().is_some()
    }

    pub fn is_done(&self) -> bool {
        self.outgoing.current().is_none() && self.incoming.current().is_none()
    }

    /// Moves what can be moved now in both directions; true when anything did.
    pub fn step(
        &mut self,
        link: &mut dyn Transport,
        part: u32,
        sends: &[Outgoing<'_>],
        recvs: &mut [Incoming<'_>],
        tally: &mut Tally,
    ) -> Result<bool, Trouble> {
        let sent = self.send(link, part, sends, tally);
        let received = self.recv(link, part, recvs, tally)?;
        match &self.send_broken {
            Some(broken) if !self.wants_to_recv() => Err(Trouble::Lost(broken.clone())),
            _ => Ok(sent || received),
        }
    }

    fn send(&mut self, link: &mut dyn Transport, part: u32, sends: &[Outgoing<'_>], tally: &mut Tally) -> bool {
        let mut any = false;
        while self.send_broken.is_none()
            && let Some(current) = self.outgoing.current()
        {
            let message = &sends[current];
            let moved = self.outgoing.moved;
            if moved == 0 {
                let body = message.data.len() as u64;
                self.out_head = Header { fingerprint: message.fingerprint, part, body }.encode();
            }
            let body = &message.data[moved.saturating_sub(frame::LEN)..];
            let count = match link.send(&self.out_head[moved.min(frame::LEN)..], body) {
                Ok(count) => count,
                Err(broken) => {
                    self.send_broken = Some(broken);
                    break;
                }
            };
            any |= count > 0;
            let of_head = count.min(frame::LEN - moved.min(frame::LEN));
            tally.sent += (count - of_head) as u64;
            tally.wire_sent += if link.is_wire() { count as u64 } else { 0 };
            if !self.outgoing.advance(count, message.data.len()) {
                break;
            }
        }
        any
    }

    fn recv(
        &mut self,
        link: &mut dyn Transport,
        part: u32,
        recvs: &mut [Incoming<'_>],
        tally: &mut Tally,
    ) -> Result<bool, Trouble> {
        let mut any = false;
        while let Some(current) = self.incoming.current() {
            let message = &mut recvs[current];
            let moved = self.incoming.moved;
            let in_header = moved < frame::LEN;
            let into = if in_header { &mut self.in_head[moved..] } else { &mut message.data[moved - frame::LEN..] };
            let wanted = into.len();
            let count = link.recv(into).map_err(Trouble::Lost)?;
            any |= count > 0;
            tally.received += if in_header { 0 } else { count as u64 };
            tally.wire_received += if link.is_wire() { count as u64 } else { 0 };
            if in_header && count == wanted {
                // Before a byte of the body is read into the caller's memory.
                check(&self.in_head, part, message).map_err(Trouble::Mismatch)?;
            }
            self.incoming.advance(count, message.data.len());
            if count < wanted {
                break;
            }
        }
        Ok(any)
    }
}

/// Compares an incoming header with what the message must be; the error says what the peer does.
fn check(head: &[u8; frame::LEN], part: u32, expected: &Incoming<'_>) -> Result<(), String> {
    let theirs = Header::decode(head).map_err(|bad| bad.to_string())?;
    let fingerprint = theirs.fingerprint;
    if fingerprint != expected.fingerprint {
        return Err(fingerprint.to_string());
    }
    if theirs.part != part {
        return Err(format!("{fingerprint} in step {} instead of {part}", theirs.part));
    }
    if theirs.body != expected.data.len() as u64 {
        return Err(format!("{fingerprint} with {} bytes instead of {}", theirs.body, expected.data.len()));
    }
    Ok(())
}
