//! Connections that have been made and proven: lines of the control plane, and plain sockets that wait to become streams.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Condvar, Mutex};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::fork::Mark;
use super::handshake::{Hello, Purpose, Refusal};
use super::{MOST_STREAMS, lock};
use crate::sync::{Deadline, SLICE};
use crate::watch::Watch;

/// Sockets that may wait at once, in small worlds.
const SEATS: usize = 4096;

/// Sockets that may wait at once; peers that open more than that are not honest. Each may be some lanes ahead of this rank.
fn seats(world_size: usize) -> usize {
    SEATS.max(world_size.saturating_mul(2 * MOST_STREAMS))
}

/// A connection in the hands of the control thread.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Socket::Tcp(stream) => Pin::new(stream).poll_read(cx, into),
            Socket::Unix(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Socket::Tcp(stream) => Pin::new(stream).poll_write(cx, from),
            Socket::Unix(stream) => Pin::new(stream).poll_write(cx, from),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Socket::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Socket::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Socket::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Socket::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// A connection that forked children close.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) mark: Mark,
    pub(super) socket: Socket,
}

impl Line {
    pub(super) fn tcp(stream: tokio::net::TcpStream) -> io::Result<Line> {
        stream.set_nodelay(true)?;
        Ok(Line { mark: Mark::new(&stream), socket: Socket::Tcp(stream) })
    }

    pub(super) fn unix(stream: tokio::net::UnixStream) -> Line {
        Line { mark: Mark::new(&stream), socket: Socket::Unix(stream) }
    }

    pub(super) fn is_unix(&self) -> bool {
        matches!(self.socket, Socket::Unix(_))
    }

    /// The same connection outside the control thread, blocking.
    pub(super) fn into_plain(self) -> io::Result<Plain> {
        let plug = match self.socket {
            Socket::Tcp(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Plug::Tcp(stream)
            }
            Socket::Unix(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Plug::Unix(stream)
            }
        };
        Ok(Plain { mark: self.mark, plug })
    }
}

/// A connection outside the control thread.
#[derive(Debug)]
pub(super) enum Plug {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
}

/// A [`Plug`] that forked children close.
#[derive(Debug)]
pub(super) struct Plain {
    pub(super) mark: Mark,
    pub(super) plug: Plug,
}

/// What a waiting socket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Seat {
    pub(super) purpose: Purpose,
    pub(super) group: u64,
    pub(super) channel: u32,
    pub(super) index: u32,
    /// World rank of the peer that connected.
    pub(super) from: usize,
}

impl From<&Hello> for Seat {
    fn from(hello: &Hello) -> Seat {
        let Hello { purpose, group, channel, index, from, .. } = *hello;
        Seat { purpose, group, channel, index, from }
    }
}

/// Where sockets wait until this rank opens the lane that they are for: a peer may be ahead.
#[derive(Debug)]
pub(super) struct WaitingRoom {
    /// The most that wait.
    limit: usize,
    seats: Mutex<HashMap<Seat, Plain>>,
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

impl WaitingRoom {
    pub(super) fn new(world_size: usize) -> WaitingRoom {
        WaitingRoom { limit: seats(world_size), seats: Mutex::default(), changed: Condvar::new() }
    }

    /// True while there is room for one more.
    pub(super) fn has_room(&self) -> bool {
        lock(&self.seats).len() < self.limit
    }

    /// Seats a socket. One that waits in the same seat is from an attempt that its peer gave up.
    pub(super) fn enter(&self, seat: Seat, plain: Plain) -> Result<(), Refusal> {
        let mut seats = lock(&self.seats);
        if seats.len() >= self.limit {
            return Err(Refusal::Busy);
        }
        seats.insert(seat, plain);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the socket of a seat. `peer` is its group rank.
    pub(super) fn take(&self, seat: &Seat, peer: usize, deadline: &Deadline, watch: &Watch) -> Result<Plain, Absent> {
        let mut seats = lock(&self.seats);
        loop {
            if let Some(plain) = seats.remove(seat) {
                return Ok(plain);
            }
            if watch.check().is_err() || watch.has_departed(peer) {
                return Err(Absent::Ended);
            }
            if deadline.passed() {
                return Err(Absent::Late);
            }
            let slice = SLICE.min(deadline.left());
            seats = self.changed.wait_timeout(seats, slice).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Closes what waits for a group, or everything.
    pub(super) fn clear(&self, group: Option<u64>) {
        lock(&self.seats).retain(|seat, _| group.is_some_and(|group| group != seat.group));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_peer_has_a_seat_for_each_stream_that_may_be_asked_for() {
        for world_size in [2, 65, 2000, 100_000] {
            assert!(seats(world_size) >= (world_size - 1) * MOST_STREAMS);
        }
    }
}
