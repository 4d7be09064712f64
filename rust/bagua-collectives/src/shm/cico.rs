//! all_reduce and reduce through windows ("copy in, copy out"), for tensors that do not fit into a slot.
//!
//! Each rank reduces its share of every chunk, from all windows and its own tensor. It writes the result to its own
//! tensor and to the peers' windows. A peer copies the result from its window to its tensor in the same pass that fills
//! the window with the chunk after next. This pass is divided into blocks, which alternate with the blocks in which the
//! rank reduces the chunk in between:
//!
//! ```text
//! step p:  reduce chunk p      |  from window p % 2, result to all windows p % 2
//!          copy out chunk p-1  |  from window (p-1) % 2 to the tensor
//!          copy in chunk p+1   |  from the tensor to window (p+1) % 2
//! ```
//!
//! - Each rank both reads and writes every shared cache line. So a line crosses between two cores once per chunk in
//!   each direction: with what the peer wrote, and with what the peer reads next.
//! - Loads from the peer's cache and loads of the tensor from main memory are in flight at the same time.
//!
//! The limit is the rate at which two cores read each other's caches, 16 to 20 GB/s on the measured machine, because
//! every byte of an ordinary tensor crosses once. Share of this limit at 1, 16 and 64 MiB (`cargo bench --bench
//! limit`): 0.33, 0.36 and 0.36 if each chunk is copied out, refilled and reduced one after the other, and 0.40, 0.44
//! and 0.52 with alternating blocks.
//!
//! Tried and rejected. Slower there: every rank reducing all of every chunk, windows of 64 KiB or of 512 KiB and more,
//! non-temporal stores, demoting lines. No gain: two to eight streams at a time, four windows, prefetching to write.
//! Slower on other machines: slots with a separate result area, and `process_vm_readv`.

use std::ops::Range;

use super::chunks::{Cut, Timer, combine_into, inputs, others, shifted};
use super::protocol::Phase;
use super::segment_layout::{ALIGN, Buffer, Segment};
use crate::reduce::{combine, combine_everywhere_after};
use crate::types::ReduceOp;
use crate::{HostIo, OpContext};

pub(super) struct Reduction<'a, 'c> {
    pub(super) cx: &'a OpContext<'c>,
    pub(super) op: ReduceOp,
    /// Rank that gets the result of a reduce, or `None` for an all_reduce.
    pub(super) root: Option<usize>,
    pub(super) cut: Cut,
}

/// The ranges of a rank's tensor that a step copies while it reduces a chunk. A range may be empty or short.
struct Beside<'a> {
    /// Chunk before, into which results are copied from the window.
    out: &'a mut [u8],
    /// Chunk after, which is copied into the window.
    into: &'a [u8],
}

impl Reduction<'_, '_> {
    /// Returns the range that a rank reduces, in a chunk or window of `len` bytes, at the same offset in all.
    fn share(&self, segment: &Segment, rank: usize, len: usize) -> Range<usize> {
        let each = self.each(segment);
        (each * rank).min(len)..(each * (rank + 1)).min(len)
    }

    fn each(&self, segment: &Segment) -> usize {
        self.cut.each.div_ceil(segment.ranks).next_multiple_of(ALIGN)
    }

    /// Implements the phases of [`super::protocol::Protocol::run`], with `collect` on ranks that get the result.
    pub(super) fn phase(&self, segment: &Segment, phase: Phase, buffer: Buffer, io: &mut HostIo<'_>) {
        let (first, chunks) = (self.cut.range(0), self.cut.chunks);
        match phase {
            Phase::Fill(0) => self.refill(segment, buffer, Beside { out: &mut [], into: &io.input()[first] }),
            Phase::Fill(chunk) if chunk > chunks => {
                let out = &mut io.output()[self.cut.range(chunks - 1)];
                self.refill(segment, buffer, Beside { out, into: &[] });
            }
            // The `Take` that follows does both in one pass.
            Phase::Fill(_) => {}
            Phase::Take(chunk) => match self.root {
                None => self.step(segment, chunk, buffer, io),
                Some(root) => self.step_towards(segment, root, chunk, buffer, io),
            },
        }
    }

    /// Copies the results from this rank's window to the tensor, and fills the window with the next chunk.
    fn refill(&self, segment: &Segment, buffer: Buffer, mut beside: Beside<'_>) {
        self.refill_block(segment, buffer, &mut beside, 0..self.each(segment));
    }

    /// Does the work of [`Reduction::refill`] for one block of every peer's share.
    fn refill_block(&self, segment: &Segment, buffer: Buffer, beside: &mut Beside<'_>, block: Range<usize>) {
        for rank in others(segment.index, segment.ranks) {
            let within = |len| {
                let share = self.share(segment, rank, len);
                (share.start + block.start).min(share.end)..(share.start + block.end).min(share.end)
            };
            let (out, into) = (within(beside.out.len()), within(beside.into.len()));
            // SAFETY: rule W2. The peer that wrote the result here did so when it took that chunk.
            beside.out[out.clone()].copy_from_slice(unsafe { segment.read(segment.index, buffer, out) });
            // SAFETY: rule W2. The slice above is no longer used.
            unsafe { segment.write(segment.index, buffer, into.clone()) }.copy_from_slice(&beside.into[into]);
        }
    }

    /// Reduces a chunk of an all_reduce. Meanwhile copies the result of the chunk before to this rank's tensor, and the
    /// chunk after from the tensor to the window.
    fn step(&self, segment: &Segment, chunk: usize, buffer: Buffer, io: &mut HostIo<'_>) {
        let (me, next) = (segment.index, buffer.other());
        let range = self.cut.range(chunk);
        let (before, behind) = (self.cut.before(chunk), self.cut.behind(chunk));
        let mine = self.share(segment, me, range.len());
        let (src, out, dst, into): (Option<&[u8]>, _, _, &[u8]) = match io {
            HostIo::InPlace(data) => {
                let (done, rest) = data.split_at_mut(range.start);
                let (now, rest) = rest.split_at_mut(range.len());
                (None, &mut done[before], now, &rest[..behind.len()])
            }
            HostIo::Split { src, dst } => {
                let (done, rest) = dst.split_at_mut(range.start);
                (
                    Some(&src[shifted(mine.clone(), range.start)]),
                    &mut done[before],
                    &mut rest[..range.len()],
                    &src[behind],
                )
            }
        };
        let mut beside = Beside { out, into };
        let mut own = Some(&mut dst[mine.clone()]);
        let part = |rank| match own.take_if(|_| rank == me) {
            Some(own) => own,
            // SAFETY: rule W1. Only this rank reads and writes its share of every window.
            None => unsafe { segment.write(rank, buffer, mine.clone()) },
        };
        let mut parts: Vec<&mut [u8]> = (0..segment.ranks).map(part).collect();
        let timer = Timer::start(self.cx, mine.len());
        combine_everywhere_after(self.cx.dtype(), self.op, &mut parts, &mut |block, parts| {
            if let Some(src) = src {
                parts[me][block.clone()].copy_from_slice(&src[block.clone()]);
            }
            self.refill_block(segment, next, &mut beside, block);
        });
        timer.stop();
        // The last rank's share may be shorter than its peers' shares: copy what is left of them.
        self.refill_block(segment, next, &mut beside, mine.len()..self.each(segment));
    }

    /// Reduces a chunk of a reduce. First fills the window with the next chunk, and on the root takes the last result.
    fn step_towards(&self, segment: &Segment, root: usize, chunk: usize, buffer: Buffer, io: &mut HostIo<'_>) {
        let (me, ranks) = (segment.index, segment.ranks);
        if root == me {
            let out = &mut io.output()[self.cut.before(chunk)];
            self.refill(segment, buffer.other(), Beside { out, into: &[] });
        }
        let into = &io.input()[self.cut.behind(chunk)];
        self.refill(segment, buffer.other(), Beside { out: &mut [], into });

        let range = self.cut.range(chunk);
        let mine = self.share(segment, me, range.len());
        let local = shifted(mine.clone(), range.start);
        // SAFETY: rule W1. Only this rank reads and writes its share of every window.
        let theirs = |rank| unsafe { segment.read(rank, buffer, mine.clone()) };
        if root == me {
            combine_into(self.cx, self.op, inputs(ranks, theirs), me, io, local.clone(), local);
            return;
        }
        let timer = Timer::start(self.cx, mine.len());
        let input = |rank| match rank {
            _ if rank == root => None,
            _ if rank == me => Some(&io.input()[local.clone()]),
            _ => Some(theirs(rank)),
        };
        let inputs: Vec<Option<&[u8]>> = (0..ranks).map(input).collect();
        // SAFETY: as above, and the root's window is not among the inputs.
        combine(self.cx.dtype(), self.op, &inputs, unsafe { segment.write(root, buffer, mine.clone()) });
        timer.stop();
    }
}
