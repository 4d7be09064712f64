//! A connection to the server of a store.

use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::super::blocking_frames::Frames;
use super::super::handshake::{Failed, Key};
use super::super::tls::{Access, Ends};
use super::super::wire::{Encoding, TEXT_LIMIT};
use super::message::{Reply, Request};
use super::{FRAME_LIMIT, REPLY_LIMIT, Store, hello, key, no_number, sum};
use crate::error::{Error, Progress, Result};
use crate::wait::{Deadline, lock};

/// Time limit of one request; a wait has its own in addition.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long after its deadline a client takes the reply to a request.
const GRACE: Duration = Duration::from_millis(500);

/// A connection to the server of a store.
pub struct TcpStore {
    server: Server,
    frames: Mutex<Frames>,
    /// If there is one: no request lasts longer than until shortly after it, and a broken connection is an error
    /// instead of another attempt, because what was claimed is lost with the connection.
    until: Option<Deadline>,
    /// True if the connection broke.
    is_broken: AtomicBool,
}

/// The address of a store's server, and the secret by which its client proves itself.
#[derive(Clone)]
pub(in super::super) struct Server {
    pub(in super::super) host: String,
    pub(in super::super) port: u16,
    pub(in super::super) key: Key,
    pub(in super::super) tls: Option<Ends>,
    /// The client's rank, if it has one.
    pub(in super::super) rank: usize,
    /// How long to try to connect.
    pub(in super::super) limit: Duration,
}

impl TcpStore {
    /// Connects to the server, within `limit`; tries again while none listens there.
    ///
    /// # Errors
    /// `Timeout` when no server answers there in time, `System` when server and client have different secrets, or one
    /// uses TLS and the other does not; `InvalidArgument` for TLS without a secret or certificates.
    pub fn connect(host: &str, port: u16, access: &Access<'_>, limit: Duration) -> Result<TcpStore> {
        let server = Server::new((host, port), access, 0, limit)?;
        let frames = server.connect_again()?;
        Ok(TcpStore::over(server, frames, None))
    }

    /// Connects, and tries again after failures for which `retries` says so. The store serves until `until`, or until
    /// its connection breaks.
    pub(in super::super) fn until(
        until: Deadline,
        server: &Server,
        retries: fn(&Failed) -> bool,
    ) -> Result<std::result::Result<TcpStore, Failed>> {
        Ok(server.connect(retries)?.map(|frames| TcpStore::over(server.clone(), frames, Some(until))))
    }

    fn over(server: Server, frames: Frames, until: Option<Deadline>) -> TcpStore {
        TcpStore { server, frames: Mutex::new(frames), until, is_broken: AtomicBool::new(false) }
    }

    /// True if the connection broke, and this store does not connect again.
    pub(in super::super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// This host's address on the connection.
    pub(in super::super) fn local_address(&self) -> Result<IpAddr> {
        lock(&self.frames).local_address()
    }

    /// The value with which the server replies to a request. `repeats`: after a connection that broke, the request is
    /// sent again.
    fn ask(&self, request: &Request, repeats: bool) -> Result<Option<Vec<u8>>> {
        match self.reply(request, repeats, Duration::ZERO)? {
            Reply::Nothing => Ok(None),
            Reply::Value(value) => Ok(Some(value)),
            Reply::Full => Err(Error::other("the store is full")),
            Reply::NoNumber => Err(no_number(request.key())),
            Reply::Keys(_) => Err(Error::other("the store replies to another request")),
        }
    }

    fn reply(&self, request: &Request, repeats: bool, wait: Duration) -> Result<Reply> {
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
            let longest = |until: &Deadline| until.left() + GRACE;
            let limit = self.until.as_ref().map_or_else(|| wait.saturating_add(REQUEST_TIMEOUT), longest);
            frames.receive(REPLY_LIMIT, limit)
        };
        let reply = match exchange(&mut frames) {
            Err(why) if self.until.is_some() => {
                self.is_broken.store(true, Ordering::Relaxed);
                return Err(why);
            }
            // The server may have been started again.
            Err(_) if repeats => {
                *frames = self.server.connect_again()?;
                exchange(&mut frames)?
            }
            outcome => outcome?,
        };
        Reply::parse(&reply).map_err(|why| Error::other(format!("the store sends no reply: {why}")))
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

    fn claim(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        let found = self.ask(&Request::Claim(key.to_owned(), value.to_vec()), true)?;
        found.ok_or_else(|| Error::other("the store has not kept a value"))
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.ask(&Request::Remove(key.to_owned()), true).map(drop)
    }

    fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        match self.reply(&Request::Keys(prefix.to_owned()), true, Duration::ZERO)? {
            Reply::Keys(keys) => Ok(keys),
            other => Err(Error::other(format!("the store replies {other:?} to a question for keys"))),
        }
    }

    fn find(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        match self.reply(&Request::Wait(key.to_owned(), millis), true, limit)? {
            Reply::Value(value) => Ok(Some(value)),
            _ => Ok(None),
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        // An addition must not be repeated. Read the key first, which connects again if the server was restarted.
        self.get(key)?;
        let found = self.ask(&Request::Add(key.to_owned(), amount), false)?;
        sum(found.as_deref(), 0).ok_or_else(|| no_number(key))
    }
}

impl Server {
    pub(in super::super) fn new(
        (host, port): (&str, u16),
        access: &Access<'_>,
        rank: usize,
        limit: Duration,
    ) -> Result<Server> {
        Ok(Server { host: host.to_owned(), port, key: key(access.secret), tls: Ends::of(access)?, rank, limit })
    }

    fn whom(&self) -> String {
        format!("the store at {}:{}", self.host, self.port)
    }

    fn connect(&self, retries: fn(&Failed) -> bool) -> Result<std::result::Result<Frames, Failed>> {
        let Server { host, port, key, tls, rank, limit } = self;
        Frames::connect((host.as_str(), *port), &hello(*rank), (key, tls.as_ref()), self.whom(), *limit, retries)
    }

    /// A connection to it; see [`TcpStore::connect`].
    fn connect_again(&self) -> Result<Frames> {
        let (whom, limit) = (self.whom(), self.limit);
        self.connect(|why| matches!(why, Failed::Broken { .. }))?.map_err(|why| match why {
            Failed::Broken { how, .. } => {
                let what = format!("connecting to {whom} ({how})");
                let progress = Some(Box::new(Progress { what, ..Progress::default() }));
                Error::Timeout { after: limit, missing: Vec::new(), noticed_by: 0, progress }
            }
            why => Error::other(format!("{whom}: {why}")),
        })
    }
}
