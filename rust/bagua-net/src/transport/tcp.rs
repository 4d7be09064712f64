//! A non-blocking stream over one TCP connection.

use std::io::{self, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::net::{SendAncillaryBuffer, sendmsg};

use super::{Broken, Readiness, Transport};
use crate::platform;

/// Maximum number of unsent bytes in a socket's buffer. Otherwise the buffer grows to megabytes, which no other stream
/// can take over. With two streams, one of them ten times slower than the other, this limit raised the throughput from
/// 0.4 to 0.9 of the sum of both rates.
const UNSENT: u32 = 128 << 10;

/// One TCP connection to a peer.
pub struct Tcp {
    stream: Arc<TcpStream>,
}

impl Tcp {
    /// Name of the transport, as returned by [`Transport::name`].
    pub const NAME: &'static str = "tcp";

    /// Creates a transport over an authenticated connection.
    ///
    /// # Errors
    /// Fails if a socket option cannot be set.
    pub fn new(stream: impl Into<Arc<TcpStream>>) -> io::Result<Tcp> {
        let stream = stream.into();
        prepare(&stream)?;
        Ok(Tcp { stream })
    }
}

/// Sets the options of a data connection.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    // Every send passes all bytes that are ready, so Nagle's algorithm would only delay them.
    stream.set_nodelay(true)?;
    platform::limit_unsent(stream, UNSENT)
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        Tcp::NAME
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken> {
        let parts = [IoSlice::new(head), IoSlice::new(body)];
        retry(|| Ok(sendmsg(&self.stream, &parts, &mut SendAncillaryBuffer::default(), platform::NO_SIGNAL)?))
    }

    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        retry(|| match (&*self.stream).read(into) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "connection closed")),
            other => other,
        })
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Descriptor(self.stream.as_fd())
    }

    fn is_wire(&self) -> bool {
        true
    }
}

/// Repeats a system call after a signal. Returns the number of bytes moved, 0 if the call would block, or `Broken`.
pub(super) fn retry(mut call: impl FnMut() -> io::Result<usize>) -> Result<usize, Broken> {
    loop {
        match call() {
            Ok(count) => return Ok(count),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(e) => {
                let how = match e.kind() {
                    io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof => "connection closed".to_owned(),
                    io::ErrorKind::ConnectionReset => "connection reset".to_owned(),
                    io::ErrorKind::TimedOut => "connection timed out".to_owned(),
                    _ => format!("connection failed: {e}"),
                };
                return Err(Broken { how, source: e.into() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_reset_connection_keeps_the_error_of_the_operating_system() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let mut tcp = Tcp::new(own).unwrap();
        // Closing with a linger time of zero sends a reset instead of the end of the stream.
        socket2::SockRef::from(&peer).set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(peer);
        let mut byte = [0];
        let broken = loop {
            match tcp.recv(&mut byte) {
                Ok(count) => assert_eq!(count, 0),
                Err(broken) => break broken,
            }
        };
        assert_eq!(broken.how, "connection reset");
        assert_eq!(broken.source.get().and_then(io::Error::raw_os_error), Some(libc::ECONNRESET));
    }
}
