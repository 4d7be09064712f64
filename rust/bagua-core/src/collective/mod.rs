//! How ranks combine tensors: one trait, one file per implementation.
//!
//! `solo` is the one to read first (a group of one rank). `shm` works in memory that all ranks of one host map, `net` over any
//! mesh of transports, `hier` adds inside hosts first and between hosts then.
//!
//! Invariants, quoted by the contract test:
//!
//! 1. **Rank order.** Every element is combined as ((x0 + x1) + x2) + …, on whichever rank that happens, so results are bitwise
//!    equal on all ranks, from run to run, and between `shm` and `net`. Half-precision types accumulate in float32 and round once.
//! 2. **Avg divides once**, after the sum, by the number of ranks.
//! 3. **No partial trust.** Each rank checks every peer's fingerprint before it uses a byte of that peer's data.
//! 4. **Every wait ends**: done, first cause of failure, or deadline.

pub mod hier;
mod net;
pub mod shm;
mod solo;
mod stages;

pub use hier::Hier;
pub use net::{Algorithm, Net};
pub use shm::Shm;
pub use solo::Solo;
pub use stages::{Chunks, Stage, Stages};

pub use crate::request::{Incoming, OpContext, Outgoing};

use crate::error::Result;
use crate::types::ReduceOp;

/// Where an operation reads and where it writes. n is the number of ranks, c the bytes of one rank's chunk.
pub enum Io<'a> {
    /// One buffer for both. Rank r's chunk lies at r * c.
    InPlace(&'a mut [u8]),
    /// Two buffers that do not overlap.
    Split {
        /// What this rank contributes.
        src: &'a [u8],
        /// What this rank gets.
        dst: &'a mut [u8],
    },
}

/// The operations of a group of ranks. Sizes were checked by the caller ([`crate::group::Lane`]): implementations may rely on
/// them and index accordingly. Ranks are ranks of the group that the implementation was built for.
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

    /// Every rank gets the combination of all. `InPlace`: N bytes. `Split`: N and N.
    fn all_reduce(&mut self, cx: &OpContext<'_>, io: Io<'_>, op: ReduceOp) -> Result<()>;

    /// [`Collective::all_reduce`] in place of a tensor that this rank prepares and passes on chunk by chunk. An implementation that can
    /// does so while other chunks travel.
    fn all_reduce_in_stages(
        &mut self,
        cx: &OpContext<'_>,
        data: &mut [u8],
        op: ReduceOp,
        chunks: Chunks,
        stages: &mut dyn Stages,
    ) -> Result<()> {
        stages::chunk_by_chunk(data, chunks, stages, |chunk| self.all_reduce(cx, Io::InPlace(chunk), op))
    }

    /// `root` gets the combination of all. `InPlace`: N bytes, unchanged on the others. `Split`: N and N (`dst` is empty or
    /// ignored on the others).
    fn reduce(&mut self, cx: &OpContext<'_>, io: Io<'_>, op: ReduceOp, root: usize) -> Result<()>;

    /// Every rank gets `root`'s bytes.
    fn broadcast(&mut self, cx: &OpContext<'_>, data: &mut [u8], root: usize) -> Result<()>;

    /// Every rank gets every rank's chunk. `InPlace`: n * c, own chunk at r * c. `Split`: c and n * c.
    fn all_gather(&mut self, cx: &OpContext<'_>, io: Io<'_>) -> Result<()>;

    /// `root` gets every rank's chunk. `InPlace`: n * c everywhere, own chunk at r * c. `Split`: c and n * c (`dst` is empty or
    /// ignored on the others).
    fn gather(&mut self, cx: &OpContext<'_>, io: Io<'_>, root: usize) -> Result<()>;

    /// Every rank gets its chunk of `root`'s. `InPlace`: n * c everywhere, own chunk lands at r * c. `Split`: n * c (empty or
    /// ignored on the others) and c.
    fn scatter(&mut self, cx: &OpContext<'_>, io: Io<'_>, root: usize) -> Result<()>;

    /// Rank r gets the combination of all ranks' chunk r. `InPlace`: n * c, result at r * c, the other chunks are left as they
    /// were. `Split`: n * c and c.
    fn reduce_scatter(&mut self, cx: &OpContext<'_>, io: Io<'_>, op: ReduceOp) -> Result<()>;

    /// Rank r gets chunk r of every rank, in rank order. `InPlace`: n * c. `Split`: n * c and n * c.
    fn all_to_all(&mut self, cx: &OpContext<'_>, io: Io<'_>) -> Result<()>;

    /// All messages at once, in both directions; several to one peer arrive in the order given. Send, recv and all_to_all_v are
    /// made of it.
    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()>;

    /// Returns when every rank has called it.
    fn barrier(&mut self, cx: &OpContext<'_>) -> Result<()>;
}
