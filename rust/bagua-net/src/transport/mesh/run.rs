//! One run of a plan: which of its messages have been sent and have come. Their headers are compared with the plan before a byte is used.

use super::frames::Frames;
use super::plan::Plan;
use crate::transport::frame::{FrameKind, Header};

/// In [`PeerMessages::missing`]: a message of which nothing has arrived.
const UNSEEN: usize = usize::MAX;
/// In [`PeerMessages::missing`]: a message that has arrived completely.
const COMPLETE: usize = usize::MAX - 1;

/// The messages to and from one peer. Kept between runs, for the numbers and to reuse the memory.
#[derive(Default)]
pub(super) struct PeerMessages {
    /// Number of messages of earlier runs, sent and received.
    before: (u64, u64),
    /// Number of messages to the peer that are not started.
    to_begin: usize,
    /// By number of a started message to the peer: bytes of its body that are in no completely sent chunk.
    unsent: Vec<usize>,
    /// By number of a message from the peer: missing bytes, [`UNSEEN`] or [`COMPLETE`].
    missing: Vec<usize>,
    /// Number of messages from the peer that are not complete.
    to_arrive: usize,
}

impl PeerMessages {
    /// Starts a run.
    pub(super) fn begin(&mut self, (sends, recvs): (usize, usize)) {
        self.to_begin = sends;
        self.to_arrive = recvs;
        self.unsent.clear();
        self.unsent.resize(sends, 0);
        self.missing.clear();
        self.missing.resize(recvs, UNSEEN);
    }

    /// Ends a run in which all messages were sent and received.
    pub(super) fn end(&mut self) {
        self.before.0 += self.unsent.len() as u64;
        self.before.1 += self.missing.len() as u64;
    }

    /// Between runs: number of messages sent, and received.
    pub(super) fn done(&self) -> (u64, u64) {
        self.before
    }

    /// True when every message has begun to be sent, and has come.
    pub(super) fn is_done(&self) -> bool {
        self.to_begin == 0 && self.to_arrive == 0
    }
}

/// See the module.
pub(super) struct Run<'p> {
    pub(super) plan: &'p mut dyn Plan,
    /// By index of the peer.
    pub(super) peers: &'p mut [PeerMessages],
    /// Whether there are several streams to a peer, or there may be at the peer's end of those that open here, so that a frame of the next run
    /// may overtake the last of this one.
    pub(super) overtaken: bool,
}

impl Run<'_> {
    fn sent_number(&self, peer: usize, message: u64) -> usize {
        (message - self.peers[peer].before.0) as usize
    }

    fn number(&self, peer: usize, message: u64) -> usize {
        usize::try_from(message.wrapping_sub(self.peers[peer].before.1)).unwrap_or(usize::MAX)
    }

    /// Compares a header with the message that is expected; false while it is not admitted.
    fn check(&self, peer: usize, theirs: &Header) -> Result<bool, String> {
        let Header { fingerprint, part, body, frame, message, offset, length } = *theirs;
        let PeerMessages { before, missing, .. } = &self.peers[peer];
        if self.overtaken && message >= before.1.saturating_add(missing.len() as u64) {
            return Ok(false);
        }
        let number = self.number(peer, message);
        // An unknown number is compared with the first incomplete message of this run.
        let known = missing.get(number).copied();
        let waiting = || missing.iter().position(|missing| *missing != COMPLETE).unwrap_or(0);
        let nearest = if known.is_some() { number } else { waiting() };
        let (expected, len) = self.plan.expected(peer, nearest);
        if fingerprint != expected || frame != FrameKind::Data {
            return Err(fingerprint.to_string());
        }
        let (Some(known), true) = (known, part == self.plan.part(nearest)) else {
            return Err(format!("{fingerprint} in step {part} instead of {}", self.plan.part(nearest)));
        };
        if body != len as u64 {
            return Err(format!("{fingerprint} with {body} bytes instead of {len}"));
        }
        let left = match known {
            UNSEEN => len as u64,
            COMPLETE => return Err(format!("{fingerprint} in step {part} twice")),
            left => left as u64,
        };
        if !theirs.fits() || length > left {
            return Err(format!("{fingerprint} with {length} bytes at {offset} of {len}"));
        }
        Ok(self.plan.admits(peer, number))
    }
}

impl Frames for Run<'_> {
    fn next(&mut self, peer: usize) -> Option<Header> {
        let messages = &mut self.peers[peer];
        if messages.to_begin == 0 {
            return None;
        }
        let number = self.plan.next(peer)?;
        messages.to_begin -= 1;
        let (fingerprint, body) = self.plan.outgoing(peer, number);
        messages.unsent[number] = body.len();
        Some(Header::whole(fingerprint, self.plan.part(number), body.len(), messages.before.0 + number as u64))
    }

    fn following(&self, peer: usize) -> usize {
        self.peers[peer].to_begin
    }

    fn outgoing(&self, peer: usize, message: u64) -> &[u8] {
        self.plan.outgoing(peer, self.sent_number(peer, message)).1
    }

    fn sent(&mut self, peer: usize, frame: &Header) {
        let number = self.sent_number(peer, frame.message);
        let unsent = &mut self.peers[peer].unsent[number];
        *unsent -= frame.length as usize;
        if *unsent == 0 {
            self.plan.sent(peer, number);
        }
    }

    fn expects(&self, peer: usize) -> bool {
        self.peers[peer].to_arrive > 0
    }

    fn begin(&mut self, peer: usize, frame: &Header) -> Result<bool, String> {
        let admitted = self.check(peer, frame)?;
        if admitted {
            let number = self.number(peer, frame.message);
            let missing = &mut self.peers[peer].missing[number];
            if *missing == UNSEEN {
                *missing = self.plan.expected(peer, number).1;
            }
        }
        Ok(admitted)
    }

    fn incoming(&mut self, peer: usize, message: u64) -> &mut [u8] {
        let number = self.number(peer, message);
        self.plan.incoming(peer, number)
    }

    fn came(&mut self, peer: usize, message: u64, count: usize) {
        let number = self.number(peer, message);
        let messages = &mut self.peers[peer];
        let missing = &mut messages.missing[number];
        *missing -= count;
        if *missing == 0 {
            *missing = COMPLETE;
            messages.to_arrive -= 1;
            self.plan.arrived(peer, number);
        }
    }
}
