//! Rounds in which every rank sends to the rank at distance 1, 2, 4, … after it, and receives from the one as far before it: in
//! ceil(log2 n) rounds something of every rank reaches every other.
//!
//! The barrier is that of Hensgen, Finkel and Manber (1988). The all_gather is that of Bruck, Ho, Kipnis, Upfal and Weathersby (1997), which
//! sends all shards that a rank has; here in the direction of a ring, so that the shards of a message are neighbours in the destination,
//! and no byte is copied.

use super::Net;
use super::rounds::{Rounds, circular, disjoint};
use crate::error::Result;
use crate::{Collective, OpContext};

/// 1, 2, 4, … below n.
fn distances(n: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1usize), |distance| distance.checked_mul(2)).take_while(move |distance| *distance < n)
}

impl Net {
    /// Returns when every rank has called it.
    pub(super) fn barrier_by_dissemination(&mut self, cx: &OpContext<'_>) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let mut rounds = Rounds::new(&mut self.mesh, cx, 0);
        for distance in distances(n) {
            let (sent, received): (&[u8], &mut [u8]) = (&[], &mut []);
            rounds.exchange([((rank + distance) % n, sent)], [((rank + n - distance) % n, received)])?;
        }
        Ok(())
    }

    /// Every rank gets all shards of `data`, of which it has its own.
    pub(super) fn gather_by_dissemination(&mut self, cx: &OpContext<'_>, data: &mut [u8]) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let each = data.len() / n;
        let mut rounds = Rounds::new(&mut self.mesh, cx, data.len() - each);
        for distance in distances(n) {
            // A rank has the shards of `distance` ranks up to itself; the last round needs fewer.
            let count = distance.min(n - distance);
            let newest = |rank: usize| circular((rank + n + 1 - count) % n, count, n);
            let bytes = |run: std::ops::Range<usize>| run.start * each..run.end * each;
            let before = (rank + n - distance) % n;
            let sent: Vec<_> = newest(rank).map(bytes).collect();
            let ranges: Vec<_> = sent.iter().cloned().chain(newest(before).map(bytes)).collect();
            let mut parts = disjoint(data, &ranges);
            let received = parts.split_off(sent.len());
            let to = (rank + distance) % n;
            let sends = parts.into_iter().map(|part| (to, &*part));
            rounds.exchange(sends, received.into_iter().map(|part| (before, part)))?;
        }
        Ok(())
    }
}
