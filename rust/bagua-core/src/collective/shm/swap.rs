//! Two ranks that give each other a chunk: all_gather and all_to_all of what does not fit a slot.
//!
//! Where one rank has read a stretch of a window it writes what the other will read there next: so each line travels once per
//! piece, as in [`super::reduction`], and not once to be read and once more to be written again.

use super::pieces::Cut;
use super::run::Turn;
use super::segment::{Buffer, Segment};
use super::shifted;
use crate::collective::Io;

/// Bytes that are read before they are replaced: they stay in the first-level cache meanwhile. Not less, because copies from 8 KiB
/// on are made with `rep movsb`, which does not read what it overwrites: all_gather of 16 MiB took 1.32 times OpenMPI's time with
/// 512 bytes, and 1.03 times with 16 KiB.
const STRETCH: usize = 16 << 10;

/// One operation of two ranks. The places are those of chunks in this rank's input and output.
pub(super) struct Swap {
    pub(super) cut: Cut,
    /// What the peer gets, in the input.
    pub(super) give: usize,
    /// What the peer gives, in the output.
    pub(super) get: usize,
    /// What stays here: from where to where.
    pub(super) keep: (usize, usize),
}

impl Swap {
    /// The pattern for [`super::run::Runner::run`]. One window of each rank is used, that of parity 0 (fact X1).
    pub(super) fn turn(&self, segment: &Segment, turn: Turn, io: &mut Io<'_>) {
        match turn {
            Turn::Fill(0) => {
                let first = self.cut.range(0);
                // SAFETY: W2.
                let window = unsafe { segment.write(segment.index, Buffer::Window(0), first.clone()) };
                window.copy_from_slice(&io.input()[shifted(first, self.give)]);
            }
            Turn::Fill(_) => {}
            Turn::Take(piece) => self.step(segment, piece, io),
        }
    }

    /// Takes a piece, and leaves the next one in its place.
    fn step(&self, segment: &Segment, piece: usize, io: &mut Io<'_>) {
        let owner = (segment.index + 1 + piece) % 2;
        let (now, next) = (self.cut.range(piece), self.cut.behind(piece));
        let mut start = 0;
        while start < now.len() {
            // No piece is longer than the one before it.
            let part = |len: usize| start.min(len)..(start + STRETCH).min(len);
            let (takes, leaves) = (part(now.len()), part(next.len()));
            // SAFETY: X1.
            let window = unsafe { segment.read(owner, Buffer::Window(0), takes.clone()) };
            io.output()[shifted(takes.clone(), now.start + self.get)].copy_from_slice(window);
            // SAFETY: X1; the slice above is no longer used.
            let window = unsafe { segment.write(owner, Buffer::Window(0), leaves.clone()) };
            window.copy_from_slice(&io.input()[shifted(leaves, next.start + self.give)]);
            let kept = shifted(takes, now.start);
            io.keep_own(shifted(kept.clone(), self.keep.0), kept.start + self.keep.1);
            start += STRETCH;
        }
    }
}
