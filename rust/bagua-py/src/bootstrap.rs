//! `Bootstrap`: a rank on its way into a group.

use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;

use bagua_core::collective::Algorithm;
use bagua_core::engine as core;
use bagua_core::error::Error;
use bagua_core::group::{self, Config, TransportChoice};
use bagua_core::wait::lock;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{self, seconds};
use crate::gil::DropWithoutGil;
use crate::group::Communicator;
use crate::interrupt;

/// A rank that listens and has an address to spread, but knows no peer yet.
///
/// `host_id` tells which ranks can share memory ("" asks the system), `host_name` is for people ("": the system's),
/// `transport` is "auto" or "tcp", `streams_per_peer` (1 to 64) are TCP streams to a rank on another host, `algorithm` ("auto",
/// "direct", "ring" or "doubling") is how all_reduce goes between hosts;
/// `listen_port` 0 takes any free port; `timeout` (of an operation), `connect_timeout` and `heartbeat_timeout` are seconds.
/// Raises ValueError for arguments that cannot be used, BaguaError when the system refuses to listen.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Bootstrap {
    address: Vec<u8>,
    world_size: usize,
    /// Taken by `connect`.
    pending: Mutex<Option<DropWithoutGil<group::Bootstrap>>>,
}

#[pymethods]
impl Bootstrap {
    #[new]
    #[pyo3(signature = (rank, world_size, *, name, host_id, host_name, secret, listen_host, listen_port, timeout,
        connect_timeout, heartbeat_timeout, transport, streams_per_peer, algorithm))]
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
    ) -> PyResult<Bootstrap> {
        let raise = |error| errors::raise(py, error);
        if rank >= world_size {
            return Err(raise(Error::InvalidArgument(format!("rank {rank} is not below world size {world_size}"))));
        }
        let transport = match transport {
            "auto" => TransportChoice::Auto,
            "tcp" => TransportChoice::Tcp,
            other => {
                return Err(raise(Error::InvalidArgument(format!("transport '{other}' is neither 'auto' nor 'tcp'"))));
            }
        };
        let algorithm = Algorithm::named(algorithm).ok_or_else(|| {
            raise(Error::InvalidArgument(format!("there is no algorithm '{algorithm}' for an all_reduce")))
        })?;
        let listen_host: IpAddr = listen_host.parse().map_err(|e| {
            raise(Error::InvalidArgument(format!("listen_host '{listen_host}' is not an IP address: {e}")))
        })?;
        let config = Config {
            rank,
            world_size,
            name,
            host_id,
            host_name,
            secret,
            listen: SocketAddr::new(listen_host, listen_port),
            timeout: seconds("timeout", timeout)?,
            connect_timeout: seconds("connect_timeout", connect_timeout)?,
            heartbeat_timeout: seconds("heartbeat_timeout", heartbeat_timeout)?,
            transport,
            streams_per_peer,
            algorithm,
            factories: Vec::new(),
        };
        let pending = py.detach(|| group::Bootstrap::bind(config)).map_err(raise)?;
        let address = pending.address().to_vec();
        Ok(Bootstrap { address, world_size, pending: Mutex::new(Some(DropWithoutGil::new(pending))) })
    }

    /// Opaque bytes that the peers need: spread them to every rank.
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.address)
    }

    /// Connects to all peers and opens the group's main lane. `addresses[r]` is rank r's. Works once.
    ///
    /// Raises BaguaTimeoutError naming the ranks that did not come within `connect_timeout`.
    fn connect(&self, py: Python<'_>, addresses: Vec<Vec<u8>>) -> PyResult<Communicator> {
        let raise = |error| errors::raise(py, error);
        if addresses.len() != self.world_size {
            let text = format!("{} addresses for a world of {} ranks", addresses.len(), self.world_size);
            return Err(raise(Error::InvalidArgument(text)));
        }
        let pending = lock(&self.pending).take();
        let pending = pending.ok_or_else(|| raise(Error::other("this rank has connected already")))?;
        let core =
            interrupt::run_on_thread(py, move || core::Communicator::new(pending.into_inner().connect(&addresses)?))?;
        Ok(Communicator::of(core))
    }
}
