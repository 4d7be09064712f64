//! Zero-copy operations: the tensors of all ranks lie in arenas that all have mapped.
//!
//! An arena is made by its rank alone, so its peers do not know it before they see it offered. When all ranks offer tensors in arenas, and
//! not all of these arenas were mapped together, they pass each other the descriptors and give what they have mapped a new number. A tensor
//! is then offered by number and offset, and equal numbers mean that every rank has mapped the arenas of every other.
//!
//! Ranks may combine arenas in any way (the first with the peer's second, and later the second with the peer's first): what was mapped
//! under the numbers that were offered is mapped anew under one number, so each arena of n is passed less than n times.
//!
//! Every rank reads its peers' tensors, and in a reduction writes to them; the `unsafe` blocks quote the numbered rules of
//! [`super::protocol`]. A rank accesses its own tensor through the caller's slice and the peers' through the mappings.

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::chunks::{Timer, others};
use super::protocol::{BufferOffer, FIRST_ID, Location};
use super::segment::ALIGN;
use crate::OpContext;
use crate::error::{Error, Result};
use crate::memory::{Finder, KnownArena, LaneId, Mapped, MappedArenas, Mapping, Registry};
use crate::reduce::{combine, combine_everywhere};
use crate::types::ReduceOp;

/// Passes file descriptors between the ranks of a host: implemented where their connections are.
pub trait PassDescriptors: Send {
    /// Gives every rank what the others give, by rank on this host; the entry of this rank stays empty. `None` means a descriptor
    /// that this process had no room for. Collective: returns on no rank before all ranks have called it.
    ///
    /// # Errors
    /// The first cause of the group's failure, `Timeout`, `PeerLost`.
    fn pass(&mut self, cx: &OpContext<'_>, own: &[BorrowedFd<'_>]) -> Result<Vec<Vec<Option<OwnedFd>>>>;
}

/// What a lane knows of arenas.
pub(super) struct LaneArenas {
    lane: LaneId,
    registry: Arc<Registry>,
    finder: Finder,
    between: Box<dyn PassDescriptors>,
    /// The number of the next arenas that are mapped; equal on all ranks.
    next_id: u64,
}

impl LaneArenas {
    pub(super) fn new(registry: Arc<Registry>, between: Box<dyn PassDescriptors>) -> LaneArenas {
        let finder = Finder::new(Arc::clone(&registry));
        LaneArenas { lane: LaneId::new(), registry, finder, between, next_id: FIRST_ID }
    }

    /// A tensor that lies in an arena; `None` for others.
    pub(super) fn tensor(&mut self, tensor: &[u8]) -> Option<ArenaTensor> {
        let (arena, offset) = self.finder.find(tensor)?;
        let mapped = arena.mapped(self.lane);
        Some(ArenaTensor { arena, offset, len: tensor.len(), mapped })
    }

    /// Maps the arenas in which all ranks have offered tensors, with those that were mapped under the numbers `ids` that were offered, and
    /// returns the new offer of this rank's tensor. A rank that cannot map all of them offers nothing, now and later. Collective.
    pub(super) fn map(&mut self, cx: &OpContext<'_>, tensor: &mut ArenaTensor, ids: &[u64]) -> Result<BufferOffer> {
        let mut own = self.registry.mapped_as(self.lane, ids);
        if own.iter().all(|arena| arena.address() != tensor.arena.address()) {
            own.push(tensor.arena.clone());
        }
        let descriptors: Vec<_> = own.iter().filter_map(|arena| arena.fd()).collect();
        let peers = self.between.pass(cx, &descriptors)?;
        // Also when this rank cannot map them: the others count on.
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

/// A rank's tensor in an arena.
pub(super) struct ArenaTensor {
    arena: KnownArena,
    /// In the arena.
    offset: usize,
    /// Bytes of the tensor; equal on all ranks, or their fingerprints would differ.
    len: usize,
    /// Whether the ranks of the lane have mapped the arena.
    mapped: Mapped,
}

impl ArenaTensor {
    /// What this rank publishes of it.
    pub(super) fn offer(&self) -> BufferOffer {
        match &self.mapped {
            Mapped::No => BufferOffer::Unmapped,
            Mapped::Refused => BufferOffer::Nowhere,
            Mapped::In(all, begin) => {
                BufferOffer::At(Location { arenas: all.id(), offset: (begin + self.offset) as u64 })
            }
        }
    }

    /// The tensors of all ranks, each at an offset of its rank's part; rank `me` is this one. Every rank offered a tensor in the same
    /// mapped arenas, so all get the same result or the same error.
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

/// The tensors of all ranks, during one operation.
pub(super) struct PeerBuffers {
    /// Keeps the peers' arenas mapped.
    arenas: Arc<MappedArenas>,
    /// Where each rank's tensor begins in its part, by rank on this host; in bounds for all but this one, whose tensor the caller has.
    offsets: Vec<usize>,
    /// Bytes of each tensor.
    len: usize,
}

impl PeerBuffers {
    /// The memory of a peer's tensor, and the range in it.
    fn range(&self, rank: usize, range: Range<usize>) -> (&Mapping, Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len);
        let (mapping, begin) =
            self.arenas.find(rank, self.offsets[rank], self.len).expect("a peer's tensor, found before");
        (mapping, begin + range.start..begin + range.end)
    }

    /// Bytes of a peer's tensor.
    ///
    /// # Safety
    /// No rank writes to the range before this rank's second arrival, and the slice does not outlive that moment.
    pub(super) unsafe fn read(&self, rank: usize, range: Range<usize>) -> &[u8] {
        let (mapping, range) = self.range(rank, range);
        // SAFETY: by this function's promise; D3 says that the owner has not returned from the operation before.
        unsafe { mapping.slice(range) }
    }

    /// Bytes of a peer's tensor, to write.
    ///
    /// # Safety
    /// No other rank reads or writes the range before this rank's second arrival, the slice does not outlive that moment, and
    /// this rank holds no other slice of the range.
    #[expect(clippy::mut_from_ref, reason = "exclusion is across processes, which only the protocol can promise")]
    unsafe fn write(&self, rank: usize, range: Range<usize>) -> &mut [u8] {
        let (mapping, range) = self.range(rank, range);
        // SAFETY: by this function's promise; D3 says that the owner has not returned from the operation before.
        unsafe { mapping.slice_mut(range) }
    }

    /// Rank `me` combines its share of all tensors and writes the result to all of them, or to the root's. `own` is its tensor.
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
                    // SAFETY: D2; this share of every tensor is read and written by this rank only.
                    None => unsafe { self.write(rank, mine.clone()) },
                };
                let mut parts: Vec<&mut [u8]> = (0..ranks).map(part).collect();
                combine_everywhere(cx.dtype(), op, &mut parts);
            }
            Some(root) => {
                // SAFETY: D2; this share of every tensor is read and written by this rank only.
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
                    // SAFETY: as above; the root's tensor is not among the inputs.
                    combine(cx.dtype(), op, &inputs, unsafe { self.write(root, mine.clone()) });
                }
            }
        }
        timer.stop();
    }

    /// Rank `me`'s part of a broadcast of `data`, its own tensor. The root does as much as each of the others: it writes the last n-th
    /// of every tensor of n, and the others take the rest. With two ranks that takes half as long as one reading it all.
    pub(super) fn broadcast(&self, me: usize, root: usize, data: &mut [u8]) {
        let ranks = self.offsets.len();
        let cut = (data.len() - data.len() / ranks) / ALIGN * ALIGN;
        let pushed = cut..data.len();
        if me == root {
            for rank in others(me, ranks) {
                // SAFETY: D2; only the root accesses this range of another rank's tensor.
                unsafe { self.write(rank, pushed.clone()) }.copy_from_slice(&data[pushed.clone()]);
            }
        } else {
            // SAFETY: D2; no rank writes to the root's tensor.
            data[..cut].copy_from_slice(unsafe { self.read(root, 0..cut) });
        }
    }

    /// Copies a range of every peer's tensor to the range `to(peer)` of `out`, in verbs that do not write to the ranges they read.
    pub(super) fn pull(&self, me: usize, range: Range<usize>, to: impl Fn(usize) -> Range<usize>, out: &mut [u8]) {
        for rank in others(me, self.offsets.len()) {
            // SAFETY: D2; the verbs that come here write only to what no other rank reads.
            out[to(rank)].copy_from_slice(unsafe { self.read(rank, range.clone()) });
        }
    }
}
