//! Frames over one authenticated connection, for threads that block.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::Duration;

use tokio::net::ToSocketAddrs;

use super::connection::{ControlConn, DataConn, Socket};
use super::fork::ForkFd;
use super::handshake::{self, Failed, Hello, Key};
use super::tls::Ends;
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// Pause between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A connection whose messages are frames. Closed in forked children.
pub(super) struct Frames {
    socket: Socket,
    _fork_fd: ForkFd,
    /// Name of the other end, for error texts.
    whom: String,
}

impl Frames {
    pub(super) fn over(conn: DataConn, whom: String) -> Frames {
        let DataConn { fork_fd, socket } = conn;
        Frames { socket, _fork_fd: fork_fd, whom }
    }

    /// Connects and authenticates within `limit`. Tries again after a failure if `retries` returns true for it. The
    /// inner error is that of the last attempt. Fails with `System` if the process cannot try.
    pub(super) fn connect(
        at: impl ToSocketAddrs,
        hello: &Hello,
        (key, tls): (&Key, Option<&Ends>),
        whom: String,
        limit: Duration,
        retries: fn(&Failed) -> bool,
    ) -> Result<std::result::Result<Frames, Failed>> {
        let attempt = async || {
            // The operating system would try for minutes to reach a host that is down.
            let connecting = tokio::time::timeout(handshake::STEP_TIMEOUT, tokio::net::TcpStream::connect(&at)).await;
            let stream = connecting.map_err(|_| Failed::broken("no answer"))??;
            let mut conn = ControlConn::connect(stream, tls).await?;
            handshake::connect(&mut conn.socket, hello, key).await?;
            Ok::<_, Failed>(conn.into_data()?)
        };
        let mut last = Failed::broken(format!("no answer within {:.1} s", limit.as_secs_f64()));
        let connecting = async {
            loop {
                match attempt().await {
                    Err(why) if retries(&why) => last = why,
                    outcome => return outcome,
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| Error::system("starting to connect", e))?;
        let outcome = runtime.block_on(async { tokio::time::timeout(limit, connecting).await });
        // A name lookup that is still running must not delay the return.
        runtime.shutdown_background();
        Ok(outcome.unwrap_or(Err(last)).map(|conn| Frames::over(conn, whom)))
    }

    /// Returns the name of the other end, for error texts.
    pub(super) fn whom(&self) -> &str {
        &self.whom
    }

    /// Returns this host's address on the connection.
    pub(super) fn local_address(&self) -> Result<IpAddr> {
        let address = self.tcp()?.local_addr();
        address.map(|address| address.ip()).map_err(|e| Error::system("the address of a connection", e))
    }

    fn tcp(&self) -> Result<&TcpStream> {
        self.socket.tcp().ok_or_else(|| Error::other("frames over a connection that is not by TCP"))
    }

    /// Sends a frame. Fails with `System` if the connection is broken or the other end does not read.
    pub(super) fn send(&mut self, body: &[u8]) -> Result<()> {
        let len = u32::try_from(body.len()).map_err(|_| Error::other("a message beyond its limit"))?;
        let frame = [&len.to_le_bytes()[..], body].concat();
        let failed = |e| Error::system(&format!("sending to {}", self.whom), e);
        self.tcp()?.set_write_timeout(Some(handshake::STEP_TIMEOUT)).map_err(failed)?;
        self.socket.write_all(&frame).map_err(failed)
    }

    /// Receives a frame of at most `longest` bytes within `limit`. Fails with `System` if the connection ends, the time
    /// passes, or the frame is longer.
    pub(super) fn receive(&mut self, longest: usize, limit: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(limit);
        let mut len = [0; 4];
        self.read(&mut len, &deadline)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > longest {
            return Err(Error::other(format!("{} sends a frame of {len} bytes", self.whom)));
        }
        let mut body = vec![0; len];
        self.read(&mut body, &deadline)?;
        Ok(body)
    }

    fn read(&mut self, into: &mut [u8], deadline: &Deadline) -> Result<()> {
        let failed = |e| Error::system(&format!("receiving from {}", self.whom), e);
        let mut filled = 0;
        while filled < into.len() {
            let left = deadline.left();
            if left.is_zero() {
                return Err(Error::other(format!(
                    "{} says nothing for {:.1} s",
                    self.whom,
                    deadline.limit().as_secs_f64()
                )));
            }
            self.tcp()?.set_read_timeout(Some(left)).map_err(failed)?;
            match self.socket.read(&mut into[filled..]) {
                Ok(0) => return Err(Error::other(format!("{} has closed the connection", self.whom))),
                Ok(read) => filled += read,
                Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        Ok(())
    }
}
