//! Pinned memory of the host, copies between it and a device, and temporary memory of a device on a stream.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use bagua_core::error::Result;
use cudarc::driver::sys::CUdeviceptr;

use crate::context::Context;
use crate::driver_functions::{CUstream, call, checked};

/// Memory of the host that a device copies from and to while the host does other things. The owner guarantees that no
/// copy uses bytes that are borrowed, or runs when the memory is dropped.
pub(crate) struct Pinned {
    context: Arc<Context>,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory.
unsafe impl Send for Pinned {}
// SAFETY: as above. Shared references only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `len` bytes, at least one, filled with zeros.
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Pinned> {
        let _entered = context.enter()?;
        let mut at: *mut c_void = ptr::null_mut();
        // SAFETY: the function writes one address. There are no flags.
        unsafe { checked!(context, cuMemHostAlloc(&raw mut at, len, 0)) }?;
        let Some(at) = NonNull::new(at.cast::<u8>()) else {
            return Err(context.api().failure(
                context.device(),
                c"cuMemHostAlloc",
                crate::driver_functions::OUT_OF_MEMORY,
            ));
        };
        // SAFETY: only this function has the address of these `len` bytes.
        unsafe { at.write_bytes(0, len) };
        Ok(Pinned { context: Arc::clone(context), at, len })
    }

    pub(crate) fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.len);
        // SAFETY: the bytes are within the memory and initialised. The owner guarantees that no copy writes to them.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), len) }
    }

    pub(crate) fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.len);
        // SAFETY: as in `bytes`. `&mut self` is the host's only access.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), len) }
    }

    /// Returns the address of the first word, which is the same for the device.
    pub(crate) fn address(&self) -> usize {
        self.at.as_ptr() as usize
    }

    /// Reads the first word, possibly while the device writes it.
    pub(crate) fn word(&self) -> u32 {
        assert!(self.len >= 4);
        // SAFETY: the word is within the memory, which is aligned to a page.
        unsafe { self.at.cast::<u32>().as_ptr().read_volatile() }
    }

    fn part(&self, range: &Range<usize>) -> *mut c_void {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the range is within the memory.
        unsafe { self.at.add(range.start) }.as_ptr().cast()
    }

    /// Starts to copy from the device into some of the bytes.
    ///
    /// # Safety
    /// The bytes at `from` must be memory of the context's device, and stay allocated until the copy is done.
    pub(crate) unsafe fn fill(&mut self, range: Range<usize>, from: usize, stream: CUstream) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        let to = self.part(&range);
        // SAFETY: the range is in this memory, which outlives the copy. The caller guarantees the source.
        unsafe { checked!(self.context, cuMemcpyDtoHAsync_v2(to, from as CUdeviceptr, range.len(), stream as _)) }
    }

    /// Starts to copy some of the bytes to the device.
    ///
    /// # Safety
    /// The bytes at `to` must be memory of this device that is allocated and not used otherwise until the copy is done.
    pub(crate) unsafe fn spill(&self, range: Range<usize>, to: usize, stream: CUstream) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        let from = self.part(&range);
        // SAFETY: as in `fill`.
        unsafe { checked!(self.context, cuMemcpyHtoDAsync_v2(to as CUdeviceptr, from, range.len(), stream as _)) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // As in `Event::drop`.
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the owner guarantees that no copy uses the memory.
            unsafe { call!(self.context.api(), cuMemFreeHost(self.at.as_ptr().cast())) };
        }
    }
}

/// Memory of a device for the work that is put on a stream before `free` or drop.
pub(crate) struct Scratch<'a> {
    context: &'a Context,
    stream: CUstream,
    address: usize,
}

impl<'a> Scratch<'a> {
    /// Allocates `bytes` bytes, at least one.
    pub(crate) fn new(context: &'a Context, bytes: usize, stream: CUstream) -> Result<Scratch<'a>> {
        Ok(Scratch { context, stream, address: context.allocate(bytes, stream)? })
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Frees the memory after the work that is on the stream now.
    pub(crate) fn free(mut self) -> Result<()> {
        let address = std::mem::take(&mut self.address);
        self.free_ordered(address)
    }

    fn free_ordered(&self, address: usize) -> Result<()> {
        // SAFETY: the memory was allocated on this stream, and no work that is queued later uses it.
        unsafe { self.context.free(address, self.stream) }
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if self.address != 0 {
            // A drop without `free` follows an error, which the caller gets instead of this one.
            let _ = self.free_ordered(self.address);
        }
    }
}
