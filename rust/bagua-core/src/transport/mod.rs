//! Streams of bytes between two ranks, and the mesh of them that a group uses.
//!
//! A [`Transport`] is the seam: one file per implementation, `local` to read first, one contract test for all.
//! [`Mesh`] owns one transport per peer, frames messages, checks fingerprints, and drives many transfers at once.

mod fault;
pub mod frame;
mod local;
mod mesh;
pub mod shm;
mod tcp;

pub use crate::request::{Incoming, OpContext, Outgoing};
pub use fault::{Clock, Fault, Faults};
pub use local::{Local, local_mesh};
pub(crate) use mesh::Plan;
pub use mesh::{Mesh, Step};
pub use tcp::Tcp;

use std::os::fd::BorrowedFd;

use crate::error::Source;

/// A transport that cannot go on: the peer closed it, or the operating system refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// What broke it.
    pub how: String,
    /// The operating system's error.
    pub source: Source,
}

impl Broken {
    /// A transport that broke without an error of the operating system.
    pub fn new(how: impl Into<String>) -> Broken {
        Broken { how: how.into(), source: Source::default() }
    }
}

/// What a waiter sleeps on until a transport can move bytes again.
pub enum Readiness<'a> {
    /// `poll` this descriptor.
    Descriptor(BorrowedFd<'a>),
    /// The peer rings the mesh's doorbell.
    Doorbell,
    /// Nothing tells: look again after a nap.
    Nap,
}

/// A reliable, ordered, non-blocking, full-duplex stream of bytes to one peer.
///
/// Contract: bytes arrive once, in order, unchanged; neither call ever blocks; bytes that were sent before the peer went
/// away can still be received; after that `recv` is `Broken`.
pub trait Transport: Send {
    /// Short name for reports: "tcp", "shm", "local".
    fn name(&self) -> &'static str;

    /// Takes some prefix of `head` followed by `body` and returns its length; 0 when there is no room now.
    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken>;

    /// Fills some prefix of `into` and returns its length; 0 when there is nothing now. `into` is not empty.
    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken>;

    /// What to sleep on when a call returned 0.
    fn readiness(&self) -> Readiness<'_>;

    /// True when the bytes leave the process's memory for a network, and so count as wire bytes.
    fn is_wire(&self) -> bool;
}
