//! A stream between two hosts: one TCP connection, non-blocking.

use std::io::{self, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg, sockopt};

use super::{Broken, Readiness, Transport};

/// How long the kernel retries unacknowledged bytes before it gives the connection up. The group's heartbeat usually notices
/// first; this is for a mesh without one.
const USER_TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes that a socket takes beyond those that it has sent. Its buffer grows to megabytes, and what lies there no other stream can
/// take over: with one of two streams at a tenth of the other's rate the two carried 0.4 of their rates without this, 0.9 with it.
const UNSENT: u32 = 128 << 10;

/// One TCP connection to a peer.
pub struct Tcp {
    stream: TcpStream,
}

impl Tcp {
    /// Takes over a connection whose handshake is done.
    ///
    /// # Errors
    /// When the system refuses one of the socket's options.
    pub fn new(stream: TcpStream) -> io::Result<Tcp> {
        stream.set_nonblocking(true)?;
        // Messages are whole when they are sent: there is nothing to wait for and join.
        stream.set_nodelay(true)?;
        sockopt::set_tcp_user_timeout(&stream, u32::try_from(USER_TIMEOUT.as_millis()).unwrap_or(u32::MAX))?;
        socket2::SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT)?;
        Ok(Tcp { stream })
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken> {
        let parts = [IoSlice::new(head), IoSlice::new(body)];
        // NOSIGNAL: a peer that left is an error here, whatever the embedding program does with SIGPIPE.
        retry(|| Ok(sendmsg(&self.stream, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?))
    }

    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        retry(|| match self.stream.read(into) {
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

/// Sorts the outcomes of a system call: again after a signal, nothing now, or the end.
fn retry(mut call: impl FnMut() -> io::Result<usize>) -> Result<usize, Broken> {
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
        socket2::SockRef::from(&peer).set_linger(Some(Duration::ZERO)).unwrap();
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
