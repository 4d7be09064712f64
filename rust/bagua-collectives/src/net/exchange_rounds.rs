//! Operations in rounds: in each round, a rank exchanges messages with one or two others and then uses them.

use std::ops::Range;
use std::time::Instant;

use crate::error::Result;
use crate::reduce::combine;
use crate::transport::{Mesh, Step};
use crate::types::{DType, ReduceOp};
use crate::{Incoming, OpContext, Outgoing};

pub(super) struct Rounds<'m, 'c> {
    /// Mesh of streams. A ring algorithm that replaces some of the rounds uses it, too.
    pub mesh: &'m mut Mesh,
    pub cx: &'m OpContext<'c>,
    arrived: u64,
    /// Upper bound on the bytes that arrive in the whole operation, for error texts.
    total: u64,
    /// True if the next round also sends an empty message to the next rank and receives one from the previous rank.
    greets: bool,
}

impl<'m, 'c> Rounds<'m, 'c> {
    /// Starts an operation in which at most `total` bytes arrive.
    pub fn new(mesh: &'m mut Mesh, cx: &'m OpContext<'c>, total: usize) -> Rounds<'m, 'c> {
        Rounds { mesh, cx, arrived: 0, total: total as u64, greets: false }
    }

    /// Makes the first round also compare headers along the ring of ranks.
    ///
    /// So does the first round of a ring, a barrier and an all_gather of any size. If neighbours run different verbs of
    /// these, they thus see each other's headers. Every rank must call this, and only in operations in which each rank
    /// depends on all others anyway.
    pub fn greeting(self) -> Rounds<'m, 'c> {
        Rounds { greets: true, ..self }
    }

    pub fn rank(&self) -> usize {
        self.mesh.rank()
    }

    pub fn ranks(&self) -> usize {
        self.mesh.size()
    }

    /// Accounts for a ring that replaces rounds and in which `arriving` bytes arrive. Returns the number of bytes that
    /// arrived before the ring, and that arrive in the whole operation.
    pub fn continues(&mut self, arriving: usize) -> (u64, u64) {
        self.greets = false;
        let before = self.arrived;
        self.arrived += arriving as u64;
        (before, self.total.max(self.arrived))
    }

    /// Sends and receives the messages of a round, given as pairs of a peer and bytes. Returns the errors of
    /// [`Mesh::exchange`].
    pub fn exchange<'b>(
        &mut self,
        sends: impl IntoIterator<Item = (usize, &'b [u8])>,
        recvs: impl IntoIterator<Item = (usize, &'b mut [u8])>,
    ) -> Result<()> {
        let (rank, n, fingerprint) = (self.rank(), self.ranks(), self.cx.fingerprint);
        let greets = std::mem::take(&mut self.greets);
        let empty: (&[u8], &mut [u8]) = (&[], &mut []);
        let next = greets.then_some(((rank + 1) % n, empty.0));
        let before = greets.then_some(((rank + n - 1) % n, empty.1));
        let sends: Vec<_> =
            next.into_iter().chain(sends).map(|(peer, data)| Outgoing::new(peer, fingerprint, data)).collect();
        let mut recvs: Vec<_> =
            before.into_iter().chain(recvs).map(|(peer, data)| Incoming::new(peer, fingerprint, data)).collect();
        // The messages of a pair of ranks arrive in order, so they need no numbers.
        let step = Step { part: 0, before: self.arrived, total: self.total };
        self.arrived += recvs.iter().map(|message| message.data.len() as u64).sum::<u64>();
        self.mesh.exchange_step(self.cx, step, &sends, &mut recvs)
    }

    /// Computes `data` = `theirs` op `data`, or `data` op `theirs` if `data` is from lower ranks.
    pub fn combine(&self, (dtype, op): (DType, ReduceOp), data: &mut [u8], theirs: &[u8], lower: bool) {
        let start = Instant::now();
        let inputs = if lower { [None, Some(theirs)] } else { [Some(theirs), None] };
        combine(dtype, op, &inputs, data);
        self.cx.stats.add_reduce(start.elapsed());
    }
}

/// Splits a buffer into disjoint ranges, in the order given.
pub(super) fn disjoint<'a>(data: &'a mut [u8], ranges: &[Range<usize>]) -> Vec<&'a mut [u8]> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_by_key(|index| (ranges[*index].start, ranges[*index].end));
    let mut parts: Vec<&mut [u8]> = ranges.iter().map(|_| &mut [][..]).collect();
    let (mut rest, mut done) = (data, 0);
    for index in order {
        let Range { start, end } = ranges[index];
        rest.split_off_mut(..start - done).expect("ranges do not overlap");
        parts[index] = rest.split_off_mut(..end - start).expect("ranges lie in the buffer");
        done = end;
    }
    parts
}

/// Returns the indices `first..first + count` modulo `n`, as one range, or as two ranges if they wrap around.
pub(super) fn circular(first: usize, count: usize, n: usize) -> impl Iterator<Item = Range<usize>> {
    let end = first + count;
    let wraps = end > n;
    [Some(first..end.min(n)), wraps.then(|| 0..end - n)].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_a_circle_are_one_run_or_two() {
        let runs = |first, count| circular(first, count, 5).map(|run| (run.start, run.end)).collect::<Vec<_>>();
        assert_eq!(runs(1, 3), [(1, 4)]);
        assert_eq!(runs(2, 3), [(2, 5)]);
        assert_eq!(runs(3, 4), [(3, 5), (0, 2)]);
        assert_eq!(runs(0, 5), [(0, 5)]);
    }

    #[test]
    fn disjoint_ranges_come_in_the_order_given() {
        let mut data: Vec<u8> = (0..9).collect();
        let parts = disjoint(&mut data, &[6..8, 1..3, 3..3, 3..5]);
        assert_eq!(parts, [&[6, 7][..], &[1, 2], &[], &[3, 4]]);
    }
}
