//! Who the ranks are: building a group, its health, its lanes, its sub-groups.

mod lane;

pub use lane::{Chunks, Lane, Options};

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::stats::Stats;
use crate::watch::Watch;

/// Which transports a group may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Shared memory between ranks of one host, TCP between hosts.
    #[default]
    Auto,
    /// TCP between all ranks, as if every rank had a host of its own.
    Tcp,
}

/// What a rank must know before it can join a group.
#[derive(Clone, Debug)]
pub struct Config {
    /// This process's rank, below `world_size`.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Name of the group, for reports and errors.
    pub name: String,
    /// Which host this is: equal on two ranks only if they can share memory. Empty: boot id and network namespace decide.
    pub host_id: String,
    /// Name of the host for people. Empty: the system's host name.
    pub host_name: String,
    /// Proves that a connection belongs to this job.
    pub secret: Vec<u8>,
    /// Address to listen on (port 0: any free one), as [`local_address_towards`] finds it.
    pub listen: SocketAddr,
    /// Default deadline of an operation.
    pub timeout: Duration,
    /// Deadline for building groups and lanes.
    pub connect_timeout: Duration,
    /// A peer that is silent for this long is lost.
    pub heartbeat_timeout: Duration,
    /// Which transports may be used.
    pub transport: TransportChoice,
}

impl Config {
    /// A configuration with the defaults: operations 300 s, connecting 60 s, heartbeat 5 s, loopback, automatic transports.
    pub fn new(rank: usize, world_size: usize) -> Config {
        Config {
            rank,
            world_size,
            name: "world".to_owned(),
            host_id: String::new(),
            host_name: String::new(),
            secret: Vec::new(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            timeout: Duration::from_secs(300),
            connect_timeout: Duration::from_secs(60),
            heartbeat_timeout: Duration::from_secs(5),
            transport: TransportChoice::Auto,
        }
    }
}

/// The address of the interface that the route towards `host:port` uses. Nothing is sent.
pub fn local_address_towards(host: &str, port: u16) -> Result<std::net::IpAddr> {
    let _ = (host, port);
    unimplemented!()
}

/// A rank that listens and has an address to spread, but knows no peer yet.
pub struct Pending {}

impl Pending {
    /// First step: listens. The caller spreads [`Pending::address`] by whatever it has.
    pub fn bind(config: Config) -> Result<Pending> {
        let _ = config;
        unimplemented!()
    }

    /// Opaque bytes that the peers need; a few hundred.
    pub fn address(&self) -> &[u8] {
        unimplemented!()
    }

    /// Second step: connects to all peers. `addresses[r]` is rank r's. Returns when every pair has a control connection.
    pub fn connect(self, addresses: &[Vec<u8>]) -> Result<Group> {
        let _ = addresses;
        unimplemented!()
    }
}

/// A group of ranks, cheap to clone. The last clone to be dropped leaves the group.
#[derive(Clone)]
pub struct Group {
    watch: Arc<Watch>,
}

impl Group {
    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.watch.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.watch.size()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        unimplemented!()
    }

    /// World ranks of the members, by group rank.
    pub fn ranks(&self) -> &[usize] {
        self.watch.world_ranks()
    }

    /// Group ranks of the members on each host, hosts in the order of their first rank.
    pub fn hosts(&self) -> Vec<Vec<usize>> {
        unimplemented!()
    }

    /// Default deadline of an operation.
    pub fn timeout(&self) -> Duration {
        unimplemented!()
    }

    /// Its state of failure.
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// Its counters.
    pub fn stats(&self) -> &Arc<Stats> {
        unimplemented!()
    }

    /// World ranks that are connected, this one included.
    pub fn peers_seen(&self) -> usize {
        unimplemented!()
    }

    /// A new lane: streams and shared memory of its own, so that operations on it run beside those of other lanes.
    /// Collective: all members open lanes in the same order.
    pub fn lane(&self) -> Result<Lane> {
        unimplemented!()
    }

    /// The group of some members, given as ranks of this group (any order; the new group sorts them; duplicates are refused).
    /// `None` when this rank is not among them. Only the members need to call it, in the same order for the same ranks.
    pub fn subgroup(&self, ranks: &[usize], name: &str) -> Result<Option<Group>> {
        let _ = (ranks, name);
        unimplemented!()
    }

    /// Poisons the group on every rank: the others get `PeerRaised` with this class name and text.
    pub fn raise(&self, kind: &str, message: &str) {
        let _ = (kind, message);
        unimplemented!()
    }

    /// Poisons the group on every rank with `Aborted`.
    pub fn abort(&self, reason: &str) {
        let _ = reason;
        unimplemented!()
    }

    /// Says goodbye and closes every connection of this rank. Waits of this rank end with `Aborted`. Idempotent; leaving the
    /// world group leaves its sub-groups.
    pub fn leave(&self) {
        unimplemented!()
    }
}

/// Spreads addresses through a small TCP server that rank 0 runs on `server` until everybody has everything.
pub fn rendezvous_tcp(server: (&str, u16), rank: usize, world_size: usize, address: &[u8], secret: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
    let _ = (server, rank, world_size, address, secret, timeout);
    Err(Error::System("not yet".into()))
}

/// Spreads addresses through files beside `path` on a file system that all ranks share.
pub fn rendezvous_file(path: &Path, rank: usize, world_size: usize, address: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
    let _ = (path, rank, world_size, address, timeout);
    Err(Error::System("not yet".into()))
}
