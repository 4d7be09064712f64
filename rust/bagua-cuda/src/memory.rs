//! Pinned memory of the host, and copies between it and a device; memory of a device that lasts for a while on a stream.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use bagua_core::error::Result;
use cudarc::driver::sys::CUdeviceptr;

use crate::context::Context;
use crate::driver_functions::{CUstream, call, checked};

/// Memory of the host that a device copies from and to while the host does other things.
///
/// Who holds it makes sure that no copy uses the bytes that it borrows, and that none is when it is dropped.
pub(crate) struct Pinned {
    context: Arc<Context>,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory.
unsafe impl Send for Pinned {}
// SAFETY: as above; shared, it is only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// So many bytes, not 0, all zero.
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Pinned> {
        let _entered = context.enter()?;
        let mut at: *mut c_void = ptr::null_mut();
        // SAFETY: it writes one address; there are no flags.
        unsafe { checked!(context, cuMemHostAlloc(&raw mut at, len, 0)) }?;
        let Some(at) = NonNull::new(at.cast::<u8>()) else {
            return Err(context.api().failure(
                context.device(),
                c"cuMemHostAlloc",
                crate::driver_functions::OUT_OF_MEMORY,
            ));
        };
        // SAFETY: `len` bytes, which only this function has the address of.
        unsafe { at.write_bytes(0, len) };
        Ok(Pinned { context: Arc::clone(context), at, len })
    }

    /// The first bytes, to read.
    pub(crate) fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.len);
        // SAFETY: within the memory, initialised, and no copy writes to it: the promise at the type.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), len) }
    }

    /// The first bytes, to write.
    pub(crate) fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.len);
        // SAFETY: as in `bytes`; `&mut self` is the host's only access.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), len) }
    }

    /// The address of the first word, which the device knows under the same.
    pub(crate) fn address(&self) -> usize {
        self.at.as_ptr() as usize
    }

    /// The first word, also while the device writes it.
    pub(crate) fn word(&self) -> u32 {
        assert!(self.len >= 4);
        // SAFETY: within the memory, which is aligned to a page.
        unsafe { self.at.cast::<u32>().as_ptr().read_volatile() }
    }

    fn part(&self, range: &Range<usize>) -> *mut c_void {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the memory.
        unsafe { self.at.add(range.start) }.as_ptr().cast()
    }

    /// Begins to copy from the device into some of the bytes.
    ///
    /// # Safety
    /// As many bytes at `from` are memory of the context's device, and live until the copy is done.
    pub(crate) unsafe fn fill(&mut self, range: Range<usize>, from: usize, stream: CUstream) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        let to = self.part(&range);
        // SAFETY: the range is within this memory, which lives until the copy is done; the source is the caller's promise.
        unsafe { checked!(self.context, cuMemcpyDtoHAsync_v2(to, from as CUdeviceptr, range.len(), stream as _)) }
    }

    /// Begins to copy some of the bytes to the device.
    ///
    /// # Safety
    /// As many bytes at `to` are memory of the context's device, live until the copy is done, and are used by no other work or thread.
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
            // SAFETY: no copy uses it, by the promise at the type.
            unsafe { call!(self.context.api(), cuMemFreeHost(self.at.as_ptr().cast())) };
        }
    }
}

/// Memory of a device that belongs to a stream: it is there for work behind this, until work behind `free`.
pub(crate) struct Scratch<'a> {
    context: &'a Context,
    stream: CUstream,
    address: usize,
}

impl<'a> Scratch<'a> {
    /// So many bytes, not 0.
    pub(crate) fn new(context: &'a Context, bytes: usize, stream: CUstream) -> Result<Scratch<'a>> {
        Ok(Scratch { context, stream, address: context.allocate(bytes, stream)? })
    }

    /// Of the first byte.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Frees it when the stream has come so far.
    pub(crate) fn free(mut self) -> Result<()> {
        let address = std::mem::take(&mut self.address);
        self.free_ordered(address)
    }

    fn free_ordered(&self, address: usize) -> Result<()> {
        // SAFETY: it was allocated on this stream, and nothing that is enqueued later uses it.
        unsafe { self.context.free(address, self.stream) }
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if self.address != 0 {
            // After an error, which the caller gets.
            let _ = self.free_ordered(self.address);
        }
    }
}
