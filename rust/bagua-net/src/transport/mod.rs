//! Byte streams between two ranks, and the mesh of streams of a group.
//!
//! [`Transport`] is the interface. Each implementation is one file (read `local` first), and one contract test covers
//! all of them. [`Mesh`] owns the transports to all peers, frames messages, checks fingerprints, and drives many
//! transfers at the same time.

pub mod frame;
mod local;
mod mesh;
pub mod shm;
mod tcp;
pub mod tls;

pub use crate::request::{Incoming, OpContext, Outgoing};
pub use local::{Local, local_mesh};
pub use mesh::{Batch, ByteCounts, Endpoint, Frames, Mesh, OpenStreams, Opened, PeerFault, Plan, SPIN, Step};
pub use tcp::Tcp;
pub use tls::Tls;

use std::io;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bagua_kernels::coded;

use crate::error::Source;

/// Generates [`TransportChoice`] and its constructor from the list of transports that run over a plain TCP connection.
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
            /// Returns this transport over a TCP connection that is authenticated but not encrypted.
            ///
            /// # Errors
            /// Fails if a socket option cannot be set.
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
    /// TCP between all ranks, even on one host.
    Tcp = 1, "tcp", Tcp;
}

impl TransportChoice {
    /// Returns the name, as [`Transport::name`] does, of this transport when it runs over a TCP connection.
    pub const fn name_over_tcp(self) -> &'static str {
        match self {
            TransportChoice::Auto => Tcp::NAME,
            chosen => chosen.name(),
        }
    }

    /// True if ranks of one host use shared memory.
    pub const fn shares_memory(self) -> bool {
        matches!(self, TransportChoice::Auto)
    }
}

/// The error of a transport that cannot move any more bytes, because the peer closed it or a system call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Description of what happened, for error messages.
    pub how: String,
    /// The operating system's error, if there is one.
    pub source: Source,
}

impl Broken {
    /// Creates an error that has no cause in the operating system.
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
    /// There is no notification, so sleep briefly and try again.
    Poll,
}

/// A reliable, ordered, non-blocking, full-duplex stream of bytes to one peer.
///
/// Contract: bytes arrive once, in order and unchanged. Neither call blocks. Bytes sent before the peer closed its end
/// can still be received. After them, `recv` returns `Broken`.
pub trait Transport: Send {
    /// Returns a short name for statistics: "tcp", "tls", "shm" or "local".
    fn name(&self) -> &'static str;

    /// Sends a prefix of `head` followed by `body`, and returns the length of that prefix: 0 if there is no room now.
    /// The next call must start with the bytes that were not sent. After a call that returned 0 and offered more than
    /// one byte, the next call may start with different bytes.
    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken>;

    /// Receives into a prefix of `into`, which must not be empty. Returns the length of that prefix: 0 if none arrived.
    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken>;

    /// Returns how to wait after a call that returned 0.
    fn readiness(&self) -> Readiness<'_>;

    /// True if the bytes go through a socket and therefore count as wire bytes.
    fn is_wire(&self) -> bool;
}
