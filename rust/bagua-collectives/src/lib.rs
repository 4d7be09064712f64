//! Collectives: how ranks combine tensors. One trait, and one file for each implementation.
//!
//! Read `solo` first, a group of one rank. `shm` works in memory that all ranks of one host map, `net` over any mesh of
//! transports, and `hier` first inside hosts and then between them. The verbs that consist of messages (`compressed`,
//! `gossip`, all_to_all_v) are written once, over `exchange`. A collective that has nothing faster passes them from its
//! `run` to [`over_exchange()`].
//!
//! Invariants, quoted by the contract test:
//!
//! 1. **Rank order.** Every element is combined as ((x0 + x1) + x2) + …, on whichever rank that happens. Results are
//!    bitwise equal on all ranks, in every run, and between `shm` and `net`. Half-precision types accumulate in float32
//!    and are rounded once. `net` with more than 16 ranks has a different order, but results are still bitwise equal on
//!    all ranks and in every run.
//! 2. **Avg divides once**, after the sum, by the number of ranks.
//! 3. **No partial trust.** Each rank checks every peer's fingerprint before it uses a byte of that peer's data.
//! 4. **Every wait ends** when the operation is done, with the first cause of a failure, or at the deadline.

#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod compressed;
mod gossip;
mod hier;
mod net;
pub mod shm;
mod solo;
mod verbs_over_exchange;

pub use compressed::{
    RecordExchange, all_reduce as compressed_all_reduce, reduce_scatter as compressed_reduce_scatter,
};
pub use hier::Hier;
pub use net::{Algorithm, Net};
pub use shm::Shm;
pub use solo::Solo;
pub use verbs_over_exchange::{agreed, check_layouts, check_operands, over_exchange};

pub use bagua_net::request::{HostIo, Incoming, Io, OpContext, Outgoing, Verb};

use bagua_kernels::{codec, error, reduce, types};
#[cfg(test)]
use bagua_net::{health, stats};
use bagua_net::{memory, platform, request, sync, transport, wait};

use std::fmt::Debug;

use crate::codec::Codec;
use crate::error::Result;
use crate::memory::{Buffer, BufferMut, DeviceRef};
use crate::types::{DType, ReduceOp};

/// The partition of a tensor into equal chunks, each of which one member combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// Element type.
    pub dtype: DType,
    /// Number of chunks: one for each member.
    pub chunks: usize,
    /// Number of elements in a chunk. All chunks together have at least as many elements as the tensor. Elements after
    /// the end of the tensor count as zeros.
    pub count: usize,
    /// Number of elements that carry values. Later elements count as zeros, whatever the tensor contains.
    pub elements: usize,
    /// Size of a chunk's record in bytes.
    pub record: usize,
}

/// A two-shot codec on a device, for compressed all_reduce and for the compressed ring.
///
/// The records are on the device, with the same bytes as those of the codec on the host. Each method is a step of the
/// running operation. A method may return before the device has done the work. Records that are not finite are counted
/// when the device is done, or earlier. Methods return the errors of the device, the first cause of the group's
/// failure, or `Timeout`.
pub trait DeviceCodec {
    /// Encodes all chunks into consecutive records.
    fn encode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, data: Buffer<'_>, records: BufferMut<'_>) -> Result<()>;

    /// Combines the records of all members for one chunk into the record of their result: decodes and adds them in
    /// member order, divides, rounds, and encodes.
    fn combine(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        records: Buffer<'_>,
        divisor: usize,
        record: BufferMut<'_>,
    ) -> Result<()>;

    /// Decodes the records of all chunks into the tensor, with zeros after the elements that carry values.
    fn decode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, records: Buffer<'_>, data: BufferMut<'_>) -> Result<()>;

    /// True if the four methods for error feedback work with this number of members.
    fn feeds_back(&self, members: usize) -> bool;

    /// Computes `after` = data + error, a float32 per element that carries a value, and stores it, rounded, in data.
    fn compensate(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        data: BufferMut<'_>,
        error: Buffer<'_>,
        after: BufferMut<'_>,
    ) -> Result<()>;

    /// Subtracts the decoded records of all chunks from `after`.
    fn lose(&mut self, cx: &OpContext<'_>, chunks: &Chunks, records: Buffer<'_>, after: BufferMut<'_>) -> Result<()>;

    /// Adds what the second encoding of one chunk lost to `after`: divisor * (mean of the records of all members -
    /// decoded `record`), for the elements that carry values. `record` is the result of [`DeviceCodec::combine`].
    fn lose_mean(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        records: Buffer<'_>,
        divisor: usize,
        record: Buffer<'_>,
        after: BufferMut<'_>,
    ) -> Result<()>;

    /// Copies `after` to `error` if all elements of the data that carry values are finite.
    fn keep(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        data: Buffer<'_>,
        after: Buffer<'_>,
        error: BufferMut<'_>,
    ) -> Result<()>;

    /// Encodes the difference that the compressed ring sends (see [`Verb::CompressedRing`]) as a single chunk.
    /// `replicas` are those of the left neighbour, the right neighbour and this member.
    fn encode_difference(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        weights: Buffer<'_>,
        replicas: [Buffer<'_>; 3],
        record: BufferMut<'_>,
    ) -> Result<()>;

    /// Decodes the record of a single chunk, and adds it to a replica, rounded.
    fn add(&mut self, cx: &OpContext<'_>, chunks: &Chunks, record: Buffer<'_>, replica: BufferMut<'_>) -> Result<()>;
}

/// The operations of a group of ranks. Ranks are ranks of the group that the implementation was created for. The
/// caller, a lane of the group, has checked sizes and ranks, and implementations rely on that.
///
/// An error leaves the collective unusable: its streams may be in the middle of a message.
pub trait Collective: Send {
    /// Returns a short name for reports: "solo", "shm", "net" or "hier".
    fn name(&self) -> &'static str;

    /// Returns this process's rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Returns the name of the transport to each rank ("self" for this rank).
    fn transports(&self) -> Vec<&'static str>;

    /// True if the collective can work on memory of this device. `None` is the host, which every collective can use.
    fn reaches(&self, place: DeviceRef<'_>) -> bool {
        place.is_none()
    }

    /// Returns the codec on a device that this collective reaches, or `None` if copies on the host must be encoded
    /// instead. Sends nothing.
    ///
    /// # Errors
    /// `Unavailable` if the codec would run on the device but something is missing, or the errors of the device.
    fn codec_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        let _ = (place, codec, dtype);
        Ok(None)
    }

    /// Averages inputs in their order into `into`, dividing once at the end. `None` stands for the values in `into`.
    ///
    /// All inputs are on the device of `into`, which this collective reaches. A step of the running operation, which
    /// sends nothing and may leave the work to the device.
    fn average(&mut self, cx: &OpContext<'_>, inputs: &[Option<Buffer<'_>>], into: BufferMut<'_>) -> Result<()> {
        average_on_host(cx, inputs, into)
    }

    /// Runs a verb. [`Verb`] says which bytes of `io` it reads and writes.
    ///
    /// # Errors
    /// The first cause of the group's failure, `Timeout`, `PeerLost` or `Mismatch`. `UnsupportedType` for memory that
    /// the collective does not reach, which a lane of the group checks before.
    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()>;

    /// Called when the group's communication thread ends and no operation follows, so that the collective can wait for
    /// a device. Not called in a group without that thread.
    fn end(&mut self) {}

    /// Sends and receives all messages at once. Several messages to one peer arrive in the order given.
    /// [`over_exchange()`] is built on this. Returns the errors of [`Collective::run`].
    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()>;
}

/// Implements [`Collective::average`] on the host. Data on a device is copied to the host and back.
pub fn average_on_host(cx: &OpContext<'_>, inputs: &[Option<Buffer<'_>>], mut into: BufferMut<'_>) -> Result<()> {
    if into.device().is_none() {
        let inputs: Vec<_> =
            inputs.iter().map(|input| input.map(|input| input.as_host()).transpose()).collect::<Result<_>>()?;
        reduce::combine(cx.dtype(), ReduceOp::Avg, &inputs, into.into_host()?);
        return Ok(());
    }
    let given: Vec<_> =
        inputs.iter().map(|input| input.map(|input| input.to_vec()).transpose()).collect::<Result<_>>()?;
    let inputs: Vec<_> = given.iter().map(Option::as_deref).collect();
    let mut host = into.as_buffer().to_vec()?;
    reduce::combine(cx.dtype(), ReduceOp::Avg, &inputs, &mut host);
    into.copy_from(&host)
}

/// Generates those methods of [`Collective`] that a wrapper forwards to the collective that it wraps.
#[macro_export]
macro_rules! same_ranks_as {
    ($self:ident => $inner:expr) => {
        fn name(&$self) -> &'static str {
            $inner.name()
        }

        fn rank(&$self) -> usize {
            $inner.rank()
        }

        fn size(&$self) -> usize {
            $inner.size()
        }

        fn transports(&$self) -> Vec<&'static str> {
            $inner.transports()
        }
    };
}

/// An extension point for collectives of other crates, for example for a device or a different network. Given in the
/// group's configuration.
///
/// Every lane of the group passes its collective through the factories in order: through those for a device at the
/// first operation on its memory, and through all others when the lane opens. The result replaces the collective that
/// the factory was given. It may pass host memory on to that collective, and use it to agree with the other ranks.
pub trait CollectiveFactory: Send + Sync + Debug {
    /// Returns a short name for reports. All ranks must have the same factories in the same order.
    fn name(&self) -> &'static str;

    /// Returns the kind of device that the factory serves, see [`crate::memory::Device::kind`], or 0 for none.
    fn device(&self) -> u8 {
        0
    }

    /// Returns a collective that wraps the lane's collective. `hosts` are the ranks of the lane on each host,
    /// ascending. Must not send anything, because other ranks may call this later or never.
    fn wrap(&self, inner: Box<dyn Collective>, hosts: &[Vec<usize>]) -> Box<dyn Collective>;
}
