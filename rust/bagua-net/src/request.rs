//! One operation as a value: the verb, its buffers, and its context. Every layer passes these three on, as NCCL's `ncclInfo` and
//! UCC's `ucc_coll_args` do, instead of having a method per verb.

mod extra;
mod peers;

pub use self::extra::{Compression, Extra, Operands, Replicas, Workspace};
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

/// A collective operation with its reduce operation and root. n is the number of ranks, N the bytes of a tensor, c those of one
/// rank's shard; r is a rank. [`Io`] says where the buffers are.
#[derive(Clone, Copy, Debug)]
pub enum Verb<'a> {
    /// Every rank gets the combination of all. In place: N bytes. Split: N and N.
    AllReduce(ReduceOp),
    /// `root` gets the combination of all. In place: N bytes, unchanged on the others. Split: N and N (`dst` is not used on the
    /// others).
    Reduce {
        /// How elements are combined.
        op: ReduceOp,
        /// Rank that gets the result.
        root: usize,
    },
    /// Every rank gets `root`'s N bytes. In place only.
    Broadcast {
        /// Rank whose bytes they are.
        root: usize,
    },
    /// Every rank gets every rank's shard. In place: n * c, own shard at r * c. Split: c and n * c.
    AllGather,
    /// `root` gets every rank's shard. In place: n * c everywhere, own shard at r * c. Split: c and n * c (`dst` is not used on
    /// the others).
    Gather {
        /// Rank that gets them.
        root: usize,
    },
    /// Every rank gets its shard of `root`'s. In place: n * c everywhere, own shard lands at r * c. Split: n * c (not used on the
    /// others) and c.
    Scatter {
        /// Rank that has them.
        root: usize,
    },
    /// Rank r gets the combination of all ranks' shard r. In place: n * c, result at r * c, the other shards stay as they were.
    /// Split: n * c and c.
    ReduceScatter(ReduceOp),
    /// Rank r gets shard r of every rank, in rank order. In place: n * c. Split: n * c and n * c.
    AllToAll,
    /// Rank r gets part r of every rank's source. In place the source is a copy of the buffer. Ranks may differ in the layouts.
    AllToAllV {
        /// Where the parts for each rank lie in the source.
        send: PartLayout<'a>,
        /// Where each rank's part goes in the destination; parts do not overlap.
        recv: PartLayout<'a>,
    },
    /// Every rank gets the combination of all, of which only records of a codec travel. In place. Works with [`Extra::error`], and on a
    /// device that has the codec encodes there.
    CompressedAllReduce(Compression<'a>),
    /// The mean of this rank's N bytes and those of its peers, in rank order, divided once. In place: N. Split: N and N.
    NeighborAverage {
        /// Whose are averaged; not [`PeerSelection::All`], which is an all_reduce.
        peers: PeerSelection,
        /// Number of the call, equal on all ranks.
        round: u64,
    },
    /// One round of averaging with both neighbours of the ring of ranks, of which only encoded differences travel; the buffer becomes
    /// [`Replicas::own`]. In place. Works with [`Extra::replicas`].
    CompressedRing {
        /// Encodes the differences.
        codec: &'a dyn Codec,
        /// Number of the call, for codecs that draw at random.
        draw: u64,
    },
    /// Returns when every rank has called it. No bytes.
    Barrier,
}

/// Where each rank's part of a buffer lies, in elements.
#[derive(Clone, Copy, Debug)]
pub struct PartLayout<'a> {
    /// Elements per rank.
    pub counts: &'a [usize],
    /// First element per rank.
    pub displs: &'a [usize],
}

impl PartLayout<'_> {
    /// The bytes of a rank's part, of elements of so many bytes.
    pub fn range(&self, rank: usize, element: usize) -> Range<usize> {
        self.displs[rank] * element..(self.displs[rank] + self.counts[rank]) * element
    }

    /// The ranks with a part that is not empty, by where it begins.
    pub fn in_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.counts.len()).filter(|rank| self.counts[*rank] > 0).collect();
        order.sort_by_key(|rank| self.displs[*rank]);
        order
    }

    /// The part of each rank, to write. The parts lie within `data` and do not overlap.
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

/// How the two buffers of a verb relate. n is the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Source and destination of one size, of any number of elements.
    Equal,
    /// Source and destination of one size, n shards each.
    EqualShards,
    /// The destination has n shards of the source's size.
    Grows,
    /// The source has n shards of the destination's size.
    Shrinks,
    /// The verb says where the parts of each side lie.
    Parts,
}

impl Layout {
    /// How many times the count of elements, as the fingerprint has it, source and destination hold among so many ranks.
    pub const fn shards(self, ranks: usize) -> (usize, usize) {
        match self {
            Layout::Equal | Layout::Parts => (1, 1),
            Layout::EqualShards => (ranks, ranks),
            Layout::Grows => (1, ranks),
            Layout::Shrinks => (ranks, 1),
        }
    }
}

/// Which of two separate buffers a rank uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Uses {
    Both,
    SourceOnly,
    DestinationOnly,
}

/// What the methods of [`Verb`] of the same names return.
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
    /// What depends neither on this rank nor on the number of ranks.
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

    /// Its kind, for headers and counters.
    #[inline]
    pub const fn kind(self) -> Kind {
        self.row().kind
    }

    /// The verb of a kind; a kind that has no reduce operation or no root ignores it.
    ///
    /// # Errors
    /// `InvalidArgument` for a kind that needs more than these, or that is no verb.
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
                    "{} is made of messages, and not defined by its kind alone",
                    kind.name()
                )));
            }
        })
    }

    /// Its reduce operation, if it has one.
    #[inline]
    pub const fn op(self) -> Option<ReduceOp> {
        self.row().op
    }

    /// Its root, if it has one.
    #[inline]
    pub const fn root(self) -> Option<usize> {
        self.row().root
    }

    /// True for the verbs that every collective can run by its messages, see `bagua_collectives::over_exchange`.
    #[inline]
    pub const fn is_over_exchange(self) -> bool {
        self.row().is_over_exchange
    }

    /// True when all ranks' tensors must have one shape.
    #[inline]
    pub const fn compares_shapes(self) -> bool {
        self.row().compares_shapes
    }

    /// How its buffers relate.
    #[inline]
    pub const fn layout(self) -> Layout {
        self.row().layout
    }

    /// Which of two separate buffers this rank uses.
    #[inline]
    pub fn uses(self, rank: usize) -> Uses {
        match self {
            Verb::Reduce { root, .. } | Verb::Gather { root } if root != rank => Uses::SourceOnly,
            Verb::Scatter { root } if root != rank => Uses::DestinationOnly,
            _ => Uses::Both,
        }
    }

    /// As [`Layout::shards`], of the buffers that this rank uses. In place (`split` false) only the destination counts.
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
    /// One buffer for input and output, as MPI_IN_PLACE. Rank r's shard lies at r * c.
    InPlace(BufferMut<'a>),
    /// Two buffers that do not overlap.
    Split {
        /// What this rank contributes.
        src: Buffer<'a>,
        /// What this rank gets.
        dst: BufferMut<'a>,
    },
}

impl<'a> Io<'a> {
    /// One buffer of host memory.
    #[inline]
    pub fn in_place(data: &'a mut [u8]) -> Io<'a> {
        Io::InPlace(data.into())
    }

    /// Two buffers of host memory.
    #[inline]
    pub fn split(src: &'a [u8], dst: &'a mut [u8]) -> Io<'a> {
        Io::Split { src: src.into(), dst: dst.into() }
    }

    /// No buffer.
    pub fn none() -> Io<'a> {
        Io::in_place(&mut [])
    }

    /// Bytes of the larger buffer.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Io::InPlace(data) => data.len(),
            Io::Split { src, dst } => src.len().max(dst.len()),
        }
    }

    /// True when there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device of both buffers; `None` for the host.
    ///
    /// # Errors
    /// `UnsupportedType` when they are in different places.
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
        Err(Error::UnsupportedType(format!("the source is on {src}, the destination on {dst}")))
    }

    /// The same for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> Io<'_> {
        match self {
            Io::InPlace(data) => Io::InPlace(data.reborrow()),
            Io::Split { src, dst } => Io::Split { src: *src, dst: dst.reborrow() },
        }
    }

    /// What this rank gets.
    #[inline]
    pub fn into_output(self) -> BufferMut<'a> {
        match self {
            Io::InPlace(data) | Io::Split { dst: data, .. } => data,
        }
    }

    /// The bytes of each buffer before `mid`, and those from it on.
    ///
    /// # Panics
    /// When `mid` is beyond a buffer.
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

    /// The buffers as slices, where they are on the host.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device.
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
        /// What this rank contributes.
        src: &'a [u8],
        /// What this rank gets.
        dst: &'a mut [u8],
    },
}

impl HostIo<'_> {
    /// What this rank contributes.
    #[inline]
    pub fn input(&self) -> &[u8] {
        match self {
            HostIo::InPlace(data) => data,
            HostIo::Split { src, .. } => src,
        }
    }

    /// What this rank gets.
    #[inline]
    pub fn output(&mut self) -> &mut [u8] {
        match self {
            HostIo::InPlace(data) => data,
            HostIo::Split { dst, .. } => dst,
        }
    }

    /// Copies what a rank sends to itself from the input to the output, unless it is there already.
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

/// What accompanies one operation through the layers.
#[derive(Clone, Copy)]
pub struct OpContext<'a> {
    /// What the operation says of itself to the other ranks. Headers carry it as it is; the verb says what to do (inside `hier` a
    /// reduce runs under the fingerprint of the all_reduce that it is part of).
    pub fingerprint: Fingerprint,
    /// When it must be done.
    pub deadline: Deadline,
    /// What ends its waits.
    pub health: &'a GroupHealth,
    /// Where it counts.
    pub stats: &'a OpStats,
    /// Bucket or other label for error texts; may be empty.
    pub label: &'a str,
    /// What it works with beside its buffers.
    pub extra: &'a RefCell<Extra<'a>>,
}

impl OpContext<'_> {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.fingerprint.dtype
    }

    /// Looks at the health and the deadline: the error to return, if the wait must end. `missing` are the group ranks that the
    /// caller still waits for; one of them having left the group is an error too. Call it after looking once more for what is
    /// waited for, so that a peer that did its part and left is not blamed.
    pub fn check(&self, missing: &[usize], done: u64, total: u64) -> Result<()> {
        self.check_unless(|_| false, missing, done, total)
    }

    /// [`OpContext::check`], where bytes of a rank that has left may be in flight: then that is no error.
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

    /// How far this operation has come.
    pub fn progress(&self, done: u64, total: u64) -> Progress {
        Progress { what: self.fingerprint.to_string(), label: self.label.to_owned(), done, total }
    }

    /// The error for a peer (a group rank) that does something else.
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

/// A message of a grouped exchange to a group rank.
#[derive(Clone, Copy)]
pub struct Outgoing<'a> {
    /// Group rank of the receiver; never this rank.
    pub peer: usize,
    /// What the message says of itself.
    pub fingerprint: Fingerprint,
    /// The bytes.
    pub data: Buffer<'a>,
}

impl<'a> Outgoing<'a> {
    /// A message of these bytes of host memory.
    pub fn new(peer: usize, fingerprint: Fingerprint, data: &'a [u8]) -> Outgoing<'a> {
        Outgoing { peer, fingerprint, data: data.into() }
    }
}

/// A message of a grouped exchange from a group rank.
pub struct Incoming<'a> {
    /// Group rank of the sender; never this rank.
    pub peer: usize,
    /// What the message must say of itself.
    pub fingerprint: Fingerprint,
    /// Where the bytes go; the message must have exactly this length.
    pub data: BufferMut<'a>,
}

impl<'a> Incoming<'a> {
    /// A message into these bytes of host memory.
    pub fn new(peer: usize, fingerprint: Fingerprint, data: &'a mut [u8]) -> Incoming<'a> {
        Incoming { peer, fingerprint, data: data.into() }
    }
}
