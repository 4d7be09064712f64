//! `Handle`: an operation that may still be running.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bagua_core::engine as core;
use bagua_core::error::{Error, Result};
use bagua_cuda::OperationDevice;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::{self, Origin, seconds};
use crate::interrupt;
use crate::user_callback::call_user;

/// The outcome of an asynchronous operation, now or later.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Handle {
    core: core::Handle,
    /// Group of the operation. `None` if the operation had nothing to do.
    origin: Option<Origin>,
    /// Senders of the messages that a receive has got.
    senders: Option<core::Senders>,
    device: Option<Arc<OperationDevice>>,
}

impl Handle {
    pub fn of(core: core::Handle, origin: Option<Origin>) -> Handle {
        Handle { core, origin, senders: None, device: None }
    }

    /// Returns the handle of messages.
    pub fn of_messages(posted: core::Posted, origin: Origin) -> Handle {
        Handle { core: posted.handle, origin: Some(origin), senders: Some(posted.senders), device: None }
    }

    /// Returns the handle of an operation on a device.
    pub fn on_device(self, place: Arc<OperationDevice>) -> Handle {
        Handle { device: Some(place), ..self }
    }

    /// Makes work that the stream (None: the call's stream) gets from now on see the result. Call it after `finish`.
    pub fn order(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        let Some(place) = &self.device else { return Ok(()) };
        py.detach(|| place.order(stream)).map_err(|e| self.failed(py, e))
    }

    /// Returns the exception for a failure of the device, and reports the failure to the other ranks of the group.
    fn failed(&self, py: Python<'_>, error: Error) -> PyErr {
        match &self.origin {
            Some(origin) => origin.fail(py, error),
            None => errors::raise(py, error),
        }
    }

    pub fn finish(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        let wait = |limit| self.core.wait_for(limit);
        interrupt::wait_in_slices(py, self.origin.as_ref(), timeout, wait, |after| self.core.timed_out(after))
    }
}

#[pymethods]
impl Handle {
    /// Waits until the operation is done, for at most `timeout` seconds (None: until the operation's own deadline).
    /// Ctrl-C ends the wait.
    ///
    /// For an operation on a device, work that `stream` (None: the call's stream) gets from now on sees the result. The
    /// device may still be working.
    ///
    /// Raises BaguaTimeoutError if `timeout` passes, and the operation continues. Raises NotImplementedError for a
    /// stream that is being captured, and otherwise the error of the operation.
    #[pyo3(signature = (timeout=None, *, stream=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, stream: Option<usize>) -> PyResult<()> {
        let timeout = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        self.finish(py, timeout)?;
        self.order(py, stream)
    }

    /// Waits until the operation is done, also on its device, for at most `timeout` seconds. Ctrl-C ends the wait.
    /// Raises the errors of `wait`.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let start = Instant::now();
        let timeout = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        self.finish(py, timeout)?;
        let Some(place) = &self.device else { return Ok(()) };
        let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
        let rank = self.origin.as_ref().map_or(0, Origin::rank);
        let late = move |_| Error::Timeout {
            after: timeout.unwrap_or_default(),
            missing: vec![],
            noticed_by: rank,
            progress: None,
        };
        interrupt::wait_in_slices(py, self.origin.as_ref(), left, |limit| place.wait_for(limit), late)
    }

    /// Ranks of the group that sent the received messages, in the order of the receives; None for a message on its way.
    fn senders(&self) -> Vec<Option<usize>> {
        let senders = self.senders.iter().flat_map(|senders| senders.iter());
        senders.map(|rank| Some(rank.load(Ordering::Acquire)).filter(|rank| *rank != core::NO_RANK)).collect()
    }

    /// Calls `callback(error)` exactly once when the operation is done. `error` is None, or the exception that `wait`
    /// raises.
    ///
    /// If the operation is done already, this thread calls the callback now. Otherwise the thread "bagua-callbacks"
    /// does. It calls the callbacks of all handles of the process one after another, so a callback may block and start
    /// operations, and delays only other callbacks. An exception of a callback goes to `sys.unraisablehook`. Only if
    /// this thread calls the callback, an exception that is not an Exception (KeyboardInterrupt, SystemExit) is raised
    /// here.
    ///
    /// Raises TypeError if `callback` is not callable, BaguaError in a forked child while the operation is pending.
    #[pyo3(signature = (callback, /))]
    fn then(&self, py: Python<'_>, callback: Bound<'_, PyAny>) -> PyResult<()> {
        let later = callable(&callback)?;
        let origin = self.origin.clone();
        let call_later = move |result: &Result<()>| {
            // If the interpreter has shut down, there is nothing to call.
            let _ = Python::try_attach(|py| {
                let callback = later.into_bound(py);
                if let Err(raised) = call_with(&callback, origin.as_ref(), result) {
                    raised.write_unraisable(py, Some(&callback));
                }
            });
        };
        // This keeps the GIL. No thread waits for the GIL while it holds a lock of a handle or of the callbacks.
        let added = self.core.add_callback(call_later).map_err(|e| errors::raise(py, e))?;
        match added.map(|(_, result)| call_with(&callback, self.origin.as_ref(), &result)) {
            Some(Err(raised)) if raised.is_instance_of::<PyException>(py) => {
                raised.write_unraisable(py, Some(&callback));
                Ok(())
            }
            Some(called) => called,
            None => Ok(()),
        }
    }

    /// True if the operation is done, with or without an error, and its device too.
    fn is_completed(&self, py: Python<'_>) -> bool {
        self.core.is_completed() && self.device.as_ref().is_none_or(|place| py.detach(|| place.is_done()))
    }

    /// Returns the handle of an operation that had nothing to do.
    #[staticmethod]
    fn completed() -> Handle {
        Handle::of(core::Handle::completed(Ok(())), None)
    }
}

fn call_with(callback: &Bound<'_, PyAny>, origin: Option<&Origin>, result: &Result<()>) -> PyResult<()> {
    let py = callback.py();
    let exception = |error: &Error| match origin {
        Some(origin) => origin.raise(py, error.clone()),
        None => errors::raise(py, error.clone()),
    };
    let error = result.as_ref().err().map(|error| exception(error).into_value(py));
    call_user(callback, &PyTuple::new(py, [error])?)
}

/// Returns a reference to a callable, or TypeError for anything else.
pub fn callable(object: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    if !object.is_callable() {
        let text = format!("{} is not callable", object.repr()?);
        return Err(errors::raise(object.py(), Error::UnsupportedType(text)));
    }
    Ok(object.clone().unbind())
}

/// Waits until every callback that was given to `Handle.then` has returned. Call it at the end of a program, after
/// leaving its groups.
///
/// Raises BaguaError if some have not returned after `timeout` seconds. Raises ValueError in a callback, which would
/// wait for itself.
#[pyfunction]
pub fn wait_for_callbacks(py: Python<'_>, timeout: f64) -> PyResult<()> {
    let timeout = seconds("timeout", timeout)?;
    let timed_out = |after: Duration| {
        Error::other(format!("a callback of a handle has not returned after {:.1} s", after.as_secs_f64()))
    };
    interrupt::wait_in_slices(py, None, Some(timeout), core::wait_for_callbacks, timed_out)
}
