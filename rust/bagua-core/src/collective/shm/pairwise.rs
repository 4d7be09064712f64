//! Two ranks that give each other a chunk: all_gather and all_to_all of what does not fit a slot.
//!
//! Where one rank has read a stretch of a window it writes what the other will read there next: so each line travels once per
//! piece, as in [`super::cico`], and not once to be read and once more to be written again.

use std::ops::Range;

use super::pieces::Cut;
use super::prefetch_copy::{copy, copy_to_both};
use super::protocol::Phase;
use super::segment::{Buffer, Segment};
use super::shifted;
use crate::collective::HostIo;
use crate::sync::buffer_len;

/// Bytes of a piece, at most. Twice that is slower at 1 MiB, and equal from 4 MiB on.
pub(super) const PIECE: usize = buffer_len(128 << 10);
/// Bytes that are read before they are replaced: they stay in the first-level cache meanwhile. 8 and 16 KiB are 3 % slower.
const STRETCH: usize = 4 << 10;

/// One operation of two ranks. The places are those of chunks in this rank's input and output.
pub(super) struct Pairwise {
    pub(super) cut: Cut,
    /// What the peer gets, in the input.
    pub(super) give: usize,
    /// What the peer gives, in the output.
    pub(super) get: usize,
    /// What stays here: from where to where.
    pub(super) keep: (usize, usize),
}

impl Pairwise {
    /// The pattern for [`super::protocol::Protocol::run`]. One window of each rank is used, that of parity 0 (fact X1).
    pub(super) fn phase(&self, segment: &Segment, phase: Phase, io: &mut HostIo<'_>) {
        match phase {
            Phase::Fill(0) => {
                let first = self.cut.range(0);
                // SAFETY: W2.
                let window = unsafe { segment.write(segment.index, Buffer::Window(0), first.clone()) };
                self.leave(window, first, io);
            }
            Phase::Fill(_) => {}
            Phase::Take(piece) => self.step(segment, piece, io),
        }
    }

    /// Takes a piece, and leaves the next one in its place.
    fn step(&self, segment: &Segment, piece: usize, io: &mut HostIo<'_>) {
        let owner = (segment.index + 1 + piece) % 2;
        let (now, next) = (self.cut.range(piece), self.cut.behind(piece));
        let mut start = 0;
        while start < now.len() {
            // No piece is longer than the one before it.
            let part = |len: usize| start.min(len)..(start + STRETCH).min(len);
            let (takes, leaves) = (part(now.len()), part(next.len()));
            // SAFETY: X1.
            let window = unsafe { segment.read(owner, Buffer::Window(0), takes.clone()) };
            copy(window, &mut io.output()[shifted(takes, now.start + self.get)]);
            // SAFETY: X1; the slice above is no longer used.
            let window = unsafe { segment.write(owner, Buffer::Window(0), leaves.clone()) };
            self.leave(window, shifted(leaves, next.start), io);
            start += STRETCH;
        }
    }

    /// Puts a range of the chunk that the peer gets into a window, and the same range of what stays here where it belongs.
    fn leave(&self, window: &mut [u8], range: Range<usize>, io: &mut HostIo<'_>) {
        let (give, keep) = (shifted(range.clone(), self.give), shifted(range.clone(), self.keep.0));
        match io {
            HostIo::InPlace(data) => copy(&data[give], window),
            HostIo::Split { src, dst } => {
                let kept = &mut dst[shifted(range, self.keep.1)];
                if give == keep {
                    copy_to_both(&src[give], window, kept);
                } else {
                    copy(&src[give], window);
                    copy(&src[keep], kept);
                }
            }
        }
    }
}
