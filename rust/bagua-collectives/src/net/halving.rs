//! Reduce-scatter by recursive halving and all_gather by recursive doubling, the two phases of an all_reduce of Rabenseifner (2004).
//!
//! In log2(n) rounds a rank and the one at distance n / 2, n / 4, …, 1 each send the half that the other keeps, and combine the half that
//! they keep; the distances in the other order gather what has been combined. Where n is no power of two, the upper rank of each pair of a
//! [`Fold`] sends its values to its partner first, and gets its shard, or everything, from it at the end.

use std::ops::Range;

use super::grown;
use super::rounds::{Fold, Rounds, disjoint};
use crate::error::Result;
use crate::reduce::divide;
use crate::types::{DType, ReduceOp};

/// The bytes of the shards of these ranks. Shards follow each other in the order of the ranks.
fn bytes(shards: &[Range<usize>], ranks: Range<usize>) -> Range<usize> {
    shards[ranks.start].start..shards[ranks.end - 1].end
}

/// Each rank's shard of `data` becomes the combination of all ranks'. The others' hold partial results afterwards. At least half of `data` is
/// staged, all of it where n is no power of two.
pub(super) fn reduce_shards(
    rounds: &mut Rounds<'_, '_>,
    staging: &mut Vec<u8>,
    (dtype, op): (DType, ReduceOp),
    data: &mut [u8],
    shards: &[Range<usize>],
) -> Result<()> {
    let (rank, n) = (rounds.rank(), rounds.ranks());
    let fold = Fold::new(rank, n);
    let partner = fold.partner();
    if let Some(partner) = partner.filter(|_| !fold.takes_part()) {
        rounds.exchange([(partner, &*data)], [])?;
        let own = &mut data[shards[rank].clone()];
        return if own.is_empty() { Ok(()) } else { rounds.exchange([], [(partner, own)]) };
    }
    let sum = (dtype, op.undivided());
    if let Some(partner) = partner {
        let theirs = grown(staging, data.len());
        rounds.exchange([], [(partner, &mut *theirs)])?;
        rounds.combine(sum, data, theirs, true);
    }
    let mut mine = 0..1usize << fold.rounds;
    for round in (0..fold.rounds).rev() {
        let middle = mine.start + (1 << round);
        let lower = fold.number() < middle;
        let (keep, give) =
            if lower { (mine.start..middle, middle..mine.end) } else { (middle..mine.end, mine.start..middle) };
        let peer = fold.rank(fold.number() ^ 1 << round);
        let (kept, given) = (bytes(shards, fold.ranks(keep.clone())), bytes(shards, fold.ranks(give)));
        let theirs = grown(staging, kept.len());
        rounds.exchange([(peer, &data[given])], [(peer, &mut *theirs)])?;
        rounds.combine(sum, &mut data[kept], theirs, lower);
        mine = keep;
    }
    if op == ReduceOp::Avg {
        divide(dtype, &mut data[bytes(shards, fold.ranks(mine))], n);
    }
    match partner.filter(|partner| !shards[*partner].is_empty()) {
        Some(partner) => rounds.exchange([(partner, &data[shards[partner].clone()])], []),
        None => Ok(()),
    }
}

/// Every rank gets all shards of `data`, of which it has its own.
pub(super) fn gather_shards(rounds: &mut Rounds<'_, '_>, data: &mut [u8], shards: &[Range<usize>]) -> Result<()> {
    let rank = rounds.rank();
    let fold = Fold::new(rank, rounds.ranks());
    let partner = fold.partner();
    if let Some(partner) = partner.filter(|_| !fold.takes_part()) {
        let own = &data[shards[rank].clone()];
        if !own.is_empty() {
            rounds.exchange([(partner, own)], [])?;
        }
        return rounds.exchange([], [(partner, data)]);
    }
    if let Some(partner) = partner.filter(|partner| !shards[*partner].is_empty()) {
        rounds.exchange([], [(partner, &mut data[shards[partner].clone()])])?;
    }
    for round in 0..fold.rounds {
        let peer = fold.number() ^ 1 << round;
        let known = |number: usize| {
            let first = number >> round << round;
            bytes(shards, fold.ranks(first..first + (1 << round)))
        };
        let [mine, theirs]: [&mut [u8]; 2] =
            disjoint(data, &[known(fold.number()), known(peer)]).try_into().expect("two ranges, two parts");
        let peer = fold.rank(peer);
        rounds.exchange([(peer, &*mine)], [(peer, theirs)])?;
    }
    match partner {
        Some(partner) => rounds.exchange([(partner, &*data)], []),
        None => Ok(()),
    }
}
