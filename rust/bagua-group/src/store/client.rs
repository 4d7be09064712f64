//! A connection to the server of a store.

use std::sync::Mutex;
use std::time::Duration;

use super::super::blocking_frames::Frames;
use super::super::handshake::{Failed, Key};
use super::super::tls::{Access, Ends};
use super::super::wire::{Encoding, TEXT_LIMIT};
use super::message::{Reply, Request};
use super::{FRAME_LIMIT, Store, hello, key, no_number, sum};
use crate::error::{Error, Progress, Result};
use crate::wait::lock;

/// Time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the server of a store.
pub struct TcpStore {
    server: Server,
    frames: Mutex<Frames>,
}

/// Where a store is served, and how its client proves itself.
struct Server {
    host: String,
    port: u16,
    key: Key,
    tls: Option<Ends>,
    /// How long to try to connect.
    limit: Duration,
}

impl TcpStore {
    /// Connects to the server, within `limit`; tries again while none listens there.
    ///
    /// # Errors
    /// `Timeout` when no server answers there in time, `System` when server and client have different secrets, or one uses TLS and the
    /// other does not; `InvalidArgument` for TLS without a secret or certificates.
    pub fn connect(host: &str, port: u16, access: &Access<'_>, limit: Duration) -> Result<TcpStore> {
        let server = Server { host: host.to_owned(), port, key: key(access.secret), tls: Ends::of(access)?, limit };
        let frames = Mutex::new(server.connect()?);
        Ok(TcpStore { server, frames })
    }

    /// The value with which the server replies to a request. `repeats`: after a connection that broke, the request is sent again.
    fn ask(&self, request: &Request, repeats: bool) -> Result<Option<Vec<u8>>> {
        let (body, key) = (request.encode(), request.key());
        if body.len() > FRAME_LIMIT || key.len() > TEXT_LIMIT {
            let (len, most) = (body.len(), FRAME_LIMIT);
            return Err(Error::InvalidArgument(format!(
                "a key and a value of {len} bytes: a store takes {most} at most"
            )));
        }
        let mut frames = lock(&self.frames);
        let exchange = |frames: &mut Frames| {
            frames.send(&body)?;
            frames.receive(FRAME_LIMIT, REQUEST_TIMEOUT)
        };
        let reply = match exchange(&mut frames) {
            // The server may have been started again.
            Err(_) if repeats => {
                *frames = self.server.connect()?;
                exchange(&mut frames)?
            }
            outcome => outcome?,
        };
        match Reply::parse(&reply) {
            Ok(Reply::Nothing) => Ok(None),
            Ok(Reply::Value(value)) => Ok(Some(value)),
            Ok(Reply::Full) => Err(Error::other("the store is full")),
            Ok(Reply::NoNumber) => Err(no_number(key)),
            Err(why) => Err(Error::other(format!("the store sends no reply: {why}"))),
        }
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(&Request::Set(key.to_owned(), value.to_vec()), true).map(drop)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.ask(&Request::Get(key.to_owned()), true)
    }

    fn set_new(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        let found = self.ask(&Request::SetNew(key.to_owned(), value.to_vec()), true)?;
        found.ok_or_else(|| Error::other("the store has not kept a value"))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        // A sum must not be made twice. Where the server has been started again, this connects anew.
        self.get(key)?;
        let found = self.ask(&Request::Add(key.to_owned(), amount), false)?;
        sum(found.as_deref(), 0).ok_or_else(|| no_number(key))
    }
}

impl Server {
    /// A connection to it; see [`TcpStore::connect`].
    fn connect(&self) -> Result<Frames> {
        let Server { host, port, key, tls, limit } = self;
        let whom = format!("the store at {host}:{port}");
        let is_broken = |why: &Failed| matches!(why, Failed::Broken { .. });
        let (at, proofs) = ((host.as_str(), *port), (key, tls.as_ref()));
        Frames::connect(at, &hello(), proofs, whom.clone(), *limit, is_broken)?.map_err(|why| match why {
            Failed::Broken { how, .. } => {
                let what = format!("connecting to {whom} ({how})");
                let progress = Some(Box::new(Progress { what, ..Progress::default() }));
                Error::Timeout { after: *limit, missing: Vec::new(), noticed_by: 0, progress }
            }
            why => Error::other(format!("{whom}: {why}")),
        })
    }
}
