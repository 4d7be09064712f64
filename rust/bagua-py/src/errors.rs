//! The mapping from the core's errors to the Python classes of `bagua.errors`.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bagua_core::error::{Error, Progress, Result};
use bagua_core::group::Group;
use bagua_core::health::GroupHealth;
use bagua_core::wait::lock;
use pyo3::exceptions::{PyException, PyNotImplementedError, PyOSError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

/// The module `bagua.errors`, imported at the first error.
static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The module `bagua.records`, imported at the first failure of a group.
static RECORDS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The group whose operation ended with an error. Holds no reference to the group, so that a handle that nobody waits
/// for does not keep the group alive.
#[derive(Clone)]
pub struct Origin(Arc<FailedGroup>);

/// The facts about a group that go into a flight record.
struct FailedGroup {
    /// Identifier, different for every group of this process.
    id: u64,
    name: String,
    /// Failure state of the group.
    health: Arc<GroupHealth>,
    /// Id of the process that built the group. A forked child is not a rank of the group.
    owner: u32,
}

impl Origin {
    pub fn new(group: &Group) -> Origin {
        let (name, health) = (group.name().to_owned(), Arc::clone(group.health()));
        Origin(Arc::new(FailedGroup { id: group.id(), name, health, owner: std::process::id() }))
    }

    /// Returns the exception for a core error, as [`raise`] does. If the group has failed without being aborted, the
    /// first exception writes the flight record of this rank, and the text of every exception ends with the record's
    /// path.
    pub fn raise(&self, py: Python<'_>, error: Error) -> PyErr {
        let FailedGroup { id, name, health, owner } = &*self.0;
        let aborted = |error: &Error| matches!(error, Error::Aborted(_));
        if health.cause().is_none_or(|cause| aborted(&cause)) {
            return raise(py, error);
        }
        if error.is_argument() || aborted(&error) || std::process::id() != *owner {
            return raise(py, error);
        }
        let own = health.rank();
        let written = || -> PyResult<(Option<String>, String)> {
            let module = RECORDS.get_or_try_init(py, || py.import("bagua.records").map(Bound::unbind))?;
            let arguments = (*id, name, health.world_rank(own), health.host(own), error.to_string());
            module.bind(py).getattr("of_failure")?.call1(arguments)?.extract()
        };
        match written() {
            // Ctrl-C was pressed while the record was written.
            Err(raised) if !raised.is_instance_of::<PyException>(py) => raised,
            // A failure to write the record must not replace the error. Only an interpreter that shuts down raises
            // here.
            record => raise_with(py, error, record.unwrap_or_default()),
        }
    }
}

impl Origin {
    /// Returns the exception for a failure on this rank outside of a communication thread. Unless an argument caused
    /// the failure, the group fails too. If the group had already failed, returns the exception for its first failure.
    pub fn fail(&self, py: Python<'_>, error: Error) -> PyErr {
        let error = if error.is_argument() { error } else { py.detach(|| self.0.health.fail(error)) };
        self.raise(py, error)
    }

    /// World rank of this process.
    pub fn rank(&self) -> usize {
        self.0.health.world_rank(self.0.health.rank())
    }
}

/// Returns the exception for a core error, created as `cls(message, **fields)` with a class of `bagua.errors`. Its
/// `__cause__` is the error of the operating system, or the exception of a user's function, that led to the error.
pub fn raise(py: Python<'_>, error: Error) -> PyErr {
    raise_with(py, error, (None, String::new()))
}

fn raise_with(py: Python<'_>, error: Error, record: (Option<String>, String)) -> PyErr {
    let code = error.os_error().and_then(std::io::Error::raw_os_error);
    let original = error.exception().and_then(|exception| take_exception(&*exception.original));
    let raised = exception(py, error, record).unwrap_or_else(|while_raising| while_raising);
    if let Some(cause) = original.or_else(|| code.and_then(|code| os_error(py, code).ok())) {
        raised.set_cause(py, Some(cause));
    }
    raised
}

/// Wraps an exception for [`bagua_core::error::Exception`]. The first exception that is raised because of this one
/// takes it out. Otherwise a failed group, which keeps its cause, would keep the objects in the traceback alive, and
/// these may in turn keep the group alive.
pub fn keep_exception(raised: PyErr) -> Box<dyn Any + Send + Sync> {
    Box::new(Mutex::new(Some(raised)))
}

fn take_exception(kept: &(dyn Any + Send + Sync)) -> Option<PyErr> {
    let kept = kept.downcast_ref::<Mutex<Option<PyErr>>>()?;
    lock(kept).take()
}

/// Returns the `OSError` with this number. Python chooses the subclass, such as `ConnectionResetError`.
fn os_error(py: Python<'_>, code: i32) -> PyResult<PyErr> {
    let text: String = py.import(intern!(py, "os"))?.call_method1(intern!(py, "strerror"), (code,))?.extract()?;
    Ok(PyOSError::new_err((code, text)))
}

/// Returns the exception for a core error, without its cause. `Err` if the exception cannot be created.
fn exception(py: Python<'_>, error: Error, (record, note): (Option<String>, String)) -> PyResult<PyErr> {
    let text = error.to_string() + &note;
    let fields = PyDict::new(py);
    if let Some(path) = record {
        fields.set_item("record", path)?;
    }
    // This match has no wildcard, so that the compiler asks for the class of a new variant.
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
        Error::System { .. } | Error::Unavailable(_) => "BaguaError",
        Error::Device(failure) => {
            fields.set_item("api", failure.api)?;
            fields.set_item("code", failure.code)?;
            fields.set_item("name", failure.name)?;
            fields.set_item("device", failure.device)?;
            "DeviceError"
        }
        Error::InvalidArgument(_) => return Ok(PyValueError::new_err(text)),
        Error::UnsupportedType(_) => return Ok(PyTypeError::new_err(text)),
        Error::NotImplemented(_) => return Ok(PyNotImplementedError::new_err(text)),
    };
    let module = ERRORS.get_or_try_init(py, || py.import("bagua.errors").map(Bound::unbind))?;
    Ok(PyErr::from_value(module.bind(py).getattr(class)?.call((text,), Some(&fields))?))
}

/// Returns class name and text of an exception, for other threads and ranks.
pub fn described(py: Python<'_>, raised: &PyErr) -> (String, String) {
    let class = raised.get_type(py).name().map_or_else(|_| "an exception".to_owned(), |name| name.to_string());
    (class, raised.value(py).to_string())
}

fn set_progress(fields: &Bound<'_, PyDict>, progress: Option<Box<Progress>>) -> PyResult<()> {
    let Some(Progress { what, label, done, total }) = progress.map(|progress| *progress) else { return Ok(()) };
    fields.set_item("during", what)?;
    fields.set_item("bucket", label)?;
    fields.set_item("done_bytes", done)?;
    fields.set_item("total_bytes", total)
}

/// Returns an argument in seconds as a duration. Raises ValueError if it is negative or NaN.
pub fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    // A longer duration would overflow when it is added to the clock.
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    if value.is_nan() || value < 0.0 {
        return Err(PyValueError::new_err(format!("{name} is {value} s; it must be 0 or more")));
    }
    Ok(Duration::try_from_secs_f64(value).unwrap_or(LONGEST).min(LONGEST))
}

/// Runs a check, and converts its error to Python's exception.
pub fn with<T>(py: Python<'_>, check: impl FnOnce() -> Result<T>) -> PyResult<T> {
    check().map_err(|e| raise(py, e))
}
