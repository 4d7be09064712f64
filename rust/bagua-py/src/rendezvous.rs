//! The exchange of addresses between ranks; the version of this build.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;

use bagua_core::error::{Error, Result};
use bagua_core::group::{self, Access, Limits};
use bagua_core::wait::lock;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::interrupt;
use crate::tls::{Tls, tls_of};

/// Exchanges addresses on another thread, while this thread notices Ctrl-C and calls `waiting`. Returns the addresses
/// of all ranks.
fn exchange(
    py: Python<'_>,
    waiting: Option<Bound<'_, PyAny>>,
    limits: &Limits,
    run: impl FnOnce() -> Result<Vec<Vec<u8>>> + Send + 'static,
) -> PyResult<Vec<Py<PyBytes>>> {
    let addresses = interrupt::run_and_report(py, waiting.as_ref().map(|function| (function, &limits.awaited)), run)?;
    Ok(addresses.iter().map(|blob| PyBytes::new(py, blob).unbind()).collect())
}

/// Returns the time limits of an exchange, from seconds.
fn limits(timeout: f64, heartbeat_timeout: f64) -> PyResult<Limits> {
    let lost_after = errors::seconds("heartbeat_timeout", heartbeat_timeout)?;
    Ok(Limits { lost_after, ..errors::seconds("timeout", timeout)?.into() })
}

/// Exchanges addresses through a TCP server that rank 0 runs on `host:port` until every rank has all addresses.
///
/// `address` is this rank's blob from `Bootstrap.address()`, `timeout` is in seconds. Returns the blobs of all ranks,
/// by rank. A rank whose process ends after it has connected is lost unless another process takes its rank within
/// `heartbeat_timeout` seconds. While this rank knows which ranks are missing, it calls `waiting` with them every 50 to
/// 200 ms.
///
/// Raises BaguaTimeoutError, which names the missing ranks, PeerLostError, which names a lost rank, or another
/// BaguaError.
#[pyfunction]
#[pyo3(signature = (host, port, rank, world_size, address, secret, timeout, tls=None, heartbeat_timeout=5.0, waiting=None))]
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
    tls: Option<Bound<'_, Tls>>,
    heartbeat_timeout: f64,
    waiting: Option<Bound<'_, PyAny>>,
) -> PyResult<Vec<Py<PyBytes>>> {
    let (limits, tls) = (limits(timeout, heartbeat_timeout)?, tls_of(tls.as_ref()));
    exchange(py, waiting, &limits.clone(), move || {
        let access = Access { secret: &secret, tls: tls.as_ref() };
        group::rendezvous_tcp((&host, port), rank, world_size, &address, access, limits)
    })
}

fn socket_address(py: Python<'_>, host: &str, port: u16) -> PyResult<SocketAddr> {
    let parsed = host.parse().map_err(|e| Error::InvalidArgument(format!("host '{host}' is not an IP address: {e}")));
    parsed.map(|host| SocketAddr::new(host, port)).map_err(|e| errors::raise(py, e))
}

/// Rank 0's server of a rendezvous. Listens at once, on `host` (an IP address) and `port` (0: any free port).
///
/// Raises ValueError for an invalid address, BaguaError if the socket cannot be opened.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct RendezvousServer {
    address: SocketAddr,
    server: Mutex<Option<group::RendezvousServer>>,
}

#[pymethods]
impl RendezvousServer {
    #[new]
    fn new(py: Python<'_>, host: &str, port: u16) -> PyResult<RendezvousServer> {
        let raise = |error| errors::raise(py, error);
        let server = group::RendezvousServer::bind(socket_address(py, host, port)?).map_err(raise)?;
        Ok(RendezvousServer { address: server.address().map_err(raise)?, server: Mutex::new(Some(server)) })
    }

    /// Host and port, which the other ranks pass to `rendezvous_at`.
    fn address(&self) -> (String, u16) {
        (self.address.ip().to_string(), self.address.port())
    }

    /// Exchanges the addresses of all ranks; `address` is rank 0's blob, `timeout` is in seconds. May be called once.
    ///
    /// Returns the blobs of all ranks, by rank. Raises BaguaTimeoutError and PeerLostError as `rendezvous_tcp`.
    #[expect(clippy::too_many_arguments, reason = "those of the call from Python")]
    #[pyo3(signature = (world_size, address, secret, timeout, tls=None, heartbeat_timeout=5.0, waiting=None))]
    fn serve(
        &self,
        py: Python<'_>,
        world_size: usize,
        address: Vec<u8>,
        secret: Vec<u8>,
        timeout: f64,
        tls: Option<Bound<'_, Tls>>,
        heartbeat_timeout: f64,
        waiting: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Py<PyBytes>>> {
        let (limits, tls) = (limits(timeout, heartbeat_timeout)?, tls_of(tls.as_ref()));
        let server = lock(&self.server).take();
        let called_twice = || errors::raise(py, Error::other("this rendezvous has been served already"));
        let server = server.ok_or_else(called_twice)?;
        exchange(py, waiting, &limits.clone(), move || {
            let access = Access { secret: &secret, tls: tls.as_ref() };
            server.serve(world_size, &address, access, limits)
        })
    }
}

/// Exchanges addresses as `rendezvous_tcp` does on ranks other than 0, through the `RendezvousServer` at `host:port`.
///
/// Raises PeerLostError if the connection to the server fails or breaks.
#[pyfunction]
#[pyo3(signature = (host, port, rank, world_size, address, secret, timeout, tls=None, heartbeat_timeout=5.0, waiting=None))]
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
    tls: Option<Bound<'_, Tls>>,
    heartbeat_timeout: f64,
    waiting: Option<Bound<'_, PyAny>>,
) -> PyResult<Vec<Py<PyBytes>>> {
    let (server, limits) = (socket_address(py, host, port)?, limits(timeout, heartbeat_timeout)?);
    let tls = tls_of(tls.as_ref());
    exchange(py, waiting, &limits.clone(), move || {
        let access = Access { secret: &secret, tls: tls.as_ref() };
        group::rendezvous_at(server, rank, world_size, &address, access, limits)
    })
}

/// Exchanges addresses through files next to `path`, on a file system that all ranks share. `timeout` is in seconds.
///
/// Returns the blobs of all ranks, by rank. Raises BaguaTimeoutError naming the missing ranks, or another BaguaError.
#[pyfunction]
#[pyo3(signature = (path, rank, world_size, address, timeout, waiting=None))]
pub fn rendezvous_file(
    py: Python<'_>,
    path: PathBuf,
    rank: usize,
    world_size: usize,
    address: Vec<u8>,
    timeout: f64,
    waiting: Option<Bound<'_, PyAny>>,
) -> PyResult<Vec<Py<PyBytes>>> {
    let limits = Limits::from(errors::seconds("timeout", timeout)?);
    exchange(py, waiting, &limits.clone(), move || group::rendezvous_file(&path, rank, world_size, &address, limits))
}

/// Returns the local address of the route to `host:port`. Sends nothing.
#[pyfunction]
pub fn local_address_towards(py: Python<'_>, host: String, port: u16) -> PyResult<String> {
    py.detach(|| group::local_address_towards(&host, port))
        .map(|address| address.to_string())
        .map_err(|e| errors::raise(py, e))
}

/// Returns the version of this build.
#[pyfunction]
pub fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
