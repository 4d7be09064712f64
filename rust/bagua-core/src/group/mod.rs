//! Who the ranks are: building a group, its health, its lanes, its sub-groups.
//!
//! | file | what it is |
//! |---|---|
//! | `config` | what a rank must know before it can join |
//! | `address` | where a rank listens and who it is: the blob that the caller spreads |
//! | `bootstrap` | from addresses to a group |
//! | `membership` | the group: failures, goodbyes, sub-groups |
//! | `control` | the thread behind it: connections, heartbeats, spreading the first cause |
//! | `handshake`, `wire`, `connection`, `listen` | how connections begin, what is said on them, where they wait |
//! | `builder`, `lane` | streams and shared memory for a sequence of operations, and the operations |
//! | `fork` | what a forked child must not touch |
//! | `rendezvous` | spreading the addresses, for callers that have nothing of their own |

mod address;
mod bootstrap;
mod builder;
mod config;
mod connection;
mod control;
mod fork;
mod handshake;
mod lane;
mod lanes;
mod listen;
mod membership;
mod rendezvous;
mod wire;

pub use bootstrap::Bootstrap;
pub use config::{Config, MAX_STREAMS, TransportChoice};
pub(crate) use fork::{OwnerProcess, PerProcess};
pub use lane::{HostLanes, Lane, Options, PartLayout};
pub use lanes::Lanes;
pub use membership::Group;
pub use rendezvous::{RendezvousServer, local_address_towards, rendezvous_at, rendezvous_file, rendezvous_tcp};
