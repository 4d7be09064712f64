//! The messages of one run of the mesh, by peer and number.
//!
//! Buffers are borrowed only while a call moves bytes. So an operation may, in one run, send from and receive into the
//! same buffer, reduce messages while others arrive, and forward reduced data.

use crate::transport::{Incoming, Outgoing};
use crate::types::Fingerprint;

/// Position of an exchange within an operation that has several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// Number of the exchange. Equal on both sides.
    pub part: u32,
    /// Bytes of the operation that arrived in earlier exchanges.
    pub before: u64,
    /// Bytes that arrive in the whole operation. At least those of this exchange.
    pub total: u64,
}

/// The messages of one run.
///
/// Messages to a peer are numbered from 0, and so are messages from it. Both sides must agree on the number of
/// messages. A message that its receiver does not admit yet blocks later messages of the same sender, so both sides
/// must use compatible orders.
pub trait Plan {
    /// Returns the number of messages to the peer and from it.
    fn counts(&self, peer: usize) -> (usize, usize);

    /// Returns an upper bound on the length of any message to or from the peer, equal on both sides. Called only while
    /// not all streams are open.
    fn longest(&self, peer: usize) -> usize;

    /// Returns the next message to send to the peer, each only once, or `None` while none is ready.
    fn next(&mut self, peer: usize) -> Option<usize>;

    /// Returns the fingerprint and body of a message that `next` has returned.
    fn outgoing(&self, peer: usize, number: usize) -> (Fingerprint, &[u8]);

    /// Notes that a message was sent, so that its body is no longer needed.
    fn sent(&mut self, _peer: usize, _number: usize) {}

    /// Returns the expected fingerprint and length of a message from the peer.
    fn expected(&self, peer: usize, number: usize) -> (Fingerprint, usize);

    /// False while there is no room for a message from the peer. Once true, the answer must stay true.
    fn admits(&self, _peer: usize, _number: usize) -> bool {
        true
    }

    /// Returns the buffer for an admitted message from the peer.
    fn incoming(&mut self, peer: usize, number: usize) -> &mut [u8];

    /// Notes that a message from the peer has arrived completely.
    fn arrived(&mut self, _peer: usize, _number: usize) {}

    /// False for a peer that cannot send its remaining messages until other ranks have sent theirs. A timeout then
    /// names those other ranks.
    fn owes(&self, _peer: usize) -> bool {
        true
    }

    /// Returns the `part` for the header of a message.
    fn part(&self, number: usize) -> u32;

    /// Returns the bytes of the operation that arrived in earlier runs, and the bytes of the whole operation.
    fn progress(&self) -> (u64, u64);

    /// Returns the text of a peer's operation if it differs from this one and the peer has shown it elsewhere, for
    /// example in shared memory.
    fn elsewhere(&self, _peer: usize) -> Option<String> {
        None
    }
}

/// Panic text: [`super::Mesh::exchange`] refuses messages in device memory before it makes a plan.
const ON_HOST: &str = "messages in host memory";

/// For each peer, the indices of the messages to it and from it in the caller's lists.
pub(super) type Lists = Vec<(Vec<usize>, Vec<usize>)>;

/// A plan whose messages are all ready from the start.
pub(super) struct Listed<'r, 's, 'd> {
    pub sends: &'r [Outgoing<'s>],
    pub recvs: &'r mut [Incoming<'d>],
    /// Messages of each peer, in order.
    pub lists: Lists,
    /// Number of messages to each peer that have been started.
    pub begun: Vec<usize>,
    /// Position of the run in its operation. All messages have the same `part`, so that messages sent one by one can be
    /// received as a group.
    pub step: Step,
    /// Source of [`Plan::elsewhere`].
    pub elsewhere: &'r dyn Fn(usize) -> Option<String>,
}

impl Plan for Listed<'_, '_, '_> {
    fn elsewhere(&self, peer: usize) -> Option<String> {
        (self.elsewhere)(peer)
    }

    fn counts(&self, peer: usize) -> (usize, usize) {
        (self.lists[peer].0.len(), self.lists[peer].1.len())
    }

    fn longest(&self, peer: usize) -> usize {
        let (to, from) = &self.lists[peer];
        let lengths = to.iter().map(|index| self.sends[*index].data.len());
        lengths.chain(from.iter().map(|index| self.recvs[*index].data.len())).max().unwrap_or(0)
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

    fn progress(&self) -> (u64, u64) {
        (self.step.before, self.step.total)
    }
}
