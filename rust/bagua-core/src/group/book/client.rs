//! A connection to the server of a book.

use std::sync::Mutex;
use std::time::Duration;

use super::super::frames::Frames;
use super::super::handshake::{Failed, Key};
use super::super::tls::{Access, Ends};
use super::super::wire::Encoding;
use super::message::{Reply, Request};
use super::{FRAME_LIMIT, hello, key};
use crate::error::{Error, Progress, Result};
use crate::wait::{Deadline, lock};

/// Time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// A connection to the server of an address book.
pub struct Book {
    server: Server,
    frames: Mutex<Frames>,
}

/// Where a book is served, and how its client proves itself.
struct Server {
    host: String,
    port: u16,
    key: Key,
    tls: Option<Ends>,
    /// How long to try to connect.
    limit: Duration,
}

impl Book {
    /// Connects to the server, within `limit`; tries again while nobody listens there.
    ///
    /// # Errors
    /// `Timeout` when nobody serves there in time, `System` when server and client have different secrets, or one uses TLS and the other
    /// does not; `InvalidArgument` for TLS without a secret or certificates.
    pub fn connect(host: &str, port: u16, access: &Access<'_>, limit: Duration) -> Result<Book> {
        let server = Server { host: host.to_owned(), port, key: key(access.secret), tls: Ends::of(access)?, limit };
        let frames = Mutex::new(server.connect()?);
        Ok(Book { server, frames })
    }

    /// The entry of a name; `None` when it has none.
    ///
    /// # Errors
    /// `System` when the server does not answer.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.ask(&Request::Read(name.to_owned()))
    }

    /// Replaces the entry of a name.
    ///
    /// # Errors
    /// `System` when the server does not answer, or its book is full.
    pub fn write(&self, name: &str, entry: &[u8]) -> Result<()> {
        self.ask(&Request::Write(name.to_owned(), entry.to_vec())).map(drop)
    }

    /// Writes an entry if the name has none, and returns the one that it has then.
    ///
    /// # Errors
    /// As [`Book::write`].
    pub fn claim(&self, name: &str, entry: &[u8]) -> Result<Vec<u8>> {
        let found = self.ask(&Request::Claim(name.to_owned(), entry.to_vec()))?;
        found.ok_or_else(|| Error::other("the address book has not kept an entry"))
    }

    fn ask(&self, request: &Request) -> Result<Option<Vec<u8>>> {
        let mut frames = lock(&self.frames);
        let reply = match exchange(&mut frames, request) {
            Ok(reply) => reply,
            // The server may have been started again. A request may be repeated.
            Err(_) => {
                *frames = self.server.connect()?;
                exchange(&mut frames, request)?
            }
        };
        match Reply::parse(&reply) {
            Ok(Reply::Nothing) => Ok(None),
            Ok(Reply::Entry(entry)) => Ok(Some(entry)),
            Ok(Reply::Full) => Err(Error::other("the address book is full")),
            Err(why) => Err(Error::other(format!("the address book sends no reply: {why}"))),
        }
    }
}

/// Sends a request and receives the reply.
fn exchange(frames: &mut Frames, request: &Request) -> Result<Vec<u8>> {
    frames.send(&request.encode())?;
    frames.receive(FRAME_LIMIT, REQUEST_TIMEOUT)
}

impl Server {
    /// A connection to it; see [`Book::connect`].
    fn connect(&self) -> Result<Frames> {
        let Server { host, port, key, tls, limit } = self;
        let (whom, deadline) = (format!("the address book at {host}:{port}"), Deadline::after(*limit));
        let at = (host.as_str(), *port);
        loop {
            match Frames::connect(at, &hello(), (key, tls.as_ref()), whom.clone(), deadline.left())? {
                Ok(frames) => return Ok(frames),
                Err(why @ (Failed::Refused(_) | Failed::Tls(_))) => return Err(Error::other(format!("{whom}: {why}"))),
                Err(Failed::Broken { how, .. }) if deadline.left() <= RETRY_PAUSE => {
                    let what = format!("connecting to {whom} ({how})");
                    let progress = Some(Box::new(Progress { what, ..Progress::default() }));
                    return Err(Error::Timeout { after: *limit, missing: Vec::new(), noticed_by: 0, progress });
                }
                Err(Failed::Broken { .. }) => std::thread::sleep(RETRY_PAUSE),
            }
        }
    }
}
