//! The layout of the segment that the ranks of one host share, and of the fingerprint that a rank publishes in it
//! before it arrives, so that its peers can compare it with theirs.
//!
//! ```text
//! control blocks of all ranks   (every rank reads all of them, so they share pages)
//! rank 0: 2 slots, 2 windows
//! rank 1: 2 slots, 2 windows
//! ...
//! byte rings for the messages of Shm
//! byte rings for the mesh of a group on several hosts (see `spare_links`)
//! ```
//!
//! This file computes offsets and words. [`super::protocol`] defines which rank may access which range when.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::memory::Arena;
use crate::sync::{AtomicU32, AtomicU64, buffer_len};
use crate::transport::shm::rings_len;
use crate::types::{DType, Fingerprint, Kind, ReduceOp, Shape};

/// Size of two cache lines, because the hardware fetches lines in pairs.
const LINE: usize = 128;
/// Size in bytes of a control block: the announcement and two fingerprints, each on its own lines.
///
/// The announcement is the only line that peers read in every operation. It holds the arrival word, the processor and,
/// for each parity, three words (digest, arenas, offset). Peers read a fingerprint only if digests differ, so it stays
/// in its writer's cache. When peers read it in every operation, 1 KiB between two ranks took 2.3 us instead of 1.9, or
/// 3.4 instead of 2.1 from Python, depending on the run.
const CONTROL: usize = 3 * LINE;
/// Size of a slot in bytes. A message that fits into a slot needs a single synchronisation.
pub(super) const SLOT: usize = buffer_len(16 << 10);
/// Alignment of the ranges of a window that different ranks access, so that they do not share cache lines.
pub(super) const ALIGN: usize = 64;
const WORDS: usize = 9;

/// Returns the size of a window in bytes. By measurement, 256 KiB is best for two ranks. With four ranks on two cores,
/// 64 and 128 KiB are equally fast, and 256 KiB takes 1.2 times as long at 1 MiB.
const fn window_len(ranks: usize) -> usize {
    buffer_len(if ranks <= 2 { 256 << 10 } else { 128 << 10 })
}

const fn buffers_len(ranks: usize) -> usize {
    2 * SLOT + 2 * window_len(ranks)
}

/// Returns the bytes of shared memory that a lane of `ranks` ranks on one host needs. The kernel allocates a page only
/// when it is first accessed.
pub const fn segment_len(ranks: usize) -> usize {
    ranks * (CONTROL + buffers_len(ranks)) + 2 * rings_len(ranks)
}

/// A buffer in which a rank passes data to its peers.
#[derive(Clone, Copy)]
pub(super) enum Buffer {
    /// Slot for operations with this parity.
    Slot(usize),
    /// Window for chunks with this parity.
    Window(usize),
}

impl Buffer {
    pub(super) fn other(self) -> Buffer {
        match self {
            Buffer::Slot(parity) => Buffer::Slot(1 - parity),
            Buffer::Window(parity) => Buffer::Window(1 - parity),
        }
    }
}

/// The mapped segment, as seen by one rank.
pub(super) struct Segment {
    arena: Arc<Arena>,
    pub(super) index: usize,
    pub(super) ranks: usize,
}

impl Segment {
    pub(super) fn new(arena: Arc<Arena>, index: usize, ranks: usize) -> Result<Segment> {
        if index >= ranks || arena.len() < segment_len(ranks) {
            return Err(Error::other(format!(
                "the shared segment of rank {index} of {ranks} has {} bytes, but needs {}",
                arena.len(),
                segment_len(ranks)
            )));
        }
        Ok(Segment { arena, index, ranks })
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(super) fn window(&self) -> usize {
        window_len(self.ranks)
    }

    /// Returns the arrival word of a rank: its count of arrivals, and flags.
    pub(super) fn arrived(&self, rank: usize) -> &AtomicU32 {
        self.arena.word(rank * CONTROL)
    }

    /// Returns the processor of a rank, as written by [`super::cpu_placement`]. On the same cache line as the arrival
    /// word.
    pub(super) fn processor(&self, rank: usize) -> &AtomicU32 {
        self.arena.word(rank * CONTROL + 4)
    }

    fn fingerprint(&self, rank: usize, parity: usize, word: usize) -> &AtomicU64 {
        self.arena.long(rank * CONTROL + (1 + parity) * LINE + 8 * word)
    }

    pub(super) fn digest(&self, rank: usize, parity: usize) -> &AtomicU64 {
        self.announced(rank, parity, 0)
    }

    pub(super) fn offer(&self, rank: usize, parity: usize, word: usize) -> &AtomicU64 {
        self.announced(rank, parity, 1 + word)
    }

    /// Returns a word that a rank announces: its digest (0) or its offer (1 and 2), for even or odd operations
    /// (`parity`). All of them are on the cache line of the arrival word.
    fn announced(&self, rank: usize, parity: usize, word: usize) -> &AtomicU64 {
        self.arena.long(rank * CONTROL + 8 * (1 + 3 * parity + word))
    }

    fn place(&self, rank: usize, buffer: Buffer, range: Range<usize>) -> Range<usize> {
        let (begin, len) = match buffer {
            Buffer::Slot(parity) => (parity * SLOT, SLOT),
            Buffer::Window(parity) => (2 * SLOT + parity * self.window(), self.window()),
        };
        assert!(rank < self.ranks && range.start <= range.end && range.end <= len);
        let begin = self.ranks * CONTROL + rank * buffers_len(self.ranks) + begin;
        begin + range.start..begin + range.end
    }

    /// Returns a range of a rank's buffer.
    ///
    /// # Safety
    /// No rank may write to the range before this rank's next arrival, and the slice must not outlive that moment.
    pub(super) unsafe fn read(&self, rank: usize, buffer: Buffer, range: Range<usize>) -> &[u8] {
        // SAFETY: by this function's promise.
        unsafe { self.arena.slice(self.place(rank, buffer, range)) }
    }

    /// Returns a range of a rank's buffer for writing.
    ///
    /// # Safety
    /// No other rank may read or write the range before this rank's next arrival. The slice must not outlive that
    /// moment, and this rank must hold no other slice of the range.
    #[expect(clippy::mut_from_ref, reason = "exclusion is across processes, which only the protocol can promise")]
    pub(super) unsafe fn write(&self, rank: usize, buffer: Buffer, range: Range<usize>) -> &mut [u8] {
        // SAFETY: by this function's promise.
        unsafe { self.arena.slice_mut(self.place(rank, buffer, range)) }
    }

    pub(super) fn own_rings(&self) -> usize {
        own_rings(self.ranks)
    }
}

fn own_rings(ranks: usize) -> usize {
    (ranks * (CONTROL + buffers_len(ranks))).next_multiple_of(LINE)
}

pub(super) fn spare_rings(ranks: usize) -> usize {
    own_rings(ranks) + rings_len(ranks)
}

/// A call of a method of [`super::Shm`] as published to the peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Announcement {
    pub(super) fingerprint: Fingerprint,
    /// Method that was called. Differs from the fingerprint's kind if `hier` made the call.
    pub(super) verb: Kind,
    /// Number of bytes that the method was given, counted in the same way on every rank.
    pub(super) bytes: u64,
}

/// Error text for a published operation that no rank of this version can have written.
pub(super) const NONSENSE: &str = "something unreadable";

/// Word for an option that is not set, in place of its code.
const NONE: u64 = 0xff;

impl Announcement {
    fn words(&self) -> [u64; WORDS] {
        let it = &self.fingerprint;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        [
            pair(it.epoch, it.lane),
            it.kind as u64
                | (it.dtype as u64) << 8
                | it.op.map_or(NONE, |op| op as u64) << 16
                | u64::from(it.root.is_some()) << 24
                | u64::from(it.root.unwrap_or(0)) << 32,
            it.seq,
            it.count,
            pair(it.shape.dims[0], it.shape.dims[1]),
            pair(it.shape.dims[2], it.shape.dims[3]),
            u64::from(it.shape.ndim)
                | (self.verb as u64) << 8
                | u64::from(it.codec) << 16
                | u64::from(it.device) << 24
                | u64::from(it.flags) << 32
                | u64::from(it.tag) << 48,
            self.bytes,
            u64::from(it.step),
        ]
    }

    fn from_words(words: [u64; WORDS]) -> Option<Announcement> {
        let byte = |word: usize, at: u32| (words[word] >> (8 * at)) as u8;
        let low = |word: usize| words[word] as u32;
        let high = |word: usize| (words[word] >> 32) as u32;
        let op = match byte(1, 2) {
            0xff => None,
            code => Some(ReduceOp::from_code(code)?),
        };
        let fingerprint = Fingerprint {
            epoch: low(0),
            lane: high(0),
            kind: Kind::from_code(byte(1, 0))?,
            seq: words[2],
            dtype: DType::from_code(byte(1, 1))?,
            op,
            root: (byte(1, 3) != 0).then(|| high(1)),
            count: words[3],
            shape: Shape { ndim: byte(6, 0), dims: [low(4), high(4), low(5), high(5)] },
            // Tags of messages have 32 bits, but they go through the mesh.
            tag: high(6) >> 16,
            codec: byte(6, 2),
            device: byte(6, 3),
            flags: high(6) as u16,
            step: low(8),
        };
        Some(Announcement { fingerprint, verb: Kind::from_code(byte(6, 1))?, bytes: words[7] })
    }

    /// Writes the announcement to this rank's control block and returns its digest, which peers compare first. Peers
    /// read both after this rank's next arrival, which orders the accesses.
    pub(super) fn publish(&self, segment: &Segment, parity: usize) -> u64 {
        let words = self.words();
        for (at, word) in words.into_iter().enumerate() {
            segment.fingerprint(segment.index, parity, at).store(word, Ordering::Relaxed);
        }
        digest(&words)
    }

    /// Reads what `peer` published for its last operation with this parity, which it has begun. Returns `None` if that
    /// makes no sense.
    pub(super) fn read_from(segment: &Segment, peer: usize, parity: usize) -> Option<Announcement> {
        let word = |at| segment.fingerprint(peer, parity, at).load(Ordering::Relaxed);
        Announcement::from_words(std::array::from_fn(word))
    }

    /// Describes the operation of `peer`, whose digest differs from this rank's.
    #[cold]
    pub(super) fn difference(&self, segment: &Segment, peer: usize, parity: usize) -> String {
        match Announcement::read_from(segment, peer, parity) {
            None => NONSENSE.to_owned(),
            Some(announcement) if announcement.fingerprint != self.fingerprint => announcement.fingerprint.to_string(),
            Some(announcement) => format!(
                "{}, in it {} of {} bytes",
                announcement.fingerprint,
                announcement.verb.name(),
                announcement.bytes
            ),
        }
    }
}

/// Returns a fingerprint's digest of 64 bits.
///
/// Every step is a bijection both of the state and of the word. So two fingerprints that differ in one word never have
/// the same digest, and two that differ in several words have the same one with a probability of about 2^-64. This does
/// not protect against forgery: any process that maps the segment can write anything.
fn digest(words: &[u64; WORDS]) -> u64 {
    words.iter().fold(0, |state, word| {
        // Odd constants. Two rounds, because a single round would leave a difference in the highest bits in place.
        let first = (state ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let second = (first ^ first >> 32).wrapping_mul(0x94d0_49bb_1331_11eb);
        second ^ second >> 29
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_survives_shared_memory() {
        let plain = Announcement {
            fingerprint: Fingerprint {
                epoch: 0xfeed_beef,
                lane: 7,
                kind: Kind::Reduce,
                seq: u64::MAX - 1,
                dtype: DType::I64,
                op: Some(ReduceOp::Avg),
                root: Some(u32::MAX),
                count: 3 << 40,
                shape: Shape { ndim: 255, dims: [1, 2, 3, u32::MAX] },
                tag: 0,
                codec: 255,
                device: 254,
                flags: u16::MAX,
                step: u32::MAX,
            },
            verb: Kind::Broadcast,
            bytes: 1 << 50,
        };
        let bare = Announcement { fingerprint: Fingerprint { op: None, root: None, ..plain.fingerprint }, ..plain };
        let other_root = Announcement { fingerprint: Fingerprint { root: Some(0), ..bare.fingerprint }, ..plain };
        for announcement in [plain, bare, other_root] {
            assert_eq!(Announcement::from_words(announcement.words()), Some(announcement));
        }
        assert_ne!(bare.words(), other_root.words());
        assert_eq!(Announcement::from_words([0; WORDS]), None);
    }

    #[test]
    fn a_fingerprint_with_any_one_or_two_bits_changed_has_another_digest() {
        let words = [7 | 1 << 32, 0x0203, 1234, 256, 256, 0, 1 | 0x0100, 1024, 8];
        let mut seen = std::collections::HashSet::from([digest(&words)]);
        for one in 0..64 * WORDS {
            let mut once = words;
            once[one / 64] ^= 1 << (one % 64);
            assert!(seen.insert(digest(&once)), "bit {one}");
            for two in 0..one {
                let mut twice = once;
                twice[two / 64] ^= 1 << (two % 64);
                assert!(seen.insert(digest(&twice)), "bits {one} and {two}");
            }
        }
    }

    #[test]
    fn a_segment_stays_within_a_megabyte_and_some_per_rank_beside_its_rings() {
        for ranks in 1..=64 {
            assert!(CONTROL + buffers_len(ranks) <= (1 << 20) + (64 << 10));
            assert!(spare_rings(ranks) + rings_len(ranks) <= segment_len(ranks));
            assert_eq!((CONTROL % LINE, buffers_len(ranks) % LINE), (0, 0));
        }
    }

    #[test]
    fn a_segment_that_is_too_short_is_refused() {
        let arena = Arc::new(Arena::create("bagua-test", segment_len(2)).unwrap());
        assert!(Segment::new(Arc::clone(&arena), 1, 2).is_ok());
        assert!(Segment::new(Arc::clone(&arena), 2, 2).is_err());
        assert!(Segment::new(arena, 0, 3).is_err());
    }
}
