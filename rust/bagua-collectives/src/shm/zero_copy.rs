//! Zero-copy operations, for tensors in arenas that all ranks have mapped.
//!
//! Each rank creates its arenas alone, so its peers learn of an arena only when a tensor in it is offered:
//!
//! 1. All ranks offer tensors in arenas, some of which were not mapped together.
//! 2. The ranks pass each other descriptors of these arenas, map them, and give the set of mapped arenas a new id.
//! 3. From then on, a rank offers a tensor in the set by the id and an offset. If all ranks offer the same id, each has
//!    mapped the arenas of all others.
//!
//! Ranks may combine arenas in any way, for example first their first arenas, and later this rank's second one with the
//! peer's first one. Sets whose ids were offered are then mapped again as one new set, so each of n arenas is passed
//! fewer than n times.
//!
//! Every rank reads its peers' tensors, and in a reduction also writes to them. A rank accesses its own tensor through
//! the caller's slice, and its peers' tensors through the mappings. The `unsafe` blocks quote the numbered rules of
//! [`super::protocol`].

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::chunks::{Timer, others};
use super::protocol::{BufferOffer, FIRST_ID, Location};
use super::segment_layout::ALIGN;
use crate::OpContext;
use crate::error::{Error, Result};
use crate::memory::{Finder, KnownArena, LaneId, Mapped, MappedArenas, Mapping, Registry};
use crate::reduce::{combine, combine_everywhere};
use crate::types::ReduceOp;

/// A way to pass file descriptors between the ranks of a host, implemented by the owner of their connections.
pub trait PassDescriptors: Send {
    /// Sends this rank's descriptors to all ranks, and returns the descriptors of each rank on this host. The entry of
    /// this rank stays empty. A `None` stands for a descriptor that this process had no room for. Collective: does not
    /// return on any rank before all ranks have called it.
    ///
    /// # Errors
    /// The first cause of the group's failure, `Timeout`, or `PeerLost`.
    fn pass(&mut self, cx: &OpContext<'_>, own: &[BorrowedFd<'_>]) -> Result<Vec<Vec<Option<OwnedFd>>>>;
}

/// The arenas that one lane has mapped, and how it maps more.
pub(super) struct LaneArenas {
    lane: LaneId,
    registry: Arc<Registry>,
    finder: Finder,
    between: Box<dyn PassDescriptors>,
    /// Id of the next set of mapped arenas. Equal on all ranks.
    next_id: u64,
}

impl LaneArenas {
    pub(super) fn new(registry: Arc<Registry>, between: Box<dyn PassDescriptors>) -> LaneArenas {
        let finder = Finder::new(Arc::clone(&registry));
        LaneArenas { lane: LaneId::new(), registry, finder, between, next_id: FIRST_ID }
    }

    pub(super) fn tensor(&mut self, tensor: &[u8]) -> Option<ArenaTensor> {
        let (arena, offset) = self.finder.find(tensor)?;
        let mapped = arena.mapped(self.lane);
        Some(ArenaTensor { arena, offset, len: tensor.len(), mapped })
    }

    /// Maps the arenas in which all ranks have offered tensors, together with the sets whose ids were offered, and
    /// returns the new offer of this rank's tensor. A rank that cannot map all of them makes no offer, now or later.
    /// Collective.
    pub(super) fn map(&mut self, cx: &OpContext<'_>, tensor: &mut ArenaTensor, ids: &[u64]) -> Result<BufferOffer> {
        let mut own = self.registry.mapped_as(self.lane, ids);
        if own.iter().all(|arena| arena.address() != tensor.arena.address()) {
            own.push(tensor.arena.clone());
        }
        let descriptors: Vec<_> = own.iter().filter_map(|arena| arena.fd()).collect();
        let peers = self.between.pass(cx, &descriptors)?;
        // Count up even if this rank cannot map them, because the other ranks do.
        let id = self.next_id;
        self.next_id += 1;
        let all = MappedArenas::new(id, peers).ok().map(Arc::new);
        self.registry.set_mapped(self.lane, &own, all.as_ref());
        tensor.mapped = tensor.arena.mapped(self.lane);
        Ok(tensor.offer())
    }
}

impl Drop for LaneArenas {
    fn drop(&mut self) {
        self.registry.unmap(self.lane);
    }
}

pub(super) struct ArenaTensor {
    arena: KnownArena,
    offset: usize,
    /// Size of the tensor in bytes. Equal on all ranks, because otherwise their fingerprints would differ.
    len: usize,
    mapped: Mapped,
}

impl ArenaTensor {
    /// Returns the offer that this rank publishes for the tensor.
    pub(super) fn offer(&self) -> BufferOffer {
        match &self.mapped {
            Mapped::No => BufferOffer::Unmapped,
            Mapped::Refused => BufferOffer::Nowhere,
            Mapped::In(all, begin) => {
                BufferOffer::At(Location { arenas: all.id(), offset: (begin + self.offset) as u64 })
            }
        }
    }

    /// Returns the tensors of all ranks, each at an offset in its rank's part. `me` is this rank. Every rank offered a
    /// tensor in the same set of arenas, so all ranks get the same result or the same error.
    pub(super) fn tensors(&self, cx: &OpContext<'_>, me: usize, offsets: &[u64]) -> Result<PeerBuffers> {
        let outside = |rank: usize| {
            Error::Mismatch(format!(
                "{}: rank {rank} on this host published an offset outside of its arenas",
                cx.fingerprint
            ))
        };
        let Mapped::In(arenas, _) = &self.mapped else { return Err(outside(me)) };
        for (rank, offset) in offsets.iter().enumerate().filter(|(rank, _)| *rank != me) {
            let found = usize::try_from(*offset).ok().and_then(|offset| arenas.find(rank, offset, self.len));
            found.ok_or_else(|| outside(rank))?;
        }
        let offsets = offsets.iter().map(|offset| *offset as usize).collect();
        Ok(PeerBuffers { arenas: Arc::clone(arenas), offsets, len: self.len })
    }
}

pub(super) struct PeerBuffers {
    arenas: Arc<MappedArenas>,
    /// Offset of each rank's tensor in its part, by rank on this host. Checked for all ranks but this one, whose tensor
    /// the caller holds.
    offsets: Vec<usize>,
    len: usize,
}

impl PeerBuffers {
    /// Returns the mapping that contains a peer's tensor, and a range of the tensor as a range in the mapping.
    fn range(&self, rank: usize, range: Range<usize>) -> (&Mapping, Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len);
        let (mapping, begin) =
            self.arenas.find(rank, self.offsets[rank], self.len).expect("a peer's tensor, found before");
        (mapping, begin + range.start..begin + range.end)
    }

    /// Returns a range of a peer's tensor.
    ///
    /// # Safety
    /// No rank may write to the range before this rank's second arrival, and the slice must not outlive that moment.
    pub(super) unsafe fn read(&self, rank: usize, range: Range<usize>) -> &[u8] {
        let (mapping, range) = self.range(rank, range);
        // SAFETY: by this function's promise. By D3, the owner does not return from the operation before.
        unsafe { mapping.slice(range) }
    }

    /// Returns a range of a peer's tensor for writing.
    ///
    /// # Safety
    /// No other rank may read or write the range before this rank's second arrival. The slice must not outlive that
    /// moment, and this rank must hold no other slice of the range.
    #[expect(clippy::mut_from_ref, reason = "exclusion is across processes, which only the protocol can promise")]
    unsafe fn write(&self, rank: usize, range: Range<usize>) -> &mut [u8] {
        let (mapping, range) = self.range(rank, range);
        // SAFETY: by this function's promise. By D3, the owner does not return from the operation before.
        unsafe { mapping.slice_mut(range) }
    }

    /// Combines rank `me`'s share of all tensors, and writes the result to all tensors or to that of the root. `own` is
    /// this rank's tensor.
    pub(super) fn reduce(&self, cx: &OpContext<'_>, op: ReduceOp, me: usize, root: Option<usize>, own: &mut [u8]) {
        let ranks = self.offsets.len();
        let each = own.len().div_ceil(ranks).next_multiple_of(ALIGN);
        let mine = (each * me).min(own.len())..(each * (me + 1)).min(own.len());
        let timer = Timer::start(cx, mine.len());
        let own = &mut own[mine.clone()];
        match root {
            None => {
                let mut own = Some(own);
                let part = |rank| match own.take_if(|_| rank == me) {
                    Some(own) => own,
                    // SAFETY: rule D2. Only this rank reads and writes its share of every tensor.
                    None => unsafe { self.write(rank, mine.clone()) },
                };
                let mut parts: Vec<&mut [u8]> = (0..ranks).map(part).collect();
                combine_everywhere(cx.dtype(), op, &mut parts);
            }
            Some(root) => {
                // SAFETY: rule D2. Only this rank reads and writes its share of every tensor.
                let theirs = |rank| unsafe { self.read(rank, mine.clone()) };
                if root == me {
                    let inputs: Vec<_> = (0..ranks).map(|rank| (rank != me).then(|| theirs(rank))).collect();
                    combine(cx.dtype(), op, &inputs, own);
                } else {
                    let input = |rank| match rank {
                        _ if rank == root => None,
                        _ if rank == me => Some(&*own),
                        _ => Some(theirs(rank)),
                    };
                    let inputs: Vec<_> = (0..ranks).map(input).collect();
                    // SAFETY: as above, and the root's tensor is not among the inputs.
                    combine(cx.dtype(), op, &inputs, unsafe { self.write(root, mine.clone()) });
                }
            }
        }
        timer.stop();
    }

    /// Runs rank `me`'s part of a broadcast of `data`, its own tensor. To share the work evenly among n ranks, the root
    /// writes the last n-th of every tensor, and each of the other ranks reads the rest. With two ranks, this takes
    /// half the time of one rank reading everything.
    pub(super) fn broadcast(&self, me: usize, root: usize, data: &mut [u8]) {
        let ranks = self.offsets.len();
        let cut = (data.len() - data.len() / ranks) / ALIGN * ALIGN;
        let pushed = cut..data.len();
        if me == root {
            for rank in others(me, ranks) {
                // SAFETY: rule D2. Only the root accesses this range of another rank's tensor.
                unsafe { self.write(rank, pushed.clone()) }.copy_from_slice(&data[pushed.clone()]);
            }
        } else {
            // SAFETY: rule D2. No rank writes to the root's tensor.
            data[..cut].copy_from_slice(unsafe { self.read(root, 0..cut) });
        }
    }

    /// Copies a range of every peer's tensor to the range `to(peer)` of `out`. For verbs that do not write to the
    /// ranges they read.
    pub(super) fn pull(&self, me: usize, range: Range<usize>, to: impl Fn(usize) -> Range<usize>, out: &mut [u8]) {
        for rank in others(me, self.offsets.len()) {
            // SAFETY: rule D2. The verbs that call this write only to ranges that no other rank reads.
            out[to(rank)].copy_from_slice(unsafe { self.read(rank, range.clone()) });
        }
    }
}
