//! A conversation between a visitor and a door, on an authenticated connection.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::super::connection::{ControlConn, DataConn, Socket};
use super::super::fork::ForkFd;
use super::super::handshake::{self, Failed, Hello, Key};
use super::super::rendezvous::runtime;
use super::super::tls::Ends;
use super::message::DoorMessage;
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// The longest frame: the addresses of the largest membership that is sent.
const FRAME_LIMIT: usize = 8 << 20;

/// Either end of a conversation; closed in forked children.
pub(crate) struct Visit {
    socket: Socket,
    _fork_fd: ForkFd,
    /// The other end, for error texts.
    whom: String,
}

impl Visit {
    pub(super) fn over(conn: DataConn, whom: String) -> Result<Visit> {
        let DataConn { fork_fd, socket } = conn;
        Ok(Visit { socket, _fork_fd: fork_fd, whom })
    }

    /// Connects to the door at an address, and authenticates.
    ///
    /// # Errors
    /// `System` when nobody answers there within `limit`, or the door refuses.
    pub(super) fn to(
        at: SocketAddr,
        hello: &Hello,
        (key, tls): (&Key, Option<&Ends>),
        limit: Duration,
    ) -> Result<Visit> {
        let whom = format!("the door at {at}");
        let connecting = async {
            let mut conn = ControlConn::connect(tokio::net::TcpStream::connect(at).await?, tls).await?;
            handshake::connect(&mut conn.socket, hello, key).await?;
            Ok::<_, Failed>(conn.into_data()?)
        };
        let outcome = runtime()?.block_on(async { tokio::time::timeout(limit, connecting).await });
        match outcome {
            Ok(Ok(conn)) => Visit::over(conn, whom),
            Ok(Err(failed)) => Err(Error::other(format!("{whom}: {failed}"))),
            Err(_) => Err(Error::other(format!("{whom}: no answer within {:.1} s", limit.as_secs_f64()))),
        }
    }

    fn tcp(&self) -> Result<&TcpStream> {
        self.socket.tcp().ok_or_else(|| Error::other("a visit that is not a TCP connection"))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `System` when the connection is broken, or the other end does not read.
    pub(crate) fn send(&mut self, message: &DoorMessage) -> Result<()> {
        let body = message.encode();
        let len = u32::try_from(body.len()).map_err(|_| Error::other("a message beyond its limit"))?;
        let frame = [&len.to_le_bytes()[..], &body].concat();
        let failed = |e| Error::system(&format!("sending to {}", self.whom), e);
        self.tcp()?.set_write_timeout(Some(handshake::STEP_TIMEOUT)).map_err(failed)?;
        self.socket.write_all(&frame).map_err(failed)
    }

    /// Receives a message within `limit`.
    ///
    /// # Errors
    /// `System` when the connection ends, the time passes, or what comes is no message.
    pub(crate) fn receive(&mut self, limit: Duration) -> Result<DoorMessage> {
        let deadline = Deadline::after(limit);
        let mut len = [0; 4];
        self.read(&mut len, &deadline)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > FRAME_LIMIT {
            return Err(Error::other(format!("{} sends a frame of {len} bytes", self.whom)));
        }
        let mut body = vec![0; len];
        self.read(&mut body, &deadline)?;
        DoorMessage::parse(&body).map_err(|why| Error::other(format!("{} sends no message: {why}", self.whom)))
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
