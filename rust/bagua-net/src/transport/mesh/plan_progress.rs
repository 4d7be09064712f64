//! The state of one run of a plan: which messages have been sent and which have arrived. Headers are compared with the
//! plan before any byte is used.

use super::frame_handler::Frames;
use super::message_plan::Plan;
use crate::transport::frame::{FrameKind, Header};

/// Value in [`PeerMessages::missing`] of a message of which nothing has arrived.
const UNSEEN: usize = usize::MAX;
/// Value in [`PeerMessages::missing`] of a message that has arrived completely.
const COMPLETE: usize = usize::MAX - 1;

/// The messages to and from one peer. Kept between runs, to continue the numbering and to reuse the memory.
#[derive(Default)]
pub(super) struct PeerMessages {
    /// Number of messages sent and received in earlier runs.
    before: (u64, u64),
    /// Number of messages to the peer that have not been started.
    to_begin: usize,
    /// For each started message to the peer, the bytes that are not in a completely sent chunk.
    unsent: Vec<usize>,
    /// For each message from the peer, the number of missing bytes, [`UNSEEN`] or [`COMPLETE`].
    missing: Vec<usize>,
    /// Number of messages from the peer that are incomplete.
    to_arrive: usize,
}

impl PeerMessages {
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

    /// True if every message has been started or has arrived, respectively.
    pub(super) fn is_done(&self) -> bool {
        self.to_begin == 0 && self.to_arrive == 0
    }
}

/// The messages of one run as [`Frames`].
pub(super) struct Run<'p> {
    pub(super) plan: &'p mut dyn Plan,
    pub(super) peers: &'p mut [PeerMessages],
    /// True if a frame of the next run may overtake the last frame of this one: if some peer has several streams, or
    /// may have them at its end while they are still opening here.
    pub(super) overtaken: bool,
}

impl Run<'_> {
    fn sent_number(&self, peer: usize, message: u64) -> usize {
        (message - self.peers[peer].before.0) as usize
    }

    fn number(&self, peer: usize, message: u64) -> usize {
        usize::try_from(message.wrapping_sub(self.peers[peer].before.1)).unwrap_or(usize::MAX)
    }

    /// Compares a header with the expected message. Returns false while the message is not admitted.
    fn check(&self, peer: usize, theirs: &Header) -> Result<bool, String> {
        let Header { fingerprint, part, body, frame, message, offset, length } = *theirs;
        let PeerMessages { before, missing, .. } = &self.peers[peer];
        if self.overtaken && message >= before.1.saturating_add(missing.len() as u64) {
            return Ok(false);
        }
        let number = self.number(peer, message);
        // A header with an unknown number is compared with the first incomplete message of this run.
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
