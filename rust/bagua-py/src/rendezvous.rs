//! Spreading addresses, and what this build and this machine offer.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;

use bagua_core::error::Error;
use bagua_core::group;
use bagua_core::wait::lock;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors;
use crate::interrupt;

fn blobs(py: Python<'_>, addresses: Vec<Vec<u8>>) -> Vec<Py<PyBytes>> {
    addresses.iter().map(|blob| PyBytes::new(py, blob).unbind()).collect()
}

/// Spreads addresses through a small TCP server that rank 0 runs on `host:port` until every rank has all of them.
///
/// `address` is this rank's blob from `Bootstrap.address()`, `timeout` is in seconds. Returns every rank's blob, by rank.
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
    let addresses = interrupt::run_on_thread(py, move || {
        group::rendezvous_tcp((&host, port), rank, world_size, &address, &secret, timeout)
    })?;
    Ok(blobs(py, addresses))
}

/// A place that was named to a rank.
fn place(py: Python<'_>, host: &str, port: u16) -> PyResult<SocketAddr> {
    let parsed = host.parse().map_err(|e| Error::InvalidArgument(format!("host '{host}' is not an IP address: {e}")));
    parsed.map(|host| SocketAddr::new(host, port)).map_err(|e| errors::raise(py, e))
}

/// Rank 0's end of a rendezvous, which listens from the start: on `host`, an IP address, and on `port`, 0 for any free one.
///
/// Raises ValueError for an address that cannot be used, BaguaError when the system refuses to listen.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct RendezvousServer {
    place: SocketAddr,
    /// Taken by `serve`.
    server: Mutex<Option<group::RendezvousServer>>,
}

#[pymethods]
impl RendezvousServer {
    #[new]
    fn new(py: Python<'_>, host: &str, port: u16) -> PyResult<RendezvousServer> {
        let raise = |error| errors::raise(py, error);
        let server = group::RendezvousServer::bind(place(py, host, port)?).map_err(raise)?;
        Ok(RendezvousServer { place: server.place().map_err(raise)?, server: Mutex::new(Some(server)) })
    }

    /// Host and port to tell the other ranks, for their `rendezvous_at`.
    fn place(&self) -> (String, u16) {
        (self.place.ip().to_string(), self.place.port())
    }

    /// Spreads the addresses of all ranks; `address` is rank 0's blob, `timeout` is in seconds. Works once.
    ///
    /// Returns every rank's blob, by rank. Raises BaguaTimeoutError naming the ranks that did not come.
    fn serve(
        &self,
        py: Python<'_>,
        world_size: usize,
        address: Vec<u8>,
        secret: Vec<u8>,
        timeout: f64,
    ) -> PyResult<Vec<Py<PyBytes>>> {
        let timeout = errors::seconds("timeout", timeout)?;
        let server = lock(&self.server).take();
        let again = || errors::raise(py, Error::other("this rendezvous has been served already"));
        let server = server.ok_or_else(again)?;
        let addresses = interrupt::run_on_thread(py, move || server.serve(world_size, &address, &secret, timeout))?;
        Ok(blobs(py, addresses))
    }
}

/// Spreads addresses as `rendezvous_tcp` does on ranks other than 0, by way of the `RendezvousServer` at `host:port`.
///
/// Raises PeerLostError as soon as that does not answer, or no longer.
#[pyfunction]
#[pyo3(signature = (host, port, rank, world_size, address, secret, timeout))]
#[expect(clippy::too_many_arguments, reason = "the signature is Python's")]
pub fn rendezvous_at(
    py: Python<'_>,
    host: &str,
    port: u16,
    rank: usize,
    world_size: usize,
    address: Vec<u8>,
    secret: Vec<u8>,
    timeout: f64,
) -> PyResult<Vec<Py<PyBytes>>> {
    let (server, timeout) = (place(py, host, port)?, errors::seconds("timeout", timeout)?);
    let addresses = interrupt::run_on_thread(py, move || {
        group::rendezvous_at(server, rank, world_size, &address, &secret, timeout)
    })?;
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
    let addresses =
        interrupt::run_on_thread(py, move || group::rendezvous_file(&path, rank, world_size, &address, timeout))?;
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
