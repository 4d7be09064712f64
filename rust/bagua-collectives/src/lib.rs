//! How ranks combine tensors: one trait, one file per implementation.
//!
//! `solo` is the one to read first (a group of one rank). `shm` works in memory that all ranks of one host map, `net` over any
//! mesh of transports, `hier` adds inside hosts first and between hosts then. The verbs that are made of messages (`compressed`, `gossip`,
//! all_to_all_v) are written once, over the `exchange` of any of them: the `run` of a collective that has nothing faster passes them to
//! [`over_exchange()`].
//!
//! Invariants, quoted by the contract test:
//!
//! 1. **Rank order.** Every element is combined as ((x0 + x1) + x2) + …, on whichever rank that happens, so results are bitwise
//!    equal on all ranks, from run to run, and between `shm` and `net`. Half-precision types accumulate in float32 and round once. `net` of
//!    more than 16 ranks has an order of its own, bitwise equal on all ranks and from run to run.
//! 2. **Avg divides once**, after the sum, by the number of ranks.
//! 3. **No partial trust.** Each rank checks every peer's fingerprint before it uses a byte of that peer's data.
//! 4. **Every wait ends**: done, first cause of failure, or deadline.

#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod compressed;
mod gossip;
mod hier;
mod net;
mod over_exchange;
pub mod shm;
mod solo;

pub use compressed::{RecordExchange, all_reduce as compressed_all_reduce};
pub use hier::{ByHost, Hier};
pub use net::{Algorithm, Net};
pub use over_exchange::{agreed, check_layouts, check_operands, over_exchange};
pub use shm::Shm;
pub use solo::Solo;

pub use bagua_net::request::{HostIo, Incoming, Io, OpContext, Outgoing, Verb};

use bagua_kernels::{codec, reduce};
#[cfg(test)]
use bagua_net::{health, stats};
use bagua_net::{memory, platform, request, sync, transport, wait};
use bagua_types::{error, types};

use std::fmt::Debug;

use crate::codec::Codec;
use crate::error::Result;
use crate::memory::{Buffer, BufferMut, DeviceRef};
use crate::types::{DType, ReduceOp};

/// The equal chunks that a tensor is cut into, of which each member combines one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// The elements' type.
    pub dtype: DType,
    /// Number of chunks, one for each member.
    pub chunks: usize,
    /// Elements of a chunk. All chunks together have at least as many as the tensor; those behind its end are zeros.
    pub count: usize,
    /// Elements in front that carry values: the tensor's own others are zeros, too, whatever it holds there.
    pub elements: usize,
    /// Bytes of the record of a chunk.
    pub record: usize,
}

/// A two-shot codec on a device, for compressed all_reduce and for the compressed ring. Its records are on the device too, and those of the
/// codec on the host, byte for byte. Each method is a step of the operation that runs, and may leave the work to the device; records that are
/// not finite are counted, at the latest when the device is done.
pub trait DeviceCodec {
    /// Encodes all chunks into one record after the other.
    ///
    /// # Errors
    /// Whatever the device reports; the first cause of the group's failure, `Timeout`.
    fn encode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, data: Buffer<'_>, records: BufferMut<'_>) -> Result<()>;

    /// The records of all members for one chunk become the one of their sum, added in member order, divided, and rounded.
    ///
    /// # Errors
    /// As [`DeviceCodec::encode`].
    fn combine(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        records: Buffer<'_>,
        divisor: usize,
        record: BufferMut<'_>,
    ) -> Result<()>;

    /// Decodes the records of all chunks into the tensor, with zeros behind the elements that carry values.
    ///
    /// # Errors
    /// As [`DeviceCodec::encode`].
    fn decode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, records: Buffer<'_>, data: BufferMut<'_>) -> Result<()>;

    /// Whether it has error feedback among so many members: the four methods that follow.
    fn feeds_back(&self, members: usize) -> bool;

    /// `after` = data + error, a float32 for each element that carries a value; data = that, rounded.
    ///
    /// # Errors
    /// As [`DeviceCodec::encode`].
    fn compensate(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        data: BufferMut<'_>,
        error: Buffer<'_>,
        after: BufferMut<'_>,
    ) -> Result<()>;

    /// `after` -= what the records of all chunks decode to.
    ///
    /// # Errors
    /// As [`DeviceCodec::encode`].
    fn lose(&mut self, cx: &OpContext<'_>, chunks: &Chunks, records: Buffer<'_>, after: BufferMut<'_>) -> Result<()>;

    /// `after`, of the elements of one chunk that carry values, += divisor * (the mean of the records of all members - what `record`, which
    /// [`DeviceCodec::combine`] has made of them, decodes to).
    ///
    /// # Errors
    /// As [`DeviceCodec::encode`].
    fn lose_mean(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        records: Buffer<'_>,
        divisor: usize,
        record: Buffer<'_>,
        after: BufferMut<'_>,
    ) -> Result<()>;

    /// `error` = `after`, where all elements of the data that carry values are finite.
    ///
    /// # Errors
    /// As [`DeviceCodec::encode`].
    fn keep(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        data: Buffer<'_>,
        after: Buffer<'_>,
        error: BufferMut<'_>,
    ) -> Result<()>;

    /// Encodes what the compressed ring sends, see [`Verb::CompressedRing`], as the only chunk: of the weights, and of the replicas of the left
    /// neighbour, of the right one, and of this member.
    ///
    /// # Errors
    /// As [`DeviceCodec::encode`].
    fn encode_difference(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        weights: Buffer<'_>,
        replicas: [Buffer<'_>; 3],
        record: BufferMut<'_>,
    ) -> Result<()>;

    /// Adds what the record of the only chunk decodes to to a replica, rounded.
    ///
    /// # Errors
    /// As [`DeviceCodec::encode`].
    fn add(&mut self, cx: &OpContext<'_>, chunks: &Chunks, record: Buffer<'_>, replica: BufferMut<'_>) -> Result<()>;
}

/// The operations of a group of ranks. The caller (a lane of the group) has checked sizes and ranks: implementations rely on
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

    /// Where a codec runs on a device that this collective reaches; `None`: copies on the host are encoded. Sends nothing.
    ///
    /// # Errors
    /// `Unavailable` for a codec that would run there and lacks something; whatever the device reports.
    fn codec_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        let _ = (place, codec, dtype);
        Ok(None)
    }

    /// Inputs that lie where `into` does, at a place that this collective reaches, become their combination: in their order, divided once.
    /// `None` is what `into` holds. A step of the operation that runs; it sends nothing, and may leave the work to the device.
    ///
    /// # Errors
    /// Whatever a device reports.
    fn combine(
        &mut self,
        cx: &OpContext<'_>,
        op: ReduceOp,
        inputs: &[Option<Buffer<'_>>],
        into: BufferMut<'_>,
    ) -> Result<()> {
        combine_on_host(cx, op, inputs, into)
    }

    /// Its parts by host, as MPI_Comm_split makes them of a communicator: the ranks of this host, and the first ranks of all hosts. They have
    /// no sequence of their own: all ranks run this one and its parts in the same order. `None` where it has no such parts.
    fn split(&mut self) -> Option<ByHost<'_>> {
        None
    }

    /// Runs a verb. [`Verb`] says which bytes of `io` each verb reads and writes.
    ///
    /// # Errors
    /// The first cause of the group's failure, `Timeout`, `PeerLost`, `Mismatch`; `UnsupportedType` for memory that
    /// it does not reach (a lane of the group asks before).
    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()>;

    /// The group's communication thread ends, and no operation follows: what waits for a device may do so here. Not called where
    /// there was no such thread.
    fn end(&mut self) {}

    /// All messages at once, in both directions; several to one peer arrive in the order given. [`over_exchange()`]
    /// is made of it.
    ///
    /// # Errors
    /// As [`Collective::run`].
    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()>;
}

/// [`Collective::combine`] on the host; what lies on a device, by copies.
///
/// # Errors
/// Whatever a device reports.
pub fn combine_on_host(
    cx: &OpContext<'_>,
    op: ReduceOp,
    inputs: &[Option<Buffer<'_>>],
    mut into: BufferMut<'_>,
) -> Result<()> {
    if into.device().is_none() {
        let inputs: Vec<_> =
            inputs.iter().map(|input| input.map(|input| input.as_host()).transpose()).collect::<Result<_>>()?;
        reduce::combine(cx.dtype(), op, &inputs, into.into_host()?);
        return Ok(());
    }
    let given: Vec<_> =
        inputs.iter().map(|input| input.map(|input| input.to_vec()).transpose()).collect::<Result<_>>()?;
    let inputs: Vec<_> = given.iter().map(Option::as_deref).collect();
    let mut host = into.as_buffer().to_vec()?;
    reduce::combine(cx.dtype(), op, &inputs, &mut host);
    into.copy_from(&host)
}

/// The methods of [`Collective`] that say what a collective is, for one that wraps another.
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

/// The seam for collectives of other crates: a device's own, or another route. Given in the group's configuration.
///
/// Every lane of the group passes its collective through the factories, in order: through one that serves a device at the first operation on
/// its memory, through the others when it is opened. What a factory returns takes the place of the collective that it was given: it may pass
/// host memory on to that one, and use it to agree with the other ranks.
pub trait CollectiveFactory: Send + Sync + Debug {
    /// Short name for reports. All ranks must have the same factories in the same order.
    fn name(&self) -> &'static str;

    /// Kind of the device that it serves, see [`crate::memory::Device::kind`]; 0 for none.
    fn device(&self) -> u8 {
        0
    }

    /// A collective over the one of the lane. `hosts` are the ranks of the lane on each host, ascending. Sends nothing: other ranks may call it
    /// later, or never.
    fn wrap(&self, inner: Box<dyn Collective>, hosts: &[Vec<usize>]) -> Box<dyn Collective>;
}
