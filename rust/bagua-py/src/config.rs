//! The parameters of a group, from Python's keywords.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bagua_core::collective::Algorithm;
use bagua_core::error::Error;
use bagua_core::group::{Config, Tls, TransportChoice};
use pyo3::prelude::*;

use crate::errors::{self, seconds};

/// The parameters of a group, from Python's; `seconds_of` are `timeout`, `connect_timeout` and `heartbeat_timeout`.
#[expect(clippy::too_many_arguments, reason = "they are keywords of Python's signatures")]
pub fn config_of(
    py: Python<'_>,
    rank: usize,
    world_size: usize,
    name: String,
    host_id: String,
    host_name: String,
    secret: Vec<u8>,
    (listen_host, listen_port): (&str, u16),
    seconds_of: [f64; 3],
    transport: &str,
    streams_per_peer: usize,
    algorithm: &str,
    tls: Option<Tls>,
) -> PyResult<Config> {
    let [timeout, connect_timeout, heartbeat_timeout] = seconds_of;
    let raise = |error| errors::raise(py, error);
    if rank >= world_size {
        return Err(raise(Error::InvalidArgument(format!("rank {rank} is not in a world of {world_size} ranks"))));
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
    let listen_host: IpAddr = listen_host
        .parse()
        .map_err(|e| raise(Error::InvalidArgument(format!("listen_host '{listen_host}' is not an IP address: {e}"))))?;
    Ok(Config {
        rank,
        world_size,
        name,
        host_id,
        host_name,
        secret,
        tls,
        listen: SocketAddr::new(listen_host, listen_port),
        timeout: seconds("timeout", timeout)?,
        connect_timeout: seconds("connect_timeout", connect_timeout)?,
        heartbeat_timeout: seconds("heartbeat_timeout", heartbeat_timeout)?,
        transport,
        streams_per_peer,
        algorithm,
        view: 1,
        factories: vec![Arc::new(bagua_cuda::Factory)],
    })
}
