//! all_reduce over several hosts: inside hosts by windows, between them by messages of the host's collective.
//!
//! As the host's `hier`, and with its bits: the first rank of each host adds up the ranks of its host in their order, the hosts' sums are
//! added up in the order of the hosts, and an average is divided once. In between a piece passes through pinned memory of the first rank.

use std::sync::atomic::Ordering::Relaxed;

use bagua_core::collective::{Collective, Incoming, OpContext, Outgoing, Verb};
use bagua_core::error::Result;
use bagua_core::reduce::{combine, divide};
use bagua_core::types::ReduceOp;

use super::rank::Ipc;
use super::verbs::{Operation, next, share};
use crate::parts::Parts;
use crate::reduction::Reduction;
use crate::stage::{Copier, PIECE, Stage, wait_until_reached};

/// Index of the rank that speaks for its host.
const LEADER: usize = 0;

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
                let window = self.shared.window(LEADER, turn);
                let done = (range.start, parts.shard);
                stage.copier(|copier| self.by_the_host(inner, cx, op, stage, copier, (window, range.len()), done))?;
                self.shared.signals(LEADER).made[turn].record(self.taking.handle())?;
            }
            self.meet(inner, cx)?;
            operation.get_whole(turn, range, LEADER)?;
            turn = next(turn);
        }
        self.turn = turn;
        Ok(())
    }

    /// The sum of a host, in a window, becomes that of all hosts.
    #[expect(clippy::too_many_arguments, reason = "those of the operation, and what it has come to")]
    fn by_the_host(
        &self,
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        op: ReduceOp,
        stage: &Stage,
        copier: &mut Copier,
        (window, bytes): (usize, usize),
        (done, total): (usize, usize),
    ) -> Result<()> {
        let taking = self.taking.handle();
        let go_on = || cx.check(&[], done as u64, total as u64);
        // SAFETY: this rank's own window; the copy is waited for below.
        unsafe { copier.input[0].fill(0..bytes, window, taking) }?;
        copier.arrived[0].record(taking)?;
        stage.to_host.fetch_add(bytes as u64, Relaxed);
        wait_until_reached(&copier.arrived[0], go_on)?;
        wait_until_reached(&copier.left[0], go_on)?;
        let data = copier.output[0].bytes_mut(bytes);
        data.copy_from_slice(copier.input[0].bytes(bytes));
        self.between(inner, cx, op.undivided(), data)?;
        if op == ReduceOp::Avg {
            divide(cx.dtype(), data, inner.size());
        }
        // SAFETY: as above; nobody else writes to the window, and pinned memory is used again after `left`.
        unsafe { copier.output[0].spill(0..bytes, window, taking) }?;
        stage.to_device.fetch_add(bytes as u64, Relaxed);
        copier.left[0].record(taking)
    }

    /// All_reduce of the hosts' first ranks: each combines a share, in the order of the hosts, and sends it to the others.
    fn between(&self, inner: &mut dyn Collective, cx: &OpContext<'_>, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        let (hosts, own) = (self.leaders.len(), self.host);
        let shares: Vec<_> = (0..hosts).map(|host| share(host, hosts, data.len())).collect();
        let others = || (0..hosts).filter(|host| *host != own);
        let mut got: Vec<Vec<u8>> = others().map(|_| vec![0; shares[own].len()]).collect();
        let sends: Vec<_> = others()
            .map(|host| Outgoing::new(self.leaders[host], cx.fingerprint, &data[shares[host].clone()]))
            .collect();
        let mut recvs: Vec<_> = others()
            .zip(&mut got)
            .map(|(host, data)| Incoming::new(self.leaders[host], cx.fingerprint, data))
            .collect();
        inner.exchange(cx, &sends, &mut recvs)?;
        drop(recvs);
        let mut inputs: Vec<Option<&[u8]>> = got.iter().map(|data| Some(&data[..])).collect();
        inputs.insert(own, None);
        combine(cx.dtype(), op, &inputs, &mut data[shares[own].clone()]);
        let result = data[shares[own].clone()].to_vec();
        let sends: Vec<_> = others().map(|host| Outgoing::new(self.leaders[host], cx.fingerprint, &result)).collect();
        let mut rest = data;
        let mut recvs = Vec::with_capacity(hosts - 1);
        for (host, share) in shares.iter().enumerate() {
            let (part, behind) = rest.split_at_mut(share.len());
            rest = behind;
            if host != own {
                recvs.push(Incoming::new(self.leaders[host], cx.fingerprint, part));
            }
        }
        inner.exchange(cx, &sends, &mut recvs)
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
