//! Connecting to peers, with retries until a deadline.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpStream, UnixStream};

use super::super::address::Address;
use super::super::connection::{ControlConn, DataConn};
use super::super::descriptors;
use super::super::handshake::{self, Failed, Hello, Purpose, Refusal, STEP_TIMEOUT};
use super::super::plane::{Network, Unreachable};
use super::shared::Plane;
use super::thread::Control;
use crate::error::{Error, Result};
use crate::platform::{is_stopped, path_of_name};
use crate::wait::lock;

/// The peer and the purpose of a connection to open.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Dial {
    /// World rank of the peer.
    pub(in super::super) to: usize,
    pub(in super::super) purpose: Purpose,
    pub(in super::super) group: u64,
    pub(in super::super) channel: u32,
    pub(in super::super) index: u32,
}

/// The kind of socket of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SocketKind {
    Unix,
    Tcp,
}

impl Plane {
    pub(super) fn hello(&self, dial: &Dial) -> Result<Hello> {
        let Dial { to, purpose, group, channel, index } = *dial;
        let (world_size, from, job) = (self.config.world_size, self.config.rank, self.world()?.job);
        Ok(Hello { world_size, from, to, purpose, group, channel, index, job })
    }

    /// False if another rank of this host cannot be connected to by a Unix socket, although both have one. Tries only
    /// the rank before this one on the host, because sockets of one network namespace reach each other.
    async fn reaches_its_host(&self) -> bool {
        let Ok(world) = self.world() else { return false };
        let own = &world.addresses[self.config.rank];
        let before = world.addresses[..self.config.rank].iter().rev().find(|address| address.host_id == own.host_id);
        match before {
            Some(before) if self.may_share_host(before).unwrap_or(false) => self.is_reached_by_unix(before).await,
            _ => true,
        }
    }

    /// The kind of the control connection to a rank.
    fn kind_towards(&self, address: &Address) -> SocketKind {
        if self.may_share_host(address).unwrap_or(false) { SocketKind::Unix } else { SocketKind::Tcp }
    }

    /// True when the peer may be reachable by a Unix socket.
    fn may_share_host(&self, address: &Address) -> Result<bool> {
        let own = &self.world()?.addresses[self.config.rank];
        let shares = self.config.transport.shares_memory();
        Ok(shares && !address.unix.is_empty() && !own.unix.is_empty() && address.host_id == own.host_id)
    }

    async fn attempt(
        &self,
        address: &Address,
        kind: SocketKind,
        hello: &Hello,
    ) -> std::result::Result<ControlConn, Failed> {
        let mut conn = match (kind, address.tcp) {
            (SocketKind::Unix, _) => ControlConn::unix(UnixStream::connect(path_of_name(&address.unix)).await?)?,
            (SocketKind::Tcp, Some(tcp)) => {
                let connecting = tokio::time::timeout(STEP_TIMEOUT, TcpStream::connect(tcp)).await;
                let stream = connecting.map_err(|_| Failed::broken("no answer"))??;
                ControlConn::connect(stream, self.tls.as_ref()).await?
            }
            (SocketKind::Tcp, None) => return Err(Failed::broken("it has no TCP address")),
        };
        let key = &self.world().map_err(|e| Failed::broken(e.to_string()))?.key;
        handshake::connect(&mut conn.socket, hello, key).await?;
        Ok(conn)
    }

    /// Tries to connect until an attempt succeeds or every further one would fail. Calls `ends` with every other
    /// failure, which returns true to give up. The caller limits the time.
    async fn dial(
        &self,
        dial: &Dial,
        mut kind: SocketKind,
        ends: impl Fn(&Failed) -> bool,
    ) -> std::result::Result<ControlConn, Failed> {
        let (Ok(hello), Ok(world)) = (self.hello(dial), self.world()) else {
            return Err(Failed::Refused(Refusal::Job));
        };
        let address = &world.addresses[dial.to];
        let mut pause = Duration::from_millis(5);
        loop {
            match self.attempt(address, kind, &hello).await {
                Ok(conn) => return Ok(conn),
                // The table of the peer was full.
                Err(why @ Failed::Refused(Refusal::Busy)) => _ = ends(&why),
                Err(why @ (Failed::Refused(_) | Failed::Tls(_))) => return Err(why),
                Err(why @ Failed::Broken { .. }) => {
                    // The peer's Unix socket exists. If it cannot be found here, the peer is in another namespace.
                    if kind == SocketKind::Unix
                        && dial.purpose == Purpose::Control
                        && !self.unix_name_exists(address).await
                    {
                        kind = SocketKind::Tcp;
                        continue;
                    }
                    if ends(&why) {
                        return Err(why);
                    }
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }

    async fn is_reached_by_unix(&self, address: &Address) -> bool {
        let Ok(stream) = UnixStream::connect(path_of_name(&address.unix)).await else {
            return self.unix_name_exists(address).await;
        };
        let hello = Dial { to: address.rank, purpose: Purpose::Probe, group: 0, channel: 0, index: 0 };
        if let (Ok(mut conn), Ok(hello)) = (ControlConn::unix(stream), self.hello(&hello)) {
            // A connection that says nothing would be counted as refused there.
            let _ = tokio::time::timeout(STEP_TIMEOUT, handshake::probe(&mut conn, &hello)).await;
        }
        true
    }

    async fn unix_name_exists(&self, address: &Address) -> bool {
        let path = path_of_name(&address.unix);
        match UnixStream::connect(path).await {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }
}

impl Network for Plane {
    type Stream = ControlConn;

    async fn dial(&self, to: usize) -> std::result::Result<ControlConn, Unreachable> {
        let world = self.world().map_err(|error| Unreachable { error, ended: false })?;
        let dial = Dial { to, purpose: Purpose::Control, group: world.id, channel: 0, index: 0 };
        // The peer listened before it published its address.
        let has_ended = |why: &Failed| {
            lock(&self.connecting).last_failures.insert(to, why.to_string());
            why.no_listener()
        };
        let why = match self.dial(&dial, self.kind_towards(&world.addresses[to]), has_ended).await {
            Ok(conn) => {
                conn.expedite();
                return Ok(conn);
            }
            Err(why) => why,
        };
        if why.no_listener() {
            let refusal = lock(&self.connecting).refusal();
            let text = format!("its process died or gave up before it was connected ({why}){refusal}");
            return Err(Unreachable { error: Error::other(text), ended: true });
        }
        let text = format!("{}: {why}", world.addresses[to].describe());
        let error = match why {
            Failed::Refused(
                Refusal::Version(_) | Refusal::WorldSize | Refusal::Job | Refusal::NeedsTls | Refusal::NoTls,
            ) => Error::Mismatch(text),
            Failed::Refused(Refusal::Protocol | Refusal::Rank | Refusal::Secret | Refusal::Purpose | Refusal::Busy)
            | Failed::Tls(_)
            | Failed::Broken { .. } => Error::other(text),
        };
        Err(Unreachable { error, ended: false })
    }

    fn is_watched(&self, rank: usize, conn: &ControlConn) -> bool {
        conn.is_unix() && self.process(rank).is_some()
    }

    fn is_stopped(&self, rank: usize) -> bool {
        self.process(rank).is_some_and(is_stopped)
    }

    async fn is_apart(&self) -> bool {
        !self.reaches_its_host().await
    }
}

impl Control {
    /// Starts to open a connection of a lane. The receiver gets the outcome, or is disconnected after `limit`. A rank
    /// that cannot be reached for the heartbeat timeout is a failure: there may be no heartbeats between the two ranks.
    pub(in super::super) fn dial_lane(
        &self,
        dial: Dial,
        limit: Duration,
    ) -> std::sync::mpsc::Receiver<std::result::Result<DataConn, Failed>> {
        let (outcome, receiver) = std::sync::mpsc::channel();
        let plane = Arc::clone(&self.plane);
        self.spawn(async move {
            let kind = if dial.purpose == Purpose::Segment { SocketKind::Unix } else { SocketKind::Tcp };
            let longest = plane.config.heartbeat_timeout;
            let made = match tokio::time::timeout(limit.min(longest), plane.dial(&dial, kind, |_| false)).await {
                Ok(made) => made.and_then(|conn| Ok(conn.into_data()?)),
                Err(_) if limit <= longest => return,
                Err(_) => Err(Failed::broken(format!("no connection for {:.1} s", longest.as_secs_f64()))),
            };
            let _ = outcome.send(made);
        });
        receiver
    }

    /// Starts to open a stream of messages. Fails if the process may not open `need()` descriptors for `what`. `done`
    /// gets the outcome on the control thread, or `None` after the deadline.
    pub(in super::super) fn dial_messages(
        &self,
        dial: Dial,
        need: impl FnOnce() -> usize + Send + 'static,
        what: String,
        deadline: Instant,
        done: impl FnOnce(Option<std::result::Result<DataConn, String>>) + Send + 'static,
    ) {
        let plane = Arc::clone(&self.plane);
        self.spawn(async move {
            if let Err(error) = descriptors::provide(need, what) {
                return done(Some(Err(error.to_string())));
            }
            let dialled = tokio::time::timeout_at(deadline.into(), plane.dial(&dial, SocketKind::Tcp, |_| false)).await;
            done(dialled.ok().map(|made| {
                made.map_err(|why| why.to_string()).and_then(|conn| conn.into_data().map_err(|e| e.to_string()))
            }));
        });
    }
}
