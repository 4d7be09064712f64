//! CUDA streams that Bagua creates for its copies.

use std::sync::Arc;

use bagua_core::error::Result;
use cudarc::driver::sys::CUstream_flags;

use crate::context::Context;
use crate::driver_functions::{CUstream, call, checked};

/// A stream with the highest priority, because all ranks wait for its copies. It waits for other streams only by
/// events.
pub(crate) struct Stream {
    context: Arc<Context>,
    handle: CUstream,
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Stream> {
        let _entered = context.enter()?;
        let mut handle: CUstream = 0;
        // A non-blocking stream is not ordered with the legacy stream.
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the function writes one handle, in the current context.
        unsafe { checked!(context, cuStreamCreateWithPriority((&raw mut handle).cast(), flags, context.priority())) }?;
        Ok(Stream { context: Arc::clone(context), handle })
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // As in `Event::drop`.
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: no thread puts work on the stream any more. Queued work still runs.
            unsafe { call!(self.context.api(), cuStreamDestroy_v2(self.handle as _)) };
        }
    }
}
