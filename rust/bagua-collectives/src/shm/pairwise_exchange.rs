//! Pairwise exchange between two ranks: all_gather and all_to_all of shards that do not fit a slot.
//!
//! A rank reads a block of the window with the peer's chunk, and then overwrites the block with its own next chunk. So
//! each cache line of the window crosses between the two cores once per chunk. With two windows, each read by one rank
//! and rewritten by the other, a line crosses twice: once to be read, and once to be rewritten.
//!
//! Measured on two cores of an EPYC (Zen 4): time through two windows divided by the time of this exchange, by the size
//! of all shards together. The first figure of each pair is for cores between which a line takes 100 ns, the second for
//! 500 ns.
//!
//! | | 64 and 256 KiB | 512 KiB | 1 MiB | 4 MiB | 16 MiB |
//! |---|---|---|---|---|---|
//! | all_gather | 1.0 / 0.95 | 1.1 / 5.3 | 1.3 / 6.4 | 2.2 / 6.6 | 1.2 / 3.2 |
//! | all_to_all | 0.95 / 0.95 | 1.3 / 4.5 | 1.6 / 4.9 | 1.6 / 5.6 | 1.2 / 2.5 |
//!
//! Tried and rejected: copies with software prefetch of source and destination. They took 1.2 to 1.4 times as long as
//! `memcpy` in all_gather from 512 KiB to 16 MiB, and 0.9 to 1.2 times as long in all_to_all.

use std::ops::Range;

use super::chunks::{Cut, shifted};
use super::protocol::Phase;
use super::segment_layout::{Buffer, Segment};
use crate::HostIo;
use crate::sync::buffer_len;

/// Maximum size of a chunk in bytes. 256 KiB is slower at 1 MiB, and equal from 4 MiB on.
pub(super) const CHUNK: usize = buffer_len(128 << 10);
/// Number of bytes read before they are overwritten, which stay in the first-level cache. 8 and 16 KiB are 3 % slower.
const BLOCK: usize = 4 << 10;

/// A pairwise exchange. Offsets are in this rank's input and output.
pub(super) struct Pairwise {
    pub(super) cut: Cut,
    /// Offset in the input of the shard for the peer.
    pub(super) send: usize,
    /// Offset in the output of the peer's shard.
    pub(super) recv: usize,
    /// Offsets in the input and the output of the shard that this rank keeps.
    pub(super) keep: (usize, usize),
}

impl Pairwise {
    /// Implements the phases of [`super::protocol::Protocol::run`]. Uses each rank's window of parity 0 (X1).
    pub(super) fn phase(&self, segment: &Segment, phase: Phase, io: &mut HostIo<'_>) {
        match phase {
            Phase::Fill(0) => {
                let first = self.cut.range(0);
                for block in blocks(first.len()) {
                    // SAFETY: no other rank accesses the window while it is filled (`protocol`, W2).
                    let window = unsafe { segment.write(segment.index, Buffer::Window(0), block.clone()) };
                    self.copy_in(window, shifted(block, first.start), io);
                }
            }
            Phase::Fill(_) => {}
            Phase::Take(chunk) => self.exchange(segment, chunk, io),
        }
    }

    /// Reads the peer's chunk, and overwrites it with the next chunk for the peer.
    fn exchange(&self, segment: &Segment, chunk: usize, io: &mut HostIo<'_>) {
        let owner = (segment.index + 1 + chunk) % 2;
        let (received, sent) = (self.cut.range(chunk), self.cut.behind(chunk));
        // A chunk is never longer than the one before it.
        for block in blocks(received.len()) {
            // SAFETY: only this rank accesses this window now (`protocol`, X1).
            let window = unsafe { segment.read(owner, Buffer::Window(0), block.clone()) };
            io.output()[shifted(block.clone(), received.start + self.recv)].copy_from_slice(window);
            let block = block.start.min(sent.len())..block.end.min(sent.len());
            // SAFETY: rule X1; the slice above is no longer used.
            let window = unsafe { segment.write(owner, Buffer::Window(0), block.clone()) };
            self.copy_in(window, shifted(block, sent.start), io);
        }
    }

    /// Copies a range of the peer's shard to a window, and that range of this rank's own shard to the output.
    fn copy_in(&self, window: &mut [u8], range: Range<usize>, io: &mut HostIo<'_>) {
        window.copy_from_slice(&io.input()[shifted(range.clone(), self.send)]);
        io.keep_own(shifted(range.clone(), self.keep.0), range.start + self.keep.1);
    }
}

/// Returns the ranges of a chunk of `len` bytes, which are exchanged one after the other.
fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(len))
}
