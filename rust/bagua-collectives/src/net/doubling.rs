//! all_reduce by recursive doubling (Thakur, Rabenseifner and Gropp, 2005): log2(n) rounds, in each of which a rank and the one
//! at distance 1, 2, 4, … exchange what they have.
//!
//! Where n is no power of two, as many ranks as it is too large by first hand their values to a neighbour, and get the result
//! from it at the end. Both of a pair combine in the same order, the lower ranks' values first, so all ranks have the same bits.

use super::algorithm::DIRECT;
use super::rounds::Rounds;
use super::{Net, grown};
use crate::error::Result;
use crate::reduce::divide;
use crate::types::{DType, ReduceOp};
use crate::{Collective, OpContext};

/// The ranks that take part: a power of two. The first ranks make pairs, as many as n is too large by, of which the lower rank takes part
/// for both.
#[derive(Clone, Copy, Debug)]
struct Fold {
    /// This rank.
    rank: usize,
    /// log2 of the ranks that take part.
    rounds: u32,
    /// Pairs.
    extra: usize,
}

impl Fold {
    /// Of `n` ranks.
    fn new(rank: usize, n: usize) -> Fold {
        let rounds = n.ilog2();
        Fold { rank, rounds, extra: n - (1 << rounds) }
    }

    /// The other rank of this one's pair.
    fn partner(&self) -> Option<usize> {
        (self.rank < 2 * self.extra).then_some(self.rank ^ 1)
    }

    /// False on the upper rank of a pair.
    fn takes_part(&self) -> bool {
        self.partner().is_none_or(|partner| self.rank < partner)
    }

    /// The number of this rank, or of its pair, among those that take part.
    fn number(&self) -> usize {
        if self.rank < 2 * self.extra { self.rank / 2 } else { self.rank - self.extra }
    }

    /// The rank that takes part under a number.
    fn rank(&self, number: usize) -> usize {
        number + number.min(self.extra)
    }
}

impl Net {
    /// Combines all ranks' `data` in place, as elements of this type.
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
