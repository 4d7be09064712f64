//! Spreading the addresses, for callers that have nothing of their own to do it with.

mod client;
mod file;
mod server;
#[cfg(test)]
mod tests;
mod tree;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::Duration;

use tokio::runtime::Runtime;

pub use client::{rendezvous_at, rendezvous_tcp};
pub use file::rendezvous_file;
pub use server::RendezvousServer;

use super::handshake::Key;
use super::wire::FRAME_LIMIT;
use crate::error::{Error, Progress, Result};

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// The address of the interface that the route towards `host:port` uses. Nothing is sent.
///
/// # Errors
/// `System` when the name has no address, or none of them has a route.
pub fn local_address_towards(host: &str, port: u16) -> Result<IpAddr> {
    let failed = |e: std::io::Error| Error::system(&format!("the route towards {host}"), e);
    let mut last = None;
    for towards in (host, port).to_socket_addrs().map_err(failed)? {
        let any: IpAddr = if towards.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        // Connecting a datagram socket only asks the routing table. Port 0 is no destination, any other one will do.
        let towards = SocketAddr::new(towards.ip(), towards.port().max(1));
        let found = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(towards)?;
            socket.local_addr()
        });
        match found {
            Ok(found) => return Ok(found.ip()),
            Err(error) => last = Some(error),
        }
    }
    Err(last.map_or_else(|| Error::other(format!("{host} has no address")), failed))
}

fn check(rank: usize, world_size: usize) -> Result<()> {
    if rank >= world_size || u32::try_from(world_size).is_err() {
        return Err(Error::InvalidArgument(format!("rank {rank} in a world of {world_size} ranks")));
    }
    Ok(())
}

/// As [`check`], for an address too.
fn check_all(rank: usize, world_size: usize, address: &[u8]) -> Result<()> {
    check(rank, world_size)?;
    if address.len() > FRAME_LIMIT {
        return Err(Error::InvalidArgument(format!("an address of {} bytes", address.len())));
    }
    Ok(())
}

/// Proves that who asks belongs to the job.
fn key(secret: &[u8]) -> Key {
    Key::new(secret, b"rendezvous")
}

/// What drives a rendezvous on the thread that called it.
fn runtime() -> Result<Runtime> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|e| Error::system("starting the rendezvous", e))
}

/// The error for a deadline that passed.
fn late(after: Duration, missing: Vec<usize>, noticed_by: usize, what: String) -> Error {
    let progress = Some(Box::new(Progress { what, ..Progress::default() }));
    Error::Timeout { after, missing, noticed_by, progress }
}
