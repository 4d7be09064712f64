//! `GroupConfig`: the parameters with which a rank joins a group.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bagua_core::collective::Algorithm;
use bagua_core::error::Error;
use bagua_core::group::{Config, TransportChoice};
use pyo3::prelude::*;

use crate::errors::{self, seconds};
use crate::tls::{Tls, tls_of};

/// The parameters of a rank that joins the group `name` and listens on any free port of `listen_host`.
///
/// `settings` has the attributes of `bagua.config.Settings`:
/// - Ranks with equal `host_id` share memory ("": boot id and network namespace).
/// - `transport` is one of `TRANSPORTS`.
/// - `streams_per_peer` (1 to 64) is the number of TCP streams to a rank on another host.
/// - `algorithm` (one of `ALGORITHMS`) is the algorithm of all_reduce between hosts.
/// - `timeout` (of an operation, and of connecting) and `heartbeat_timeout` are in seconds.
/// - `tls` encrypts every TCP connection.
///
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
    #[pyo3(signature = (rank, world_size, settings, *, name, secret, listen_host))]
    fn new(
        py: Python<'_>,
        rank: usize,
        world_size: usize,
        settings: &Bound<'_, PyAny>,
        name: String,
        secret: Vec<u8>,
        listen_host: &str,
    ) -> PyResult<GroupConfig> {
        let refuse = |text| Err(errors::raise(py, Error::InvalidArgument(text)));
        if rank >= world_size {
            return refuse(format!("rank {rank} is not in a world of {world_size} ranks"));
        }
        let text = |name: &str| settings.getattr(name)?.extract::<String>();
        let transport = TransportChoice::by_name("transport", &text("transport")?);
        let algorithm = Algorithm::by_name("algorithm of all_reduce", &text("algorithm")?);
        let listen_host: IpAddr = match listen_host.parse() {
            Ok(address) => address,
            Err(error) => return refuse(format!("listen_host '{listen_host}' is not an IP address: {error}")),
        };
        let timeout = seconds("timeout", settings.getattr("timeout")?.extract()?)?;
        let core = Config {
            name,
            host_id: text("host_id")?,
            host_name: String::new(),
            secret,
            tls: tls_of(settings.getattr("tls")?.extract::<Option<Bound<'_, Tls>>>()?.as_ref()),
            listen: SocketAddr::new(listen_host, 0),
            timeout,
            connect_timeout: timeout,
            heartbeat_timeout: seconds("heartbeat_timeout", settings.getattr("heartbeat_timeout")?.extract()?)?,
            transport: transport.map_err(|e| errors::raise(py, e))?,
            streams_per_peer: settings.getattr("streams_per_peer")?.extract()?,
            algorithm: algorithm.map_err(|e| errors::raise(py, e))?,
            factories: vec![Arc::new(bagua_cuda::Factory)],
            ..Config::new(rank, world_size)
        };
        Ok(GroupConfig { core })
    }
}
