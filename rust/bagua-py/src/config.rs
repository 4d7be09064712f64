//! `GroupConfig`: the parameters with which a rank joins a group.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bagua_core::collective::Algorithm;
use bagua_core::error::Error;
use bagua_core::group::{Config, TransportChoice};
use pyo3::prelude::*;

use crate::errors::{self, seconds};
use crate::tls::{Tls, tls_of};

/// The parameters with which a rank joins a group.
///
/// Ranks with equal `host_id` share memory ("": boot id and network namespace), `host_name` appears in error texts ("": the system's),
/// `transport` is "auto" or "tcp", `streams_per_peer` (1 to 64) is the number of TCP streams to a rank on another host, `algorithm`
/// ("auto", "direct", "ring" or "doubling") is the algorithm of all_reduce between hosts; `listen_port` 0 takes any free port; `timeout`
/// (of an operation), `connect_timeout` and `heartbeat_timeout` are in seconds; with `tls` every TCP connection is encrypted.
/// Raises ValueError for invalid arguments.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct GroupConfig {
    core: Config,
}

impl GroupConfig {
    pub fn core(&self) -> Config {
        self.core.clone()
    }
}

#[pymethods]
impl GroupConfig {
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
    ) -> PyResult<GroupConfig> {
        let refuse = |text| Err(errors::raise(py, Error::InvalidArgument(text)));
        if rank >= world_size {
            return refuse(format!("rank {rank} is not in a world of {world_size} ranks"));
        }
        let transport = match transport {
            "auto" => TransportChoice::Auto,
            "tcp" => TransportChoice::Tcp,
            other => return refuse(format!("transport '{other}' is neither 'auto' nor 'tcp'")),
        };
        let Some(algorithm) = Algorithm::named(algorithm) else {
            return refuse(format!("there is no algorithm '{algorithm}' for an all_reduce"));
        };
        let listen_host: IpAddr = match listen_host.parse() {
            Ok(address) => address,
            Err(error) => return refuse(format!("listen_host '{listen_host}' is not an IP address: {error}")),
        };
        let core = Config {
            rank,
            world_size,
            name,
            host_id,
            host_name,
            secret,
            tls: tls_of(tls.as_ref()),
            listen: SocketAddr::new(listen_host, listen_port),
            timeout: seconds("timeout", timeout)?,
            connect_timeout: seconds("connect_timeout", connect_timeout)?,
            heartbeat_timeout: seconds("heartbeat_timeout", heartbeat_timeout)?,
            transport,
            streams_per_peer,
            algorithm,
            view: 1,
            factories: vec![Arc::new(bagua_cuda::Factory)],
        };
        Ok(GroupConfig { core })
    }
}
