//! Memory that peers on this host can map.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic;

use super::mapping::Mapping;
use crate::error::{Error, Result};
use crate::platform;
use crate::sync::{self, AtomicU32, AtomicU64};

/// An anonymous shared-memory file and its mapping in this process.
///
/// The file has no name in any file system, so a killed process leaves nothing behind and `/dev/shm` is not needed. The
/// owner sends the descriptor to its peers, and each peer maps it with [`Arena::from_fd`].
#[derive(Debug)]
pub struct Arena {
    mapping: Mapping,
    fd: OwnedFd,
}

impl Arena {
    /// Creates zeroed memory of `len` bytes, rounded up to whole pages. `label` shows in `/proc/<pid>/maps`.
    ///
    /// # Errors
    /// `System` if the kernel refuses.
    pub fn create(label: &str, len: usize) -> Result<Arena> {
        let len = len.max(1).next_multiple_of(rustix::param::page_size());
        let fd = platform::shared_file(label, len);
        let fd = fd.map_err(|e| Error::system(&format!("shared memory of {len} bytes"), e))?;
        Ok(Arena { mapping: Mapping::shared(fd.as_fd(), len)?, fd })
    }

    /// Maps the memory that a peer created.
    ///
    /// # Errors
    /// `System` if the descriptor is not shared memory that is sealed against shrinking, or cannot be mapped.
    pub fn from_fd(fd: OwnedFd) -> Result<Arena> {
        let sealed = platform::sealed_len(fd.as_fd());
        let Some(len) = sealed.map_err(|e| Error::system("mapping a peer's shared memory", e))? else {
            return Err(Error::other("a peer's shared memory is not sealed against shrinking"));
        };
        if len == 0 {
            return Err(Error::other("a peer's shared memory is empty"));
        }
        Ok(Arena { mapping: Mapping::shared(fd.as_fd(), len)?, fd })
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Always false, because an arena has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the descriptor to send to a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Closes the descriptor and keeps only the mapping. No further process can map the memory through this arena.
    pub fn into_mapping(self) -> Mapping {
        self.mapping
    }

    /// Returns the 4-byte atomic at `offset`. Panics if `offset` is out of bounds or not aligned.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset <= self.len() - 4);
        // SAFETY: in bounds and aligned (checked); the memory lives as long as self; atomics allow shared writes.
        sync::word(unsafe { atomic::AtomicU32::from_ptr(self.mapping.pointer().add(offset).cast()) })
    }

    /// Returns the 8-byte atomic at `offset`. Panics like [`Arena::word`].
    pub fn long(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset <= self.len() - 8);
        // SAFETY: as in `word`.
        sync::long(unsafe { atomic::AtomicU64::from_ptr(self.mapping.pointer().add(offset).cast()) })
    }

    /// Returns the bytes in `range`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    ///
    /// # Safety
    /// While the slice exists, no code in any process may write to the range.
    pub unsafe fn slice(&self, range: Range<usize>) -> &[u8] {
        // SAFETY: by this function's promise.
        unsafe { self.mapping.slice(range) }
    }

    /// Returns the bytes in `range` for writing.
    ///
    /// # Panics
    /// If the range is out of bounds.
    ///
    /// # Safety
    /// While the slice exists, no other code in any process may read or write the range.
    #[expect(
        clippy::mut_from_ref,
        reason = "exclusion is across processes, which only the caller's protocol can promise"
    )]
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [u8] {
        // SAFETY: by this function's promise.
        unsafe { self.mapping.slice_mut(range) }
    }
}

// Models have no memory that processes share, so there is nothing to test.
#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_of_one_arena_see_the_same_bytes() {
        let mine = Arena::create("bagua-test", 10_000).unwrap();
        let theirs = Arena::from_fd(mine.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(mine.len(), theirs.len());
        mine.word(4).store(7, Ordering::Release);
        mine.long(8).store(8, Ordering::Release);
        assert_eq!((theirs.word(4).load(Ordering::Acquire), theirs.long(8).load(Ordering::Acquire)), (7, 8));
        // SAFETY: one thread, one slice at a time.
        unsafe { mine.slice_mut(100..103).copy_from_slice(b"abc") };
        // SAFETY: as above.
        assert_eq!(unsafe { theirs.slice(100..103) }, b"abc");
    }

    #[test]
    #[should_panic]
    fn a_word_outside_the_arena_is_not_reachable() {
        let arena = Arena::create("bagua-test", 1).unwrap();
        arena.word(arena.len());
    }
}
