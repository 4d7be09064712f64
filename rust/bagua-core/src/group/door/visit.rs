//! A conversation between a visitor and a door, on an authenticated connection.

use std::net::SocketAddr;
use std::time::Duration;

use super::super::connection::DataConn;
use super::super::frames::Frames;
use super::super::handshake::{Hello, Key};
use super::super::tls::Ends;
use super::super::wire::Encoding;
use super::message::DoorMessage;
use crate::error::{Error, Result};

/// The longest frame: the addresses of the largest membership that is sent.
const FRAME_LIMIT: usize = 8 << 20;

/// Either end of a conversation; closed in forked children.
pub(crate) struct Visit {
    frames: Frames,
}

impl Visit {
    pub(super) fn over(conn: DataConn, whom: String) -> Visit {
        Visit { frames: Frames::over(conn, whom) }
    }

    /// Connects to the door at an address, and authenticates.
    ///
    /// # Errors
    /// `System` when nobody answers there within `limit`, or the door refuses.
    pub(super) fn to(at: SocketAddr, hello: &Hello, proofs: (&Key, Option<&Ends>), limit: Duration) -> Result<Visit> {
        let whom = format!("the door at {at}");
        let failed = |why| Error::other(format!("the door at {at}: {why}"));
        Frames::connect(at, hello, proofs, whom, limit)?.map(|frames| Visit { frames }).map_err(failed)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `System` when the connection is broken, or the other end does not read.
    pub(crate) fn send(&mut self, message: &DoorMessage) -> Result<()> {
        self.frames.send(&message.encode())
    }

    /// Receives a message within `limit`.
    ///
    /// # Errors
    /// `System` when the connection ends, the time passes, or what comes is no message.
    pub(crate) fn receive(&mut self, limit: Duration) -> Result<DoorMessage> {
        let body = self.frames.receive(FRAME_LIMIT, limit)?;
        DoorMessage::parse(&body).map_err(|why| Error::other(format!("{} sends no message: {why}", self.frames.whom())))
    }
}
