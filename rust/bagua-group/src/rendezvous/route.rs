//! The local address that peers can connect to.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use crate::error::{Error, Result};

/// The local address of the route to `host:port`. Sends nothing.
///
/// # Errors
/// `System` when the name has no address, or no address has a route.
pub fn local_address_towards(host: &str, port: u16) -> Result<IpAddr> {
    let failed = |e: io::Error| Error::system(&format!("the route to {host}"), e);
    let mut last = None;
    for towards in (host, port).to_socket_addrs().map_err(failed)? {
        let any: IpAddr = if towards.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        // Connecting a datagram socket only looks up the route. Port 0 is not a valid destination; every other port is.
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
