//! Lengths of the chunks in which a message is sent over several streams.

/// Shortest chunk. In shorter ones, a header and a system call would cost as much as the bytes.
pub(super) const SHORTEST: usize = 32 << 10;

/// Longest message that is sent as one chunk, however many streams there are.
const UNDIVIDED: usize = SHORTEST + SHORTEST / 2;

pub(super) const LONGEST: usize = 256 << 10;

/// Bytes that a slow stream can delay with one chunk: the chunk, unsent bytes in the socket, and bytes in the network.
const HELD: usize = 256 << 10;

/// Bytes that the fastest stream must have carried before another stream can count as slow.
const SIGNIFICANT: u64 = 1 << 20;

/// Speed of a stream, measured by the bytes carried in this run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Bytes that this stream has carried.
    pub own: u64,
    /// Bytes that the fastest stream has carried.
    pub best: u64,
}

impl Pace {
    /// Returns the bytes that this stream carries while the fastest one carries `bytes`.
    fn share(self, bytes: usize) -> usize {
        if self.best < SIGNIFICANT {
            return bytes;
        }
        usize::try_from(bytes as u128 * u128::from(self.own) / u128::from(self.best)).unwrap_or(bytes)
    }

    /// True below a quarter of the fastest stream's rate. Congestion control alone makes the rates of streams on one
    /// link differ by more than a factor of 2.
    fn is_slow(self) -> bool {
        self.best >= SIGNIFICANT && self.own < self.best / 4
    }
}

/// True if a message of this length is divided among several streams.
pub(super) fn is_divided(len: usize) -> bool {
    len > UNDIVIDED
}

/// True if two of `ranks` ranks should open several streams for a message of `len` bytes. Recursive halving sends long
/// messages to many peers. Because `len` must exceed 1 KiB times `ranks`, only few of these peers get more than one
/// stream, so a rank has O(log n) descriptors.
pub(super) fn wants_several(len: usize, ranks: usize) -> bool {
    is_divided(len) && len > ranks << 10
}

/// Returns the length of the next chunk of a message with `left` unsent bytes, which `after` bytes of other messages
/// follow. Returns `None` for a slow stream that would still be sending the chunk after the other streams have sent the
/// rest.
///
/// This is guided self-scheduling (Polychronopoulos and Kuck, 1987): chunks become shorter towards the end of all
/// messages, and a slow stream gets short chunks from the start, so that the wait for the last chunk is short.
pub(super) fn next_len(left: usize, after: usize, streams: usize, pace: Pace) -> Option<usize> {
    if streams == 1 {
        return Some(left);
    }
    let rest = left.saturating_add(after);
    if pace.is_slow() && pace.share(rest) < HELD {
        return None;
    }
    if !is_divided(left) {
        return Some(left);
    }
    Some((rest / (2 * streams)).clamp(SHORTEST, pace.share(LONGEST).max(SHORTEST)).min(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_ranks_there_are_the_longer_is_the_message_that_is_worth_more_than_one_stream() {
        for (ranks, longest) in [(2, 48 << 10), (48, 48 << 10), (64, 64 << 10), (1024, 1 << 20)] {
            assert!(!wants_several(longest, ranks) && wants_several(longest + 1, ranks), "{ranks} ranks");
        }
    }

    const FIRST: Pace = Pace { own: 0, best: 0 };

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
