//! Copies of tensors that lie far away, in lines that peers take turns to write.
//!
//! `memcpy` leaves it to the processor to guess what comes next, and a processor guesses within a page: it meets every new page
//! of 4 KiB with a look into the page table and a first line that it waits for, once where it reads and once where it writes. Here
//! both are asked for ahead, and for writing: the line of a tensor because it will be overwritten, that of a window because this
//! rank writes there next. Measured (`cargo bench --bench limit -- --copies`): see the patterns that use it.
//!
//! Not here: non-temporal stores into the tensor, which gained 5 to 8 % more at 16 MiB in a bare loop, but leave nothing in the caches for
//! whoever reads the result.

use crate::memory::prefetch::{prefetch_read, prefetch_write};

/// Bytes that are copied between two looks ahead: a cache line.
const BLOCK: usize = 64;
/// How far ahead. On the machine measured 1 and 2 KiB are equal, 512 bytes and 4 KiB a little slower.
const AHEAD: usize = 1024;

/// Copies all of `from` to `to`, which has the same length.
pub(super) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    let (blocks, rest) = from.as_chunks::<BLOCK>();
    let (places, end) = to.as_chunks_mut::<BLOCK>();
    for (block, place) in blocks.iter().zip(places) {
        prefetch_write(ahead(block));
        prefetch_write(ahead(place));
        *place = *block;
    }
    end.copy_from_slice(rest);
}

/// Copies all of `from` to `near` and to `far`, which have the same length, and reads it once. `near` is in this core's cache.
pub(super) fn copy_to_both(from: &[u8], near: &mut [u8], far: &mut [u8]) {
    assert!(from.len() == near.len() && from.len() == far.len());
    let (blocks, rest) = from.as_chunks::<BLOCK>();
    let (near, near_end) = near.as_chunks_mut::<BLOCK>();
    let (far, far_end) = far.as_chunks_mut::<BLOCK>();
    for ((block, near), far) in blocks.iter().zip(near).zip(far) {
        prefetch_read(ahead(block));
        prefetch_write(ahead(far));
        *near = *block;
        *far = *block;
    }
    near_end.copy_from_slice(rest);
    far_end.copy_from_slice(rest);
}

/// What lies [`AHEAD`] of this block, within the tensor or not.
#[inline]
fn ahead(block: &[u8; BLOCK]) -> *const u8 {
    block.as_ptr().wrapping_add(AHEAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_at_every_length_and_alignment() {
        let from: Vec<u8> = (0..4000).map(|at| (at % 251) as u8).collect();
        for len in (0..300).chain([1023, 1024, 3990]) {
            for at in [0, 1, 7] {
                let (from, [mut one, mut two, mut three]) = (&from[at..at + len], [(); 3].map(|()| vec![0; len + 2]));
                copy(from, &mut one[1..=len]);
                copy_to_both(from, &mut two[1..=len], &mut three[1..=len]);
                for to in [one, two, three] {
                    assert_eq!((&to[1..=len], to[0], to[len + 1]), (from, 0, 0));
                }
            }
        }
    }
}
