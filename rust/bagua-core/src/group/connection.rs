//! Connections that have been made and proven: conns of the control plane, and plain sockets that wait to become streams.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Condvar, Mutex};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::MOST_STREAMS;
use super::fork::ForkFd;
use super::handshake::{Hello, Purpose, Refusal};
use crate::health::GroupHealth;
use crate::wait::{Deadline, SLICE, lock, wait_on_for};

/// Sockets that may wait at once, in small worlds.
const PENDING_LIMIT: usize = 4096;

/// Sockets that may wait at once; peers that open more than that are not honest. Each may be some lanes ahead of this rank.
fn pending_limit(world_size: usize) -> usize {
    PENDING_LIMIT.max(world_size.saturating_mul(2 * MOST_STREAMS))
}

/// A connection in the hands of the control thread.
#[derive(Debug)]
pub(super) enum AsyncSocket {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

impl AsyncRead for AsyncSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            AsyncSocket::Tcp(stream) => Pin::new(stream).poll_read(cx, into),
            AsyncSocket::Unix(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for AsyncSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            AsyncSocket::Tcp(stream) => Pin::new(stream).poll_write(cx, from),
            AsyncSocket::Unix(stream) => Pin::new(stream).poll_write(cx, from),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            AsyncSocket::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            AsyncSocket::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            AsyncSocket::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            AsyncSocket::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// A connection that forked children close.
#[derive(Debug)]
pub(super) struct ControlConn {
    pub(super) fork_fd: ForkFd,
    pub(super) socket: AsyncSocket,
}

impl ControlConn {
    pub(super) fn tcp(stream: tokio::net::TcpStream) -> io::Result<ControlConn> {
        stream.set_nodelay(true)?;
        Ok(ControlConn { fork_fd: ForkFd::new(&stream), socket: AsyncSocket::Tcp(stream) })
    }

    pub(super) fn unix(stream: tokio::net::UnixStream) -> ControlConn {
        ControlConn { fork_fd: ForkFd::new(&stream), socket: AsyncSocket::Unix(stream) }
    }

    pub(super) fn is_unix(&self) -> bool {
        matches!(self.socket, AsyncSocket::Unix(_))
    }

    /// The same connection outside the control thread, blocking.
    pub(super) fn into_plain(self) -> io::Result<DataConn> {
        let socket = match self.socket {
            AsyncSocket::Tcp(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Socket::Tcp(stream)
            }
            AsyncSocket::Unix(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Socket::Unix(stream)
            }
        };
        Ok(DataConn { fork_fd: self.fork_fd, socket })
    }
}

/// A connection outside the control thread.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
}

/// A [`Socket`] that forked children close.
#[derive(Debug)]
pub(super) struct DataConn {
    pub(super) fork_fd: ForkFd,
    pub(super) socket: Socket,
}

/// What a waiting socket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ConnKey {
    pub(super) purpose: Purpose,
    pub(super) group: u64,
    pub(super) channel: u32,
    pub(super) index: u32,
    /// World rank of the peer that connected.
    pub(super) from: usize,
}

impl From<&Hello> for ConnKey {
    fn from(hello: &Hello) -> ConnKey {
        let Hello { purpose, group, channel, index, from, .. } = *hello;
        ConnKey { purpose, group, channel, index, from }
    }
}

/// Where sockets wait until this rank opens the lane that they are for: a peer may be ahead.
#[derive(Debug)]
pub(super) struct PendingConns {
    /// The most that wait.
    limit: usize,
    pending_limit: Mutex<HashMap<ConnKey, DataConn>>,
    changed: Condvar,
}

/// Why nobody came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absent {
    /// The deadline passed.
    Late,
    /// The group failed, or the peer left it.
    Ended,
}

impl PendingConns {
    pub(super) fn new(world_size: usize) -> PendingConns {
        PendingConns { limit: pending_limit(world_size), pending_limit: Mutex::default(), changed: Condvar::new() }
    }

    /// True while there is room for one more.
    pub(super) fn has_room(&self) -> bool {
        lock(&self.pending_limit).len() < self.limit
    }

    /// Seats a socket. One that waits in the same seat is from an attempt that its peer gave up.
    pub(super) fn enter(&self, seat: ConnKey, data_conn: DataConn) -> Result<(), Refusal> {
        let mut pending_limit = lock(&self.pending_limit);
        if pending_limit.len() >= self.limit {
            return Err(Refusal::Busy);
        }
        pending_limit.insert(seat, data_conn);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the socket of a seat. `peer` is its group rank.
    pub(super) fn take(
        &self,
        seat: &ConnKey,
        peer: usize,
        deadline: &Deadline,
        health: &GroupHealth,
    ) -> Result<DataConn, Absent> {
        let mut pending_limit = lock(&self.pending_limit);
        loop {
            if let Some(data_conn) = pending_limit.remove(seat) {
                return Ok(data_conn);
            }
            if health.check().is_err() || health.has_departed(peer) {
                return Err(Absent::Ended);
            }
            if deadline.passed() {
                return Err(Absent::Late);
            }
            let slice = SLICE.min(deadline.left());
            pending_limit = wait_on_for(&self.changed, pending_limit, slice);
        }
    }

    /// Closes what waits for a group, or everything.
    pub(super) fn clear(&self, group: Option<u64>) {
        lock(&self.pending_limit).retain(|seat, _| group.is_some_and(|group| group != seat.group));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_peer_has_a_seat_for_each_stream_that_may_be_asked_for() {
        for world_size in [2, 65, 2000, 100_000] {
            assert!(pending_limit(world_size) >= (world_size - 1) * MOST_STREAMS);
        }
    }
}
