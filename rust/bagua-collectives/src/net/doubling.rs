//! all_reduce by recursive doubling (Thakur, Rabenseifner and Gropp, 2005): log2(n) rounds, in each of which a rank and the one
//! at distance 1, 2, 4, … exchange what they have.
//!
//! Where n is no power of two, as many ranks as it is too large by first hand their values to a neighbour, and get the result
//! from it at the end. Both of a pair combine in the same order, the lower ranks' values first, so all ranks have the same bits.

use super::algorithm::DIRECT;
use super::rounds::{Fold, Rounds};
use super::{Net, grown};
use crate::error::Result;
use crate::reduce::divide;
use crate::types::{DType, ReduceOp};
use crate::{Collective, OpContext};

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
