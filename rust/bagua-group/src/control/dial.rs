//! Connecting to peers, with retries until a deadline.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpStream, UnixStream};

use super::super::address::Address;
use super::super::connection::{ControlConn, DataConn};
use super::super::descriptors;
use super::super::handshake::{self, Failed, Hello, Purpose, Refusal, STEP_TIMEOUT};
use super::plane::Plane;
use super::probe::{Verdict, probe};
use super::session;
use super::thread::Control;
use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::platform::path_of_name;
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

    /// False when another rank of this host cannot be connected to by a Unix socket, although both have one. The rank before this one on the host
    /// is asked: sockets of one network namespace reach each other.
    pub(super) async fn reaches_its_host(&self) -> bool {
        let Ok(world) = self.world() else { return false };
        let own = &world.addresses[self.config.rank];
        let before = world.addresses[..self.config.rank].iter().rev().find(|address| address.host_id == own.host_id);
        match before {
            Some(before) if self.may_share_host(before).unwrap_or(false) => match self.by_unix(before.rank) {
                Some(by_unix) => by_unix,
                None => self.unix_name_exists(before).await,
            },
            _ => true,
        }
    }

    /// Opens a control connection to a rank that replaces another as a neighbour, if it runs, and is lower: a higher one connects itself.
    pub(super) async fn connect_to_neighbour(self: &Arc<Plane>, to: usize) {
        if let Verdict::Lost(reason, source, loss) = probe(Arc::clone(self), to).await {
            // It may have left, which this rank does not know yet. If it is lost, its own neighbours notice that at once.
            tokio::time::sleep(self.config.heartbeat_timeout).await;
            return self.peer_lost(to, &reason, &source, loss);
        }
        let Ok(world) = self.world() else { return };
        if to > self.config.rank || self.has_left() {
            return;
        }
        let dial = Dial { to, purpose: Purpose::Control, group: world.id, channel: 0, index: 0 };
        let dialled = self.dial(&dial, self.kind_towards(&world.addresses[to]), |_| ());
        // A rank that does not answer in time is silent: see `Plane::repair`.
        if let Ok(Ok(conn)) = tokio::time::timeout(self.config.heartbeat_timeout, dialled).await {
            session::start(self, to, conn);
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

    /// Tries to connect until an attempt succeeds or every further one would fail. Calls `failed` with the reason of every other failure. The caller
    /// limits the time.
    async fn dial(
        &self,
        dial: &Dial,
        mut kind: SocketKind,
        mut failed: impl FnMut(String),
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
                Err(why @ Failed::Refused(Refusal::Busy)) => failed(why.to_string()),
                Err(why @ (Failed::Refused(_) | Failed::Tls(_))) => return Err(why),
                Err(Failed::Broken { how, .. }) => {
                    failed(how);
                    // The peer listened before it published its name: a name that does not exist here is in another namespace.
                    if kind == SocketKind::Unix
                        && dial.purpose == Purpose::Control
                        && !self.unix_name_exists(address).await
                    {
                        kind = SocketKind::Tcp;
                        continue;
                    }
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }

    async fn unix_name_exists(&self, address: &Address) -> bool {
        let path = path_of_name(&address.unix);
        match UnixStream::connect(path).await {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }
}

impl Control {
    /// Starts to open the control connection to a lower rank, until `deadline`. The connection is added to `connecting`; a refusal fails
    /// the world group.
    pub(in super::super) fn dial_control(&self, to: usize, deadline: Instant, health: &Arc<GroupHealth>) -> Result<()> {
        let world = self.plane.world()?;
        let dial = Dial { to, purpose: Purpose::Control, group: world.id, channel: 0, index: 0 };
        let kind = self.plane.kind_towards(&world.addresses[to]);
        let peer = world.addresses[to].describe();
        let (plane, health) = (Arc::clone(&self.plane), Arc::clone(health));
        self.spawn(async move {
            let failed = |how| _ = lock(&plane.connecting).last_failures.insert(to, how);
            match tokio::time::timeout_at(deadline.into(), plane.dial(&dial, kind, failed)).await {
                Ok(Ok(conn)) => _ = session::start(&plane, to, conn),
                Ok(Err(why)) => {
                    let text = format!("{peer}: {why}");
                    let error = match why {
                        Failed::Refused(
                            Refusal::Version(_)
                            | Refusal::WorldSize
                            | Refusal::Job
                            | Refusal::NeedsTls
                            | Refusal::NoTls,
                        ) => Error::Mismatch(text),
                        Failed::Refused(
                            Refusal::Protocol
                            | Refusal::Rank
                            | Refusal::Secret
                            | Refusal::Purpose
                            | Refusal::Busy
                            | Refusal::Duplicate,
                        )
                        | Failed::Tls(_)
                        | Failed::Broken { .. } => Error::other(text),
                    };
                    let _ = health.fail(error);
                }
                // `connect` has the same deadline, and names the missing ranks.
                Err(_) => {}
            }
            plane.wake_connecting();
        });
        Ok(())
    }

    /// Starts to open a connection of a lane. The receiver gets the outcome, or is disconnected after `limit`.
    pub(in super::super) fn dial_lane(
        &self,
        dial: Dial,
        limit: Duration,
    ) -> std::sync::mpsc::Receiver<std::result::Result<DataConn, String>> {
        let (outcome, receiver) = std::sync::mpsc::channel();
        let plane = Arc::clone(&self.plane);
        self.spawn(async move {
            let kind = if dial.purpose == Purpose::Segment { SocketKind::Unix } else { SocketKind::Tcp };
            if let Ok(made) = tokio::time::timeout(limit, plane.dial(&dial, kind, |_| ())).await {
                let made = made.map_err(|why| why.to_string());
                let _ = outcome.send(made.and_then(|conn| conn.into_data().map_err(|e| e.to_string())));
            }
        });
        receiver
    }

    /// Starts to open a stream of messages, if the process may open as many descriptors as `need` returns; `what` says who needs them. `done`
    /// gets the outcome on the control thread: `None` when the deadline passed.
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
            let dialled = tokio::time::timeout_at(deadline.into(), plane.dial(&dial, SocketKind::Tcp, |_| ())).await;
            done(dialled.ok().map(|made| {
                made.map_err(|why| why.to_string()).and_then(|conn| conn.into_data().map_err(|e| e.to_string()))
            }));
        });
    }
}
