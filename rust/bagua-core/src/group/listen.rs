//! Listening sockets that hold the connection attempts of a whole world.

use std::io;
use std::os::fd::AsFd;

/// Connections that may wait to be accepted.
pub(super) const BACKLOG: i32 = 4096;

/// Raises the backlog of a listening TCP socket above the 128 connections of the standard library: all ranks connect at the same time,
/// and a connection that finds the backlog full is retried after a second at the earliest. The system's limit
/// (`net.core.somaxconn`) still applies.
pub(super) fn raise_backlog(listener: &impl AsFd) -> io::Result<()> {
    // A second `listen` changes only the backlog.
    Ok(rustix::net::listen(listener, BACKLOG)?)
}
