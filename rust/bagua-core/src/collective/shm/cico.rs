//! all_reduce and reduce through windows, of tensors that do not fit a slot.
//!
//! Each rank reduces one share of every chunk from all windows and its own tensor, into its own tensor and into the peers' windows.
//! From there the peers copy it to their tensors, in the same pass that fills the window for the chunk after next, and stretch
//! by stretch in phase with their own reducing of the chunk between the two. So
//!
//! - both sides read *and* write every shared line, and each line travels once per chunk in either direction: it brings what the
//!   peer wrote, and takes away what the peer will read;
//! - lines that come from the peer's cache and lines of the tensor that come from far away are under way at the same time.
//!
//! Measured (`cargo bench --bench limit`) on two cores that read each other's caches at 16 to 20 GB/s, which is what bounds this,
//! because every byte of an ordinary tensor has to come over once: of the limit at 1, 16 and 64 MiB, 0.33, 0.36 and 0.36 when
//! copying out, refilling and reducing followed each other chunk by chunk; 0.40, 0.44 and 0.52 in stretches. Slower there: every
//! rank reducing all of every chunk, windows of 64 or 512 KiB and more, non-temporal stores, demoting lines. No gain: two to eight
//! streams at a time, four windows, prefetching to write. On other machines slower: slots with a separate result area, and
//! `process_vm_readv`.

use std::ops::Range;

use super::chunks::{Cut, Timer, combine_into, inputs};
use super::protocol::Phase;
use super::ranges::{others, shifted};
use super::segment::{ALIGN, Buffer, Segment};
use crate::collective::{HostIo, OpContext};
use crate::reduce::{combine, combine_everywhere_after};
use crate::types::ReduceOp;

/// One operation.
pub(super) struct Reduction<'a> {
    pub(super) cx: &'a OpContext<'a>,
    pub(super) op: ReduceOp,
    /// Who gets the result; nobody in particular in all_reduce.
    pub(super) root: Option<usize>,
    pub(super) cut: Cut,
}

/// What a step touches of a rank's tensor besides the chunk that it reduces. Either may be empty, or shorter than a chunk.
struct Beside<'a> {
    /// The chunk before, where results go that the peers left in the window.
    out: &'a mut [u8],
    /// The chunk behind, which goes into the window.
    into: &'a [u8],
}

impl Reduction<'_> {
    /// What a rank is responsible for, in a chunk or window of `len` bytes. It begins at the same place in all chunks.
    fn share(&self, segment: &Segment, rank: usize, len: usize) -> Range<usize> {
        let each = self.each(segment);
        (each * rank).min(len)..(each * (rank + 1)).min(len)
    }

    fn each(&self, segment: &Segment) -> usize {
        self.cut.each.div_ceil(segment.ranks).next_multiple_of(ALIGN)
    }

    /// The pattern for [`super::protocol::Protocol::run`], which is to be told to collect where this rank gets the result.
    pub(super) fn phase(&self, segment: &Segment, phase: Phase, buffer: Buffer, io: &mut HostIo<'_>) {
        let (first, chunks) = (self.cut.range(0), self.cut.chunks);
        match phase {
            Phase::Fill(0) => self.turn_over(segment, buffer, Beside { out: &mut [], into: &io.input()[first] }),
            Phase::Fill(chunk) if chunk > chunks => {
                let out = &mut io.output()[self.cut.range(chunks - 1)];
                self.turn_over(segment, buffer, Beside { out, into: &[] });
            }
            // Together with the Take that follows.
            Phase::Fill(_) => {}
            Phase::Take(chunk) => match self.root {
                None => self.step(segment, chunk, buffer, io),
                Some(root) => self.step_towards(segment, root, chunk, buffer, io),
            },
        }
    }

    /// Copies the results in the own window to the tensor, and fills it again.
    fn turn_over(&self, segment: &Segment, buffer: Buffer, mut beside: Beside<'_>) {
        self.turn_stretch_over(segment, buffer, &mut beside, 0..self.each(segment));
    }

    /// The same for one stretch of every peer's share.
    fn turn_stretch_over(&self, segment: &Segment, buffer: Buffer, beside: &mut Beside<'_>, stretch: Range<usize>) {
        for rank in others(segment.index, segment.ranks) {
            let within = |len| {
                let share = self.share(segment, rank, len);
                (share.start + stretch.start).min(share.end)..(share.start + stretch.end).min(share.end)
            };
            let (out, into) = (within(beside.out.len()), within(beside.into.len()));
            // SAFETY: W2; the peer that wrote the result here did so when it took that chunk.
            beside.out[out.clone()].copy_from_slice(unsafe { segment.read(segment.index, buffer, out) });
            // SAFETY: W2; the slice above is no longer used.
            unsafe { segment.write(segment.index, buffer, into.clone()) }.copy_from_slice(&beside.into[into]);
        }
    }

    /// A chunk of an all_reduce, and what is beside it.
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
            // SAFETY: W1; of every window, this rank's share is read and written by this rank only.
            None => unsafe { segment.write(rank, buffer, mine.clone()) },
        };
        let mut parts: Vec<&mut [u8]> = (0..segment.ranks).map(part).collect();
        let timer = Timer::start(self.cx, mine.len());
        combine_everywhere_after(self.cx.dtype(), self.op, &mut parts, &mut |stretch, parts| {
            if let Some(src) = src {
                parts[me][stretch.clone()].copy_from_slice(&src[stretch.clone()]);
            }
            self.turn_stretch_over(segment, next, &mut beside, stretch);
        });
        timer.stop();
        // Where the own share is shorter than others, as the last one may be.
        self.turn_stretch_over(segment, next, &mut beside, mine.len()..self.each(segment));
    }

    /// A chunk of a reduce, and what is beside it.
    fn step_towards(&self, segment: &Segment, root: usize, chunk: usize, buffer: Buffer, io: &mut HostIo<'_>) {
        let (me, ranks) = (segment.index, segment.ranks);
        if root == me {
            let out = &mut io.output()[self.cut.before(chunk)];
            self.turn_over(segment, buffer.other(), Beside { out, into: &[] });
        }
        let into = &io.input()[self.cut.behind(chunk)];
        self.turn_over(segment, buffer.other(), Beside { out: &mut [], into });

        let range = self.cut.range(chunk);
        let mine = self.share(segment, me, range.len());
        let local = shifted(mine.clone(), range.start);
        // SAFETY: W1; of every window, this rank's share is read and written by this rank only.
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
        // SAFETY: as above; the root's window is not among the inputs.
        combine(self.cx.dtype(), self.op, &inputs, unsafe { segment.write(root, buffer, mine.clone()) });
        timer.stop();
    }
}
