//! Pages of this process's address space.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::error::{Error, Result};
use crate::platform;
use crate::sync;

/// Readable and writable memory that is unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    /// Length in bytes: a whole number of pages.
    len: usize,
}

// SAFETY: the mapping is plain memory, valid in every thread until drop; shared access goes through atomics, or through
// the unsafe slice methods, whose callers promise exclusion.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file, shared with all processes that map it.
    pub(super) fn shared(file: BorrowedFd<'_>, len: usize) -> Result<Mapping> {
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing.
        let ptr = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        };
        let mapping = Mapping::made(ptr, len, "shared memory")?;
        sync::mapped(file, mapping.pointer(), len);
        Ok(mapping)
    }

    /// Maps zeroed memory that only this process can access.
    pub(super) fn private(len: usize) -> Result<Mapping> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing.
        let ptr = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
        Mapping::made(ptr, len, "memory")
    }

    fn made(ptr: rustix::io::Result<*mut std::ffi::c_void>, len: usize, what: &str) -> Result<Mapping> {
        let ptr = ptr.map_err(|e| Error::system(&format!("mapping {len} bytes of {what}"), e))?;
        let ptr = NonNull::new(ptr.cast()).ok_or_else(|| Error::other(format!("{what} mapped at address 0")))?;
        Ok(Mapping { ptr, len })
    }

    /// Returns the size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a mapping has at least one page")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the first byte.
    pub fn pointer(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Populates a range, as [`platform::populate`] does. Fails with `System` if there is not enough memory.
    pub(super) fn populate(&self, range: Range<usize>) -> Result<()> {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds (checked), and mapped since the constructor.
        let populated = unsafe { platform::populate(self.ptr.as_ptr().add(range.start).cast(), range.len()) };
        populated.map_err(|e| Error::system(&format!("getting {} bytes of memory", range.len()), e))
    }

    /// Returns the bytes in `range`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    ///
    /// # Safety
    /// While the slice exists, no code in any process may write to the range.
    pub unsafe fn slice(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds (checked); no writer by this function's promise.
        let bytes = unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().add(range.start), range.len()) };
        sync::reads(bytes);
        bytes
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
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds (checked); exclusive by this function's promise.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().add(range.start), range.len()) };
        sync::writes(bytes);
        bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `made` mapped this memory, and no slice of it outlives self.
        let unmapped = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}
