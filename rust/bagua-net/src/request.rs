//! One operation as a value: the verb, its buffers, and its context. Every layer passes these three on instead of
//! having one method per verb. NCCL's `ncclInfo` and UCC's `ucc_coll_args` are the same idea.

mod extra_operands;
mod peers;

pub use self::extra_operands::{Compression, Extra, Operands, Replicas, Workspace};
pub use self::peers::PeerSelection;

use std::cell::RefCell;
use std::ops::Range;

use crate::codec::Codec;
use crate::error::{Error, Progress, Result, in_bucket};
use crate::health::{GroupHealth, LEFT};
use crate::memory::{Buffer, BufferMut, DeviceRef, name_of, same_place};
use crate::stats::OpStats;
use crate::types::{DType, Fingerprint, Kind, ReduceOp};
use crate::wait::Deadline;

/// A collective operation with its reduce operation and root.
///
/// In the variants, n is the number of ranks, r is a rank, N is the size of a tensor in bytes, and c is the size of one
/// rank's shard in bytes. A verb works in place ([`Io::InPlace`]) or has a source and a destination ([`Io::Split`]).
#[derive(Clone, Copy, Debug)]
pub enum Verb<'a> {
    /// Every rank gets the reduction of all tensors. Every buffer has N bytes.
    AllReduce(ReduceOp),
    /// `root` gets the reduction of all tensors. Every buffer has N bytes. The other ranks change no buffer.
    Reduce {
        /// How elements are combined.
        op: ReduceOp,
        /// Rank that gets the result.
        root: usize,
    },
    /// Every rank gets the N bytes of `root`. Always in place.
    Broadcast {
        /// Rank that sends its tensor.
        root: usize,
    },
    /// Every rank gets all shards. In place, the buffer has n * c bytes, with rank r's own shard at r * c. Otherwise
    /// the source has c bytes, and the destination n * c.
    AllGather,
    /// `root` gets the shards of all ranks. In place, the buffer has n * c bytes on every rank, with rank r's own shard
    /// at r * c. Otherwise the source has c bytes, and the destination, which only `root` uses, n * c.
    Gather {
        /// Rank that gets the shards.
        root: usize,
    },
    /// Every rank gets its shard of `root`'s tensor. In place, the buffer has n * c bytes on every rank, and rank r's
    /// shard arrives at r * c. Otherwise the source, which only `root` uses, has n * c bytes, and the destination c.
    Scatter {
        /// Rank that sends the shards.
        root: usize,
    },
    /// Rank r gets the reduction of shard r of all ranks. In place, the buffer has n * c bytes, and only shard r
    /// changes. Otherwise the source has n * c bytes, and the destination c.
    ReduceScatter(ReduceOp),
    /// Rank r gets shard r of every rank, in rank order. Every buffer has n * c bytes.
    AllToAll,
    /// Rank r gets part r of every rank's source. In place, a copy of the buffer is the source. Layouts may differ
    /// between ranks.
    AllToAllV {
        /// Layout of the source. Part r is for rank r.
        send: PartLayout<'a>,
        /// Layout of the destination. Part r is from rank r. The parts must not overlap.
        recv: PartLayout<'a>,
    },
    /// Every rank gets the reduction of all tensors, and ranks send only records encoded by a codec. Always in place.
    /// Uses [`Extra::error`]. A device that implements the codec does the encoding.
    CompressedAllReduce(Compression<'a>),
    /// Every rank gets the mean of its own tensor and its peers' tensors, added in rank order and divided once. Every
    /// buffer has N bytes.
    NeighborAverage {
        /// Selects the peers of each rank. [`PeerSelection::All`] is not allowed, because that is an all_reduce.
        peers: PeerSelection,
        /// Number of the call, equal on all ranks.
        round: u64,
    },
    /// One round of averaging with both neighbours on the ring of ranks. Ranks send only encoded differences. The
    /// buffer ends up equal to [`Replicas::own`]. Always in place. Uses [`Extra::replicas`].
    CompressedRing {
        /// Codec for the differences.
        codec: &'a dyn Codec,
        /// Number of the call, which seeds codecs with random rounding.
        draw: u64,
    },
    /// Returns once every rank has called it. No buffer.
    Barrier,
}

/// The position of each rank's part in a buffer, in elements.
#[derive(Clone, Copy, Debug)]
pub struct PartLayout<'a> {
    /// Number of elements for each rank.
    pub counts: &'a [usize],
    /// Index of the first element for each rank.
    pub displs: &'a [usize],
}

impl PartLayout<'_> {
    /// Returns the byte range of a rank's part, if one element has `element` bytes.
    pub fn range(&self, rank: usize, element: usize) -> Range<usize> {
        self.displs[rank] * element..(self.displs[rank] + self.counts[rank]) * element
    }

    /// Returns the ranks whose part is not empty, ordered by where the part starts.
    pub fn in_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.counts.len()).filter(|rank| self.counts[*rank] > 0).collect();
        order.sort_by_key(|rank| self.displs[*rank]);
        order
    }

    /// Splits `data` into one writable part per rank. The parts must lie within `data` and must not overlap.
    pub fn split<'b>(&self, mut data: BufferMut<'b>, element: usize) -> Vec<BufferMut<'b>> {
        let mut slices: Vec<BufferMut<'b>> = self.counts.iter().map(|_| BufferMut::from(&mut [][..])).collect();
        let mut done = 0;
        for rank in self.in_order() {
            let Range { start, end } = self.range(rank, element);
            let (part, rest) = data.split_at(start - done).1.split_at(end - start);
            slices[rank] = part;
            data = rest;
            done = end;
        }
        slices
    }
}

/// How the sizes of a verb's two buffers relate. n is the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Source and destination have the same size, with any number of elements.
    Equal,
    /// Source and destination have the same size, and each consists of n shards.
    EqualShards,
    /// The destination has n shards of the source's size.
    Grows,
    /// The source has n shards of the destination's size.
    Shrinks,
    /// The verb itself says where the parts lie in each buffer.
    Parts,
}

impl Layout {
    /// Returns the lengths of source and destination for `ranks` ranks, in units of the fingerprint's element count.
    pub const fn shards(self, ranks: usize) -> (usize, usize) {
        match self {
            Layout::Equal | Layout::Parts => (1, 1),
            Layout::EqualShards => (ranks, ranks),
            Layout::Grows => (1, ranks),
            Layout::Shrinks => (ranks, 1),
        }
    }
}

/// The buffers of a split operation that a rank uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Uses {
    Both,
    SourceOnly,
    DestinationOnly,
}

/// The properties of a verb that depend neither on this rank nor on the number of ranks.
#[derive(Clone, Copy)]
struct Row {
    kind: Kind,
    op: Option<ReduceOp>,
    root: Option<usize>,
    layout: Layout,
    compares_shapes: bool,
    is_over_exchange: bool,
}

impl Row {
    const fn new(kind: Kind, layout: Layout) -> Row {
        Row { kind, op: None, root: None, layout, compares_shapes: false, is_over_exchange: false }
    }

    const fn over_exchange(kind: Kind, layout: Layout) -> Row {
        Row { is_over_exchange: true, ..Row::new(kind, layout) }
    }
}

impl<'a> Verb<'a> {
    #[inline]
    const fn row(self) -> Row {
        match self {
            Verb::AllReduce(op) => {
                Row { op: Some(op), compares_shapes: true, ..Row::new(Kind::AllReduce, Layout::Equal) }
            }
            Verb::Reduce { op, root } => {
                Row { op: Some(op), root: Some(root), compares_shapes: true, ..Row::new(Kind::Reduce, Layout::Equal) }
            }
            Verb::Broadcast { root } => {
                Row { root: Some(root), compares_shapes: true, ..Row::new(Kind::Broadcast, Layout::Equal) }
            }
            Verb::AllGather => Row::new(Kind::AllGather, Layout::Grows),
            Verb::Gather { root } => Row { root: Some(root), ..Row::new(Kind::Gather, Layout::Grows) },
            Verb::Scatter { root } => Row { root: Some(root), ..Row::new(Kind::Scatter, Layout::Shrinks) },
            Verb::ReduceScatter(op) => Row { op: Some(op), ..Row::new(Kind::ReduceScatter, Layout::Shrinks) },
            Verb::AllToAll => Row::new(Kind::AllToAll, Layout::EqualShards),
            Verb::AllToAllV { .. } => Row::over_exchange(Kind::AllToAllV, Layout::Parts),
            Verb::CompressedAllReduce(_) => Row::over_exchange(Kind::CompressedAllReduce, Layout::Equal),
            Verb::NeighborAverage { .. } | Verb::CompressedRing { .. } => {
                Row::over_exchange(Kind::Gossip, Layout::Equal)
            }
            Verb::Barrier => Row::new(Kind::Barrier, Layout::Equal),
        }
    }

    /// Returns the kind, as used in headers and counters.
    #[inline]
    pub const fn kind(self) -> Kind {
        self.row().kind
    }

    /// Returns the verb of a kind. Kinds without a reduce operation or root ignore that argument.
    ///
    /// # Errors
    /// `InvalidArgument` if the kind needs more than these arguments, or is not a verb.
    #[inline]
    pub fn of(kind: Kind, op: ReduceOp, root: usize) -> Result<Verb<'a>> {
        Ok(match kind {
            Kind::AllReduce => Verb::AllReduce(op),
            Kind::Reduce => Verb::Reduce { op, root },
            Kind::Broadcast => Verb::Broadcast { root },
            Kind::AllGather => Verb::AllGather,
            Kind::Gather => Verb::Gather { root },
            Kind::Scatter => Verb::Scatter { root },
            Kind::ReduceScatter => Verb::ReduceScatter(op),
            Kind::AllToAll => Verb::AllToAll,
            Kind::Barrier => Verb::Barrier,
            Kind::AllToAllV | Kind::Send | Kind::Exchange | Kind::CompressedAllReduce | Kind::Gossip => {
                return Err(Error::InvalidArgument(format!(
                    "{} is not defined by a kind, a reduce operation and a root alone",
                    kind.name()
                )));
            }
        })
    }

    /// Returns the reduce operation, if the verb has one.
    #[inline]
    pub const fn op(self) -> Option<ReduceOp> {
        self.row().op
    }

    /// Returns the root, if the verb has one.
    #[inline]
    pub const fn root(self) -> Option<usize> {
        self.row().root
    }

    /// True if any collective can run this verb with messages alone: see `bagua_collectives::over_exchange`.
    #[inline]
    pub const fn is_over_exchange(self) -> bool {
        self.row().is_over_exchange
    }

    /// True if the tensors of all ranks must have the same shape.
    #[inline]
    pub const fn compares_shapes(self) -> bool {
        self.row().compares_shapes
    }

    /// Returns how the sizes of the buffers relate.
    #[inline]
    pub const fn layout(self) -> Layout {
        self.row().layout
    }

    /// Returns which of two separate buffers this rank uses.
    #[inline]
    pub fn uses(self, rank: usize) -> Uses {
        match self {
            Verb::Reduce { root, .. } | Verb::Gather { root } if root != rank => Uses::SourceOnly,
            Verb::Scatter { root } if root != rank => Uses::DestinationOnly,
            _ => Uses::Both,
        }
    }

    /// Returns how many times each buffer holds the fingerprint's count of elements, as [`Layout::shards`] does: 0 for
    /// a buffer that this rank does not use. In place (`split` is false), the source has 0.
    pub fn parts(self, rank: usize, ranks: usize, split: bool) -> (usize, usize) {
        let (src, dst) = self.layout().shards(ranks);
        match self.uses(rank) {
            _ if !split => (0, src.max(dst)),
            Uses::Both => (src, dst),
            Uses::SourceOnly => (src, 0),
            Uses::DestinationOnly => (0, dst),
        }
    }
}

/// The buffers of an operation, on the host or on a device.
pub enum Io<'a> {
    /// One buffer for input and output, as with MPI_IN_PLACE. The shard of rank r starts at r * c.
    InPlace(BufferMut<'a>),
    /// Two buffers that do not overlap.
    Split {
        /// Buffer with this rank's input.
        src: Buffer<'a>,
        /// Buffer for this rank's result.
        dst: BufferMut<'a>,
    },
}

impl<'a> Io<'a> {
    /// Wraps one buffer of host memory.
    #[inline]
    pub fn in_place(data: &'a mut [u8]) -> Io<'a> {
        Io::InPlace(data.into())
    }

    /// Wraps two buffers of host memory.
    #[inline]
    pub fn split(src: &'a [u8], dst: &'a mut [u8]) -> Io<'a> {
        Io::Split { src: src.into(), dst: dst.into() }
    }

    /// Returns an empty buffer, for verbs without one.
    pub fn none() -> Io<'a> {
        Io::in_place(&mut [])
    }

    /// Returns the size of the larger buffer in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Io::InPlace(data) => data.len(),
            Io::Split { src, dst } => src.len().max(dst.len()),
        }
    }

    /// True if both buffers are empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the device of both buffers, or `None` for the host.
    ///
    /// # Errors
    /// `UnsupportedType` if the buffers are on different devices.
    #[inline]
    pub fn device(&self) -> Result<DeviceRef<'a>> {
        let (src, dst) = match self {
            Io::InPlace(data) => return Ok(data.device()),
            Io::Split { src, dst } => (src.device(), dst.device()),
        };
        if same_place(src, dst) {
            return Ok(src);
        }
        let (src, dst) = (name_of(src), name_of(dst));
        Err(Error::UnsupportedType(format!("source and destination are on different devices: {src} and {dst}")))
    }

    /// Borrows the buffers again for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> Io<'_> {
        match self {
            Io::InPlace(data) => Io::InPlace(data.reborrow()),
            Io::Split { src, dst } => Io::Split { src: *src, dst: dst.reborrow() },
        }
    }

    /// Returns the buffer that the result goes into.
    #[inline]
    pub fn into_output(self) -> BufferMut<'a> {
        match self {
            Io::InPlace(data) | Io::Split { dst: data, .. } => data,
        }
    }

    /// Splits each buffer at byte `mid`. Panics if `mid` is beyond the end of a buffer.
    pub fn split_at(self, mid: usize) -> (Io<'a>, Io<'a>) {
        match self {
            Io::InPlace(data) => {
                let (head, tail) = data.split_at(mid);
                (Io::InPlace(head), Io::InPlace(tail))
            }
            Io::Split { src, dst } => {
                let (head, tail) = dst.split_at(mid);
                let (before, behind) = (src.slice(0..mid), src.slice(mid..src.len()));
                (Io::Split { src: before, dst: head }, Io::Split { src: behind, dst: tail })
            }
        }
    }

    /// Returns the buffers as slices.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device, if the buffers are not on the host.
    #[inline]
    pub fn into_host(self) -> Result<HostIo<'a>> {
        Ok(match self {
            Io::InPlace(data) => HostIo::InPlace(data.into_host()?),
            Io::Split { src, dst } => HostIo::Split { src: src.as_host()?, dst: dst.into_host()? },
        })
    }
}

/// [`Io`] in host memory.
pub enum HostIo<'a> {
    /// One buffer for input and output.
    InPlace(&'a mut [u8]),
    /// Two buffers that do not overlap.
    Split {
        /// Buffer with this rank's input.
        src: &'a [u8],
        /// Buffer for this rank's result.
        dst: &'a mut [u8],
    },
}

impl HostIo<'_> {
    /// Returns what this rank contributes.
    #[inline]
    pub fn input(&self) -> &[u8] {
        match self {
            HostIo::InPlace(data) => data,
            HostIo::Split { src, .. } => src,
        }
    }

    /// Returns the buffer that the result goes into.
    #[inline]
    pub fn output(&mut self) -> &mut [u8] {
        match self {
            HostIo::InPlace(data) => data,
            HostIo::Split { dst, .. } => dst,
        }
    }

    /// Copies the shard that this rank keeps from the input to the output. Does nothing in place.
    pub fn keep_own(&mut self, from: Range<usize>, to: usize) {
        if let HostIo::Split { src, dst } = self {
            dst[to..to + from.len()].copy_from_slice(&src[from]);
        }
    }
}

impl<'a> From<HostIo<'a>> for Io<'a> {
    fn from(host: HostIo<'a>) -> Io<'a> {
        match host {
            HostIo::InPlace(data) => Io::in_place(data),
            HostIo::Split { src, dst } => Io::split(src, dst),
        }
    }
}

/// The context that accompanies one operation through the layers.
#[derive(Clone, Copy)]
pub struct OpContext<'a> {
    /// Description of the operation that peers compare with theirs. Headers carry it unchanged even if the verb
    /// differs: inside `hier`, a reduce runs under the fingerprint of the all_reduce that it belongs to.
    pub fingerprint: Fingerprint,
    /// Time by which the operation must be done.
    pub deadline: Deadline,
    /// Failure state of the group. A failure ends all waits of the operation.
    pub health: &'a GroupHealth,
    /// Counters of this kind of operation.
    pub stats: &'a OpStats,
    /// Bucket or other label for error texts. May be empty.
    pub label: &'a str,
    /// Memory and state that the operation uses in addition to its buffers.
    pub extra: &'a RefCell<Extra<'a>>,
}

impl OpContext<'_> {
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.fingerprint.dtype
    }

    /// Returns the error that must end the wait: the group has failed, one of the `missing` group ranks has left, or
    /// the deadline has passed.
    ///
    /// `missing` are the ranks that the caller still waits for. Check once more for their data before this call, so
    /// that a peer that did its part and then left is not blamed.
    pub fn check(&self, missing: &[usize], done: u64, total: u64) -> Result<()> {
        self.check_unless(|_| false, missing, done, total)
    }

    /// Returns the same error as [`OpContext::check`], except for a rank that has left while `is_in_flight` says that
    /// its bytes may still arrive.
    pub fn check_unless(
        &self,
        is_in_flight: impl Fn(usize) -> bool,
        missing: &[usize],
        done: u64,
        total: u64,
    ) -> Result<()> {
        self.health.check().map_err(|e| e.during(self.progress(done, total)))?;
        let is_gone = |rank: usize| self.health.has_departed(rank) && !is_in_flight(rank);
        if let Some(gone) = missing.iter().find(|rank| is_gone(**rank)) {
            return Err(self.health.attribute_disconnect(*gone, LEFT).during(self.progress(done, total)));
        }
        if self.deadline.passed() {
            return Err(self.health.timed_out(self.deadline.limit(), missing, self.progress(done, total)));
        }
        Ok(())
    }

    /// Returns the progress of this operation for error texts: `done` of `total` bytes.
    pub fn progress(&self, done: u64, total: u64) -> Progress {
        Progress { what: self.fingerprint.to_string(), label: self.label.to_owned(), done, total }
    }

    /// Returns the error for a peer (a group rank) that runs a different operation.
    pub fn mismatch(&self, peer: usize, theirs: &dyn std::fmt::Display) -> Error {
        let label = in_bucket(self.label);
        let (ours, theirs) = (self.fingerprint.to_string(), theirs.to_string());
        let apart = if ours == theirs {
            " in another group"
        } else if self.fingerprint.is_of_another_step(&theirs) {
            ": one of them has loaded another state; load the same checkpoint on every rank"
        } else {
            ""
        };
        Error::Mismatch(format!(
            "rank {} does {ours}{label}, rank {} does {theirs}{apart}",
            self.health.world_rank(self.health.rank()),
            self.health.world_rank(peer),
        ))
    }
}

/// A message to one group rank, as part of a grouped exchange.
#[derive(Clone, Copy)]
pub struct Outgoing<'a> {
    /// Group rank of the receiver, never this rank.
    pub peer: usize,
    /// Description of the message, which the receiver compares with its own.
    pub fingerprint: Fingerprint,
    /// Content of the message.
    pub data: Buffer<'a>,
}

impl<'a> Outgoing<'a> {
    /// Creates a message from host memory.
    pub fn new(peer: usize, fingerprint: Fingerprint, data: &'a [u8]) -> Outgoing<'a> {
        Outgoing { peer, fingerprint, data: data.into() }
    }
}

/// A message from one group rank, as part of a grouped exchange.
pub struct Incoming<'a> {
    /// Group rank of the sender, never this rank.
    pub peer: usize,
    /// Description that the message must carry.
    pub fingerprint: Fingerprint,
    /// Destination. The message must have exactly this length.
    pub data: BufferMut<'a>,
}

impl<'a> Incoming<'a> {
    /// Creates a message that is received into host memory.
    pub fn new(peer: usize, fingerprint: Fingerprint, data: &'a mut [u8]) -> Incoming<'a> {
        Incoming { peer, fingerprint, data: data.into() }
    }
}
