//! Arithmetic on elements: which rank reduces which elements, and in which pieces. Nothing overflows as long as the
//! number of elements fits a `usize`.

use std::ops::Range;

/// Returns rank `rank`'s shard of `count` elements. Shards are as even as possible: the first ranks have one element
/// more if the division leaves a remainder.
pub fn shard(count: usize, ranks: usize, rank: usize) -> Range<usize> {
    let (each, rest) = (count / ranks, count % ranks);
    let start = rank * each + rank.min(rest);
    start..start + each + usize::from(rank < rest)
}

/// A run of elements, cut into pieces of nearly equal length up to a limit. Ranks whose runs differ by an element use
/// the pieces of the longest run, so that all take the same number of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Number of pieces. At least one, so that the headers of an empty tensor are exchanged too.
    pub steps: usize,
    /// Number of elements in each piece but the last.
    pub each: usize,
}

impl Pieces {
    /// Cuts `longest` elements into pieces of at most `limit`.
    pub fn new(longest: usize, limit: usize) -> Pieces {
        let steps = longest.div_ceil(limit.max(1)).max(1);
        Pieces { steps, each: longest.div_ceil(steps) }
    }

    /// Returns piece `step` of a run of `len` elements, which is empty beyond the end of the run.
    pub fn range(&self, step: usize, len: usize) -> Range<usize> {
        let start = step.saturating_mul(self.each).min(len);
        start..start.saturating_add(self.each).min(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_even_and_cover_everything_even_beyond_two_to_the_31_elements() {
        for count in [0, 1, 7, 1023, (1 << 31) + 5, (3 << 31) + 1, usize::MAX / 8, usize::MAX] {
            for ranks in [1usize, 2, 3, 33, 1 << 20] {
                for rank in (0..ranks).take(40).chain(ranks.saturating_sub(40)..ranks) {
                    let range = shard(count, ranks, rank);
                    let end = rank.checked_sub(1).map_or(0, |before| shard(count, ranks, before).end);
                    assert_eq!(range.start, end, "{count} over {ranks}");
                    assert!(range.len() == count / ranks || range.len() == count.div_ceil(ranks));
                }
                assert_eq!(shard(count, ranks, ranks - 1).end, count);
            }
        }
    }

    #[test]
    fn pieces_cover_a_run_within_the_limit_and_end_empty() {
        for (longest, limit) in [(0, 4), (1, 4), (4, 4), (5, 4), ((3 << 31) + 1, 1 << 30), (usize::MAX, 1 << 62)] {
            let pieces = Pieces::new(longest, limit);
            assert!(pieces.steps >= 1 && pieces.each <= limit);
            for len in [longest, longest.saturating_sub(1)] {
                let mut end = 0;
                for step in 0..pieces.steps {
                    let range = pieces.range(step, len);
                    assert!(range.start == end && range.len() <= limit);
                    end = range.end;
                }
                assert_eq!(end, len);
                assert!(pieces.range(pieces.steps, len).is_empty());
            }
        }
    }
}
