//! What a run of the mesh moves: messages by peer and number, whose memory is asked for only while a call moves bytes.
//!
//! Because nothing is borrowed for longer than one call, an operation may send from and receive into one buffer, combine
//! what has arrived while more arrives, and send on what it has combined, all in one run.

use crate::transport::{Incoming, Outgoing};
use crate::types::Fingerprint;

/// Where an exchange stands in an operation that takes several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// Number of the exchange; both sides must agree.
    pub part: u32,
    /// Bytes of the operation that arrived in earlier exchanges.
    pub before: u64,
    /// Bytes that arrive in the whole operation; at least those of this exchange.
    pub total: u64,
}

/// The messages of one run. Those to a peer are numbered from 0, and so are those from it; both sides must agree on how many
/// there are. They may be sent in any order that both sides can live with: a message that its receiver does not admit yet
/// holds up what its sender sends after it.
pub(crate) trait Plan {
    /// How many messages go to a peer, and how many come from it.
    fn counts(&self, peer: usize) -> (usize, usize);

    /// A message to the peer that may go now, each once; `None` while there is none.
    fn next(&mut self, peer: usize) -> Option<usize>;

    /// A message to the peer that `next` gave.
    fn outgoing(&self, peer: usize, number: usize) -> (Fingerprint, &[u8]);

    /// A message to the peer was handed over: its bytes are not needed again.
    fn sent(&mut self, _peer: usize, _number: usize) {}

    /// What a message from the peer must say of itself, and its length.
    fn expected(&self, peer: usize, number: usize) -> (Fingerprint, usize);

    /// False while there is no room for a message from the peer. Once true it stays so.
    fn admits(&self, _peer: usize, _number: usize) -> bool {
        true
    }

    /// Where an admitted message from the peer goes.
    fn incoming(&mut self, peer: usize, number: usize) -> &mut [u8];

    /// A message from the peer is complete.
    fn arrived(&mut self, _peer: usize, _number: usize) {}

    /// False for a peer that cannot send what is still to come from it before others have done their part: a timeout names those.
    fn owes(&self, _peer: usize) -> bool {
        true
    }

    /// The `part` in the header of a message. Where all messages say the same, a single stream carries them in order.
    fn part(&self, number: usize) -> u32;

    /// The message of which a header with this `part` speaks, on a single stream; `next` is the first that has not come.
    fn number(&self, part: u32, _next: usize) -> usize {
        part as usize
    }

    /// Bytes of the operation that arrived in earlier runs, and that arrive in the whole of it.
    fn progress(&self) -> (u64, u64);

    /// What a peer does instead of what is still to come, where that can be known from elsewhere.
    fn elsewhere(&self, _peer: usize) -> Option<String> {
        None
    }
}

/// [`super::Mesh::exchange`] refuses messages on devices before it makes a plan.
const ON_HOST: &str = "messages in host memory";

/// By peer: positions of the messages to it and from it in the caller's lists.
pub(super) type Lists = Vec<(Vec<usize>, Vec<usize>)>;

/// Messages that are all there from the beginning.
pub(super) struct Listed<'r, 's, 'd> {
    /// To everybody.
    pub sends: &'r [Outgoing<'s>],
    /// From everybody.
    pub recvs: &'r mut [Incoming<'d>],
    /// Which of them belong to a peer, in order.
    pub lists: Lists,
    /// By peer: how many messages to it were begun.
    pub begun: Vec<usize>,
    /// Where the run stands in its operation. All messages say the same `part`, so that several messages sent one by one can be
    /// received as a group.
    pub step: Step,
    /// See [`Plan::elsewhere`].
    pub elsewhere: &'r dyn Fn(usize) -> Option<String>,
}

impl Plan for Listed<'_, '_, '_> {
    fn elsewhere(&self, peer: usize) -> Option<String> {
        (self.elsewhere)(peer)
    }

    fn counts(&self, peer: usize) -> (usize, usize) {
        (self.lists[peer].0.len(), self.lists[peer].1.len())
    }

    fn next(&mut self, peer: usize) -> Option<usize> {
        let begun = &mut self.begun[peer];
        let more = *begun < self.lists[peer].0.len();
        *begun += usize::from(more);
        more.then(|| *begun - 1)
    }

    fn outgoing(&self, peer: usize, number: usize) -> (Fingerprint, &[u8]) {
        let message = &self.sends[self.lists[peer].0[number]];
        (message.fingerprint, message.data.as_host().expect(ON_HOST))
    }

    fn expected(&self, peer: usize, number: usize) -> (Fingerprint, usize) {
        let message = &self.recvs[self.lists[peer].1[number]];
        (message.fingerprint, message.data.len())
    }

    fn incoming(&mut self, peer: usize, number: usize) -> &mut [u8] {
        let message = &mut self.recvs[self.lists[peer].1[number]];
        message.data.reborrow().into_host().expect(ON_HOST)
    }

    fn part(&self, _number: usize) -> u32 {
        self.step.part
    }

    fn number(&self, part: u32, next: usize) -> usize {
        if part == self.step.part { next } else { usize::MAX }
    }

    fn progress(&self) -> (u64, u64) {
        (self.step.before, self.step.total)
    }
}
