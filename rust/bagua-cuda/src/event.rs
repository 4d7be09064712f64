//! Events: marks in a stream that other streams wait for and the host asks for.

use std::ptr;
use std::sync::Arc;

use bagua_core::error::Result;

use crate::api::{CUevent, CUstream, NOT_READY};
use crate::context::Context;

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;

/// An event without time.
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: an event may be used by any thread, by several at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, which counts as reached until it is recorded.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Event> {
        let _entered = context.enter()?;
        let mut handle: CUevent = ptr::null_mut();
        // SAFETY: it writes one handle, in the current context.
        let code = unsafe { (context.api().functions.event_create)(&raw mut handle, NO_TIMING) };
        context.check(c"cuEventCreate", code)?;
        Ok(Event { context: Arc::clone(context), handle })
    }

    /// It is reached when the work that the stream has now is done.
    pub(crate) fn record(&self, stream: CUstream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives; the stream is the caller's or one of ours, and the driver refuses others.
        let code = unsafe { (self.context.api().functions.event_record)(self.handle, stream) };
        self.context.check(c"cuEventRecord", code)
    }

    /// Work that the stream gets from now on waits for this event.
    pub(crate) fn order(&self, stream: CUstream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: as in `record`; there are no flags.
        let code = unsafe { (self.context.api().functions.stream_wait_event)(stream, self.handle, 0) };
        self.context.check(c"cuStreamWaitEvent", code)
    }

    /// Whether it was reached. Does not wait.
    pub(crate) fn is_reached(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives.
        match unsafe { (self.context.api().functions.event_query)(self.handle) } {
            NOT_READY => Ok(false),
            code => self.context.check(c"cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // An error has nobody to hear it, and the driver may have gone before, when the process ends.
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: nobody uses the event any more; work that waits for it keeps what it needs.
            unsafe { (self.context.api().functions.event_destroy)(self.handle) };
        }
    }
}
