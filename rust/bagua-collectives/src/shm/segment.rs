//! The layout of the segment that the ranks of one host share.
//!
//! For each rank in turn: a control block, two slots, two windows. After them two sets of byte rings: one for the messages of
//! [`super::Shm`], one for the mesh of a group on several hosts, which the same ranks belong to ([`super::spare_links`]).
//!
//! Which rank may access which range when is the protocol of [`super::protocol`]; this file only computes offsets.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::memory::Arena;
use crate::sync::{AtomicU32, AtomicU64, buffer_len};
use crate::transport::shm::rings_len;

/// Two cache lines: the hardware fetches lines in pairs.
const LINE: usize = 128;
/// Bytes of a control block: the announcement and two fingerprints, each on lines of its own.
///
/// The announcement is the one line that peers read in every operation: the arrival word, the processor and, for each parity, three
/// words (digest, arena, offset). Peers read a fingerprint only where digests differ, so it stays in its writer's cache.
/// Where peers read the fingerprint in every operation, 1 KiB between two ranks took 2.3 us instead of 1.9, or 3.4 instead of 2.1, from
/// Python, by the run.
const CONTROL: usize = 3 * LINE;
/// Bytes of a slot. A message that fits is exchanged with a single synchronisation.
pub(super) const SLOT: usize = buffer_len(16 << 10);
/// Ranges of a window that different ranks access begin on different cache lines.
pub(super) const ALIGN: usize = 64;
/// Words of a fingerprint.
pub(super) const WORDS: usize = 8;

/// Bytes of a window. Measured: 256 KiB with two ranks. With four ranks on two cores 64 and 128 KiB are equal, and twice that
/// takes 1.2 times as long at 1 MiB.
const fn window_len(ranks: usize) -> usize {
    buffer_len(if ranks <= 2 { 256 << 10 } else { 128 << 10 })
}

const fn rank_len(ranks: usize) -> usize {
    CONTROL + 2 * SLOT + 2 * window_len(ranks)
}

/// Bytes of shared memory that one lane of `ranks` ranks on one host needs. The kernel allocates a page when it is first accessed.
pub const fn segment_len(ranks: usize) -> usize {
    ranks * rank_len(ranks) + 2 * rings_len(ranks)
}

/// One of the buffers in which a rank passes data to its peers.
#[derive(Clone, Copy)]
pub(super) enum Buffer {
    /// The slot for operations with this parity.
    Slot(usize),
    /// The window for chunks with this parity.
    Window(usize),
}

impl Buffer {
    /// The one of the other parity.
    pub(super) fn other(self) -> Buffer {
        match self {
            Buffer::Slot(parity) => Buffer::Slot(1 - parity),
            Buffer::Window(parity) => Buffer::Window(1 - parity),
        }
    }
}

/// The mapped segment, seen by one rank.
pub(super) struct Segment {
    arena: Arc<Arena>,
    /// This rank, on this host.
    pub(super) index: usize,
    /// Ranks on this host.
    pub(super) ranks: usize,
}

impl Segment {
    pub(super) fn new(arena: Arc<Arena>, index: usize, ranks: usize) -> Result<Segment> {
        if index >= ranks || arena.len() < segment_len(ranks) {
            return Err(Error::other(format!(
                "a shared segment of {} bytes for rank {index} of {ranks}, which needs {}",
                arena.len(),
                segment_len(ranks)
            )));
        }
        Ok(Segment { arena, index, ranks })
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Bytes of one window.
    pub(super) fn window(&self) -> usize {
        window_len(self.ranks)
    }

    /// The arrival word of a rank: its count of arrivals, and flags.
    pub(super) fn arrived(&self, rank: usize) -> &AtomicU32 {
        self.arena.word(rank * rank_len(self.ranks))
    }

    /// The processor of a rank, as [`super::placement`] writes it; on the line of its arrivals.
    pub(super) fn processor(&self, rank: usize) -> &AtomicU32 {
        self.arena.word(rank * rank_len(self.ranks) + 4)
    }

    /// A word of the fingerprint of a rank's operation with this parity.
    pub(super) fn fingerprint(&self, rank: usize, parity: usize, word: usize) -> &AtomicU64 {
        self.arena.long(rank * rank_len(self.ranks) + (1 + parity) * LINE + 8 * word)
    }

    /// The digest of the fingerprint of a rank's operation with this parity.
    pub(super) fn digest(&self, rank: usize, parity: usize) -> &AtomicU64 {
        self.announced(rank, parity, 0)
    }

    /// A word of a rank's offer of a tensor in an arena, for its operation with this parity.
    pub(super) fn offer(&self, rank: usize, parity: usize, word: usize) -> &AtomicU64 {
        self.announced(rank, parity, 1 + word)
    }

    /// One of the three words per parity that share a cache line with the arrival word.
    fn announced(&self, rank: usize, parity: usize, word: usize) -> &AtomicU64 {
        self.arena.long(rank * rank_len(self.ranks) + 8 * (1 + 3 * parity + word))
    }

    fn place(&self, rank: usize, buffer: Buffer, range: Range<usize>) -> Range<usize> {
        let (begin, len) = match buffer {
            Buffer::Slot(parity) => (CONTROL + parity * SLOT, SLOT),
            Buffer::Window(parity) => (CONTROL + 2 * SLOT + parity * self.window(), self.window()),
        };
        assert!(rank < self.ranks && range.start <= range.end && range.end <= len);
        let begin = begin + rank * rank_len(self.ranks);
        begin + range.start..begin + range.end
    }

    /// Bytes of a rank's buffer.
    ///
    /// # Safety
    /// No rank writes to the range before this rank next arrives, and the slice does not outlive that moment.
    pub(super) unsafe fn read(&self, rank: usize, buffer: Buffer, range: Range<usize>) -> &[u8] {
        // SAFETY: by this function's promise.
        unsafe { self.arena.slice(self.place(rank, buffer, range)) }
    }

    /// Bytes of a rank's buffer, to write.
    ///
    /// # Safety
    /// No other rank reads or writes the range before this rank next arrives, the slice does not outlive that moment, and this
    /// rank holds no other slice of the range.
    #[expect(clippy::mut_from_ref, reason = "exclusion is across processes, which only the protocol can promise")]
    pub(super) unsafe fn write(&self, rank: usize, buffer: Buffer, range: Range<usize>) -> &mut [u8] {
        // SAFETY: by this function's promise.
        unsafe { self.arena.slice_mut(self.place(rank, buffer, range)) }
    }

    /// The offset of the rings of [`super::Shm`]'s own streams.
    pub(super) fn own_rings(&self) -> usize {
        own_rings(self.ranks)
    }
}

fn own_rings(ranks: usize) -> usize {
    (ranks * rank_len(ranks)).next_multiple_of(LINE)
}

/// The offset of the second set of rings.
pub(super) fn spare_rings(ranks: usize) -> usize {
    own_rings(ranks) + rings_len(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_stays_within_a_megabyte_and_some_per_rank_beside_its_rings() {
        for ranks in 1..=64 {
            assert!(rank_len(ranks) <= (1 << 20) + (64 << 10));
            assert!(spare_rings(ranks) + rings_len(ranks) <= segment_len(ranks));
            assert_eq!(rank_len(ranks) % LINE, 0);
        }
    }

    #[test]
    #[cfg_attr(bagua_portable, ignore = "needs memory that processes share")]
    fn a_segment_that_is_too_short_is_refused() {
        let arena = Arc::new(Arena::create("bagua-test", segment_len(2)).unwrap());
        assert!(Segment::new(Arc::clone(&arena), 1, 2).is_ok());
        assert!(Segment::new(Arc::clone(&arena), 2, 2).is_err());
        assert!(Segment::new(arena, 0, 3).is_err());
    }
}
