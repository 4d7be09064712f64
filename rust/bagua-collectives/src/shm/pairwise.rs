//! Pairwise exchange between two ranks: all_gather and all_to_all of shards that do not fit a slot.
//!
//! A rank reads a block of the window that holds the peer's chunk and then overwrites the same block with its own next chunk. Each
//! cache line of the window thus crosses between the two cores once per chunk; in two windows, each read by one rank and rewritten
//! by the other, it crosses once to be read and once more to be rewritten.
//!
//! Measured on two cores of an EPYC (Zen 4), time through two windows divided by time of this exchange, by the size of all shards
//! together, where a line crosses between the cores in 100 ns / in 500 ns:
//!
//! | | 64 and 256 KiB | 512 KiB | 1 MiB | 4 MiB | 16 MiB |
//! |---|---|---|---|---|---|
//! | all_gather | 1.0 / 0.95 | 1.1 / 5.3 | 1.3 / 6.4 | 2.2 / 6.6 | 1.2 / 3.2 |
//! | all_to_all | 0.95 / 0.95 | 1.3 / 4.5 | 1.6 / 4.9 | 1.6 / 5.6 | 1.2 / 2.5 |
//!
//! Not here: copies with software prefetch of source and destination. They took 1.2 to 1.4 times as long as `memcpy` in all_gather from
//! 512 KiB to 16 MiB and 0.9 to 1.2 times as long in all_to_all.

use std::ops::Range;

use super::chunks::{Cut, shifted};
use super::protocol::Phase;
use super::segment::{Buffer, Segment};
use crate::HostIo;
use crate::sync::buffer_len;

/// Bytes of a chunk, at most. Twice that is slower at 1 MiB, and equal from 4 MiB on.
pub(super) const CHUNK: usize = buffer_len(128 << 10);
/// Bytes that are read before they are overwritten; they stay in the first-level cache. 8 and 16 KiB are 3 % slower.
const BLOCK: usize = 4 << 10;

/// One operation of two ranks. Offsets are in this rank's input and output.
pub(super) struct Pairwise {
    /// The chunks of a shard.
    pub(super) cut: Cut,
    /// Offset of the shard for the peer, in the input.
    pub(super) send: usize,
    /// Offset of the peer's shard, in the output.
    pub(super) recv: usize,
    /// Offsets of the shard that this rank keeps, in the input and in the output.
    pub(super) keep: (usize, usize),
}

impl Pairwise {
    /// What [`super::protocol::Protocol::run`] calls. Uses one window of each rank, that of parity 0 (X1).
    pub(super) fn phase(&self, segment: &Segment, phase: Phase, io: &mut HostIo<'_>) {
        match phase {
            Phase::Fill(0) => {
                let first = self.cut.range(0);
                for block in blocks(first.len()) {
                    // SAFETY: W2.
                    let window = unsafe { segment.write(segment.index, Buffer::Window(0), block.clone()) };
                    self.copy_in(window, shifted(block, first.start), io);
                }
            }
            Phase::Fill(_) => {}
            Phase::Take(chunk) => self.exchange(segment, chunk, io),
        }
    }

    /// Reads the peer's chunk and writes the next chunk for the peer over it.
    fn exchange(&self, segment: &Segment, chunk: usize, io: &mut HostIo<'_>) {
        let owner = (segment.index + 1 + chunk) % 2;
        let (received, sent) = (self.cut.range(chunk), self.cut.behind(chunk));
        // No chunk is longer than the one before it.
        for block in blocks(received.len()) {
            // SAFETY: X1.
            let window = unsafe { segment.read(owner, Buffer::Window(0), block.clone()) };
            io.output()[shifted(block.clone(), received.start + self.recv)].copy_from_slice(window);
            let block = block.start.min(sent.len())..block.end.min(sent.len());
            // SAFETY: X1; the slice above is no longer used.
            let window = unsafe { segment.write(owner, Buffer::Window(0), block.clone()) };
            self.copy_in(window, shifted(block, sent.start), io);
        }
    }

    /// Copies a range of the shard for the peer to a window, and the same range of the shard that this rank keeps to the output.
    fn copy_in(&self, window: &mut [u8], range: Range<usize>, io: &mut HostIo<'_>) {
        window.copy_from_slice(&io.input()[shifted(range.clone(), self.send)]);
        io.keep_own(shifted(range.clone(), self.keep.0), range.start + self.keep.1);
    }
}

/// The ranges of a chunk of `len` bytes that are exchanged one after the other.
fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(len))
}
