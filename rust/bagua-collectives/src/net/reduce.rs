//! The reducing verbs of [`Net`]: which rank combines what, and in which buffers.

use std::ops::Range;

use super::direct::{Buffers, DirectReduce, Partition, Results, fold};
use super::element_partition::shard;
use super::exchange_rounds::Rounds;
use super::{Net, grown, slots};
use crate::error::Result;
use crate::transport::Mesh;
use crate::types::ReduceOp;
use crate::{Collective, HostIo, Incoming, OpContext, Outgoing};

/// Size in bytes of all pieces that may be in flight at once.
const STAGING: usize = 16 << 20;

/// Minimum and maximum size of a piece. A piece is combined while it is in the second-level cache. A shard has several
/// pieces, so that its first result is sent while inputs still arrive.
const PIECE: (usize, usize) = (64 << 10, 256 << 10);

/// Number of pieces in a shard, unless they would be too short or too long.
const CUTS: usize = 4;

/// Minimum and maximum number of pieces that may be in flight at once.
const WINDOW: (usize, usize) = (2, 16);

/// Returns the size of a piece in bytes, if the longest shard has `longest` bytes. A multiple of the size of every
/// element type.
pub(super) fn piece(longest: usize) -> usize {
    longest.div_ceil(CUTS).clamp(PIECE.0, PIECE.1).min(longest.max(1)).next_multiple_of(64)
}

pub(super) fn longest(shards: &[Range<usize>]) -> usize {
    shards.iter().map(Range::len).max().unwrap_or(0)
}

impl Net {
    /// Runs a one-shot reduction: root, or every rank if there is no root, gets all tensors and combines them.
    pub(super) fn reduce_one_shot(
        &mut self,
        cx: &OpContext<'_>,
        io: HostIo<'_>,
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = cx.fingerprint;
        let combines = root.is_none_or(|root| root == rank);
        let (src, dst) = match io {
            HostIo::InPlace(data) if combines => (None, data),
            HostIo::InPlace(data) => (Some(&*data), &mut [][..]),
            HostIo::Split { src, dst } => (Some(src), dst),
        };
        let own = src.unwrap_or(&*dst);
        let targets = self.peers().filter(|peer| root.is_none_or(|root| root == *peer));
        let sends: Vec<_> = targets.map(|peer| Outgoing::new(peer, fingerprint, own)).collect();
        let mut landing = slots(&mut self.staging, n, if combines { own.len() } else { 0 });
        let mut recvs: Vec<_> = Vec::new();
        if combines {
            let others = landing.iter_mut().enumerate().filter(|(peer, _)| *peer != rank);
            recvs.extend(others.map(|(peer, data)| Incoming::new(peer, fingerprint, data)));
        }
        self.mesh.exchange(cx, &sends, &mut recvs)?;
        drop(recvs);
        if combines {
            let inputs: Vec<_> =
                landing.iter().enumerate().map(|(peer, slot)| if peer == rank { src } else { Some(&**slot) }).collect();
            fold(cx, op, &inputs, dst);
        }
        Ok(())
    }

    fn shards(&self, len: usize, size: usize) -> Vec<Range<usize>> {
        let n = self.size();
        let shard = |rank| shard(len / size, n, rank);
        (0..n).map(shard).map(|shard| shard.start * size..shard.end * size).collect()
    }

    pub(super) fn reduce_everywhere(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let buffers = match io {
            HostIo::InPlace(data) => Buffers::Whole(data),
            HostIo::Split { src, dst } => Buffers::Two(src, dst),
        };
        let shards = vec![0..buffers.len(); self.size()];
        self.run_direct(cx, op, buffers, shards, Results::Kept)
    }

    /// Runs a two-shot reduction: each rank combines its shard and sends the result to all ranks.
    pub(super) fn reduce_two_shot(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let buffers = match io {
            HostIo::InPlace(data) => Buffers::Whole(data),
            HostIo::Split { src, dst } => Buffers::Two(src, dst),
        };
        let shards = self.shards(buffers.len(), cx.dtype().size());
        self.run_direct(cx, op, buffers, shards, Results::All)
    }

    /// Makes each rank combine its shard and send the result to root. With two ranks, root combines everything.
    pub(super) fn reduce_to(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp, root: usize) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let len = io.input().len();
        let shards = if n == 2 {
            (0..n).map(|owner| 0..if owner == root { len } else { 0 }).collect()
        } else {
            self.shards(len, cx.dtype().size())
        };
        // Ranks other than root have no other place for the shard that they combine.
        let mut kept = vec![0; if rank == root { 0 } else { shards[rank].len() }];
        let buffers = match io {
            HostIo::InPlace(data) if rank == root => Buffers::Whole(data),
            HostIo::Split { src, dst } if rank == root => Buffers::Two(src, dst),
            HostIo::InPlace(data) => Buffers::Share(data, &mut kept),
            HostIo::Split { src, .. } => Buffers::Share(src, &mut kept),
        };
        self.run_direct(cx, op, buffers, shards, Results::Root(root))
    }

    /// Makes each rank combine its own shard of all tensors.
    pub(super) fn reduce_chunks(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let buffers = match io {
            HostIo::InPlace(data) => Buffers::Whole(data),
            HostIo::Split { src, dst } => Buffers::Share(src, dst),
        };
        let shards = self.shards(buffers.len(), cx.dtype().size());
        self.run_direct(cx, op, buffers, shards, Results::Kept)
    }

    fn run_direct(
        &mut self,
        cx: &OpContext<'_>,
        op: ReduceOp,
        buffers: Buffers<'_>,
        shards: Vec<Range<usize>>,
        results: Results,
    ) -> Result<()> {
        let piece = piece(longest(&shards));
        let partition = Partition { shards, piece };
        let (mesh, mut plan) = self.prepare(cx, op, buffers, partition, results);
        // A single rank receives no message that would start this.
        plan.fold();
        mesh.run(cx, &mut plan)
    }

    /// Prepares the plan of a reduction, and returns it with the mesh that runs it.
    fn prepare<'a, 'c>(
        &'a mut self,
        cx: &'a OpContext<'c>,
        op: ReduceOp,
        buffers: Buffers<'a>,
        partition: Partition,
        results: Results,
    ) -> (&'a mut Mesh, DirectReduce<'a, 'c>) {
        let (rank, n) = (self.rank(), self.size());
        let most = (0..n).map(|owner| partition.pieces(owner)).max().unwrap_or(1);
        let window = window(n * partition.piece, most);
        let own = partition.shards[rank].len();
        let gets = results == Results::All || results == Results::Root(rank);
        let total = (own * (n - 1) + if gets { buffers.len() - own } else { 0 }) as u64;
        let overlap = n > 1 && own > 0 && partition.shards.iter().all(|shard| *shard == partition.shards[rank]);
        let waits_for_sending = overlap && matches!(buffers, Buffers::Whole(_));
        let pieces = partition.pieces(rank);
        let shards = DirectReduce {
            cx,
            op,
            rank,
            results,
            buffers,
            staging: grown(&mut self.staging, window * n * partition.piece),
            partition,
            window: vec![(None, 0); window],
            free: (0..window).rev().collect(),
            unsent: if waits_for_sending { vec![n - 1; pieces] } else { Vec::new() },
            folded: 0,
            came: vec![0; n],
            begun: vec![(0, 0); n],
            total,
        };
        (&mut self.mesh, shards)
    }

    pub(super) fn reduce_ring(&mut self, cx: &OpContext<'_>, data: &mut [u8], op: ReduceOp) -> Result<()> {
        let shards = self.shards(data.len(), cx.dtype().size());
        let mut rounds = Rounds::new(&mut self.mesh, cx, 0);
        rounds.all_reduce_by_ring(&mut self.staging, (cx.dtype(), op), data, shards)
    }
}

/// Returns the number of pieces in flight at once, for `pieces` pieces that need `each` bytes of staging each.
pub(super) fn window(each: usize, pieces: usize) -> usize {
    (STAGING / each).clamp(WINDOW.0, WINDOW.1).min(pieces.max(1))
}
