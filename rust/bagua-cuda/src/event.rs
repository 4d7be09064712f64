//! Events: marks in a stream, which other streams wait for and the host can query.

use std::ptr;
use std::sync::Arc;

use bagua_core::error::Result;
use cudarc::driver::sys::{CUevent, CUevent_flags};

use crate::context::Context;
use crate::driver_functions::{CUstream, NOT_READY, call, checked};

/// An event in a stream.
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: several threads may use an event at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event. It counts as reached until it is recorded.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event like [`Event::new`] that also records the time at which it is reached.
    pub(crate) fn timed(context: &Arc<Context>) -> Result<Event> {
        Event::with(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: CUevent_flags) -> Result<Event> {
        let _entered = context.enter()?;
        let mut handle: CUevent = ptr::null_mut();
        let flags = flags as u32;
        // SAFETY: the function writes one handle, in the current context.
        unsafe { checked!(context, cuEventCreate(&raw mut handle, flags)) }?;
        Ok(Event { context: Arc::clone(context), handle })
    }

    /// Records the event. It is reached when the work that is on the stream now is done.
    pub(crate) fn record(&self, stream: CUstream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the event exists. The stream is the caller's or one of ours, and the driver rejects any other.
        unsafe { checked!(self.context, cuEventRecord(self.handle, stream as _)) }
    }

    /// Makes work that is put on the stream from now on wait for this event.
    pub(crate) fn order(&self, stream: CUstream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: as in `record`. There are no flags.
        unsafe { checked!(self.context, cuStreamWaitEvent(stream as _, self.handle, 0)) }
    }

    /// Returns the seconds from this event to a later one. Both must be timed and reached.
    pub(crate) fn seconds_to(&self, later: &Event) -> Result<f64> {
        let _entered = self.context.enter()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: both events exist. The function writes one number.
        unsafe { checked!(self.context, cuEventElapsedTime(&raw mut milliseconds, self.handle, later.handle)) }?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    pub(crate) fn is_reached(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: the event exists.
        match unsafe { call!(self.context.api(), cuEventQuery(self.handle)) } {
            NOT_READY => Ok(false),
            code => self.context.check(c"cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // `drop` cannot return an error, and at the end of the process the driver may already be shut down.
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: no thread uses the event any more. Work that waits for it keeps what it needs.
            unsafe { call!(self.context.api(), cuEventDestroy_v2(self.handle)) };
        }
    }
}
