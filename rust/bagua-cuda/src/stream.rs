//! Streams of our own.

use std::sync::Arc;

use bagua_core::error::Result;
use cudarc::driver::sys::CUstream_flags;

use crate::context::Context;
use crate::driver_functions::{CUstream, call, checked};

/// A stream that waits for no other unless an event orders it, of the greatest priority: what it copies is waited for by all ranks.
pub(crate) struct Stream {
    context: Arc<Context>,
    handle: CUstream,
}

impl Stream {
    /// A new stream.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Stream> {
        let _entered = context.enter()?;
        let mut handle: CUstream = 0;
        // Not ordered with the legacy stream.
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: it writes one handle, in the current context.
        unsafe { checked!(context, cuStreamCreateWithPriority((&raw mut handle).cast(), flags, context.priority())) }?;
        Ok(Stream { context: Arc::clone(context), handle })
    }

    /// As the driver knows it.
    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // As in `Event::drop`.
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: no thread enqueues on it any more; what is enqueued still runs.
            unsafe { call!(self.context.api(), cuStreamDestroy_v2(self.handle as _)) };
        }
    }
}
