//! What the patterns are made of: pieces of a tensor, its input and its output, kernels that are timed.

use std::ops::Range;
use std::time::Instant;

use super::segment::{ALIGN, Buffer, Segment};
use super::{others, shifted};
use crate::collective::{Call, Io};
use crate::reduce::combine;
use crate::types::ReduceOp;

/// Kernels on less than this are not timed: reading the clock twice would cost as much.
const TIMED: usize = 16 << 10;
/// Copy out and refill alternate after this many bytes: well within the first-level cache.
const BLOCK: usize = 4 << 10;

/// A tensor or chunk cut into pieces.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub(super) total: usize,
    /// Bytes of every piece but the last, which may be shorter.
    pub(super) each: usize,
    pub(super) pieces: usize,
}

impl Cut {
    /// Pieces of at most `most` bytes, a multiple of `ALIGN`, and of about equal size. `total` is not 0.
    pub(super) fn new(total: usize, most: usize) -> Cut {
        let each = total.div_ceil(total.div_ceil(most)).next_multiple_of(ALIGN);
        Cut { total, each, pieces: total.div_ceil(each) }
    }

    pub(super) fn range(&self, piece: usize) -> Range<usize> {
        piece * self.each..((piece + 1) * self.each).min(self.total)
    }
}

impl Io<'_> {
    pub(super) fn input(&self) -> &[u8] {
        match self {
            Io::InPlace(data) => data,
            Io::Split { src, .. } => src,
        }
    }

    pub(super) fn output(&mut self) -> &mut [u8] {
        match self {
            Io::InPlace(data) => data,
            Io::Split { dst, .. } => dst,
        }
    }

    /// Copies what a rank sends to itself, unless it is there already.
    pub(super) fn keep_own(&mut self, from: Range<usize>, to: usize) {
        if let Io::Split { src, dst } = self {
            dst[to..to + from.len()].copy_from_slice(&src[from]);
        }
    }
}

/// What each rank contributes, in rank order.
pub(super) fn inputs<'a>(ranks: usize, read: impl Fn(usize) -> &'a [u8]) -> Vec<Option<&'a [u8]>> {
    (0..ranks).map(|rank| Some(read(rank))).collect()
}

/// Combines the others' contributions and this rank's own, `from` of its input, into `to` of its output.
pub(super) fn combine_into<'a>(
    call: &Call<'_>,
    op: ReduceOp,
    mut inputs: Vec<Option<&'a [u8]>>,
    me: usize,
    io: &'a mut Io<'_>,
    from: Range<usize>,
    to: Range<usize>,
) {
    let timer = Timer::start(call, to.len());
    match io {
        Io::InPlace(data) => {
            inputs[me] = None;
            combine(call.dtype(), op, &inputs, &mut data[to]);
        }
        Io::Split { src, dst } => {
            inputs[me] = Some(&src[from]);
            combine(call.dtype(), op, &inputs, &mut dst[to]);
        }
    }
    timer.stop();
}

/// Copies a share of the own window to the tensor, where `out` is the beginning of its piece there, and then fills it from the
/// tensor, where `into` is the beginning of the new piece.
pub(super) fn turn_over(
    segment: &Segment,
    buffer: Buffer,
    io: &mut Io<'_>,
    share: Range<usize>,
    out: Option<usize>,
    into: Option<usize>,
) {
    let mut start = share.start;
    while start < share.end {
        let block = start..(start + BLOCK).min(share.end);
        if let Some(out) = out {
            // SAFETY: W2; the peer that wrote the result here did so when it took that piece.
            let window = unsafe { segment.read(segment.index, buffer, block.clone()) };
            io.output()[shifted(block.clone(), out)].copy_from_slice(window);
        }
        if let Some(into) = into {
            // SAFETY: W2; the slice above is no longer used.
            let window = unsafe { segment.write(segment.index, buffer, block.clone()) };
            window.copy_from_slice(&io.input()[shifted(block.clone(), into)]);
        }
        start = block.end;
    }
}

/// Writes this piece of every other rank's chunk into the own buffer.
pub(super) fn fill_for_each(
    segment: &Segment,
    buffer: Buffer,
    input: &[u8],
    range: Range<usize>,
    chunk: usize,
    stride: usize,
) {
    for rank in others(segment.index, segment.ranks) {
        // SAFETY: S2 or W2.
        let out = unsafe { segment.write(segment.index, buffer, shifted(0..range.len(), rank * stride)) };
        out.copy_from_slice(&input[shifted(range.clone(), rank * chunk)]);
    }
}

/// Counts the time of a kernel, where it is worth it.
pub(super) struct Timer<'a> {
    call: &'a Call<'a>,
    begun: Option<Instant>,
}

impl<'a> Timer<'a> {
    pub(super) fn start(call: &'a Call<'a>, bytes: usize) -> Timer<'a> {
        Timer { call, begun: (bytes >= TIMED).then(Instant::now) }
    }

    pub(super) fn stop(self) {
        if let Some(begun) = self.begun {
            self.call.stats.add_reduce(begun.elapsed());
        }
    }
}
