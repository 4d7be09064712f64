//! How ranks combine tensors: one trait, one file per implementation.
//!
//! `solo` is the one to read first (a group of one rank). `shm` works in memory that all ranks of one host map, `net` over any
//! mesh of transports, `hier` adds inside hosts first and between hosts then. `compressed` and `gossip` are written over the
//! `exchange` of any of them.
//!
//! Invariants, quoted by the contract test:
//!
//! 1. **Rank order.** Every element is combined as ((x0 + x1) + x2) + …, on whichever rank that happens, so results are bitwise
//!    equal on all ranks, from run to run, and between `shm` and `net`. Half-precision types accumulate in float32 and round once.
//! 2. **Avg divides once**, after the sum, by the number of ranks.
//! 3. **No partial trust.** Each rank checks every peer's fingerprint before it uses a byte of that peer's data.
//! 4. **Every wait ends**: done, first cause of failure, or deadline.

pub mod compressed;
pub mod gossip;
pub mod hier;
mod net;
pub mod shm;
mod solo;

pub use hier::Hier;
pub use net::{Algorithm, Net};
pub use shm::Shm;
pub use solo::Solo;

pub use crate::request::{HostIo, Incoming, Io, OpContext, Outgoing, Verb};

use std::fmt::Debug;

use crate::error::Result;
use crate::memory::DeviceRef;

/// The operations of a group of ranks. The caller ([`crate::group::Lane`]) has checked sizes and ranks: implementations rely on
/// that and index accordingly. Ranks are ranks of the group that the implementation was built for.
///
/// An error leaves the collective unusable: its streams may be in the middle of a message.
pub trait Collective: Send {
    /// Short name for reports: "solo", "shm", "net", "hier".
    fn name(&self) -> &'static str;

    /// This process's rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Name of the transport used towards each rank ("self" for this one).
    fn transports(&self) -> Vec<&'static str>;

    /// Whether it can work on memory of this device; `None` is the host, which every collective can.
    fn reaches(&self, place: DeviceRef<'_>) -> bool {
        place.is_none()
    }

    /// Runs a verb. [`Verb`] says which bytes of `io` each verb reads and writes.
    ///
    /// # Errors
    /// The first cause of the group's failure, `Timeout`, `PeerLost`, `Mismatch`; `UnsupportedType` for memory that
    /// it does not reach ([`crate::group::Lane`] asks before).
    fn run(&mut self, cx: &OpContext<'_>, verb: Verb, io: Io<'_>) -> Result<()>;

    /// The group's communication thread ends, and no operation follows: what waits for a device may do so here. Not called where
    /// there was no such thread.
    fn end(&mut self) {}

    /// All messages at once, in both directions; several to one peer arrive in the order given. Send, recv and all_to_all_v are
    /// made of it.
    ///
    /// # Errors
    /// As [`Collective::run`].
    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()>;
}

/// The seam for collectives of other crates: a device's own, or another route. Given in the group's configuration.
///
/// Every lane of the group passes its collective through each factory, in order. What a factory returns takes the place of the
/// collective that it was given: it may hand host memory on to that one, and use it to agree with the other ranks.
pub trait CollectiveFactory: Send + Sync + Debug {
    /// Short name for reports. All ranks must have the same factories in the same order.
    fn name(&self) -> &'static str;

    /// A collective over the one of the lane. `hosts` are the ranks of the lane on each host, ascending.
    ///
    /// # Errors
    /// Whatever goes wrong; the lane is not opened then, and the group fails.
    fn wrap(&self, inner: Box<dyn Collective>, hosts: &[Vec<usize>]) -> Result<Box<dyn Collective>>;
}
