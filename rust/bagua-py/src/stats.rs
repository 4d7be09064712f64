//! The counters of a group as a dict of Python.

use std::sync::atomic::Ordering::Relaxed;

use bagua_core::group::Group;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

/// Returns the counters of a group since it was built. Times are in seconds.
pub fn of<'py>(py: Python<'py>, group: &Group) -> PyResult<Bound<'py, PyDict>> {
    let ops = PyDict::new(py);
    for (kind, counts) in group.stats().snapshot() {
        let shown = [
            ("calls", counts.calls),
            ("zero_copy", counts.zero_copy),
            ("hierarchical", counts.hierarchical),
            ("payload_bytes", counts.payload_bytes),
            ("wire_bytes_sent", counts.wire_bytes_sent),
            ("wire_bytes_received", counts.wire_bytes_received),
            ("nonfinite_records", counts.nonfinite_records),
        ];
        let shown = shown.into_py_dict(py)?;
        shown.set_item("wait_s", counts.wait_s)?;
        shown.set_item("reduce_s", counts.reduce_s)?;
        shown.set_item("encode_s", counts.encode_s)?;
        ops.set_item(kind.name(), shown)?;
    }
    let (opened, closed) = (group.stats().data_opened.load(Relaxed), group.stats().data_closed.load(Relaxed));
    let (control, data) = (group.control_connections() as u64, opened.saturating_sub(closed));
    let connections = [("control", control), ("data", data), ("opened", opened), ("closed", closed)];
    let agreement = [("messages", &group.stats().agreement_messages), ("bytes", &group.stats().agreement_bytes)];
    let agreement = agreement.map(|(name, count)| (name, count.load(Relaxed)));
    let stats = PyDict::new(py);
    stats.set_item("rank", group.rank())?;
    stats.set_item("size", group.size())?;
    stats.set_item("connections", connections.into_py_dict(py)?)?;
    stats.set_item("agreement", agreement.into_py_dict(py)?)?;
    stats.set_item("connections_refused", group.stats().connections_refused.load(Relaxed))?;
    stats.set_item("join_s", group.joined_in().as_secs_f64())?;
    stats.set_item("peers_seen", group.peers_seen())?;
    stats.set_item("ops", ops)?;
    Ok(stats)
}
