//! Dividing a tensor into chunks, copying chunks between cores, combining them with timed kernels, and the order in
//! which a rank reads from its peers.

use std::ops::Range;
use std::time::Instant;

use super::segment_layout::{ALIGN, Buffer, Segment};
use crate::reduce::combine;
use crate::types::ReduceOp;
use crate::{HostIo, OpContext};

/// Returns the peers of `me`, starting with the next rank, so that the ranks do not all read the same memory first.
pub(super) fn others(me: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (1..ranks).map(move |step| (me + step) % ranks)
}

pub(super) fn shifted(range: Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// Size in bytes below which a kernel is not timed, because reading the clock twice would take as long as the kernel.
const TIMED: usize = 16 << 10;

#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub(super) total: usize,
    /// Size in bytes of every chunk but the last, which may be shorter.
    pub(super) each: usize,
    pub(super) chunks: usize,
}

impl Cut {
    /// Cuts `total` bytes (not 0) into chunks of about equal size: at most `most` bytes, and a multiple of `ALIGN`.
    pub(super) fn new(total: usize, most: usize) -> Cut {
        let each = total.div_ceil(total.div_ceil(most)).next_multiple_of(ALIGN);
        Cut { total, each, chunks: total.div_ceil(each) }
    }

    pub(super) fn range(&self, chunk: usize) -> Range<usize> {
        (chunk * self.each).min(self.total)..((chunk + 1) * self.each).min(self.total)
    }

    pub(super) fn before(&self, chunk: usize) -> Range<usize> {
        chunk.checked_sub(1).map_or(0..0, |before| self.range(before))
    }

    /// Returns the chunk after this one, which is empty for the last.
    pub(super) fn behind(&self, chunk: usize) -> Range<usize> {
        self.range(chunk + 1)
    }
}

const LINE: usize = 64;

/// Size in bytes of one `memcpy` between cores. Longer copies run as `rep movsb` on some processors, which is several
/// times slower if the destination's cache lines are in another core's cache. With longer copies, a broadcast of 1 MiB
/// between two ranks took 1.5 times as long on an EPYC (Zen 4).
const BLOCK: usize = 4 << 10;

/// Copies bytes to or from memory that another core uses. Both slices must have the same length.
pub(super) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        to.copy_from_slice(from);
    }
}

/// Copies from a window that no other rank accesses now, as [`copy`], and then rewrites one byte of each cache line of
/// the window with its own value. This leaves the line only in this core's cache, so the other core's next write to it
/// costs one transfer. A write to a line that both caches share costs two: with [`copy`], a broadcast of 1 MiB between
/// two ranks took 2.0 times as long.
pub(super) fn copy_and_own(window: &mut [u8], to: &mut [u8]) {
    assert_eq!(window.len(), to.len());
    for (from, to) in window.chunks_mut(BLOCK).zip(to.chunks_mut(BLOCK)) {
        to.copy_from_slice(from);
        for line in from.chunks_mut(LINE) {
            let byte = &raw mut line[0];
            // SAFETY: a byte of the slice. Volatile, because the compiler would remove the store of a value just read.
            unsafe { byte.write_volatile(byte.read_volatile()) };
        }
    }
}

pub(super) fn inputs<'a>(ranks: usize, read: impl Fn(usize) -> &'a [u8]) -> Vec<Option<&'a [u8]>> {
    (0..ranks).map(|rank| Some(read(rank))).collect()
}

/// Combines the peers' inputs and this rank's (range `from` of `io`'s input) into the range `to` of its output.
pub(super) fn combine_into<'a>(
    cx: &OpContext<'_>,
    op: ReduceOp,
    mut inputs: Vec<Option<&'a [u8]>>,
    me: usize,
    io: &'a mut HostIo<'_>,
    from: Range<usize>,
    to: Range<usize>,
) {
    let timer = Timer::start(cx, to.len());
    match io {
        HostIo::InPlace(data) => {
            inputs[me] = None;
            combine(cx.dtype(), op, &inputs, &mut data[to]);
        }
        HostIo::Split { src, dst } => {
            inputs[me] = Some(&src[from]);
            combine(cx.dtype(), op, &inputs, &mut dst[to]);
        }
    }
    timer.stop();
}

/// Writes a range of the shard for every peer to this rank's buffer.
pub(super) fn fill_for_each(
    segment: &Segment,
    buffer: Buffer,
    input: &[u8],
    range: Range<usize>,
    shard: usize,
    stride: usize,
) {
    for rank in others(segment.index, segment.ranks) {
        // SAFETY: no other rank accesses this buffer while it is filled (`protocol`, S2, W2).
        let out = unsafe { segment.write(segment.index, buffer, shifted(0..range.len(), rank * stride)) };
        copy(&input[shifted(range.clone(), rank * shard)], out);
    }
}

/// Adds the time of a kernel to the statistics, unless the kernel is too short ([`TIMED`]).
pub(super) struct Timer<'a, 'c> {
    cx: &'a OpContext<'c>,
    begun: Option<Instant>,
}

impl<'a, 'c> Timer<'a, 'c> {
    pub(super) fn start(cx: &'a OpContext<'c>, bytes: usize) -> Timer<'a, 'c> {
        Timer { cx, begun: (bytes >= TIMED).then(Instant::now) }
    }

    pub(super) fn stop(self) {
        if let Some(begun) = self.begun {
            self.cx.stats.add_reduce(begun.elapsed());
        }
    }
}
