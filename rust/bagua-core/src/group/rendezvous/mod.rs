//! Spreading the addresses, for callers that have nothing of their own to do it with.

mod client;
mod exchange;
mod file;
mod route;
mod server;
#[cfg(test)]
mod tests;
mod tree;

pub use client::{rendezvous_at, rendezvous_tcp};
pub use file::rendezvous_file;
pub use route::local_address_towards;
pub use server::RendezvousServer;
