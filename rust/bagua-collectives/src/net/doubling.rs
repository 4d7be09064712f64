//! all_reduce by recursive doubling (Thakur, Rabenseifner and Gropp, 2005): log2(n) rounds, in each of which a rank and the one
//! at distance 1, 2, 4, … exchange what they have.
//!
//! Where n is no power of two, as many ranks as it is too large by first hand their values to a neighbour, and get the result
//! from it at the end. Both of a pair combine in the same order, the lower ranks' values first, so all ranks have the same bits.

use std::time::Instant;

use super::Net;
use crate::error::Result;
use crate::reduce::{combine, divide};
use crate::transport::Step;
use crate::types::ReduceOp;
use crate::{Collective, Incoming, OpContext, Outgoing};

impl Net {
    /// Combines all ranks' `data` in place.
    pub(super) fn reduce_doubling(&mut self, cx: &OpContext<'_>, data: &mut [u8], op: ReduceOp) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = cx.fingerprint;
        let sum = op.undivided();
        let rounds = n.ilog2();
        let power = 1 << rounds;
        let extra = n - power;
        // The first 2 * extra ranks make pairs, of which the lower one takes part in the rounds; the others are on their own.
        let folded = rank < 2 * extra && rank % 2 == 1;
        let virtual_rank = if rank < 2 * extra { rank / 2 } else { rank - extra };
        let real = |virtual_rank: usize| if virtual_rank < extra { 2 * virtual_rank } else { virtual_rank + extra };
        if self.staging.len() < data.len() {
            self.staging.resize(data.len(), 0);
        }
        let theirs = &mut self.staging[..data.len()];
        let mesh = &mut self.mesh;
        let len = data.len() as u64;
        // Part 0 carries the values of the folded ranks, part 1 + r is round r, the last part carries the result to the folded ranks.
        let mut step = |part: u32, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]| {
            let step = Step { part, before: u64::from(part) * len, total: u64::from(rounds + 2) * len };
            mesh.exchange_step(cx, step, sends, recvs)
        };
        if folded {
            step(0, &[Outgoing::new(rank - 1, fingerprint, &*data)], &mut [])?;
            return step(rounds + 1, &[], &mut [Incoming::new(rank - 1, fingerprint, data)]);
        }
        let fold = |theirs: &[u8], data: &mut [u8], lower: bool| {
            let start = Instant::now();
            let inputs = if lower { [None, Some(theirs)] } else { [Some(theirs), None] };
            combine(cx.dtype(), sum, &inputs, data);
            cx.stats.add_reduce(start.elapsed());
        };
        let has_folded_partner = rank < 2 * extra;
        if has_folded_partner {
            step(0, &[], &mut [Incoming::new(rank + 1, fingerprint, &mut *theirs)])?;
            fold(theirs, data, true);
        }
        for round in 0..rounds {
            let peer = real(virtual_rank ^ 1 << round);
            let sends = [Outgoing::new(peer, fingerprint, &*data)];
            step(1 + round, &sends, &mut [Incoming::new(peer, fingerprint, &mut *theirs)])?;
            fold(theirs, data, rank < peer);
        }
        if op == ReduceOp::Avg {
            divide(cx.dtype(), data, n);
        }
        if has_folded_partner {
            step(rounds + 1, &[Outgoing::new(rank + 1, fingerprint, &*data)], &mut [])?;
        }
        Ok(())
    }
}
