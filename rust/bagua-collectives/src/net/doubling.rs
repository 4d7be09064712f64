//! all_reduce by recursive doubling (Thakur, Rabenseifner and Gropp, 2005): in log2(n) rounds, each rank exchanges its
//! partial result with the rank at distance 1, 2, 4, …
//!
//! If n is not a power of two, each rank in excess first hands its values to a neighbour, and gets the result from that
//! neighbour at the end. Both ranks of an exchange combine in the same order, with the lower ranks' values first, so
//! all ranks get the same bits.

use super::algorithm::DIRECT;
use super::exchange_rounds::Rounds;
use super::{Net, grown};
use crate::error::Result;
use crate::reduce::divide;
use crate::types::{DType, ReduceOp};
use crate::{Collective, OpContext};

/// The ranks that take part: a power of two, 2^k. The first 2 (n - 2^k) ranks form pairs, and the lower rank of each
/// pair takes part for both.
#[derive(Clone, Copy, Debug)]
struct Fold {
    rank: usize,
    /// log2 of the number of ranks that take part.
    rounds: u32,
    extra: usize,
}

impl Fold {
    fn new(rank: usize, n: usize) -> Fold {
        let rounds = n.ilog2();
        Fold { rank, rounds, extra: n - (1 << rounds) }
    }

    /// Returns the other rank of this rank's pair, if it is in one.
    fn partner(&self) -> Option<usize> {
        (self.rank < 2 * self.extra).then_some(self.rank ^ 1)
    }

    /// True if this rank takes part. The upper rank of a pair does not.
    fn takes_part(&self) -> bool {
        self.partner().is_none_or(|partner| self.rank < partner)
    }

    /// Returns this rank's index among the ranks that take part. Both ranks of a pair have the index of the lower one.
    fn number(&self) -> usize {
        if self.rank < 2 * self.extra { self.rank / 2 } else { self.rank - self.extra }
    }

    /// Returns the rank with index `number` among the ranks that take part.
    fn rank(&self, number: usize) -> usize {
        number + number.min(self.extra)
    }
}

impl Net {
    /// Combines the `data` of all ranks in place, as elements of `dtype`.
    pub(super) fn reduce_doubling(
        &mut self,
        cx: &OpContext<'_>,
        (dtype, op): (DType, ReduceOp),
        data: &mut [u8],
    ) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fold = Fold::new(rank, n);
        let partner = fold.partner();
        let Net { mesh, staging, .. } = self;
        let theirs = grown(staging, data.len());
        let mut rounds = Rounds::new(mesh, cx, (fold.rounds as usize + 1) * data.len());
        if n > DIRECT {
            rounds = rounds.greeting();
        }
        if let Some(partner) = partner.filter(|_| !fold.takes_part()) {
            rounds.exchange([(partner, &*data)], [])?;
            return rounds.exchange([], [(partner, data)]);
        }
        let sum = (dtype, op.undivided());
        if let Some(partner) = partner {
            rounds.exchange([], [(partner, &mut *theirs)])?;
            rounds.combine(sum, data, theirs, true);
        }
        for round in 0..fold.rounds {
            let peer = fold.rank(fold.number() ^ 1 << round);
            rounds.exchange([(peer, &*data)], [(peer, &mut *theirs)])?;
            rounds.combine(sum, data, theirs, rank < peer);
        }
        if op == ReduceOp::Avg {
            divide(dtype, data, n);
        }
        match partner {
            Some(partner) => rounds.exchange([(partner, &*data)], []),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_of_two_takes_part_and_every_other_rank_has_a_partner_that_does() {
        for n in 2..70 {
            let folds: Vec<Fold> = (0..n).map(|rank| Fold::new(rank, n)).collect();
            let taking: Vec<usize> = (0..n).filter(|rank| folds[*rank].takes_part()).collect();
            assert_eq!(taking.len(), 1 << folds[0].rounds);
            for (number, rank) in taking.iter().enumerate() {
                assert_eq!((folds[*rank].number(), folds[0].rank(number)), (number, *rank));
            }
            for rank in (0..n).filter(|rank| !folds[*rank].takes_part()) {
                let partner = folds[rank].partner().unwrap();
                assert!(folds[partner].takes_part() && folds[partner].number() == folds[rank].number());
            }
        }
    }
}
