//! The reducing verbs of large groups, in two phases:
//!
//! 1. Combine each rank's shard, by halving or along a ring.
//! 2. Send the combined shards to the ranks that need them.
//!
//! The phases work in place on [`Limits::chunk`] bytes at a time, and halving stages half of that. They work on a copy
//! if the tensor must keep its values, and for float16 and bfloat16. The copy of these two types is float32, and is
//! rounded once, before the second phase. So no rank rounds a partial sum, and the first phase sends twice the bytes.

use std::ops::Range;

use super::algorithm::{SMALL, is_half};
use super::element_partition::{Pieces, shard};
use super::exchange_rounds::Rounds;
use super::tree::{Tree, gather_up};
use super::{Limits, Net, dissemination, grown};
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::error::Result;
use crate::types::{DType, ReduceOp};
use crate::{Collective, HostIo, OpContext};

/// The way in which shards are combined, and gathered in an all_reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phases {
    Halving,
    Ring,
}

impl Phases {
    /// Returns the way that the table gives for this number of bytes of partial results.
    fn of(bytes: usize, n: usize, limits: Limits) -> Phases {
        if bytes / n >= limits.ring_shard { Phases::Ring } else { Phases::Halving }
    }

    /// Makes each rank's shard of `data` the combination of that shard on all ranks.
    fn reduce(
        self,
        rounds: &mut Rounds<'_, '_>,
        staging: &mut Vec<u8>,
        how: (DType, ReduceOp),
        data: &mut [u8],
        shards: &[Range<usize>],
    ) -> Result<()> {
        match self {
            Phases::Halving => dissemination::reduce_shards(rounds, staging, how, data, shards),
            Phases::Ring => rounds.reduce_shards_by_ring(staging, how, data, shards),
        }
    }

    fn gather(self, rounds: &mut Rounds<'_, '_>, data: &mut [u8], shards: &[Range<usize>]) -> Result<()> {
        match self {
            Phases::Halving => dissemination::gather_shards(rounds, data, shards),
            Phases::Ring => rounds.gather_shards_by_ring(data, shards),
        }
    }
}

fn shards_of(count: usize, n: usize) -> Vec<Range<usize>> {
    (0..n).map(|rank| shard(count, n, rank)).collect()
}

/// Returns the type of partial results, which are rounded to `dtype` only at the end.
fn unrounded(dtype: DType) -> DType {
    if is_half(dtype) { DType::F32 } else { dtype }
}

fn in_bytes(runs: &[Range<usize>], size: usize) -> Vec<Range<usize>> {
    runs.iter().map(|run| run.start * size..run.end * size).collect()
}

/// Copies elements of `dtype` into partial results.
fn load(dtype: DType, from: &[u8], into: &mut [u8]) {
    if unrounded(dtype) == dtype {
        into.copy_from_slice(from);
    } else {
        for_dtype(dtype, Widen { from, into });
    }
}

/// Rounds partial results to elements of `dtype`.
fn store(dtype: DType, from: &[u8], into: &mut [u8]) {
    if unrounded(dtype) == dtype {
        into.copy_from_slice(from);
    } else {
        for_dtype(dtype, Round { from, into });
    }
}

struct Widen<'a> {
    from: &'a [u8],
    into: &'a mut [u8],
}

impl ForFloat for Widen<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        for (from, into) in self.from.chunks_exact(T::SIZE).zip(self.into.as_chunks_mut().0) {
            *into = T::load(from).to_ne_bytes();
        }
    }
}

struct Round<'a> {
    from: &'a [u8],
    into: &'a mut [u8],
}

impl ForFloat for Round<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        for (from, into) in self.from.as_chunks().0.iter().zip(self.into.chunks_exact_mut(T::SIZE)) {
            T::store(f32::from_ne_bytes(*from), into);
        }
    }
}

impl Net {
    /// Runs an all_reduce in two phases. With `by_ring`, chunks that are long enough use the ring instead of halving.
    pub(super) fn all_reduce_in_phases(
        &mut self,
        cx: &OpContext<'_>,
        data: &mut [u8],
        op: ReduceOp,
        by_ring: bool,
    ) -> Result<()> {
        let n = self.size();
        let Net { mesh, staging, working, limits, .. } = self;
        let (dtype, sums) = (cx.dtype(), unrounded(cx.dtype()));
        let count = data.len() / dtype.size();
        let pieces = Pieces::new(count, limits.chunk / sums.size());
        let mut rounds = Rounds::new(mesh, cx, 2 * data.len()).greeting();
        for run in (0..pieces.steps).map(|step| pieces.range(step, count)) {
            let chunk = &mut data[run.start * dtype.size()..run.end * dtype.size()];
            let phases = if by_ring { Phases::of(run.len() * sums.size(), n, *limits) } else { Phases::Halving };
            let elements = shards_of(run.len(), n);
            let shards = in_bytes(&elements, dtype.size());
            if sums == dtype {
                phases.reduce(&mut rounds, staging, (dtype, op), chunk, &shards)?;
            } else {
                let copy = grown(working, run.len() * sums.size());
                load(dtype, chunk, copy);
                let of_copy = in_bytes(&elements, sums.size());
                phases.reduce(&mut rounds, staging, (sums, op), copy, &of_copy)?;
                let rank = rounds.rank();
                store(dtype, &copy[of_copy[rank].clone()], &mut chunk[shards[rank].clone()]);
            }
            phases.gather(&mut rounds, chunk, &shards)?;
        }
        Ok(())
    }

    /// Runs an all_reduce by doubling in a wider type, and rounds the result once.
    pub(super) fn all_reduce_rounded_once(&mut self, cx: &OpContext<'_>, data: &mut [u8], op: ReduceOp) -> Result<()> {
        let (dtype, sums) = (cx.dtype(), unrounded(cx.dtype()));
        let mut working = std::mem::take(&mut self.working);
        let copy = grown(&mut working, data.len() / dtype.size() * sums.size());
        load(dtype, data, copy);
        self.reduce_doubling(cx, (sums, op), copy)?;
        store(dtype, copy, data);
        self.working = working;
        Ok(())
    }

    /// Runs a reduce. Small tensors go up a tree, and large ones in two phases, of which the second gathers on root.
    pub(super) fn reduce_in_phases(
        &mut self,
        cx: &OpContext<'_>,
        mut io: HostIo<'_>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let (dtype, sums) = (cx.dtype(), unrounded(cx.dtype()));
        let count = io.input().len() / dtype.size();
        if io.input().len() <= SMALL {
            let mut working = std::mem::take(&mut self.working);
            let copy = grown(&mut working, count * sums.size());
            load(dtype, io.input(), copy);
            self.reduce_tree(cx, (sums, op), copy, root)?;
            if rank == root {
                store(dtype, copy, io.output());
            }
            self.working = working;
            return Ok(());
        }
        let Net { mesh, staging, working, limits, .. } = self;
        let tree = Tree::new(rank, n, root);
        let pieces = Pieces::new(count, limits.chunk / sums.size());
        let mut rounds = Rounds::new(mesh, cx, 2 * io.input().len()).greeting();
        for run in (0..pieces.steps).map(|step| pieces.range(step, count)) {
            let chunk = run.start * dtype.size()..run.end * dtype.size();
            let phases = Phases::of(run.len() * sums.size(), n, *limits);
            let elements = shards_of(run.len(), n);
            let (shards, of_copy) = (in_bytes(&elements, dtype.size()), in_bytes(&elements, sums.size()));
            let copied = run.len() * sums.size();
            // After the copy, the rounded shards of this rank's subtree.
            let rounded = if sums == dtype { 0 } else { chunk.len() };
            let (copy, rounded) = grown(working, copied + rounded).split_at_mut(copied);
            load(dtype, &io.input()[chunk.clone()], copy);
            phases.reduce(&mut rounds, staging, (sums, op), copy, &of_copy)?;
            let place = |rank: usize| shards[rank].clone();
            if rank != root && sums == dtype {
                gather_up(&mut rounds, tree, copy, true, &place)?;
                continue;
            }
            let gathered = if rank == root { &mut io.output()[chunk] } else { rounded };
            store(dtype, &copy[of_copy[rank].clone()], &mut gathered[place(rank)]);
            gather_up(&mut rounds, tree, gathered, true, &place)?;
        }
        Ok(())
    }

    /// Runs a reduce_scatter, which is the first phase, on the same part of every shard at a time.
    pub(super) fn reduce_scatter_in_phases(
        &mut self,
        cx: &OpContext<'_>,
        mut io: HostIo<'_>,
        op: ReduceOp,
    ) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let (dtype, sums) = (cx.dtype(), unrounded(cx.dtype()));
        let count = io.input().len() / dtype.size();
        let whole = shards_of(count, n);
        let pieces = Pieces::new(whole[0].len(), self.limits.chunk / sums.size() / n);
        let Net { mesh, staging, working, limits, .. } = self;
        let mut rounds = Rounds::new(mesh, cx, io.input().len()).greeting();
        for step in 0..pieces.steps {
            let part = |rank: usize| pieces.range(step, whole[rank].len());
            let mut end = 0;
            let elements: Vec<_> = (0..n)
                .map(|rank| {
                    end += part(rank).len();
                    end - part(rank).len()..end
                })
                .collect();
            let of_copy = in_bytes(&elements, sums.size());
            let copy = grown(working, end * sums.size());
            for (rank, shard) in whole.iter().enumerate() {
                let from = shard.start + part(rank).start..shard.start + part(rank).end;
                let from = &io.input()[from.start * dtype.size()..from.end * dtype.size()];
                load(dtype, from, &mut copy[of_copy[rank].clone()]);
            }
            Phases::of(copy.len(), n, *limits).reduce(&mut rounds, staging, (sums, op), copy, &of_copy)?;
            let begin = if matches!(io, HostIo::InPlace(_)) { whole[rank].start } else { 0 };
            let own = (begin + part(rank).start) * dtype.size()..(begin + part(rank).end) * dtype.size();
            store(dtype, &copy[of_copy[rank].clone()], &mut io.output()[own]);
        }
        Ok(())
    }
}
