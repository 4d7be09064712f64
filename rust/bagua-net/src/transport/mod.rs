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
    Batch, ByteCounts, CloseRequest, Endpoint, Frames, IdleStreams, Mesh, OpenStreams, Opened, PeerFault, Plan, SPIN,
    Step, StreamTable,
};
pub use tcp::{Tcp, USER_TIMEOUT};
pub use tls::Tls;

use std::io;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bagua_types::coded;

use crate::error::Source;

/// [`TransportChoice`] of these transports over a TCP connection that is not encrypted. Each is made with the connection.
macro_rules! over_tcp {
    ($($(#[$doc:meta])* $Variant:ident = $code:literal, $name:literal, $Transport:ty;)*) => {
        coded! {
            /// The transports that a group may use.
            #[derive(Default)]
            TransportChoice {
                /// Shared memory between ranks of one host, TCP between hosts.
                #[default]
                Auto = 0, "auto";
                $($(#[$doc])* $Variant = $code, $name;)*
            }
        }

        impl TransportChoice {
            /// The transport over an authenticated connection that is not encrypted.
            ///
            /// # Errors
            /// When an option of the socket cannot be set.
            pub fn over_tcp(self, stream: Arc<TcpStream>) -> io::Result<Box<dyn Transport>> {
                Ok(match self {
                    TransportChoice::Auto => Box::new(Tcp::new(stream)?),
                    $(TransportChoice::$Variant => Box::new(<$Transport>::new(stream)?),)*
                })
            }
        }
    };
}

over_tcp! {
    /// TCP between all ranks, also on one host.
    Tcp = 1, "tcp", Tcp;
}

impl TransportChoice {
    /// Name of the transport over a TCP connection, as [`Transport::name`] returns it.
    pub const fn name_over_tcp(self) -> &'static str {
        match self {
            TransportChoice::Auto => Tcp::NAME,
            chosen => chosen.name(),
        }
    }

    /// True if ranks of one host share memory.
    pub const fn shares_memory(self) -> bool {
        matches!(self, TransportChoice::Auto)
    }
}

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
