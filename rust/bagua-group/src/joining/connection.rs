//! An authenticated connection between a joining rank and a rank of the job.

use std::net::SocketAddr;
use std::time::Duration;

use super::super::blocking_frames::Frames;
use super::super::connection::DataConn;
use super::super::handshake::{Failed, Hello, Key};
use super::super::tls::Ends;
use super::super::wire::Encoding;
use super::message::JoinMessage;
use crate::error::{Error, Result};

/// The longest frame: the addresses of the largest membership that is sent.
const FRAME_LIMIT: usize = 8 << 20;

/// Either end of the connection; closed in forked children.
pub struct JoinConnection {
    frames: Frames,
}

impl JoinConnection {
    pub(super) fn over(conn: DataConn, whom: String) -> JoinConnection {
        JoinConnection { frames: Frames::over(conn, whom) }
    }

    /// Connects to the server of a rank, and authenticates.
    ///
    /// # Errors
    /// `System` when no server answers there within `limit`, or the server refuses.
    pub(super) fn to(
        at: SocketAddr,
        hello: &Hello,
        proofs: (&Key, Option<&Ends>),
        limit: Duration,
    ) -> Result<JoinConnection> {
        let whom = format!("the join server at {at}");
        let failed = |why| Error::other(format!("the join server at {at}: {why}"));
        Frames::connect(at, hello, proofs, whom, limit, Failed::ended_by_server)?
            .map(|frames| JoinConnection { frames })
            .map_err(failed)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `System` when the connection is broken, or the other end does not read.
    pub fn send(&mut self, message: &JoinMessage) -> Result<()> {
        self.frames.send(&message.encode())
    }

    /// Receives a message within `limit`.
    ///
    /// # Errors
    /// `System` when the connection ends, the time passes, or the bytes received are not a message.
    pub fn receive(&mut self, limit: Duration) -> Result<JoinMessage> {
        let body = self.frames.receive(FRAME_LIMIT, limit)?;
        JoinMessage::parse(&body).map_err(|why| Error::other(format!("{} sends no message: {why}", self.frames.whom())))
    }
}
