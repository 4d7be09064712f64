//! Groups of ranks: bootstrap, control plane, lanes, sub-groups, rendezvous.
//!
//! | file | what it is |
//! |---|---|
//! | `config` | the parameters of a group on one rank |
//! | `address` | a rank's address blob, which the caller exchanges between the ranks |
//! | `bootstrap` | bind, then connect: from the addresses of all ranks to a group |
//! | `group` | the group: lanes, arenas, sub-groups, failing and leaving |
//! | `joining` | joining a running elastic job |
//! | `blocking_frames` | frames over one connection, for threads that wait: joining, stores |
//! | `duplicate` | a group of the same ranks with connections of its own |
//! | `collecting` | how long events are collected before what follows from them is done once |
//! | `plane` | the protocol of the control plane: how ranks learn that one of them is lost, has failed or leaves |
//! | `control` | the control thread of a rank, which runs `plane` over sockets, and the rank's groups |
//! | `handshake`, `wire` | authentication of a connection; encoding of control messages |
//! | `serve` | servers: accepting connections, their authentication, the thread |
//! | `admission` | which connections a listener keeps before they have proved that they belong to the job |
//! | `tls` | TLS on every TCP connection: keys, and the handshake that precedes that of `handshake` |
//! | `connection`, `listen` | authenticated connections, and those that wait for their lane; listening sockets |
//! | `builder`, `lane` | building a lane: shared memory, collective; operations of a lane, and the lanes of an engine |
//! | `streams` | the streams of a lane, which open on demand |
//! | `segment` | memory that the ranks of a host share, and passing descriptors of it |
//! | `message_streams` | the streams of a group's messages |
//! | `descriptors` | how many file descriptors a rank needs, and raising the limit of its process |
//! | `fork` | closing the descriptors of a group in forked children |
//! | `views` | agreement of a failed group's ranks on a smaller group |
//! | `store` | the key-value store through which processes find each other: by a server, or in files |
//! | `rendezvous` | exchange of addresses through TCP or files, for callers without a store |

#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod address;
mod admission;
mod blocking_frames;
mod bootstrap;
mod builder;
mod collecting;
mod config;
mod connection;
mod control;
mod descriptors;
mod duplicate;
mod fork;
mod group;
mod handshake;
mod joining;
mod lane;
mod listen;
mod message_streams;
mod plane;
mod rendezvous;
mod segment;
mod serve;
mod store;
mod streams;
#[cfg(test)]
mod tests;
mod tls;
mod views;
mod wire;

use bagua_collectives::{self as collective, same_ranks_as};
use bagua_kernels::{codec, error, types};
use bagua_net::{health, memory, platform, recorder, request, stats, transport, wait};

pub use bootstrap::Bootstrap;
pub use config::{Config, MAX_STREAMS, TransportChoice};
pub use fork::{OwnerProcess, PerProcess};
pub use group::{Group, flight_recorder};
pub use joining::{JobStatus, JoinConnection, JoinMessage, JoinRequest, JoinServer};
pub use lane::{Lane, Lanes, Options};
pub use message_streams::MessageStreams;
pub use rendezvous::{
    Awaited, Limits, RendezvousServer, local_address_towards, rendezvous_at, rendezvous_file, rendezvous_tcp,
};
pub use store::{FileStore, Store, StoreServer, TcpStore};
pub use tls::{Access, Tls, tls_pair};
pub use views::{Quorum, View, carry_data};
pub use wire::VERSION;
