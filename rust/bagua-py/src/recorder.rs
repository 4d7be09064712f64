//! The flight recorder as Python reads it.

use bagua_core::group;
use bagua_core::recorder::Operation;
use bagua_core::types::DType;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns the last operations of this process as dicts, oldest first. Times are in seconds since the epoch. See
/// `bagua.flight_recorder`.
#[pyfunction]
pub fn flight_recorder(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let operations = py.detach(|| group::flight_recorder().operations());
    operations.into_iter().map(|operation| shown(py, operation)).collect()
}

fn shown(py: Python<'_>, operation: Operation) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("n", operation.n)?;
    dict.set_item("group", &*operation.group)?;
    dict.set_item("channel", operation.channel)?;
    dict.set_item("seq", operation.seq)?;
    dict.set_item("kind", operation.what.text())?;
    dict.set_item("label", operation.label)?;
    dict.set_item("dtype", operation.dtype.map(DType::name))?;
    dict.set_item("count", operation.count)?;
    dict.set_item("bytes", operation.bytes)?;
    dict.set_item("root", operation.root)?;
    dict.set_item("state", operation.state.name())?;
    dict.set_item("begin", operation.begin.map(|time| time.as_secs_f64()))?;
    dict.set_item("end", operation.end.map(|time| time.as_secs_f64()))?;
    dict.set_item("missing", operation.missing)?;
    Ok(dict)
}
