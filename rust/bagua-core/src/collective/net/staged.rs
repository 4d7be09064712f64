//! An all_reduce of a tensor that becomes ready chunk by chunk: while the streams carry one chunk, the caller prepares the next.
//!
//! The caller's steps run on its own thread, between two looks at the streams. Meanwhile the kernel empties and fills the sockets'
//! buffers, which hold more than a chunk, so that the line stays busy though nobody looks.

use crate::collective::{Chunks, Stage, Stages};
use crate::error::Result;
use crate::transport::Plan;
use crate::types::Fingerprint;

use super::direct::{Place, Shares};

/// See the module.
pub(super) struct Staged<'a, 'c> {
    /// What travels. Its tensor is one buffer for inputs and results.
    pub shares: Shares<'a, 'c>,
    /// What the caller does with a chunk before and after it.
    pub stages: &'a mut dyn Stages,
    /// How the caller counts chunks.
    pub chunks: Chunks,
    /// Steps of the caller that are done.
    pub steps: usize,
    /// By chunk: results that must still come from peers or be handed over to them.
    pub open: Vec<usize>,
}

impl<'a, 'c> Staged<'a, 'c> {
    pub fn new(shares: Shares<'a, 'c>, chunks: Chunks, stages: &'a mut dyn Stages) -> Staged<'a, 'c> {
        let (rank, cut) = (shares.rank, &shares.cut);
        let peers = || (0..cut.shares.len()).filter(|peer| *peer != rank);
        let results = |chunk| {
            let from = |peer| if shares.gets(rank) { cut.per(peer, chunk) } else { 0 };
            let to = |peer| if shares.gets(peer) { cut.per(rank, chunk) } else { 0 };
            peers().map(|peer| from(peer) + to(peer)).sum()
        };
        let open = (0..cut.chunks).map(results).collect();
        Staged { shares, stages, chunks, steps: 0, open }
    }

    /// True when a chunk holds the results and nobody needs its bytes any more.
    fn is_complete(&self, chunk: usize) -> bool {
        let own = self.shares.cut.before(self.shares.rank, chunk + 1);
        self.shares.folded >= own && self.open[chunk] == 0
    }

    fn closes(&mut self, owner: usize, result: usize) {
        self.open[self.shares.cut.chunk_of(owner, result)] -= 1;
    }
}

impl Plan for Staged<'_, '_> {
    fn counts(&self, peer: usize) -> (usize, usize) {
        self.shares.counts(peer)
    }

    fn next(&mut self, peer: usize) -> Option<usize> {
        self.shares.next(peer)
    }

    fn outgoing(&self, peer: usize, number: usize) -> (Fingerprint, &[u8]) {
        self.shares.outgoing(peer, number)
    }

    fn sent(&mut self, peer: usize, number: usize) {
        match number.checked_sub(self.shares.pieces(peer)) {
            Some(result) => self.closes(self.shares.rank, result),
            None => self.shares.sent(peer, number),
        }
    }

    fn expected(&self, peer: usize, number: usize) -> (Fingerprint, usize) {
        self.shares.expected(peer, number)
    }

    fn admits(&self, peer: usize, number: usize) -> bool {
        self.shares.admits(peer, number)
    }

    fn incoming(&mut self, peer: usize, number: usize) -> &mut [u8] {
        self.shares.incoming(peer, number)
    }

    fn arrived(&mut self, peer: usize, number: usize) {
        match number.checked_sub(self.shares.pieces(self.shares.rank)) {
            Some(result) => self.closes(peer, result),
            None => self.shares.arrived(peer, number),
        }
    }

    fn owes(&self, peer: usize) -> bool {
        self.shares.owes(peer)
    }

    fn part(&self, number: usize) -> u32 {
        self.shares.part(number)
    }

    fn progress(&self) -> (u64, u64) {
        self.shares.progress()
    }

    fn work(&mut self) -> Result<bool> {
        let Some(stage) = self.chunks.stage(self.steps) else { return Ok(false) };
        let Place::Whole(data) = &mut self.shares.place else { return Ok(false) };
        match stage {
            Stage::Before(chunk) => {
                let range = self.chunks.range(chunk);
                self.stages.before(range.clone(), &mut data[range])?;
                self.shares.ready = chunk + 1;
                self.shares.fold();
            }
            Stage::After(chunk) if self.is_complete(chunk) => {
                let Place::Whole(data) = &mut self.shares.place else { return Ok(false) };
                self.stages.after(&mut data[self.chunks.range(chunk)])?;
            }
            Stage::After(_) => return Ok(false),
        }
        self.steps += 1;
        Ok(true)
    }

    fn is_done(&self) -> bool {
        self.chunks.stage(self.steps).is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::time::Duration;

    use super::*;
    use crate::collective::{Net, OpContext};
    use crate::health::GroupHealth;
    use crate::stats::OpStats;
    use crate::transport::local_mesh;
    use crate::types::{DType, Kind, ReduceOp, Shape};
    use crate::wait::Deadline;

    /// Remembers which steps were taken.
    #[derive(Default)]
    struct Steps {
        before: usize,
        after: usize,
    }

    impl Stages for Steps {
        fn before(&mut self, _: Range<usize>, chunk: &mut [u8]) -> Result<()> {
            chunk.fill(7);
            self.before += 1;
            Ok(())
        }

        fn after(&mut self, chunk: &mut [u8]) -> Result<()> {
            assert!(chunk.iter().all(|byte| *byte == 14), "a chunk is passed on when it holds the sum");
            self.after += 1;
            Ok(())
        }
    }

    /// What rank 0 of two does with five chunks, one piece each, as told by `act`.
    fn as_rank_0(everywhere: bool, act: impl FnOnce(&mut Staged<'_, '_>)) -> Steps {
        let fingerprint = Fingerprint {
            epoch: 1,
            channel: 0,
            kind: Kind::AllReduce,
            seq: 0,
            dtype: DType::U8,
            op: None,
            root: None,
            count: 500,
            shape: Shape::flat(500),
        };
        let (health, deadline) = (GroupHealth::local(0, 2), Deadline::after(Duration::from_secs(60)));
        let cx = OpContext { fingerprint, deadline, health: &health, stats: &OpStats::default(), label: "" };
        let mut net = Net::new(local_mesh(2).remove(0));
        let (mut data, mut steps) = (vec![0; 500], Steps::default());
        let chunks = Chunks { len: 500, each: 100, ahead: 2 };
        let (_, mut plan) = net.stage(&cx, &mut data, ReduceOp::Sum, (chunks, &mut steps), everywhere);
        act(&mut plan);
        drop(plan);
        steps
    }

    fn work(plan: &mut Staged<'_, '_>) {
        while plan.work().unwrap() {}
    }

    /// Everything that may go to rank 1 goes.
    fn send(plan: &mut Staged<'_, '_>) -> usize {
        let sent: Vec<usize> = std::iter::from_fn(|| plan.next(1)).collect();
        sent.iter().for_each(|number| plan.sent(1, *number));
        sent.len()
    }

    /// Rank 1's message comes: values, or a sum.
    fn receive(plan: &mut Staged<'_, '_>, number: usize, byte: u8) {
        assert!(plan.admits(1, number));
        plan.incoming(1, number).fill(byte);
        plan.arrived(1, number);
    }

    #[test]
    fn the_next_chunks_travel_while_the_first_is_not_combined() {
        let steps = as_rank_0(true, |plan| {
            assert!(plan.next(1).is_none(), "nothing is sent before it is there");
            work(plan);
            assert_eq!(send(plan), 3, "the first chunk and the two after it");
            work(plan);
            assert!(plan.next(1).is_none(), "no more than two chunks ahead");
            receive(plan, 0, 7);
            work(plan);
            assert_eq!(send(plan), 1, "one was passed on, one more may go");
            (1..5).for_each(|number| {
                receive(plan, number, 7);
                work(plan);
                send(plan);
            });
            assert!(plan.is_done());
        });
        assert_eq!((steps.before, steps.after), (5, 5));
    }

    #[test]
    fn a_chunk_is_not_passed_on_before_the_sums_of_others_have_come_and_its_own_are_sent() {
        let steps = as_rank_0(false, |plan| {
            work(plan);
            assert_eq!(send(plan), 3);
            receive(plan, 0, 7);
            work(plan);
            assert_eq!(plan.steps, 3, "the peer's sum is missing");
            receive(plan, 5, 14);
            work(plan);
            assert_eq!(plan.steps, 3, "the own sum was not sent");
            assert_eq!(send(plan), 1);
            work(plan);
            assert_eq!(plan.steps, 5, "the first chunk is passed on, the fourth prepared");
            (1..5).for_each(|number| {
                receive(plan, number, 7);
                receive(plan, 5 + number, 14);
                send(plan);
                work(plan);
            });
            send(plan);
            assert!(plan.is_done());
        });
        assert_eq!((steps.before, steps.after), (5, 5));
    }
}
