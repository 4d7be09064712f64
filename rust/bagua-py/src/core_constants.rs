//! The tables of the core, so that no number is written twice.

use bagua_core::codec::NAMES;
use bagua_core::collective::Algorithm;
use bagua_core::group::{MAX_STREAMS, TransportChoice};
use bagua_core::request::PeerSelection;
use bagua_core::types::{DType, Kind, ReduceOp};
use bagua_cuda::kernels::PROGRAMS;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet};

/// Returns the core's tables by name: codes of element types, operations and verbs, and lists of names. The module
/// `bagua.extension` exports each table under the same name and describes it.
#[pyfunction]
pub fn tables(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let dict = |entries: &[(&str, u8)]| -> PyResult<Bound<'_, PyDict>> {
        let table = PyDict::new(py);
        entries.iter().try_for_each(|(name, code)| table.set_item(name, code))?;
        Ok(table)
    };
    let all = PyDict::new(py);
    all.set_item("DTYPES", dict(&DType::ALL.map(|dtype| (dtype.name(), dtype as u8)))?)?;
    all.set_item("OPS", dict(&ReduceOp::ALL.map(|op| (op.name(), op as u8)))?)?;
    all.set_item("VERBS", dict(&Kind::ALL.map(|kind| (kind.name(), kind as u8)))?)?;
    let pairs = ReduceOp::ALL.iter().flat_map(|op| DType::ALL.map(|dtype| (*op, dtype)));
    let defined = pairs.filter(|(op, dtype)| op.check(*dtype).is_ok()).map(|(op, dtype)| (op as u8, dtype as u8));
    all.set_item("DEFINED", PyFrozenSet::new(py, defined)?)?;
    all.set_item("CODECS", NAMES)?;
    all.set_item("TRANSPORTS", TransportChoice::ALL.map(TransportChoice::name))?;
    all.set_item("ALGORITHMS", Algorithm::ALL.map(Algorithm::name))?;
    all.set_item("PEER_SELECTION_MODES", PeerSelection::ALL.map(PeerSelection::name))?;
    all.set_item("MAX_STREAMS", MAX_STREAMS)?;
    let kernels = PyDict::new(py);
    PROGRAMS.iter().try_for_each(|program| kernels.set_item(program.name, program.kernels))?;
    all.set_item("CUDA_KERNELS", kernels)?;
    all.set_item("IS_OPTIMIZED", !cfg!(debug_assertions))?;
    Ok(all)
}
