//! `Bootstrap`: a rank that listens, and then connects to the other ranks of a group.

use std::sync::Mutex;

use bagua_core::engine as core;
use bagua_core::error::Error;
use bagua_core::group;
use bagua_core::wait::lock;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::config::config_of;
use crate::errors;
use crate::gil::DropWithoutGil;
use crate::group::Communicator;
use crate::interrupt;
use crate::tls::{Tls, tls_of};

/// A rank that listens and has an address, but is not connected to any peer.
///
/// Ranks with equal `host_id` share memory ("": boot id and network namespace), `host_name` appears in error texts ("": the system's),
/// `transport` is "auto" or "tcp", `streams_per_peer` (1 to 64) is the number of TCP streams to a rank on another host, `algorithm`
/// ("auto", "direct", "ring" or "doubling") is the algorithm of all_reduce between hosts; `listen_port` 0 takes any free port; `timeout`
/// (of an operation), `connect_timeout` and `heartbeat_timeout` are in seconds; with `tls` every TCP connection is encrypted.
/// Raises ValueError for invalid arguments, BaguaError when the socket cannot be opened.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Bootstrap {
    address: Vec<u8>,
    world_size: usize,
    /// `None` after `connect`.
    core: Mutex<Option<DropWithoutGil<group::Bootstrap>>>,
}

#[pymethods]
impl Bootstrap {
    #[new]
    #[pyo3(signature = (rank, world_size, *, name, host_id, host_name, secret, listen_host, listen_port, timeout,
        connect_timeout, heartbeat_timeout, transport, streams_per_peer, algorithm, tls=None))]
    #[expect(clippy::too_many_arguments, reason = "the signature is Python's, and they are keywords there")]
    fn new(
        py: Python<'_>,
        rank: usize,
        world_size: usize,
        name: String,
        host_id: String,
        host_name: String,
        secret: Vec<u8>,
        listen_host: &str,
        listen_port: u16,
        timeout: f64,
        connect_timeout: f64,
        heartbeat_timeout: f64,
        transport: &str,
        streams_per_peer: usize,
        algorithm: &str,
        tls: Option<Bound<'_, Tls>>,
    ) -> PyResult<Bootstrap> {
        let config = config_of(
            py,
            rank,
            world_size,
            name,
            host_id,
            host_name,
            secret,
            (listen_host, listen_port),
            [timeout, connect_timeout, heartbeat_timeout],
            transport,
            streams_per_peer,
            algorithm,
            tls_of(tls.as_ref()),
        )?;
        let raise = |error| errors::raise(py, error);
        let core = py.detach(|| group::Bootstrap::bind(config)).map_err(raise)?;
        let address = core.address().to_vec();
        Ok(Bootstrap { address, world_size, core: Mutex::new(Some(DropWithoutGil::new(core))) })
    }

    /// This rank's address: opaque bytes that all ranks need for `connect`.
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.address)
    }

    /// Connects to all peers and opens the group's main lane. `addresses[r]` is the address of rank r. May be called once.
    ///
    /// Raises BaguaTimeoutError naming the ranks that did not connect within `connect_timeout`.
    fn connect(&self, py: Python<'_>, addresses: Vec<Vec<u8>>) -> PyResult<Communicator> {
        let raise = |error| errors::raise(py, error);
        if addresses.len() != self.world_size {
            let text = format!("{} addresses for a world of {} ranks", addresses.len(), self.world_size);
            return Err(raise(Error::InvalidArgument(text)));
        }
        let bootstrap = lock(&self.core).take();
        let bootstrap = bootstrap.ok_or_else(|| raise(Error::other("this rank has connected already")))?;
        let core =
            interrupt::run_on_thread(py, move || core::Communicator::new(bootstrap.into_inner().connect(&addresses)?))?;
        Ok(Communicator::of(core))
    }
}
