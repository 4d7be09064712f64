//! Dissemination: in round k, every rank sends to the rank 2^k after it and receives from the rank 2^k before it. After
//! ceil(log2 n) rounds, something of every rank has reached every other rank.
//!
//! - The barrier is that of Hensgen, Finkel and Manber (1988).
//! - The all_gather is that of Bruck, Ho, Kipnis, Upfal and Weathersby (1997), which sends all shards that a rank has.
//!   Here they go in the direction of the ring, so that the shards of a message are adjacent in the destination, and no
//!   byte is copied.
//! - The reduce-scatter is the all_gather backwards (Bernaschi, Iannello and Lauria, 2003). Each shard's values return
//!   to its rank along the same edges, and are combined where edges meet. So a rank sends half of the shards first,
//!   then a quarter, and so on, as in the recursive halving of Rabenseifner (2004).
//!
//! Why not recursive halving and doubling themselves: they need a power of two of ranks. The ranks in excess would hand
//! their values to others first and get the result at the end, which adds 2 N bytes to the 2 (n - 1) / n N of both
//! phases. Shards would not be in rank order in memory. A rank would also have 1.5 times the number of streams, because
//! the trees, the barrier and the all_gather pair other ranks.

use std::ops::Range;

use super::Net;
use super::exchange_rounds::{Rounds, circular, disjoint};
use super::grown;
use crate::error::Result;
use crate::reduce::divide;
use crate::types::{DType, ReduceOp};
use crate::{Collective, OpContext};

/// Returns 1, 2, 4, … below n.
fn distances(n: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..n.next_power_of_two().trailing_zeros()).map(|bit| 1 << bit)
}

/// Returns the bytes that `sender` sends over a distance in an all_gather: of the shards of the last `distance` ranks
/// up to the sender, those that the receiver lacks. Shards are in rank order.
fn newest(shards: &[Range<usize>], sender: usize, distance: usize) -> impl Iterator<Item = Range<usize>> {
    let n = shards.len();
    let count = distance.min(n - distance);
    circular((sender + n + 1 - count) % n, count, n).map(|run| shards[run.start].start..shards[run.end - 1].end)
}

/// Makes each rank's shard of `data` the combination of that shard on all ranks. The other shards hold partial results
/// afterwards. Stages half of `data`.
pub(super) fn reduce_shards(
    rounds: &mut Rounds<'_, '_>,
    staging: &mut Vec<u8>,
    (dtype, op): (DType, ReduceOp),
    data: &mut [u8],
    shards: &[Range<usize>],
) -> Result<()> {
    let (rank, n) = (rounds.rank(), rounds.ranks());
    for distance in distances(n).rev() {
        let (after, before) = ((rank + distance) % n, (rank + n - distance) % n);
        let kept: Vec<_> = newest(shards, rank, distance).collect();
        let theirs = grown(staging, kept.iter().map(Range::len).sum());
        let mut rest = &mut *theirs;
        let landing = kept.iter().map(|run| rest.split_off_mut(..run.len()).expect("there is room for all runs"));
        let landing: Vec<_> = landing.map(|part| (after, part)).collect();
        rounds.exchange(newest(shards, before, distance).map(|run| (before, &data[run])), landing)?;
        let mut rest = &*theirs;
        for run in kept {
            let values = rest.split_off(..run.len()).expect("as above");
            rounds.combine((dtype, op.undivided()), &mut data[run], values, true);
        }
    }
    if op == ReduceOp::Avg {
        divide(dtype, &mut data[shards[rank].clone()], n);
    }
    Ok(())
}

/// Gives all shards of `data` to every rank, which has its own.
pub(super) fn gather_shards(rounds: &mut Rounds<'_, '_>, data: &mut [u8], shards: &[Range<usize>]) -> Result<()> {
    let (rank, n) = (rounds.rank(), rounds.ranks());
    for distance in distances(n) {
        let (after, before) = ((rank + distance) % n, (rank + n - distance) % n);
        let mut ranges: Vec<_> = newest(shards, rank, distance).collect();
        let sent = ranges.len();
        ranges.extend(newest(shards, before, distance));
        let mut parts = disjoint(data, &ranges);
        let received = parts.split_off(sent);
        let sends = parts.into_iter().map(|part| (after, &*part));
        rounds.exchange(sends, received.into_iter().map(|part| (before, part)))?;
    }
    Ok(())
}

impl Net {
    pub(super) fn barrier_by_dissemination(&mut self, cx: &OpContext<'_>) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let mut rounds = Rounds::new(&mut self.mesh, cx, 0);
        for distance in distances(n) {
            let (sent, received): (&[u8], &mut [u8]) = (&[], &mut []);
            rounds.exchange([((rank + distance) % n, sent)], [((rank + n - distance) % n, received)])?;
        }
        Ok(())
    }
}
