//! Streams of our own.

use std::sync::Arc;

use bagua_core::error::Result;

use crate::api::CUstream;
use crate::context::Context;

/// `CU_STREAM_NON_BLOCKING`: not ordered with the legacy stream.
const NON_BLOCKING: u32 = 1;

/// A stream that waits for no other unless it is told to, of the greatest priority: what it copies is waited for by all ranks.
pub(crate) struct Stream {
    context: Arc<Context>,
    handle: CUstream,
}

impl Stream {
    /// A new stream.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Stream> {
        let _entered = context.enter()?;
        let mut handle: CUstream = 0;
        // SAFETY: it writes one handle, in the current context.
        let code =
            unsafe { (context.api().functions.stream_create)(&raw mut handle, NON_BLOCKING, context.priority()) };
        context.check(c"cuStreamCreateWithPriority", code)?;
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
            // SAFETY: nobody enqueues on it any more; what is enqueued still runs.
            unsafe { (self.context.api().functions.stream_destroy)(self.handle) };
        }
    }
}
