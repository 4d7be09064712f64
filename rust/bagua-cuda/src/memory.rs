//! Pinned memory of the host, and copies between it and a device.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use bagua_core::error::Result;

use crate::api::{CUdeviceptr, CUstream};
use crate::context::Context;

/// Memory of the host that a device copies from and to while the host does other things.
///
/// Who holds it makes sure that no copy is under way on the bytes that it borrows, and that none is when it is dropped.
pub(crate) struct Pinned {
    context: Arc<Context>,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory.
unsafe impl Send for Pinned {}

impl Pinned {
    /// So many bytes, not 0, all zero.
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Pinned> {
        let _entered = context.enter()?;
        let mut at: *mut c_void = ptr::null_mut();
        // SAFETY: it writes one address; there are no flags.
        let code = unsafe { (context.api().functions.host_alloc)(&raw mut at, len, 0) };
        context.check(c"cuMemHostAlloc", code)?;
        let Some(at) = NonNull::new(at.cast::<u8>()) else {
            return Err(context.api().failure(context.device(), c"cuMemHostAlloc", crate::api::OUT_OF_MEMORY));
        };
        // SAFETY: `len` bytes, which nobody else knows.
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
        let code = unsafe { (self.context.api().functions.copy_to_host)(to, from as CUdeviceptr, range.len(), stream) };
        self.context.check(c"cuMemcpyDtoHAsync", code)
    }

    /// Begins to copy some of the bytes to the device.
    ///
    /// # Safety
    /// As many bytes at `to` are memory of the context's device, live until the copy is done, and are used by nobody else.
    pub(crate) unsafe fn spill(&self, range: Range<usize>, to: usize, stream: CUstream) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        let from = self.part(&range);
        // SAFETY: as in `fill`.
        let code =
            unsafe { (self.context.api().functions.copy_to_device)(to as CUdeviceptr, from, range.len(), stream) };
        self.context.check(c"cuMemcpyHtoDAsync", code)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // As in `Event::drop`.
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: no copy uses it, by the promise at the type.
            unsafe { (self.context.api().functions.host_free)(self.at.as_ptr().cast()) };
        }
    }
}
