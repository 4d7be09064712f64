//! The parameters of a group on one rank.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use bagua_types::coded;

use super::control::FULL;
use super::tls::{Access, Tls};
use crate::collective::{Algorithm, CollectiveFactory};
use crate::platform::SHARES_MEMORY;
use crate::transport::{Tcp, Transport};

/// Default number of streams to a peer.
const DEFAULT_STREAMS: usize = 2;

/// The most streams to a peer that a configuration may ask for.
pub const MAX_STREAMS: usize = 64;

coded! {
    /// The transports that a group may use.
    #[derive(Default)]
    TransportChoice {
        /// Shared memory between ranks of one host where the system has it ([`SHARES_MEMORY`]), TCP between hosts.
        #[default]
        Auto = 0, "auto";
        /// TCP between all ranks, also on one host.
        Tcp = 1, "tcp";
    }
}

impl TransportChoice {
    /// The transport over a TCP connection that is not encrypted.
    pub(super) fn over_tcp(self, stream: Arc<TcpStream>) -> io::Result<Box<dyn Transport>> {
        Ok(match self {
            TransportChoice::Auto | TransportChoice::Tcp => Box::new(Tcp::new(stream)?),
        })
    }

    /// Whether ranks of one host share memory.
    pub(super) const fn shares_memory(self) -> bool {
        SHARES_MEMORY && matches!(self, TransportChoice::Auto)
    }
}

/// The parameters with which a rank joins a group.
#[derive(Clone, Debug)]
pub struct Config {
    /// This process's rank, below `world_size`.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Name of the group, for statistics and error texts.
    pub name: String,
    /// Identity of the host: equal on two ranks only if they can share memory. Empty: boot id and network namespace.
    pub host_id: String,
    /// Name of the host in error texts. Empty: the system's host name.
    pub host_name: String,
    /// Secret of the job, with which the two ends of a connection authenticate each other.
    pub secret: Vec<u8>,
    /// Whether TCP connections are encrypted, and how their ends prove themselves; the same on all ranks.
    pub tls: Option<Tls>,
    /// Address to listen on (port 0: any free port), as [`local_address_towards`](super::local_address_towards) returns it.
    pub listen: SocketAddr,
    /// Default deadline of an operation.
    pub timeout: Duration,
    /// Deadline for connecting a group or a lane.
    pub connect_timeout: Duration,
    /// A peer without a heartbeat for this long is lost.
    pub heartbeat_timeout: Duration,
    /// The transports that the group may use.
    pub transport: TransportChoice,
    /// TCP streams to a peer on another host, for each lane (1 to 64). Two ranks with different numbers use the smaller one.
    pub streams_per_peer: usize,
    /// Algorithm of all_reduce between hosts; must be equal on all ranks.
    pub algorithm: Algorithm,
    /// The largest world in which every two ranks have a control connection; above it each rank has some 2 log2 n. The same on all ranks.
    pub full_mesh: usize,
    /// Number of the membership: 1 for a group that its caller built, more for one that ranks of an earlier group agreed on.
    pub view: u64,
    /// Collectives of other crates, see [`CollectiveFactory`]; the same on all ranks.
    pub factories: Vec<Arc<dyn CollectiveFactory>>,
}

impl Config {
    /// How this rank proves that it belongs to the job.
    pub(super) fn access(&self) -> Access<'_> {
        Access { secret: &self.secret, tls: self.tls.as_ref() }
    }

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
            tls: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            timeout: Duration::from_secs(300),
            connect_timeout: Duration::from_secs(60),
            heartbeat_timeout: Duration::from_secs(5),
            transport: TransportChoice::Auto,
            streams_per_peer: DEFAULT_STREAMS,
            algorithm: Algorithm::Auto,
            full_mesh: FULL,
            view: 1,
            factories: Vec::new(),
        }
    }
}
