//! Listening sockets that hold the connection attempts of a whole world.

use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::unix::net::UnixListener;

use super::fork::ForkFd;

/// Maximum number of connections that wait to be accepted.
pub(super) const BACKLOG: i32 = 4096;

/// Listens at an address with a backlog above the 128 connections of the standard library. All ranks connect at the
/// same time, and a connection that finds the backlog full is retried after a second at the earliest. The system's
/// limit (`net.core.somaxconn`) still applies.
pub(super) fn listen(at: impl ToSocketAddrs) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    // A second `listen` only changes the backlog.
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The non-blocking listening sockets of a server, closed in forked children.
pub(super) struct Listener {
    pub(super) fork_fds: Vec<ForkFd>,
    pub(super) tcp: TcpListener,
    pub(super) unix: Option<UnixListener>,
}

impl Listener {
    pub(super) fn new(tcp: TcpListener, unix: Option<UnixListener>) -> Listener {
        let fork_fds = [ForkFd::new(&tcp)].into_iter().chain(unix.as_ref().map(ForkFd::new)).collect();
        Listener { fork_fds, tcp, unix }
    }
}
