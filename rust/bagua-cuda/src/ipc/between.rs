//! all_reduce over several hosts: inside hosts by windows, between them by their first ranks ([`Leaders`]).
//!
//! As the host's `hier`, and with its bits: the first rank of each host adds up the ranks of its host in their order.

use std::sync::atomic::Ordering::Relaxed;

use bagua_core::collective::{Collective, OpContext, Verb};
use bagua_core::error::Result;
use bagua_core::types::ReduceOp;

use super::rank::Ipc;
use super::verbs::{Operation, next};
use crate::leaders::{LEADER, Leaders};
use crate::parts::Parts;
use crate::reduction::Reduction;
use crate::stage::{PIECE, Stage};

impl Ipc {
    /// One all_reduce of all hosts, range by range.
    pub(super) fn over_hosts(
        &mut self,
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        verb: Verb,
        parts: &Parts,
        stage: &Stage,
        reduction: Option<&Reduction>,
    ) -> Result<()> {
        cx.stats.hierarchical.fetch_add(1, Relaxed);
        let op = verb.op().unwrap_or(ReduceOp::Sum);
        let width = self.width(inner, cx, stage, parts.shard.min(PIECE), 1)?;
        // The ranks of a host do what they do in a broadcast: each puts all that it has into its window, and all read that of the first.
        let operation = self.operation(verb, parts, stage, reduction, width);
        let mut turn = self.turn;
        let ranges = operation.ranges();
        operation.give(turn, &ranges[0])?;
        for (at, range) in ranges.iter().enumerate() {
            self.meet(inner, cx)?;
            if let Some(range) = ranges.get(at + 1) {
                operation.give(next(turn), range)?;
            }
            if self.shared.me == LEADER {
                operation.make_whole(turn, range)?;
                let (window, taking) = ((self.shared.window(LEADER, turn), range.len()), self.taking.handle());
                stage.copier(|copier| {
                    // SAFETY: this rank's own window, to which nobody else writes.
                    unsafe { Leaders::fetch(stage, copier, 0, window, taking) }?;
                    self.leaders.combine(inner, cx, op, copier, (0, range.len()), (range.start, parts.shard))?;
                    // SAFETY: as above; the others read it when `made` is reached.
                    unsafe { Leaders::put(stage, copier, 0, window, taking) }
                })?;
                self.shared.signals(LEADER).made[turn].record(self.taking.handle())?;
            }
            self.meet(inner, cx)?;
            operation.get_whole(turn, range, LEADER)?;
            turn = next(turn);
        }
        self.turn = turn;
        Ok(())
    }
}

impl Operation<'_> {
    /// Puts a whole range into the window, on all ranks but the first.
    fn give(&self, turn: usize, range: &std::ops::Range<usize>) -> Result<()> {
        self.after_free(turn)?;
        if self.shared.me != LEADER {
            let from = self.parts.from[0] + range.start;
            self.copy(self.shared.window(self.shared.me, turn), from, range.len(), self.filling)?;
        }
        self.shared.signals(self.shared.me).filled[turn].record(self.filling)
    }

    /// The first rank's window gets the sum of its host.
    fn make_whole(&self, turn: usize, range: &std::ops::Range<usize>) -> Result<()> {
        self.after_fills(turn)?;
        let (own, to) = (self.parts.from[0] + range.start, self.shared.window(LEADER, turn));
        let source = |rank: usize| if rank == LEADER { own } else { self.shared.window(rank, turn) };
        self.reduce(source, to, range.len())
    }

    /// Reads a whole range of one rank's window.
    fn get_whole(&self, turn: usize, range: &std::ops::Range<usize>, from: usize) -> Result<()> {
        self.after_fills(turn)?;
        self.shared.signals(from).made[turn].order(self.taking)?;
        let to = self.parts.to[0] + range.start;
        self.copy(to, self.shared.window(from, turn), range.len(), self.taking)?;
        self.shared.signals(self.shared.me).free[turn].record(self.taking)
    }
}
