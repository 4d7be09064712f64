//! Mapping the arenas of all ranks of a lane, in the first operation whose tensors lie in them.
//!
//! An arena is made by its rank alone, so its peers do not know it before they see it offered. When all ranks offer tensors in arenas, and
//! not all of these arenas were mapped together, they pass each other the descriptors and give what they have mapped a new number. A tensor
//! is then offered by number and offset, and equal numbers mean that every rank has mapped the arenas of every other.
//!
//! Ranks may combine arenas in any way (the first with the peer's second, and later the second with the peer's first): what was mapped
//! under the numbers that were offered is mapped anew under one number, so each arena of n is passed less than n times.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::protocol::{BufferOffer, FIRST_ID};
use super::zero_copy::ArenaTensor;
use crate::OpContext;
use crate::error::Result;
use crate::memory::{Finder, LaneId, MappedArenas, Registry};

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
