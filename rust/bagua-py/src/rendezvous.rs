//! Spreading addresses, and what this build and this machine offer.

use std::path::PathBuf;

use bagua_core::group;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors;
use crate::waiting;

fn blobs(py: Python<'_>, addresses: Vec<Vec<u8>>) -> Vec<Py<PyBytes>> {
    addresses.iter().map(|blob| PyBytes::new(py, blob).unbind()).collect()
}

/// Spreads addresses through a small TCP server that rank 0 runs on `host:port` until every rank has all of them.
///
/// `address` is this rank's blob from `Pending.address()`, `timeout` is in seconds. Returns every rank's blob, by rank.
/// Raises BaguaTimeoutError or BaguaError when that fails.
#[pyfunction]
#[pyo3(signature = (host, port, rank, world_size, address, secret, timeout))]
#[expect(clippy::too_many_arguments, reason = "the signature is Python's")]
pub fn rendezvous_tcp(
    py: Python<'_>,
    host: String,
    port: u16,
    rank: usize,
    world_size: usize,
    address: Vec<u8>,
    secret: Vec<u8>,
    timeout: f64,
) -> PyResult<Vec<Py<PyBytes>>> {
    let timeout = errors::seconds("timeout", timeout)?;
    let addresses =
        waiting::aside(py, move || group::rendezvous_tcp((&host, port), rank, world_size, &address, &secret, timeout))?;
    Ok(blobs(py, addresses))
}

/// Spreads addresses through files beside `path`, on a file system that all ranks share. `timeout` is in seconds.
///
/// Returns every rank's blob, by rank. Raises BaguaTimeoutError or BaguaError when that fails.
#[pyfunction]
#[pyo3(signature = (path, rank, world_size, address, timeout))]
pub fn rendezvous_file(
    py: Python<'_>,
    path: PathBuf,
    rank: usize,
    world_size: usize,
    address: Vec<u8>,
    timeout: f64,
) -> PyResult<Vec<Py<PyBytes>>> {
    let timeout = errors::seconds("timeout", timeout)?;
    let addresses = waiting::aside(py, move || group::rendezvous_file(&path, rank, world_size, &address, timeout))?;
    Ok(blobs(py, addresses))
}

/// The address of the interface that the route towards `host:port` uses. Nothing is sent.
#[pyfunction]
pub fn local_address_towards(py: Python<'_>, host: String, port: u16) -> PyResult<String> {
    py.detach(|| group::local_address_towards(&host, port))
        .map(|address| address.to_string())
        .map_err(|e| errors::raise(py, e))
}

/// Version of this build.
#[pyfunction]
pub fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// What of CUDA this process can load: {"cuda_driver": bool, "nccl": bool}. Initialises no device.
#[pyfunction]
pub fn present(py: Python<'_>) -> PyResult<Py<PyDict>> {
    let present = py.detach(bagua_cuda::present);
    let found = PyDict::new(py);
    found.set_item("cuda_driver", present.driver)?;
    found.set_item("nccl", present.nccl)?;
    Ok(found.unbind())
}
