//! The mapping from the core's errors to the Python classes of `bagua.errors`.

use std::time::Duration;

use bagua_core::error::{Error, Progress};
use pyo3::exceptions::{PyNotImplementedError, PyOSError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

/// The module `bagua.errors`, imported at the first error.
static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The exception for a core error, created as `cls(message, **fields)` for classes of `bagua.errors`. The operating system's error, if
/// there is one, becomes its `__cause__`.
pub fn raise(py: Python<'_>, error: Error) -> PyErr {
    let code = error.os_error().and_then(std::io::Error::raw_os_error);
    let raised = exception(py, error).unwrap_or_else(|while_raising| while_raising);
    if let Some(cause) = code.and_then(|code| os_error(py, code).ok()) {
        raised.set_cause(py, Some(cause));
    }
    raised
}

/// The `OSError` with this number; Python chooses its subclass, such as `ConnectionResetError`.
fn os_error(py: Python<'_>, code: i32) -> PyResult<PyErr> {
    let text: String = py.import(intern!(py, "os"))?.call_method1(intern!(py, "strerror"), (code,))?.extract()?;
    Ok(PyOSError::new_err((code, text)))
}

/// The exception for a core error without its cause; `Err` when it cannot be created.
fn exception(py: Python<'_>, error: Error) -> PyResult<PyErr> {
    let text = error.to_string();
    let fields = PyDict::new(py);
    // No wildcard: the compiler asks for the class of a new variant.
    let class = match error {
        Error::PeerLost { rank, host, reason, noticed_by, progress, source: _ } => {
            fields.set_item("rank", rank)?;
            fields.set_item("host", host)?;
            fields.set_item("reason", reason)?;
            fields.set_item("noticed_by", noticed_by)?;
            set_progress(&fields, progress)?;
            "PeerLostError"
        }
        Error::Timeout { after, missing, noticed_by, progress } => {
            fields.set_item("after", after.as_secs_f64())?;
            fields.set_item("missing", PyTuple::new(py, missing)?)?;
            fields.set_item("noticed_by", noticed_by)?;
            set_progress(&fields, progress)?;
            "BaguaTimeoutError"
        }
        Error::PeerRaised { rank, host, kind, message } => {
            fields.set_item("rank", rank)?;
            fields.set_item("host", host)?;
            fields.set_item("kind", kind)?;
            fields.set_item("message", message)?;
            "PeerRaisedError"
        }
        Error::Mismatch(_) => "MismatchError",
        Error::Aborted(_) => "AbortedError",
        Error::System { .. } => "BaguaError",
        Error::InvalidArgument(_) => return Ok(PyValueError::new_err(text)),
        Error::UnsupportedType(_) => return Ok(PyTypeError::new_err(text)),
        Error::NotImplemented(_) => return Ok(PyNotImplementedError::new_err(text)),
    };
    let module = ERRORS.get_or_try_init(py, || py.import("bagua.errors").map(Bound::unbind))?;
    Ok(PyErr::from_value(module.bind(py).getattr(class)?.call((text,), Some(&fields))?))
}

fn set_progress(fields: &Bound<'_, PyDict>, progress: Option<Box<Progress>>) -> PyResult<()> {
    let Some(Progress { what, label, done, total }) = progress.map(|progress| *progress) else { return Ok(()) };
    fields.set_item("during", what)?;
    fields.set_item("bucket", label)?;
    fields.set_item("done_bytes", done)?;
    fields.set_item("total_bytes", total)
}

/// The duration of an argument in seconds, which must not be negative or NaN.
pub fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    // Longer durations overflow when they are added to the clock.
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    if value.is_nan() || value < 0.0 {
        return Err(PyValueError::new_err(format!("{name} is {value} s; it must be 0 or more")));
    }
    Ok(Duration::try_from_secs_f64(value).unwrap_or(LONGEST).min(LONGEST))
}
