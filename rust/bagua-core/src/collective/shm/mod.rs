//! Collectives in memory that all ranks of one host map.
//!
//! Where all ranks' tensors lie in one arena, the ranks work in place, on their own and on the peers' memory (`in_place`).
//! Otherwise what the others need of a tensor goes through the segment in cache-sized chunks, and results are combined straight
//! into the tensors. `run` is the protocol of taking turns, `segment` says where things lie, `announcement` compares what the ranks are
//! doing, and this file holds one pattern per operation: what to fill, what to take.
//!
//! all_reduce of an ordinary tensor that does not fit a slot is the one pattern that is more than that: `reduction`.

#![allow(unsafe_code)]

mod announce;
mod chunks;
mod cico;
mod pairwise;
mod placement;
mod protocol;
mod ranges;
mod segment;
#[cfg(test)]
mod tests;
mod zero_copy;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{Collective, HostIo, Incoming, Io, OpContext, Outgoing, Verb};
use crate::error::{Error, Result};
use crate::memory::{Arena, Finder, Registry};
use crate::sync::buffer_len;
use crate::transport::shm::ring_links;
use crate::transport::{Mesh, Transport};
use crate::types::{Kind, ReduceOp};
use crate::wait::Doorbell;

pub use segment::segment_len;

use announce::Announcement;
use chunks::{Cut, combine_into, copy, copy_and_own, fill_for_each, inputs};
use cico::Reduction;
use pairwise::Pairwise;
use protocol::{BufferOffer, Phase, Protocol, Route};
use ranges::{others, shifted};
use segment::{ALIGN, Buffer, SLOT, Segment};
use zero_copy::{ArenaSlot, PeerBuffers};

/// The shortest chunk of a broadcast.
const EARLY: usize = 32 << 10;

/// The ranks of one host, or some of them, in shared memory.
pub struct Shm {
    protocol: Protocol,
    /// Streams to the same ranks, for messages between two of them.
    mesh: Mesh,
    /// Knows which tensors lie in arenas.
    finder: Finder,
    /// The error after which the ranks are no longer in step.
    broken: Option<Error>,
}

impl Shm {
    /// Rank `index` of this host, whose ranks have the group ranks `members`. The segment has [`segment_len`] bytes, which
    /// were zeroed before the first rank came, and serves one `Shm` per rank, once.
    ///
    /// # Errors
    /// `System` when the segment is too short.
    pub fn new(arena: Arc<Arena>, index: usize, members: Vec<usize>) -> Result<Shm> {
        let segment = Segment::new(arena, index, members.len())?;
        let (links, bell) = ring_links(segment.arena(), segment.own_rings(), index, members.len());
        let mesh = Mesh::new(index, members.clone(), links, Some(bell));
        Ok(Shm { protocol: Protocol::new(segment, members), mesh, finder: Finder::default(), broken: None })
    }

    /// Works in place on tensors in the arenas of this registry. The ranks may differ in what they know of.
    #[must_use]
    pub fn knowing(self, registry: Arc<Registry>) -> Shm {
        Shm { finder: Finder::new(registry), ..self }
    }

    /// Leaves this rank on the processors that the kernel chooses: for benchmarks that compare.
    #[must_use]
    pub fn without_placement(mut self) -> Shm {
        self.protocol.placement = None;
        self
    }

    fn index(&self) -> usize {
        self.protocol.segment.index
    }

    fn ranks(&self) -> usize {
        self.protocol.segment.ranks
    }

    /// An operation that never works in place.
    fn execute(
        &mut self,
        cx: &OpContext<'_>,
        (verb, bytes): (Kind, usize),
        route: Route,
        phase: impl FnMut(&Segment, Phase, Buffer),
    ) -> Result<()> {
        let offers = self.guarded(|protocol| {
            let announcement = Announcement { fingerprint: cx.fingerprint, verb, bytes: bytes as u64 };
            protocol.run(cx, &announcement, route, false, BufferOffer::Never, phase)
        });
        offers.map(|nobody| debug_assert!(nobody.is_none()))
    }

    /// An operation that works in place when all ranks have a slot for what they offer, `bytes` long. With `Some`, nothing is done
    /// yet: [`Shm::run_zero_copy`] must follow.
    fn run_or_meet(
        &mut self,
        cx: &OpContext<'_>,
        (verb, bytes): (Kind, usize),
        (route, collect): (Route, bool),
        slot: Option<ArenaSlot>,
        phase: impl FnMut(&Segment, Phase, Buffer),
    ) -> Result<Option<PeerBuffers>> {
        self.guarded(|protocol| {
            let announcement = Announcement { fingerprint: cx.fingerprint, verb, bytes: bytes as u64 };
            let offer = match route {
                Route::Windows(_) => slot.as_ref().map_or(BufferOffer::Nowhere, ArenaSlot::offer),
                Route::Nothing | Route::Slots => BufferOffer::Never,
            };
            let offsets = protocol.run(cx, &announcement, route, collect, offer, phase)?;
            let met = offsets.zip(slot);
            met.map(|(offsets, slot)| slot.tensors(cx, &protocol.members, &offsets)).transpose()
        })
    }

    /// Does this rank's work on all ranks' tensors and waits until the others have done theirs.
    fn run_zero_copy(&mut self, cx: &OpContext<'_>, bytes: usize, work: impl FnOnce()) -> Result<()> {
        cx.stats.zero_copy.fetch_add(1, Relaxed);
        self.guarded(|protocol| {
            work();
            protocol.leave(cx, bytes as u64)
        })
    }

    /// Remembers an error: the ranks are no longer in step after it.
    fn guarded<T>(&mut self, body: impl FnOnce(&mut Protocol) -> Result<T>) -> Result<T> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let outcome = body(&mut self.protocol);
        if let Err(error) = &outcome {
            self.broken = Some(error.clone());
        }
        outcome
    }

    /// all_reduce (no root) and reduce.
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
                    // SAFETY: S2, and S1 for who read this slot last.
                    unsafe { segment.write(me, buffer, 0..total) }.copy_from_slice(io.input());
                }
                Phase::Take(_) if gets => {
                    // SAFETY: S2: slots are left alone once everybody has arrived, and S1 until this rank's next operation.
                    let inputs = inputs(ranks, |rank| unsafe { segment.read(rank, buffer, 0..total) });
                    combine_into(cx, op, inputs, me, &mut io, 0..total, 0..total);
                }
                Phase::Take(_) => {}
            });
        }
        let cut = Cut::new(total, self.protocol.segment.window());
        let slot = match &io {
            HostIo::InPlace(data) => ArenaSlot::of(data, &mut self.finder),
            HostIo::Split { .. } => None,
        };
        let route = (Route::Windows(cut.chunks), gets);
        let reduction = Reduction { cx, op, root, cut };
        let phase = |segment: &Segment, phase, buffer| reduction.phase(segment, phase, buffer, &mut io);
        let met = self.run_or_meet(cx, (verb, total), route, slot, phase)?;
        match (met, io) {
            (Some(tensors), HostIo::InPlace(data)) => {
                self.run_zero_copy(cx, total, || tensors.reduce(cx, op, me, root, data))
            }
            _ => Ok(()),
        }
    }

    /// all_gather (no root) and gather.
    fn gather_to(&mut self, cx: &OpContext<'_>, verb: Kind, mut io: HostIo<'_>, root: Option<usize>) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let gets = root.is_none_or(|root| root == me);
        let (shard, own) = match &io {
            HostIo::InPlace(data) => (data.len() / ranks, me * (data.len() / ranks)),
            HostIo::Split { src, .. } => (src.len(), 0),
        };
        let pair = ranks == 2 && root.is_none();
        let (route, cut) =
            self.route(shard, shard, if pair { pairwise::CHUNK } else { self.protocol.segment.window() });
        let slot = ArenaSlot::of(&io.input()[own..own + shard], &mut self.finder);
        let swap = Pairwise { cut, send: own, recv: (1 - me.min(1)) * shard, keep: (own, me * shard) };
        let swaps = pair && matches!(route, Route::Windows(_));
        let met = self.run_or_meet(cx, (verb, shard), (route, false), slot, |segment, phase, buffer| match phase {
            _ if swaps => swap.phase(segment, phase, &mut io),
            Phase::Fill(chunk) if chunk < cut.chunks && root != Some(me) => {
                let range = cut.range(chunk);
                // SAFETY: S2 or W2.
                let out = unsafe { segment.write(me, buffer, 0..range.len()) };
                copy(&io.input()[shifted(range, own)], out);
            }
            Phase::Take(chunk) if gets => {
                let range = cut.range(chunk);
                io.keep_own(shifted(range.clone(), own), me * shard + range.start);
                for rank in others(me, ranks) {
                    // SAFETY: S2 or W1: a buffer is left alone by its owner while the others take from it.
                    let from = unsafe { segment.read(rank, buffer, 0..range.len()) };
                    copy(from, &mut io.output()[shifted(range.clone(), rank * shard)]);
                }
            }
            Phase::Fill(_) | Phase::Take(_) => {}
        })?;
        let Some(tensors) = met else { return Ok(()) };
        self.run_zero_copy(cx, shard, || {
            if gets {
                io.keep_own(own..own + shard, me * shard);
                tensors.pull(me, 0..shard, |rank| shifted(0..shard, rank * shard), io.output());
            }
        })
    }

    /// How `shard` bytes per rank travel, when `slot` bytes would lie in a slot and `part` bytes of a shard in a window.
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

    /// How a shard for each rank travels, and where in the buffer they begin.
    fn route_for_each(&self, shard: usize) -> (Route, Cut, usize) {
        let ranks = self.ranks();
        let part = self.protocol.segment.window() / ranks / ALIGN * ALIGN;
        let (route, cut) = self.route(shard, shard.saturating_mul(ranks), part);
        (route, cut, if route == Route::Slots { shard } else { part })
    }
}

impl Shm {
    fn broadcast(&mut self, cx: &OpContext<'_>, data: &mut [u8], root: usize) -> Result<()> {
        let me = self.index();
        let total = data.len();
        // At least eight chunks, so that the readers start while the root still writes.
        let part = (total / 8 / ALIGN * ALIGN).max(EARLY).min(self.protocol.segment.window());
        let (route, cut) = self.route(total, total, part);
        let slot = ArenaSlot::of(data, &mut self.finder);
        let verb = (Kind::Broadcast, total);
        let met = self.run_or_meet(cx, verb, (route, false), slot, |segment, phase, buffer| match phase {
            Phase::Fill(chunk) if chunk < cut.chunks && me == root => {
                let range = cut.range(chunk);
                // SAFETY: S2 or W2.
                copy(&data[range.clone()], unsafe { segment.write(me, buffer, 0..range.len()) });
            }
            Phase::Take(chunk) if me != root => {
                let range = cut.range(chunk);
                if segment.ranks == 2 && matches!(buffer, Buffer::Window(_)) {
                    // SAFETY: W1: the root leaves its window alone until this rank has arrived, and there is no third rank.
                    let window = unsafe { segment.write(root, buffer, 0..range.len()) };
                    copy_and_own(window, &mut data[range]);
                } else {
                    // SAFETY: S2 or W1: the root leaves its buffer alone while the others take from it.
                    let from = unsafe { segment.read(root, buffer, 0..range.len()) };
                    copy(from, &mut data[range]);
                }
            }
            Phase::Fill(_) | Phase::Take(_) => {}
        })?;
        let Some(tensors) = met else { return Ok(()) };
        self.run_zero_copy(cx, total, || tensors.broadcast(me, root, data))
    }

    fn scatter(&mut self, cx: &OpContext<'_>, mut io: HostIo<'_>, root: usize) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let (shard, slot) = match &io {
            HostIo::InPlace(data) => (data.len() / ranks, me * (data.len() / ranks)),
            HostIo::Split { dst, .. } => (dst.len(), 0),
        };
        let (route, cut, stride) = self.route_for_each(shard);
        self.execute(cx, (Kind::Scatter, shard), route, |segment, phase, buffer| match phase {
            Phase::Fill(chunk) if chunk < cut.chunks && me == root => {
                let range = cut.range(chunk);
                for rank in (0..ranks).filter(|rank| *rank != me) {
                    // SAFETY: S2 or W2.
                    let out = unsafe { segment.write(me, buffer, shifted(0..range.len(), rank * stride)) };
                    copy(&io.input()[shifted(range.clone(), rank * shard)], out);
                }
                io.keep_own(shifted(range.clone(), me * shard), slot + range.start);
            }
            Phase::Take(chunk) if me != root => {
                let range = cut.range(chunk);
                // SAFETY: S2 or W1: the root leaves its buffer alone while the others take from it.
                let from = unsafe { segment.read(root, buffer, shifted(0..range.len(), me * stride)) };
                copy(from, &mut io.output()[shifted(range, slot)]);
            }
            Phase::Fill(_) | Phase::Take(_) => {}
        })
    }

    fn reduce_scatter(&mut self, cx: &OpContext<'_>, mut io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let shard = io.input().len() / ranks;
        let to = if matches!(io, HostIo::InPlace(_)) { me * shard } else { 0 };
        let (route, cut, stride) = self.route_for_each(shard);
        let slot = ArenaSlot::of(io.input(), &mut self.finder);
        let verb = (Kind::ReduceScatter, shard);
        let met = self.run_or_meet(cx, verb, (route, false), slot, |segment, phase, buffer| match phase {
            Phase::Fill(chunk) if chunk < cut.chunks => {
                fill_for_each(segment, buffer, io.input(), cut.range(chunk), shard, stride);
            }
            Phase::Fill(_) => {}
            Phase::Take(chunk) => {
                let range = cut.range(chunk);
                let inputs = inputs(ranks, |rank| {
                    // SAFETY: S2 or W1: a buffer is left alone by its owner while the others take from it.
                    unsafe { segment.read(rank, buffer, shifted(0..range.len(), me * stride)) }
                });
                let from = shifted(range.clone(), me * shard);
                combine_into(cx, op, inputs, me, &mut io, from, shifted(range, to));
            }
        })?;
        let Some(tensors) = met else { return Ok(()) };
        self.run_zero_copy(cx, shard, || {
            let mine = shifted(0..shard, me * shard);
            // SAFETY: D2; a result goes where only its own rank reads.
            let inputs = inputs(ranks, |rank| unsafe { tensors.read(rank, mine.clone()) });
            combine_into(cx, op, inputs, me, &mut io, mine.clone(), shifted(0..shard, to));
        })
    }

    fn all_to_all(&mut self, cx: &OpContext<'_>, mut io: HostIo<'_>) -> Result<()> {
        let (me, ranks) = (self.index(), self.ranks());
        let shard = io.input().len() / ranks;
        let (mut route, mut cut, stride) = self.route_for_each(shard);
        let swaps = ranks == 2 && matches!(route, Route::Windows(_));
        if swaps {
            (route, cut) = self.route(shard, usize::MAX, pairwise::CHUNK);
        }
        let peer = 1 - me.min(1);
        let swap = Pairwise { cut, send: peer * shard, recv: peer * shard, keep: (me * shard, me * shard) };
        // In place a rank would overwrite what its peers have not read yet.
        let slot = match &io {
            HostIo::InPlace(_) => None,
            HostIo::Split { src, .. } => ArenaSlot::of(src, &mut self.finder),
        };
        let verb = (Kind::AllToAll, shard);
        let met = self.run_or_meet(cx, verb, (route, false), slot, |segment, phase, buffer| match phase {
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
                    // SAFETY: S2 or W1: a buffer is left alone by its owner while the others take from it.
                    let from = unsafe { segment.read(rank, buffer, shifted(0..range.len(), me * stride)) };
                    copy(from, &mut io.output()[shifted(range.clone(), rank * shard)]);
                }
            }
        })?;
        let Some(tensors) = met else { return Ok(()) };
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

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb, io: Io<'_>) -> Result<()> {
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
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let protocol = &self.protocol;
        let outcome = self.mesh.exchange_unless(cx, sends, recvs, &|peer| protocol.ahead(peer));
        self.broken = outcome.as_ref().err().cloned();
        outcome
    }
}

/// Streams over the second set of rings of a lane's segment, for a group that connects the ranks of one host by streams beside
/// the `Shm` on the same segment. Rank `index` of `ranks` asks once.
pub fn spare_links(arena: &Arc<Arena>, index: usize, ranks: usize) -> (Vec<Option<Box<dyn Transport>>>, Doorbell) {
    ring_links(arena, segment::spare_rings(ranks), index, ranks)
}

/// The largest tensor that every rank reduces on its own from all slots. The more ranks, the more each of them would have to read.
fn small(ranks: usize) -> usize {
    (4 * SLOT / ranks).clamp(buffer_len(2 << 10), SLOT)
}
