//! Signals during waits.
//!
//! Python runs signal handlers on its main thread, between two bytecodes, and therefore never while that thread is
//! inside the extension. So every wait that may be long runs the handlers itself ([`run_signal_handlers`]), once in a
//! [`SLICE`], and less often in a long wait:
//! - A wait for a handle or an engine ([`wait_in_slices`]). An exception of a handler ends the wait, not the operation.
//! - A wait for work on another thread ([`run_on_thread`]). An exception of a handler ends the wait, not the work.
//! - A blocking verb on the calling thread ([`crate::gil::run_verb`]). The verb uses the caller's memory, so an
//!   exception of a handler must end the verb: the group fails on all ranks ([`fail_group`]).

use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use bagua_core::error::{Error, Result};
use bagua_core::group::{Awaited, Group};
use bagua_core::wait::{self, Waited, lengthened, lock};
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::{self, Origin};

/// Time a thread waits before it runs Python's signal handlers. In a long wait up to four times as long, see
/// [`lengthened`].
pub const SLICE: Duration = Duration::from_millis(50);

/// Runs the handlers of pending signals, on Python's main thread. Returns the exception of a handler. Returns
/// `CancelledError` if the asyncio task of this thread was cancelled, because the handler of `asyncio.run` only cancels
/// the task at the first Ctrl-C and raises nothing.
pub fn run_signal_handlers(py: Python<'_>) -> PyResult<()> {
    py.check_signals()?;
    if is_cancelled(py)? {
        let class = py.import("asyncio")?.getattr("CancelledError")?;
        return Err(PyErr::from_value(class.call1(("the task was cancelled while it waited for other ranks",))?));
    }
    Ok(())
}

/// Returns true if the asyncio task of this thread was cancelled and has not got its `CancelledError` yet. This calls
/// Python code, in which a signal handler may run and raise.
fn is_cancelled(py: Python<'_>) -> PyResult<bool> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    // This looks asyncio up without importing it. If it is not imported, there is no task.
    let asyncio = modules.call_method1(intern!(py, "get"), (intern!(py, "asyncio"),))?;
    if asyncio.is_none() {
        return Ok(false);
    }
    let running = asyncio.call_method0(intern!(py, "_get_running_loop"))?;
    if running.is_none() {
        return Ok(false);
    }
    let task = asyncio.call_method1(intern!(py, "current_task"), (running,))?;
    // Every task of CPython's asyncio has this attribute.
    task.getattr_opt(intern!(py, "_must_cancel"))?.map_or(Ok(false), |cancelled| cancelled.is_truthy())
}

/// Fails the group on all ranks, because a signal handler of this rank raised an exception. The other ranks get
/// PeerRaisedError.
pub fn fail_group(py: Python<'_>, group: &Group, raised: &PyErr) {
    let (kind, mut text) = errors::described(py, raised);
    if text.is_empty() {
        "interrupted by a signal".clone_into(&mut text);
    }
    py.detach(|| group.raise(&kind, &text));
}

/// Runs `work` on a new thread. If a signal handler raises, returns at once; `work` then ends by its own deadline.
pub fn run_on_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    run_and_report(py, None, work)
}

/// Runs `work` like [`run_on_thread`]. From time to time, the waiting thread calls the function in `waiting` with the
/// ranks that `work` waits for, if there are any.
pub fn run_and_report<T: Send + 'static>(
    py: Python<'_>,
    waiting: Option<(&Bound<'_, PyAny>, &Awaited)>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    on_thread(py, waiting, work)?.map_err(|e| errors::raise(py, e))
}

/// Runs `work` like [`run_and_report`], but returns an error of `work` as the inner `Result`. The outer error is an
/// exception raised by a signal handler or by the function in `waiting`.
pub fn on_thread<T: Send + 'static>(
    py: Python<'_>,
    waiting: Option<(&Bound<'_, PyAny>, &Awaited)>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<Result<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let spawned = std::thread::Builder::new()
        .name("bagua-joining".to_owned())
        // After an interrupt, nobody receives the result. The new thread drops it.
        .spawn(move || drop(sender.send(work())));
    let thread = match spawned {
        Ok(thread) => thread,
        Err(e) => return Ok(Err(Error::system("starting a thread", e))),
    };
    let (receiver, begun) = (Mutex::new(receiver), Instant::now());
    loop {
        let slice = lengthened(SLICE, begun.elapsed());
        let received = py.detach(|| lock(&receiver).recv_timeout(slice));
        match received {
            Ok(result) => {
                // The work is done, and the thread is about to end. A panic of the thread would change nothing.
                let _ = py.detach(|| thread.join());
                return Ok(result);
            }
            Err(RecvTimeoutError::Timeout) => {
                run_signal_handlers(py)?;
                if let Some((function, awaited)) = waiting
                    && let ranks = awaited.ranks()
                    && !ranks.is_empty()
                {
                    function.call1((ranks,))?;
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(Err(Error::other("the joining thread panicked"))),
        }
    }
}

/// Waits for an operation of the core for at most `timeout` (`None`: until it is done), in slices without the GIL, and
/// runs Python's signal handlers between the slices: see [`bagua_core::wait::wait_in_slices`]. `origin` is the group
/// that the caller waits for, if there is one.
pub fn wait_in_slices<T: Send>(
    py: Python<'_>,
    origin: Option<&Origin>,
    timeout: Option<Duration>,
    wait: impl FnMut(Duration) -> Waited<T> + Send,
    timed_out: impl FnOnce(Duration) -> Error + Send,
) -> PyResult<T> {
    // An interpreter that is shutting down runs no handlers.
    let check_signals = || Python::try_attach(run_signal_handlers).unwrap_or(Ok(()));
    let result = py.detach(|| wait::wait_in_slices(timeout, SLICE, wait, check_signals, timed_out))?;
    result.map_err(|error| match origin {
        Some(origin) => origin.raise(py, error),
        None => errors::raise(py, error),
    })
}
