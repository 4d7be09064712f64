//! Exchange of addresses between the ranks, for callers without a store of their own.
//!
//! | file | what it is |
//! |---|---|
//! | `client`, `server` | through a TCP server on rank 0 |
//! | `tree` | distribution of the list of addresses from rank to rank |
//! | `file` | through files on a shared file system |
//! | `common` | common parts |
//! | `route` | the local address that peers can connect to |

mod client;
mod common;
mod file;
mod route;
mod server;
#[cfg(test)]
mod tests;
mod tree;

pub use client::{rendezvous_at, rendezvous_tcp};
pub(super) use common::runtime;
pub use common::{Awaited, Limits};
#[cfg(test)]
pub(super) use file::Content;
pub use file::rendezvous_file;
pub use route::local_address_towards;
#[cfg(test)]
pub(super) use server::Registration;
pub use server::RendezvousServer;
#[cfg(test)]
pub(super) use tree::{Answer, MissingRanks, parent};
