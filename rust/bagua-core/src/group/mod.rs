//! Who the ranks are: building a group, its health, its lanes, its sub-groups.
//!
//! | file | what it is |
//! |---|---|
//! | `address` | where a rank listens and who it is: the blob that the caller spreads |
//! | `pending` | from addresses to a group |
//! | `membership` | the group: failures, goodbyes, sub-groups |
//! | `control` | the thread behind it: connections, heartbeats, spreading the first cause |
//! | `handshake`, `wire`, `conn` | how connections begin, what is said on them, where they wait |
//! | `lanes`, `lane` | streams and shared memory for a sequence of operations, and the operations |
//! | `fork` | what a forked child must not touch |
//! | `rendezvous` | spreading the addresses, for callers that have nothing of their own |

mod address;
mod bootstrap;
mod builder;
mod connection;
mod control;
mod fork;
mod handshake;
mod lane;
mod lanes;
mod membership;
mod rendezvous;
mod wire;

pub use bootstrap::Bootstrap;
pub(crate) use fork::OwnerProcess;
pub use lane::{Lane, Options, PartLayout};
pub use lanes::{HostLanes, Lanes};
pub use membership::Group;
pub use rendezvous::{RendezvousServer, local_address_towards, rendezvous_at, rendezvous_file, rendezvous_tcp};

use crate::collective::{Algorithm, CollectiveFactory};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Version of everything that ranks say to each other outside of operations.
const VERSION: u16 = 2;

/// Streams to a peer unless the configuration says otherwise.
const STREAMS: usize = 2;

/// The most streams to a peer that a configuration may ask for.
pub const MOST_STREAMS: usize = 64;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Lets more TCP connections wait to be accepted than the 128 that the standard library asks for: all ranks come at once, and who
/// finds no room tries again after a second at the earliest. The system's own limit (`net.core.somaxconn`) still counts.
fn let_many_wait(listener: &impl std::os::fd::AsFd) -> std::io::Result<()> {
    // A socket may listen a second time, which changes nothing else.
    Ok(rustix::net::listen(listener, BACKLOG)?)
}

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
    /// TCP streams to a peer on another host, for each lane (1 to 64); of two ranks the one that asks for fewer is heard.
    pub streams_per_peer: usize,
    /// How all_reduce goes between hosts; all ranks must say the same.
    pub algorithm: Algorithm,
    /// Collectives of other crates, see [`CollectiveFactory`]; the same on all ranks.
    pub factories: Vec<Arc<dyn CollectiveFactory>>,
}

impl Config {
    /// A configuration with the defaults: operations 300 s, connecting 60 s, heartbeat 5 s, loopback, automatic transports and
    /// algorithms, two streams per peer.
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
            streams_per_peer: STREAMS,
            algorithm: Algorithm::Auto,
            factories: Vec::new(),
        }
    }
}
