//! Authenticated connections: control connections, and data connections that wait until their lane asks for them.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

use super::config::{MAX_STREAMS, TransportChoice};
use super::fork::ForkFd;
use super::handshake::{Failed, Hello, Purpose, Refusal};
use super::tls::{Ends, Refused, TlsSocket};
use crate::platform;
use crate::transport::tls::Session;
use crate::transport::{Tls, Transport};
use crate::wait::{Deadline, lock, wait_on_for};

/// Maximum number of pending connections in small worlds.
const PENDING_LIMIT: usize = 4096;

/// Returns the maximum number of pending connections. Peers may use several lanes before this rank does, but correct
/// peers stay below this limit.
fn pending_limit(world_size: usize) -> usize {
    PENDING_LIMIT.max(world_size.saturating_mul(2 * MAX_STREAMS))
}

/// An asynchronous socket of the control thread.
#[derive(Debug)]
pub(super) enum AsyncSocket {
    Tcp(tokio::net::TcpStream),
    Tls(TlsSocket),
    Unix(UnixSocket),
}

impl AsyncSocket {
    pub(super) async fn connect(
        stream: tokio::net::TcpStream,
        ends: Option<&Ends>,
    ) -> std::result::Result<AsyncSocket, Failed> {
        Ok(match ends {
            None => AsyncSocket::Tcp(stream),
            Some(ends) => AsyncSocket::Tls(ends.connect(stream).await?),
        })
    }

    pub(super) async fn accept(
        stream: tokio::net::TcpStream,
        ends: Option<&Ends>,
    ) -> std::result::Result<AsyncSocket, Refused> {
        Ok(match ends {
            None => AsyncSocket::Tcp(stream),
            Some(ends) => AsyncSocket::Tls(ends.accept(stream).await?),
        })
    }
}

impl AsyncRead for AsyncSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            AsyncSocket::Tcp(stream) => Pin::new(stream).poll_read(cx, into),
            AsyncSocket::Tls(socket) => Pin::new(socket).poll_read(cx, into),
            AsyncSocket::Unix(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for AsyncSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            AsyncSocket::Tcp(stream) => Pin::new(stream).poll_write(cx, from),
            AsyncSocket::Tls(socket) => Pin::new(socket).poll_write(cx, from),
            AsyncSocket::Unix(stream) => Pin::new(stream).poll_write(cx, from),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            AsyncSocket::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            AsyncSocket::Tls(socket) => Pin::new(socket).poll_flush(cx),
            AsyncSocket::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            AsyncSocket::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            AsyncSocket::Tls(socket) => Pin::new(socket).poll_shutdown(cx),
            AsyncSocket::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// A Unix socket that tokio watches only for arriving bytes. Tokio's own type also watches for room, and the kernel
/// reports room whenever the peer has read. Each message would wake the control thread of its sender once more.
#[derive(Debug)]
pub(super) struct UnixSocket {
    socket: AsyncFd<StdUnixStream>,
    /// The descriptor that is watched for room. `Some` while the socket is full.
    room: Option<Room>,
}

/// A second descriptor of a socket, watched for room.
#[derive(Debug)]
struct Room {
    /// Registration that ends before the descriptor is closed.
    _fork_fd: ForkFd,
    socket: AsyncFd<StdUnixStream>,
}

impl UnixSocket {
    fn new(stream: tokio::net::UnixStream) -> io::Result<UnixSocket> {
        Ok(UnixSocket { socket: watched(stream.into_std()?, Interest::READABLE)?, room: None })
    }

    /// Returns the socket in non-blocking mode.
    fn into_std(self) -> StdUnixStream {
        self.socket.into_inner()
    }
}

/// A socket that the control thread is notified of.
#[expect(
    deprecated,
    reason = "its successor is unsafe, for values that do not keep their descriptor open; a socket does"
)]
fn watched(socket: StdUnixStream, interest: Interest) -> io::Result<AsyncFd<StdUnixStream>> {
    AsyncFd::with_interest(socket, interest)
}

impl Room {
    fn of(socket: &StdUnixStream) -> io::Result<Room> {
        let socket = socket.try_clone()?;
        Ok(Room { _fork_fd: ForkFd::new(&socket), socket: watched(socket, Interest::WRITABLE)? })
    }
}

impl AsyncRead for UnixSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.socket.poll_read_ready(cx))?;
            let space = into.initialize_unfilled();
            let Ok(outcome) = ready.try_io(|socket| socket.get_ref().read(space)) else { continue };
            let (count, len) = (outcome?, space.len());
            if 0 < count && count < len {
                // All bytes that had arrived were read. The kernel reports later ones.
                ready.clear_ready();
            }
            into.advance(count);
            return Poll::Ready(Ok(()));
        }
    }
}

impl AsyncWrite for UnixSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            if let Some(room) = &self.room {
                ready!(room.socket.poll_write_ready(cx))?.clear_ready();
            }
            match self.socket.get_ref().write(from) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.room.is_none() {
                        self.room = Some(Room::of(self.socket.get_ref())?);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => {
                    self.room = None;
                    return Poll::Ready(outcome);
                }
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.get_ref().shutdown(std::net::Shutdown::Write))
    }
}

/// An asynchronous connection, closed in forked children.
#[derive(Debug)]
pub(super) struct ControlConn {
    pub(super) fork_fd: ForkFd,
    pub(super) socket: AsyncSocket,
}

impl AsyncRead for ControlConn {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, into)
    }
}

impl AsyncWrite for ControlConn {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

impl ControlConn {
    pub(super) fn tcp(stream: tokio::net::TcpStream) -> io::Result<ControlConn> {
        stream.set_nodelay(true)?;
        Ok(ControlConn { fork_fd: ForkFd::new(&stream), socket: AsyncSocket::Tcp(stream) })
    }

    /// Makes the client's end, after the handshake of TLS if there is TLS.
    pub(super) async fn connect(
        stream: tokio::net::TcpStream,
        ends: Option<&Ends>,
    ) -> std::result::Result<ControlConn, Failed> {
        stream.set_nodelay(true)?;
        let fork_fd = ForkFd::new(&stream);
        Ok(ControlConn { fork_fd, socket: AsyncSocket::connect(stream, ends).await? })
    }

    /// Makes the server's end, after the handshake of TLS if the connection is a TCP connection and there is TLS.
    pub(super) async fn accept(self, ends: Option<&Ends>) -> std::result::Result<ControlConn, Refused> {
        let ControlConn { fork_fd, socket } = self;
        let socket = match socket {
            AsyncSocket::Tcp(stream) => AsyncSocket::accept(stream, ends).await?,
            other => other,
        };
        Ok(ControlConn { fork_fd, socket })
    }

    pub(super) fn unix(stream: tokio::net::UnixStream) -> io::Result<ControlConn> {
        Ok(ControlConn { fork_fd: ForkFd::new(&stream), socket: AsyncSocket::Unix(UnixSocket::new(stream)?) })
    }

    pub(super) fn is_unix(&self) -> bool {
        matches!(self.socket, AsyncSocket::Unix(_))
    }

    /// Makes the kernel send this connection's packets before packets of data, which can fill the line for longer than
    /// a heartbeat may take.
    pub(super) fn expedite(&self) {
        let stream = match &self.socket {
            AsyncSocket::Tcp(stream) => stream.as_fd(),
            AsyncSocket::Tls(socket) => socket.as_fd(),
            AsyncSocket::Unix(_) => return,
        };
        // If the kernel refuses, heartbeats only take longer.
        let _ = platform::expedite(stream);
    }

    /// Returns the same connection in blocking mode, for use outside the control thread.
    pub(super) fn into_data(self) -> io::Result<DataConn> {
        let socket = match self.socket {
            AsyncSocket::Tcp(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Socket::Tcp(stream)
            }
            AsyncSocket::Tls(socket) => {
                let (stream, session) = socket.into_parts();
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Socket::Tls(stream, session)
            }
            AsyncSocket::Unix(socket) => {
                let stream = socket.into_std();
                stream.set_nonblocking(false)?;
                Socket::Unix(stream)
            }
        };
        Ok(DataConn { fork_fd: self.fork_fd, socket })
    }
}

/// A blocking socket.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(std::net::TcpStream),
    Tls(std::net::TcpStream, Box<Session>),
    Unix(StdUnixStream),
}

impl Socket {
    pub(super) fn tcp(&self) -> Option<&std::net::TcpStream> {
        match self {
            Socket::Tcp(stream) | Socket::Tls(stream, _) => Some(stream),
            Socket::Unix(_) => None,
        }
    }

    /// Returns the stream of a lane, or of messages. `opened` gets the connection, which lives as long as the stream.
    pub(super) fn into_transport(
        self,
        choice: TransportChoice,
        opened: impl FnOnce(&Arc<std::net::TcpStream>),
    ) -> io::Result<Box<dyn Transport>> {
        let shared = |stream| {
            let stream = Arc::new(stream);
            opened(&stream);
            stream
        };
        Ok(match self {
            Socket::Tcp(stream) => choice.over_tcp(shared(stream))?,
            Socket::Tls(stream, session) => Box::new(Tls::new(shared(stream), *session)?),
            Socket::Unix(_) => return Err(io::Error::other("the connection is a Unix socket, not TCP")),
        })
    }
}

impl io::Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.read(into),
            Socket::Tls(stream, session) => session.read(into, |bytes| stream.read(bytes)),
            Socket::Unix(stream) => stream.read(into),
        }
    }
}

impl io::Write for Socket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.write(from),
            Socket::Tls(stream, session) => match session.write(from, &[], |bytes| stream.write(bytes))? {
                0 if !from.is_empty() => Err(io::ErrorKind::WouldBlock.into()),
                count => Ok(count),
            },
            Socket::Unix(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        // A write that returned has left nothing behind that a later write would have to send.
        Ok(())
    }
}

/// A blocking connection, closed in forked children.
#[derive(Debug)]
pub(super) struct DataConn {
    pub(super) fork_fd: ForkFd,
    pub(super) socket: Socket,
}

/// Identifies a pending connection.
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

/// Accepted connections that this rank's lane has not asked for yet, because the peer used the lane first.
pub(super) struct PendingConns {
    /// Maximum number of pending connections.
    limit: usize,
    conns: Mutex<HashMap<ConnKey, DataConn>>,
    /// Notified when a connection is added.
    added: Condvar,
    /// Callbacks by group id, called when a stream of messages of the group is added.
    watchers: Mutex<HashMap<u64, Watcher>>,
}

/// Called when a peer has opened a stream of messages.
type Watcher = Arc<dyn Fn() + Send + Sync>;

impl PendingConns {
    pub(super) fn new(world_size: usize) -> PendingConns {
        PendingConns {
            limit: pending_limit(world_size),
            conns: Mutex::default(),
            added: Condvar::new(),
            watchers: Mutex::default(),
        }
    }

    /// Returns the number of pending connections with these keys.
    pub(super) fn count(&self, keys: &[ConnKey]) -> usize {
        let conns = lock(&self.conns);
        keys.iter().filter(|key| conns.contains_key(*key)).count()
    }

    /// True if the number of pending connections is below the limit.
    pub(super) fn has_room(&self) -> bool {
        lock(&self.conns).len() < self.limit
    }

    /// Adds a connection. It replaces one with the same key, which the peer abandoned.
    pub(super) fn insert(&self, key: ConnKey, conn: DataConn) -> Result<(), Refusal> {
        let mut conns = lock(&self.conns);
        if conns.len() >= self.limit {
            return Err(Refusal::Busy);
        }
        conns.insert(key, conn);
        self.added.notify_all();
        drop(conns);
        if key.purpose == Purpose::Messages {
            let watcher = lock(&self.watchers).get(&key.group).cloned();
            watcher.inspect(|wake| wake());
        }
        Ok(())
    }

    /// Takes the connection with a key. Waits for it for at most `longest`.
    pub(super) fn take(&self, key: &ConnKey, longest: Duration) -> Option<DataConn> {
        let deadline = Deadline::after(longest);
        let mut conns = lock(&self.conns);
        loop {
            let found = conns.remove(key);
            if found.is_some() || deadline.passed() {
                return found;
            }
            conns = wait_on_for(&self.added, conns, deadline.left());
        }
    }

    /// Takes the streams of messages of a group that have arrived.
    pub(super) fn take_messages(&self, group: u64) -> Vec<(ConnKey, DataConn)> {
        let of_group = |key: &ConnKey, _: &mut DataConn| key.purpose == Purpose::Messages && key.group == group;
        lock(&self.conns).extract_if(of_group).collect()
    }

    /// Calls `wake`, on the control thread, whenever a stream of messages of a group is added. One watcher per group.
    pub(super) fn watch(&self, group: u64, wake: Watcher) {
        lock(&self.watchers).insert(group, wake);
    }

    /// Ends the calls of [`PendingConns::watch`].
    pub(super) fn unwatch(&self, group: u64) {
        lock(&self.watchers).remove(&group);
    }

    /// Closes the pending connections of one group, or of all groups.
    pub(super) fn clear(&self, group: Option<u64>) {
        lock(&self.conns).retain(|key, _| group.is_some_and(|group| group != key.group));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn a_unix_socket_that_is_full_goes_on_when_the_peer_reads_and_ends_when_the_peer_does() {
        const BYTES: usize = 4 << 20;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (a, b) = tokio::net::UnixStream::pair().unwrap();
            let (mut a, mut b) = (UnixSocket::new(a).unwrap(), UnixSocket::new(b).unwrap());
            let data: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
            let mut sent = std::pin::pin!(a.write_all(&data));
            let unread = tokio::time::timeout(Duration::from_millis(20), &mut sent).await;
            assert!(unread.is_err(), "the kernel keeps less than that");
            let mut got = vec![0; BYTES];
            let (sent, read) = tokio::join!(sent, b.read_exact(&mut got));
            assert!(sent.is_ok() && read.is_ok() && got == data);
            assert!(a.room.is_none());
            b.write_all(b"last").await.unwrap();
            drop(b);
            let mut rest = Vec::new();
            a.read_to_end(&mut rest).await.unwrap();
            assert_eq!(rest, b"last");
        });
    }

    #[test]
    fn the_limit_has_room_for_every_stream_of_a_lane_from_every_peer() {
        for world_size in [2, 65, 2000, 100_000] {
            assert!(pending_limit(world_size) >= (world_size - 1) * MAX_STREAMS);
        }
    }
}
