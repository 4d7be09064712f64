//! Byte streams between two ranks, and the mesh of streams of a group.
//!
//! [`Transport`] is the interface: one file per implementation, `local` to read first, one contract test for all.
//! [`Mesh`] owns the transports to all peers, frames messages, checks fingerprints, and drives many transfers at the same time.

mod fault;
pub mod frame;
mod local;
mod mesh;
pub mod shm;
mod tcp;
pub mod tls;

pub use crate::request::{Incoming, OpContext, Outgoing};
pub use fault::{Clock, Fault, Faults};
pub use local::{Local, local_mesh};
pub use mesh::{
    ByteCounts, CloseRequest, Endpoint, Frames, IdleStreams, Mesh, OpenStreams, PeerFault, Plan, Step, StreamTable,
};
pub use tcp::Tcp;
pub use tls::Tls;

use std::os::fd::BorrowedFd;

use crate::error::Source;

/// The error of a transport that can move no more bytes: the peer closed it, or a system call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// What happened, for error texts.
    pub how: String,
    /// The operating system's error.
    pub source: Source,
}

impl Broken {
    /// A broken transport without an error of the operating system.
    pub fn new(how: impl Into<String>) -> Broken {
        Broken { how: how.into(), source: Source::default() }
    }
}

/// How to wait until a transport can move bytes again.
pub enum Readiness<'a> {
    /// `poll` this descriptor.
    Descriptor(BorrowedFd<'a>),
    /// Wait for the mesh's doorbell, which the peer rings.
    Doorbell,
    /// There is no notification: sleep briefly and try again.
    Poll,
}

/// A reliable, ordered, non-blocking, full-duplex stream of bytes to one peer.
///
/// Contract: bytes arrive once, in order, unchanged; neither call blocks; bytes that were sent before the peer closed its end can still
/// be received, and after them `recv` returns `Broken`.
pub trait Transport: Send {
    /// Short name for statistics: "tcp", "tls", "shm", "local".
    fn name(&self) -> &'static str;

    /// Sends a prefix of `head` followed by `body` and returns its length; 0 when there is no room now. The next call must begin with the
    /// bytes that were not sent; after a 0, a call with more than one byte may begin with others.
    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken>;

    /// Receives into a prefix of `into` and returns its length; 0 when no bytes are there now. `into` is not empty.
    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken>;

    /// How to wait after a call returned 0.
    fn readiness(&self) -> Readiness<'_>;

    /// True when the bytes go through a socket, and therefore count as wire bytes.
    fn is_wire(&self) -> bool;
}
