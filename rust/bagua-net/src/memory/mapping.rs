//! Pages of this process's address space, given back on drop.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::error::{Error, Result};
use crate::platform;
use crate::sync;

/// Mapped memory, readable and writable.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    /// A whole number of pages.
    len: usize,
}

// SAFETY: the mapping is plain memory, valid in every thread until drop; shared access goes through atomics, or through
// the unsafe slice methods, whose callers promise exclusion.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The first `len` bytes of a file, as every process that maps it sees them.
    pub(super) fn shared(file: BorrowedFd<'_>, len: usize) -> Result<Mapping> {
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing.
        let ptr = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        };
        let mapping = Mapping::made(ptr, len, "shared memory")?;
        sync::mapped(file, mapping.pointer(), len);
        Ok(mapping)
    }

    /// Zeroed memory of this process alone.
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

    /// Size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a mapping has at least one page")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The first byte.
    pub fn pointer(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// As [`platform::populate`], for a range.
    ///
    /// # Errors
    /// `System` when there is not enough memory.
    pub(super) fn populate(&self, range: Range<usize>) -> Result<()> {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds (checked), and mapped by `made`.
        let populated = unsafe { platform::populate(self.ptr.as_ptr().add(range.start).cast(), range.len()) };
        populated.map_err(|e| Error::system(&format!("getting {} bytes of memory", range.len()), e))
    }

    /// The bytes in `range`.
    ///
    /// # Panics
    /// When the range is out of bounds.
    ///
    /// # Safety
    /// While the slice exists no code, in any process, writes to the range.
    pub unsafe fn slice(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds (checked); no writer by this function's promise.
        let bytes = unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().add(range.start), range.len()) };
        sync::reads(bytes);
        bytes
    }

    /// The bytes in `range`, to write.
    ///
    /// # Panics
    /// When the range is out of bounds.
    ///
    /// # Safety
    /// While the slice exists no other code, in any process, reads or writes the range.
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
        // SAFETY: this mapping was made by `made`, and no slice of it outlives self.
        let unmapped = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}
