//! The fingerprint that a rank publishes of an operation before it arrives, for its peers to compare with theirs.

use std::sync::atomic::Ordering;

use super::segment::{Segment, WORDS};
use crate::types::{DType, Fingerprint, Kind, ReduceOp, Shape};

/// One call of a method of [`super::Shm`]: the fingerprint of the operation, and which of its calls this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Announcement {
    pub(super) fingerprint: Fingerprint,
    /// The method. Differs from the fingerprint's kind in a call by `hier`.
    pub(super) verb: Kind,
    /// Bytes that the method was given, counted in the same way on every rank.
    pub(super) bytes: u64,
}

/// For errors: a published operation that no rank of this version can have written.
pub(super) const NONSENSE: &str = "something that makes no sense";

/// Means "none" where a code is expected.
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
            // Those of messages have 32 bits, and travel by the mesh.
            tag: high(6) >> 16,
            codec: byte(6, 2),
            device: byte(6, 3),
            flags: high(6) as u16,
        };
        Some(Announcement { fingerprint, verb: Kind::from_code(byte(6, 1))?, bytes: words[7] })
    }

    /// Writes it to this rank's control block and returns its digest, which peers compare first. Peers read both after this rank's next
    /// arrival, which orders the accesses.
    pub(super) fn publish(&self, segment: &Segment, parity: usize) -> u64 {
        let words = self.words();
        for (at, word) in words.into_iter().enumerate() {
            segment.fingerprint(segment.index, parity, at).store(word, Ordering::Relaxed);
        }
        digest(&words)
    }

    /// What `peer` published of its last operation with this parity, which it has begun; `None` for [`NONSENSE`].
    pub(super) fn of(segment: &Segment, peer: usize, parity: usize) -> Option<Announcement> {
        let word = |at| segment.fingerprint(peer, parity, at).load(Ordering::Relaxed);
        Announcement::from_words(std::array::from_fn(word))
    }

    /// Describes the operation of `peer`, whose digest differs from this one's.
    #[cold]
    pub(super) fn difference(&self, segment: &Segment, peer: usize, parity: usize) -> String {
        match Announcement::of(segment, peer, parity) {
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

/// A fingerprint's digest of 64 bits.
///
/// Every step is a bijection of the state and of the word, so two fingerprints that differ in one word never have the same digest;
/// two that differ in several have it with a probability of about 2^-64. (It is no defence against forgery: who maps the segment
/// can write what they like.)
fn digest(words: &[u64; WORDS]) -> u64 {
    words.iter().fold(0, |state, word| {
        // Odd numbers; two rounds, because one leaves a difference in the highest bits where it was.
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
        let words = [7 | 1 << 32, 0x0203, 1234, 256, 256, 0, 1 | 0x0100, 1024];
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
}
