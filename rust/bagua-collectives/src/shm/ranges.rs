//! Ranges of bytes, and the order in which a rank reads from its peers.

use std::ops::Range;

/// The peers of `me`, beginning with the next rank, so that the ranks do not all read the same memory first.
pub(super) fn others(me: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (1..ranks).map(move |step| (me + step) % ranks)
}

/// The range, moved by an offset.
pub(super) fn shifted(range: Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}
