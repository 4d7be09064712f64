//! The verbs by windows: what a rank puts into its own, and what it reads from those of others.
//!
//! A range of each shard goes through the windows at a time. A window has a slot for each rank's shard or share where ranks get different
//! bytes, else one.

use std::ops::Range;

use bagua_core::error::Result;
use bagua_core::request::Verb;

use super::shared::Shared;
use super::windows::TURNS;
use crate::api::CUstream;
use crate::context::Context;
use crate::parts::{Parts, share};
use crate::reduction::Reduction;
use crate::stage::Stage;

/// Slots that a verb needs for ranges of shards: one, or one for each rank. The shares of all_reduce and reduce lie in one slot.
pub(super) fn slots(verb: Verb, ranks: usize) -> usize {
    match verb {
        Verb::Scatter { .. } | Verb::AllToAll | Verb::ReduceScatter(_) => ranks,
        _ => 1,
    }
}

/// One operation inside a host.
pub(super) struct Operation<'a> {
    pub(super) shared: &'a Shared,
    pub(super) stage: &'a Stage,
    pub(super) verb: Verb,
    pub(super) parts: &'a Parts,
    /// Of a verb that reduces.
    pub(super) reduction: Option<&'a Reduction>,
    /// Bytes of a slot.
    pub(super) width: usize,
    /// Where ranks fill their windows.
    pub(super) filling: CUstream,
    /// Where they read those of others.
    pub(super) taking: CUstream,
}

impl Operation<'_> {
    fn context(&self) -> &Context {
        self.stage.context()
    }

    fn me(&self) -> usize {
        self.shared.me
    }

    fn ranks(&self) -> usize {
        self.shared.ranks()
    }

    /// Whether this rank's bytes are read by others.
    fn gives(&self) -> bool {
        match self.verb {
            Verb::Broadcast { root } | Verb::Scatter { root } => root == self.me(),
            Verb::Gather { root } => root != self.me(),
            _ => true,
        }
    }

    /// Ranges of bytes of a shard, one after the other.
    pub(super) fn ranges(&self) -> Vec<Range<usize>> {
        let starts = (0..self.parts.shard).step_by(self.width);
        starts.map(|start| start..self.parts.shard.min(start + self.width)).collect()
    }

    /// Whether ranks reduce shares, which others then read.
    pub(super) fn has_shares(&self) -> bool {
        matches!(self.verb, Verb::AllReduce(_) | Verb::Reduce { .. })
    }

    pub(super) fn copy(&self, to: usize, from: usize, bytes: usize, stream: CUstream) -> Result<()> {
        if to == from {
            return Ok(());
        }
        // SAFETY: memory of the operation, which holds it until its end on the device, or windows, whose use the shared events order. Slots
        // and ranges are within both.
        unsafe { self.context().copy(to, from, bytes, stream) }
    }

    /// Puts a range into the window of a turn, once nobody reads it any more.
    pub(super) fn fill(&self, turn: usize, range: &Range<usize>) -> Result<()> {
        let (own, len) = (self.shared.window(self.me(), turn), range.len());
        self.after_free(turn)?;
        let from = |shard: usize| self.parts.from[shard] + range.start;
        match self.verb {
            _ if !self.gives() => {}
            Verb::AllReduce(_) | Verb::Reduce { .. } => {
                // The place of its own share is for the result.
                for rank in self.others() {
                    let share = share(rank, self.ranks(), len);
                    self.copy(own + share.start, from(0) + share.start, share.len(), self.filling)?;
                }
            }
            Verb::Scatter { .. } | Verb::AllToAll | Verb::ReduceScatter(_) => {
                for rank in self.others() {
                    self.copy(own + rank * self.width, from(rank), len, self.filling)?;
                }
            }
            _ => self.copy(own, from(0), len, self.filling)?,
        }
        self.shared.signals(self.me()).filled[turn].record(self.filling)
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let me = self.me();
        (0..self.ranks()).filter(move |rank| *rank != me)
    }

    /// Reads what this rank gets, of a verb without shares. All ranks have said that they filled their windows.
    pub(super) fn take(&self, turn: usize, range: &Range<usize>) -> Result<()> {
        let (me, len) = (self.me(), range.len());
        self.after_fills(turn)?;
        let from = |shard: usize| self.parts.from[shard] + range.start;
        let to = |shard: usize| self.parts.to[shard] + range.start;
        let window = |rank: usize| self.shared.window(rank, turn);
        let get = |to: usize, from: usize| self.copy(to, from, len, self.taking);
        match self.verb {
            Verb::Broadcast { root } if root != me => get(to(0), window(root))?,
            Verb::Scatter { root } if root != me => get(to(0), window(root) + me * self.width)?,
            Verb::Scatter { .. } => get(to(0), from(me))?,
            Verb::AllGather | Verb::Gather { .. } if !self.parts.to.is_empty() => {
                for rank in self.others() {
                    get(to(rank), window(rank))?;
                }
                get(to(me), from(0))?;
            }
            Verb::AllToAll => {
                for rank in self.others() {
                    get(to(rank), window(rank) + me * self.width)?;
                }
                get(to(me), from(me))?;
            }
            Verb::ReduceScatter(_) => {
                let source = |rank: usize| if rank == me { from(me) } else { window(rank) + me * self.width };
                self.reduce(source, to(0), len)?;
            }
            _ => {}
        }
        self.shared.signals(me).free[turn].record(self.taking)
    }

    /// Reduces this rank's share of a range, in its window.
    pub(super) fn make(&self, turn: usize, range: &Range<usize>) -> Result<()> {
        let me = self.me();
        let share = share(me, self.ranks(), range.len());
        self.after_fills(turn)?;
        let own = self.parts.from[0] + range.start;
        let place = |rank: usize| if rank == me { own } else { self.shared.window(rank, turn) } + share.start;
        self.reduce(place, self.shared.window(me, turn) + share.start, share.len())?;
        self.shared.signals(me).made[turn].record(self.taking)
    }

    /// Reads all shares, on ranks that get the result. All ranks have said that they made theirs.
    pub(super) fn collect(&self, turn: usize, range: &Range<usize>) -> Result<()> {
        for rank in 0..self.ranks() {
            let share = share(rank, self.ranks(), range.len());
            let Some(to) = self.parts.to.first().filter(|_| !share.is_empty()) else { continue };
            self.shared.signals(rank).made[turn].order(self.taking)?;
            let from = self.shared.window(rank, turn) + share.start;
            self.copy(to + range.start + share.start, from, share.len(), self.taking)?;
        }
        self.shared.signals(self.me()).free[turn].record(self.taking)
    }

    /// Filling begins when nobody reads what the window had before.
    pub(super) fn after_free(&self, turn: usize) -> Result<()> {
        (0..self.ranks()).try_for_each(|rank| self.shared.signals(rank).free[turn].order(self.filling))
    }

    /// Reading begins after the filling of all.
    pub(super) fn after_fills(&self, turn: usize) -> Result<()> {
        (0..self.ranks()).try_for_each(|rank| self.shared.signals(rank).filled[turn].order(self.taking))
    }

    /// Combines the bytes of all ranks, in their order.
    pub(super) fn reduce(&self, source: impl Fn(usize) -> usize, to: usize, bytes: usize) -> Result<()> {
        let (Some(reduction), true) = (self.reduction, bytes > 0) else { return Ok(()) };
        let sources: Vec<usize> = (0..self.ranks()).map(source).collect();
        // SAFETY: as in `copy`.
        unsafe { reduction.launch(self.stage, self.taking, &sources, to, bytes) }
    }
}

/// The turn after another.
pub(super) fn next(turn: usize) -> usize {
    (turn + 1) % TURNS
}
