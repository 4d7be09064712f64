//! The division of messages into chunks: the header of a chunk, and its length.
//!
//! With one stream per peer a message is one chunk, whose header is the header of the message ([`frame`]). With several streams, every
//! chunk carries the header of its message, so that it can be checked without waiting for another stream, and its position:
//!
//! | bytes | field | |
//! |---|---|---|
//! | 0..80 | header of the message | `body` is the length of the whole message |
//! | 80..88 | message | number of the message among all messages of the sender to this peer |
//! | 88..96 | offset | of the chunk in the message |
//! | 96..104 | length | bytes that follow |

use crate::transport::frame::{self, BadFrame, Header};

/// Bytes of the longest header.
pub const LEN: usize = frame::LEN + 24;

/// Bytes of a header on this many streams to a peer.
pub(super) const fn head_len(streams: usize) -> usize {
    if streams > 1 { LEN } else { frame::LEN }
}

/// The header of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Header of the message.
    pub header: Header,
    /// Number of the message.
    pub message: u64,
    /// Offset of the chunk in the message.
    pub offset: u64,
    /// Bytes that follow.
    pub length: u64,
}

impl Chunk {
    /// The bytes of the header; only the first `head_len` of them are sent.
    pub fn encode(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        out[..frame::LEN].copy_from_slice(&self.header.encode());
        for (slot, value) in out[frame::LEN..].chunks_exact_mut(8).zip([self.message, self.offset, self.length]) {
            slot.copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    /// Parses a header. A header without position means a whole message of unknown number.
    pub fn decode(bytes: &[u8]) -> Result<Chunk, BadFrame> {
        let (head, position) = bytes.split_first_chunk().expect("a header has at least the length of a message's");
        let header = Header::decode(head)?;
        let word = |at: usize| position.get(8 * at..).and_then(<[u8]>::first_chunk).copied().map(u64::from_le_bytes);
        Ok(match (word(0), word(1), word(2)) {
            (Some(message), Some(offset), Some(length)) => Chunk { header, message, offset, length },
            _ => Chunk { header, message: u64::MAX, offset: 0, length: header.body },
        })
    }

    /// True when the chunk lies within its message, and is not empty unless the message is.
    pub fn fits(&self) -> bool {
        let Header { body, .. } = self.header;
        self.offset.checked_add(self.length).is_some_and(|end| end <= body) && (self.length > 0 || body == 0)
    }
}

/// The shortest chunk: below this length a header and a system call cost as much as the bytes.
pub(super) const SHORTEST: usize = 32 << 10;

/// The longest chunk when there are several streams.
pub(super) const LONGEST: usize = 256 << 10;

/// The most bytes that a slow stream delays with one chunk: the chunk, unsent bytes in its socket, and bytes in the network.
const HELD: usize = 256 << 10;

/// Bytes that the fastest stream must have carried before other streams are considered slow.
const SIGNIFICANT: u64 = 1 << 20;

/// The speed of a stream, by the bytes carried in this run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Bytes that the stream has carried.
    pub own: u64,
    /// Bytes that the fastest stream has carried.
    pub best: u64,
}

impl Pace {
    /// The bytes that the stream carries while the fastest one carries `bytes`.
    fn share(self, bytes: usize) -> usize {
        if self.best < SIGNIFICANT {
            return bytes;
        }
        usize::try_from(bytes as u128 * u128::from(self.own) / u128::from(self.best)).unwrap_or(bytes)
    }

    /// Less than a quarter of the fastest stream's rate: congestion control alone makes streams on one link differ by more than a factor of 2.
    fn is_slow(self) -> bool {
        self.best >= SIGNIFICANT && self.own < self.best / 4
    }
}

/// Length of the next chunk of a message with `left` unsent bytes, which `after` bytes of other messages follow. Guided self-scheduling
/// (Polychronopoulos and Kuck, 1987): chunks become shorter towards the end of all messages, and a slow stream gets short chunks from the
/// start, so that the wait for the last chunk is short. `None` for a slow stream that would still be sending the chunk after the other
/// streams have sent the rest.
pub(super) fn next_len(left: usize, after: usize, streams: usize, pace: Pace) -> Option<usize> {
    if streams == 1 {
        return Some(left);
    }
    let rest = left.saturating_add(after);
    if pace.is_slow() && pace.share(rest) < HELD {
        return None;
    }
    if left <= SHORTEST + SHORTEST / 2 {
        return Some(left);
    }
    Some((rest / (2 * streams)).clamp(SHORTEST, pace.share(LONGEST).max(SHORTEST)).min(left))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, Fingerprint, Kind};

    const FIRST: Pace = Pace { own: 0, best: 0 };

    fn example() -> Chunk {
        let fingerprint = Fingerprint { epoch: 1, lane: 2, seq: 4, ..Fingerprint::new(Kind::Send, DType::U8, 100) };
        let header = Header { fingerprint, part: 5, body: 100 };
        Chunk { header, message: 0x0102_0304_0506_0708, offset: 60, length: 40 }
    }

    #[test]
    fn a_header_is_parsed_unchanged_and_its_position_has_golden_bytes() {
        let bytes = example().encode();
        assert_eq!(Chunk::decode(&bytes), Ok(example()));
        assert_eq!(
            bytes[80..],
            [8, 7, 6, 5, 4, 3, 2, 1, 60, 0, 0, 0, 0, 0, 0, 0, 40, 0, 0, 0, 0, 0, 0, 0],
            "the wire format changed"
        );
    }

    #[test]
    fn a_short_header_describes_the_whole_message() {
        let bytes = example().encode();
        let whole = Chunk { message: u64::MAX, offset: 0, length: 100, ..example() };
        assert_eq!(Chunk::decode(&bytes[..head_len(1)]), Ok(whole));
    }

    #[test]
    fn a_chunk_beyond_its_message_or_without_bytes_does_not_fit() {
        assert!(example().fits());
        for (offset, length) in [(61, 40), (u64::MAX, 2), (100, 0), (0, 0), (0, 101)] {
            assert!(!Chunk { offset, length, ..example() }.fits(), "{offset} and {length}");
        }
    }

    #[test]
    fn a_message_that_other_messages_follow_has_long_chunks_to_its_end() {
        assert_eq!(next_len(LONGEST, 0, 2, FIRST), Some(LONGEST / 4));
        assert_eq!(next_len(LONGEST, 3 * LONGEST, 2, FIRST), Some(LONGEST));
        assert_eq!(next_len(LONGEST / 2, usize::MAX, 2, FIRST), Some(LONGEST / 2));
    }

    #[test]
    fn a_slow_stream_gets_short_chunks_and_none_at_the_end() {
        let slow = Pace { own: SIGNIFICANT / 8, best: SIGNIFICANT };
        let best = Pace { own: SIGNIFICANT, ..slow };
        assert_eq!(next_len(LONGEST, 64 << 20, 2, slow), Some(LONGEST / 8));
        assert_eq!(next_len(LONGEST, 0, 2, slow), None);
        assert_eq!(next_len(0, 0, 2, slow), None);
        for left in [0, 1, LONGEST] {
            assert!(next_len(left, 0, 2, best).is_some());
            assert_eq!(next_len(left, 0, 1, slow), Some(left), "there is no other stream");
        }
        let early = Pace { own: 0, best: SIGNIFICANT - 1 };
        assert_eq!(next_len(LONGEST, 64 << 20, 2, early), Some(LONGEST), "too few bytes to compare streams");
    }

    #[test]
    fn chunks_cover_a_message_and_the_last_ones_are_short() {
        for total in [0, 1, 40_000, 1 << 20, (64 << 20) + 1] {
            for streams in [1, 2, 4] {
                let (mut left, mut last) = (total, usize::MAX);
                while left > 0 {
                    let len = next_len(left, 0, streams, FIRST).unwrap();
                    assert!(len > 0 && len <= left);
                    assert!(streams == 1 || len <= LONGEST);
                    left -= len;
                    last = len;
                }
                assert!(streams == 1 || total == 0 || last <= 2 * SHORTEST);
            }
        }
    }
}
