//! The parameters of a group on one rank.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::tls::{Access, Tls};
use crate::collective::{Algorithm, CollectiveFactory};
pub use crate::transport::TransportChoice;

/// Maximum number of streams to a peer.
pub const MAX_STREAMS: usize = 64;

/// Declares [`Config`]: rank and size, and these parameters with their defaults.
macro_rules! parameters {
    ($($(#[$doc:meta])* $name:ident: $Type:ty = $default:expr;)*) => {
        /// The parameters with which a rank joins a group.
        #[derive(Clone, Debug)]
        pub struct Config {
            /// This process's rank, below `world_size`.
            pub rank: usize,
            /// Number of ranks.
            pub world_size: usize,
            $($(#[$doc])* pub $name: $Type,)*
        }

        impl Config {
            /// Creates a configuration with the defaults: operations 300 s, connecting 60 s, heartbeat 5 s, loopback,
            /// automatic transports and algorithms, two streams per peer.
            pub fn new(rank: usize, world_size: usize) -> Config {
                Config { rank, world_size, $($name: $default,)* }
            }
        }
    };
}

parameters! {
    /// Name of the group, for statistics and error texts.
    name: String = "world".to_owned();
    /// Identity of the host. Equal on two ranks only if they can share memory. If empty, boot id and network namespace.
    host_id: String = String::new();
    /// Name of the host in error texts. If empty, the system's host name.
    host_name: String = String::new();
    /// Secret of the job. The two ends of a connection authenticate each other with it.
    secret: Vec<u8> = Vec::new();
    /// Encryption of TCP connections, with the way in which their ends authenticate each other; `None` for plain TCP.
    /// The same on all ranks.
    tls: Option<Tls> = None;
    /// Address to listen on, from [`local_address_towards`](super::local_address_towards). Port 0 means any free port.
    listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0));
    /// Default deadline of an operation.
    timeout: Duration = Duration::from_secs(300);
    /// Deadline for connecting a group or a lane.
    connect_timeout: Duration = Duration::from_secs(60);
    /// A peer without a heartbeat for this long is lost.
    heartbeat_timeout: Duration = Duration::from_secs(5);
    /// The transports that the group may use.
    transport: TransportChoice = TransportChoice::Auto;
    /// Number of TCP streams to a peer on another host, for each lane (1 to 64). If two ranks differ, they use the
    /// smaller number.
    streams_per_peer: usize = 2;
    /// Algorithm of all_reduce between hosts. Must be equal on all ranks.
    algorithm: Algorithm = Algorithm::Auto;
    /// Number of the membership: 1 for a group that its caller built, more for one that ranks of an earlier group
    /// agreed on.
    view: u64 = 1;
    /// Collectives of other crates, see [`CollectiveFactory`]. The same on all ranks.
    factories: Vec<Arc<dyn CollectiveFactory>> = Vec::new();
}

impl Config {
    /// Returns the means by which this rank proves that it belongs to the job.
    pub(super) fn access(&self) -> Access<'_> {
        Access { secret: &self.secret, tls: self.tls.as_ref() }
    }
}
