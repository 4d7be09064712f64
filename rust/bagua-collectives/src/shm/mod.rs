//! Collectives in memory that all ranks of one host map.
//!
//! If the tensors of all ranks lie in arenas, the ranks map each other's arenas in the first such operation, and then
//! read and write each other's tensors directly (`zero_copy`). Otherwise, a rank copies the data that its peers need to
//! the segment, chunk by chunk, and the peers combine it into their tensors.
//!
//! | file | what it holds |
//! |---|---|
//! | `protocol` | the synchronisation: arrivals, waits, and which rank may access which memory when |
//! | `cpu_placement` | keeping the ranks on different processors |
//! | `segment_layout` | the layout of the shared memory, and the published fingerprints that ranks compare |
//! | `cico` | all_reduce and reduce through windows (copy in, copy out) |
//! | `pairwise_exchange` | all_gather and all_to_all between two ranks |
//! | `messages` | the streams for messages |
//! | `zero_copy` | mapping the peers' arenas, and every verb on tensors in arenas |
//! | `chunks` | dividing, copying and combining tensors |
//!
//! This file contains the verbs. Each says what a rank writes to its own buffer and what it reads from its peers'
//! buffers in each `Phase`.

#![allow(unsafe_code)]

mod chunks;
mod cico;
mod cpu_placement;
mod messages;
mod pairwise_exchange;
mod protocol;
mod segment_layout;
#[cfg(test)]
mod tests;
mod zero_copy;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{Collective, HostIo, Incoming, Io, OpContext, Outgoing, Verb, over_exchange};
use crate::error::{Error, Result};
use crate::memory::{Arena, Registry};
use crate::sync::buffer_len;
use crate::transport::Transport;
use crate::transport::shm::ring_links;
use crate::types::{Kind, ReduceOp};
use crate::wait::Doorbell;

pub use segment_layout::segment_len;
pub use zero_copy::PassDescriptors;

use chunks::{Cut, combine_into, copy, copy_and_own, fill_for_each, inputs, others, shifted};
use cico::Reduction;
use messages::Messages;
use pairwise_exchange::Pairwise;
use protocol::{BufferOffer, Phase, Protocol, Route};
use segment_layout::{ALIGN, Announcement, Buffer, SLOT, Segment};
use zero_copy::{ArenaTensor, LaneArenas, PeerBuffers};

/// Minimum size in bytes of a chunk of a broadcast.
const EARLY: usize = 32 << 10;

/// The collective of some or all ranks of one host, in shared memory.
pub struct Shm {
    protocol: Protocol,
    /// Streams to the same ranks, for messages (send, recv, exchange).
    messages: Messages,
    /// Finds and maps the arenas that contain tensors. Without it, no operation is zero-copy.
    arenas: Option<LaneArenas>,
    /// First error. The ranks may have arrived differently often since, so every later operation returns it.
    broken: Option<Error>,
}

impl Shm {
    /// Creates the collective for the rank with index `index` on this host. `members` are the group ranks of the host's
    /// ranks. The segment must have [`segment_len`] bytes, which were zero before any rank created its `Shm`. Each rank
    /// creates one `Shm` on it.
    ///
    /// # Errors
    /// `System` if the segment is too short.
    pub fn new(arena: Arc<Arena>, index: usize, members: Vec<usize>) -> Result<Shm> {
        let segment = Segment::new(arena, index, members.len())?;
        let messages = Messages::new(Arc::clone(segment.arena()), segment.own_rings(), index, members.clone());
        Ok(Shm { protocol: Protocol::new(segment, members), messages, arenas: None, broken: None })
    }

    /// Turns on zero-copy operations on tensors in arenas. `registry` contains this rank's arenas. Must be called on
    /// all ranks or on none.
    #[must_use]
    pub fn knowing(self, registry: Arc<Registry>, between: Box<dyn PassDescriptors>) -> Shm {
        Shm { arenas: Some(LaneArenas::new(registry, between)), ..self }
    }

    fn index(&self) -> usize {
        self.protocol.segment.index
    }

    fn ranks(&self) -> usize {
        self.protocol.segment.ranks
    }

    fn in_arena(&mut self, tensor: &[u8]) -> Option<ArenaTensor> {
        self.arenas.as_mut()?.tensor(tensor)
    }

    fn execute(
        &mut self,
        cx: &OpContext<'_>,
        (verb, bytes): (Kind, usize),
        route: Route,
        phase: impl FnMut(&Segment, Phase, Buffer),
    ) -> Result<()> {
        let offers = guarded(&mut self.broken, || {
            let announcement = Announcement { fingerprint: cx.fingerprint, verb, bytes: bytes as u64 };
            let map = |_: &[u64]| Ok(BufferOffer::Nowhere);
            self.protocol.run(cx, &announcement, route, false, BufferOffer::Never, map, phase)
        });
        offers.map(|offsets| debug_assert!(offsets.is_none(), "an operation without offers is not zero-copy"))
    }

    /// Runs an operation that is zero-copy if the tensors of all ranks, each of `bytes` bytes, lie in arenas. If it
    /// returns `Some`, no bytes have been moved yet, and the caller must call [`Shm::run_zero_copy`].
    fn run_or_offer(
        &mut self,
        cx: &OpContext<'_>,
        (verb, bytes): (Kind, usize),
        (route, collect): (Route, bool),
        mut tensor: Option<ArenaTensor>,
        phase: impl FnMut(&Segment, Phase, Buffer),
    ) -> Result<Option<PeerBuffers>> {
        let Shm { protocol, arenas, broken, .. } = self;
        guarded(broken, || {
            let announcement = Announcement { fingerprint: cx.fingerprint, verb, bytes: bytes as u64 };
            let offer = match route {
                Route::Windows(_) => tensor.as_ref().map_or(BufferOffer::Nowhere, ArenaTensor::offer),
                Route::Nothing | Route::Slots => BufferOffer::Never,
            };
            let map = |ids: &[u64]| match (arenas, &mut tensor) {
                (Some(arenas), Some(tensor)) => arenas.map(cx, tensor, ids),
                _ => Ok(BufferOffer::Nowhere),
            };
            let offsets = protocol.run(cx, &announcement, route, collect, offer, map, phase)?;
            let found = offsets.zip(tensor);
            found.map(|(offsets, tensor)| tensor.tensors(cx, protocol.segment.index, &offsets)).transpose()
        })
    }

    /// Runs this rank's part of a zero-copy operation, and blocks until all ranks have run theirs.
    fn run_zero_copy(&mut self, cx: &OpContext<'_>, bytes: usize, work: impl FnOnce()) -> Result<()> {
        cx.stats.zero_copy.fetch_add(1, Relaxed);
        guarded(&mut self.broken, || {
            work();
            self.protocol.leave(cx, bytes as u64)
        })
    }

    /// Runs an all_reduce if `root` is `None`, otherwise a reduce to `root`.
    fn reduce_to(
        &mut self,
        cx: &OpContext<'_>,
        verb: Kind,
        mut io: HostIo<'_>,
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let total = io.input().len();
        let gets = root.is_none_or(|root| root == me);
        if total == 0 {
            return self.execute(cx, (verb, 0), Route::Nothing, |_, _, _| {});
        }
        if total <= small(ranks) {
            return self.execute(cx, (verb, total), Route::Slots, |segment, phase, buffer| match phase {
                Phase::Fill(_) => {
                    // SAFETY: rule S2 of `protocol`, and S1 for the peers that read this slot two operations ago.
                    unsafe { segment.write(me, buffer, 0..total) }.copy_from_slice(io.input());
                }
                Phase::Take(_) if gets => {
                    // SAFETY: rules S1 and S2 of `protocol`: no rank writes to its slot after its arrival, until this
                    // rank's next operation.
                    let inputs = inputs(ranks, |rank| unsafe { segment.read(rank, buffer, 0..total) });
                    combine_into(cx, op, inputs, me, &mut io, 0..total, 0..total);
                }
                Phase::Take(_) => {}
            });
        }
        let cut = Cut::new(total, self.protocol.segment.window());
        let tensor = match &io {
            HostIo::InPlace(data) => self.in_arena(data),
            HostIo::Split { .. } => None,
        };
        let route = (Route::Windows(cut.chunks), gets);
        let reduction = Reduction { cx, op, root, cut };
        let phase = |segment: &Segment, phase, buffer| reduction.phase(segment, phase, buffer, &mut io);
        let found = self.run_or_offer(cx, (verb, total), route, tensor, phase)?;
        match (found, io) {
            (Some(tensors), HostIo::InPlace(data)) => {
                self.run_zero_copy(cx, total, || tensors.reduce(cx, op, me, root, data))
            }
            _ => Ok(()),
        }
    }

    /// Runs an all_gather (without root) or gather.
    fn gather_to(&mut self, cx: &OpContext<'_>, verb: Kind, mut io: HostIo<'_>, root: Option<usize>) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let gets = root.is_none_or(|root| root == me);
        let (shard, own) = match &io {
            HostIo::InPlace(data) => (data.len() / ranks, me * (data.len() / ranks)),
            HostIo::Split { src, .. } => (src.len(), 0),
        };
        let pair = ranks == 2 && root.is_none();
        let (route, cut) =
            self.route(shard, shard, if pair { pairwise_exchange::CHUNK } else { self.protocol.segment.window() });
        let tensor = self.in_arena(&io.input()[own..own + shard]);
        let swap = Pairwise { cut, send: own, recv: (1 - me.min(1)) * shard, keep: (own, me * shard) };
        let swaps = pair && matches!(route, Route::Windows(_));
        let found =
            self.run_or_offer(cx, (verb, shard), (route, false), tensor, |segment, phase, buffer| match phase {
                _ if swaps => swap.phase(segment, phase, &mut io),
                Phase::Fill(chunk) if chunk < cut.chunks && root != Some(me) => {
                    let range = cut.range(chunk);
                    // SAFETY: no other rank accesses this buffer while it is filled (`protocol`, S2, W2).
                    let out = unsafe { segment.write(me, buffer, 0..range.len()) };
                    copy(&io.input()[shifted(range, own)], out);
                }
                Phase::Take(chunk) if gets => {
                    let range = cut.range(chunk);
                    io.keep_own(shifted(range.clone(), own), me * shard + range.start);
                    for rank in others(me, ranks) {
                        // SAFETY: rule S2 or W1: a rank does not write to its buffer while its peers read from it.
                        let from = unsafe { segment.read(rank, buffer, 0..range.len()) };
                        copy(from, &mut io.output()[shifted(range.clone(), rank * shard)]);
                    }
                }
                Phase::Fill(_) | Phase::Take(_) => {}
            })?;
        let Some(tensors) = found else { return Ok(()) };
        self.run_zero_copy(cx, shard, || {
            if gets {
                io.keep_own(own..own + shard, me * shard);
                tensors.pull(me, 0..shard, |rank| shifted(0..shard, rank * shard), io.output());
            }
        })
    }

    /// Returns the route of one shard: through slots if `slot` bytes fit into one, and otherwise through windows in
    /// chunks of at most `part` bytes.
    fn route(&self, shard: usize, slot: usize, part: usize) -> (Route, Cut) {
        if shard == 0 {
            (Route::Nothing, Cut { total: 0, each: 1, chunks: 0 })
        } else if slot <= SLOT {
            (Route::Slots, Cut { total: shard, each: shard, chunks: 1 })
        } else {
            let cut = Cut::new(shard, part);
            (Route::Windows(cut.chunks), cut)
        }
    }

    /// Returns the route of one shard for each rank, and the distance between two shards in a buffer.
    fn route_for_each(&self, shard: usize) -> (Route, Cut, usize) {
        let ranks = self.ranks();
        let part = self.protocol.segment.window() / ranks / ALIGN * ALIGN;
        let (route, cut) = self.route(shard, shard.saturating_mul(ranks), part);
        (route, cut, if route == Route::Slots { shard } else { part })
    }
}

/// Runs `body` unless an earlier operation failed, and keeps its error for later operations.
fn guarded<T>(broken: &mut Option<Error>, body: impl FnOnce() -> Result<T>) -> Result<T> {
    if let Some(error) = broken {
        return Err(error.clone());
    }
    let outcome = body();
    *broken = outcome.as_ref().err().cloned();
    outcome
}

impl Shm {
    fn broadcast(&mut self, cx: &OpContext<'_>, data: &mut [u8], root: usize) -> Result<()> {
        let me = self.index();
        let total = data.len();
        // Use at least eight chunks, so that the other ranks read one chunk while the root writes the next.
        let part = (total / 8 / ALIGN * ALIGN).max(EARLY).min(self.protocol.segment.window());
        let (route, cut) = self.route(total, total, part);
        let tensor = self.in_arena(data);
        let verb = (Kind::Broadcast, total);
        let found = self.run_or_offer(cx, verb, (route, false), tensor, |segment, phase, buffer| match phase {
            Phase::Fill(chunk) if chunk < cut.chunks && me == root => {
                let range = cut.range(chunk);
                // SAFETY: no other rank accesses this buffer while it is filled (`protocol`, S2, W2).
                copy(&data[range.clone()], unsafe { segment.write(me, buffer, 0..range.len()) });
            }
            Phase::Take(chunk) if me != root => {
                let range = cut.range(chunk);
                if segment.ranks == 2 && matches!(buffer, Buffer::Window(_)) {
                    // SAFETY: rule W1: the root does not access its window before this rank's next arrival; no third
                    // rank exists.
                    let window = unsafe { segment.write(root, buffer, 0..range.len()) };
                    copy_and_own(window, &mut data[range]);
                } else {
                    // SAFETY: rule S2 or W1: the root does not write to its buffer while its peers read from it.
                    let from = unsafe { segment.read(root, buffer, 0..range.len()) };
                    copy(from, &mut data[range]);
                }
            }
            Phase::Fill(_) | Phase::Take(_) => {}
        })?;
        let Some(tensors) = found else { return Ok(()) };
        self.run_zero_copy(cx, total, || tensors.broadcast(me, root, data))
    }

    fn scatter(&mut self, cx: &OpContext<'_>, mut io: HostIo<'_>, root: usize) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let (shard, own) = match &io {
            HostIo::InPlace(data) => (data.len() / ranks, me * (data.len() / ranks)),
            HostIo::Split { dst, .. } => (dst.len(), 0),
        };
        let (route, cut, stride) = self.route_for_each(shard);
        self.execute(cx, (Kind::Scatter, shard), route, |segment, phase, buffer| match phase {
            Phase::Fill(chunk) if chunk < cut.chunks && me == root => {
                let range = cut.range(chunk);
                for rank in (0..ranks).filter(|rank| *rank != me) {
                    // SAFETY: no other rank accesses this buffer while it is filled (`protocol`, S2, W2).
                    let out = unsafe { segment.write(me, buffer, shifted(0..range.len(), rank * stride)) };
                    copy(&io.input()[shifted(range.clone(), rank * shard)], out);
                }
                io.keep_own(shifted(range.clone(), me * shard), own + range.start);
            }
            Phase::Take(chunk) if me != root => {
                let range = cut.range(chunk);
                // SAFETY: rule S2 or W1: the root does not write to its buffer while its peers read from it.
                let from = unsafe { segment.read(root, buffer, shifted(0..range.len(), me * stride)) };
                copy(from, &mut io.output()[shifted(range, own)]);
            }
            Phase::Fill(_) | Phase::Take(_) => {}
        })
    }

    fn reduce_scatter(&mut self, cx: &OpContext<'_>, mut io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let shard = io.input().len() / ranks;
        let to = if matches!(io, HostIo::InPlace(_)) { me * shard } else { 0 };
        let (route, cut, stride) = self.route_for_each(shard);
        let tensor = self.in_arena(io.input());
        let verb = (Kind::ReduceScatter, shard);
        let found = self.run_or_offer(cx, verb, (route, false), tensor, |segment, phase, buffer| match phase {
            Phase::Fill(chunk) if chunk < cut.chunks => {
                fill_for_each(segment, buffer, io.input(), cut.range(chunk), shard, stride);
            }
            Phase::Fill(_) => {}
            Phase::Take(chunk) => {
                let range = cut.range(chunk);
                let inputs = inputs(ranks, |rank| {
                    // SAFETY: rule S2 or W1: a rank does not write to its buffer while its peers read from it.
                    unsafe { segment.read(rank, buffer, shifted(0..range.len(), me * stride)) }
                });
                let from = shifted(range.clone(), me * shard);
                combine_into(cx, op, inputs, me, &mut io, from, shifted(range, to));
            }
        })?;
        let Some(tensors) = found else { return Ok(()) };
        self.run_zero_copy(cx, shard, || {
            let mine = shifted(0..shard, me * shard);
            let inputs = inputs(ranks, |rank| match rank {
                // Replaced by this rank's own input below.
                _ if rank == me => &[],
                // SAFETY: rule D2, and each rank writes only to a range that no other rank reads.
                _ => unsafe { tensors.read(rank, mine.clone()) },
            });
            combine_into(cx, op, inputs, me, &mut io, mine.clone(), shifted(0..shard, to));
        })
    }

    fn all_to_all(&mut self, cx: &OpContext<'_>, mut io: HostIo<'_>) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let shard = io.input().len() / ranks;
        let (mut route, mut cut, stride) = self.route_for_each(shard);
        let swaps = ranks == 2 && matches!(route, Route::Windows(_));
        if swaps {
            (route, cut) = self.route(shard, usize::MAX, pairwise_exchange::CHUNK);
        }
        let peer = 1 - me.min(1);
        let swap = Pairwise { cut, send: peer * shard, recv: peer * shard, keep: (me * shard, me * shard) };
        // In place, a rank would overwrite data that its peers have not read yet.
        let tensor = match &io {
            HostIo::InPlace(_) => None,
            HostIo::Split { src, .. } => self.in_arena(src),
        };
        let verb = (Kind::AllToAll, shard);
        let found = self.run_or_offer(cx, verb, (route, false), tensor, |segment, phase, buffer| match phase {
            _ if swaps => swap.phase(segment, phase, &mut io),
            Phase::Fill(chunk) if chunk < cut.chunks => {
                fill_for_each(segment, buffer, io.input(), cut.range(chunk), shard, stride);
            }
            Phase::Fill(_) => {}
            Phase::Take(chunk) => {
                let range = cut.range(chunk);
                let own = shifted(range.clone(), me * shard);
                io.keep_own(own.clone(), own.start);
                for rank in others(me, ranks) {
                    // SAFETY: rule S2 or W1: a rank does not write to its buffer while its peers read from it.
                    let from = unsafe { segment.read(rank, buffer, shifted(0..range.len(), me * stride)) };
                    copy(from, &mut io.output()[shifted(range.clone(), rank * shard)]);
                }
            }
        })?;
        let Some(tensors) = found else { return Ok(()) };
        self.run_zero_copy(cx, shard, || {
            let own = shifted(0..shard, me * shard);
            io.keep_own(own.clone(), own.start);
            tensors.pull(me, own, |rank| shifted(0..shard, rank * shard), io.output());
        })
    }
}

impl Collective for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn rank(&self) -> usize {
        self.index()
    }

    fn size(&self) -> usize {
        self.ranks()
    }

    fn transports(&self) -> Vec<&'static str> {
        (0..self.ranks()).map(|rank| if rank == self.index() { "self" } else { "shm" }).collect()
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        let mut io = io.into_host()?;
        match verb {
            Verb::AllReduce(op) => self.reduce_to(cx, verb.kind(), io, op, None),
            Verb::Reduce { op, root } => self.reduce_to(cx, verb.kind(), io, op, Some(root)),
            Verb::Broadcast { root } => self.broadcast(cx, io.output(), root),
            Verb::AllGather => self.gather_to(cx, verb.kind(), io, None),
            Verb::Gather { root } => self.gather_to(cx, verb.kind(), io, Some(root)),
            Verb::Scatter { root } => self.scatter(cx, io, root),
            Verb::ReduceScatter(op) => self.reduce_scatter(cx, io, op),
            Verb::AllToAll => self.all_to_all(cx, io),
            Verb::Barrier => self.execute(cx, (Kind::Barrier, 0), Route::Nothing, |_, _, _| {}),
            other => over_exchange(self, cx, other, io.into()),
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let protocol = &self.protocol;
        let outcome = self.messages.mesh().exchange_unless(cx, sends, recvs, &|peer| protocol.ahead(peer));
        self.broken = outcome.as_ref().err().cloned();
        outcome
    }
}

/// Returns the streams over the second set of rings in a lane's segment. A group on several hosts uses them in its mesh
/// to connect the ranks of one host, in addition to the `Shm` on the same segment. Each rank calls this once.
pub fn spare_links(arena: &Arc<Arena>, index: usize, ranks: usize) -> (Vec<Option<Box<dyn Transport>>>, Doorbell) {
    ring_links(arena, segment_layout::spare_rings(ranks), index, ranks)
}

/// Returns the size in bytes of the largest tensor that is reduced one-shot: every rank reads all slots, so it reads
/// more the more ranks there are.
fn small(ranks: usize) -> usize {
    (4 * SLOT / ranks).clamp(buffer_len(2 << 10), SLOT)
}
