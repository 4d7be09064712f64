//! all_reduce over several hosts: inside hosts by NCCL, between them by their first ranks ([`Leaders`]) through host memory.
//!
//! A piece at a time: NCCL reduces it to the first rank of each host, undivided; the first ranks exchange it; NCCL broadcasts the result
//! inside each host. The first ranks copy on streams of their own, so that the device reduces the next piece while the host sends one. All ranks
//! of a host put the same calls on their streams in the same order: reduce 0, reduce 1, broadcast 0, reduce 2, broadcast 1, …
//!
//! The other ranks wait for nobody on the host, as with `nccl` alone. The other verbs are `staged`, and so is what NCCL cannot reduce: that has
//! the host's bits.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bagua_core::collective::{Collective, OpContext, Verb};
use bagua_core::error::{Error, Result};
use bagua_core::types::ReduceOp;

use super::communicator::Communicator;
use super::verbs::reduction;
use crate::context::Context;
use crate::device::Place;
use crate::event::Event;
use crate::leaders::{LEADER, Leaders};
use crate::parts::Parts;
use crate::stage::{Copier, PIECE, Stage};
use crate::staged;

/// A rank's side.
pub(crate) struct InHosts {
    leaders: Leaders,
    /// Of the ranks of this host; `None` where there is one.
    inside: Option<Communicator>,
    context: Arc<Context>,
    /// Recorded behind each reduction, for the stream that copies from the device.
    reduced: Event,
}

/// One all_reduce.
struct Operation<'a> {
    hosts: &'a InHosts,
    stage: &'a Stage,
    op: ReduceOp,
    parts: &'a Parts,
}

impl InHosts {
    /// With the communicator of this rank's host, if that has several ranks.
    ///
    /// # Errors
    /// `Device`.
    pub(crate) fn new(context: &Arc<Context>, leaders: Leaders, inside: Option<Communicator>) -> Result<InHosts> {
        Ok(InHosts { leaders, inside, context: Arc::clone(context), reduced: Event::new(context)? })
    }

    /// For its end.
    pub(crate) fn into_communicator(self) -> Option<Communicator> {
        self.inside
    }

    /// Refuses another device than the first array's.
    ///
    /// # Errors
    /// `UnsupportedType`, before anything is put on a device.
    pub(crate) fn check_device(&self, place: &Place) -> Result<()> {
        let (own, other) = (self.context.device(), place.stage().context().device());
        if own == other {
            return Ok(());
        }
        let text =
            format!("the array is on cuda:{other}, and the group combines arrays by NCCL inside hosts on cuda:{own}");
        Err(Error::UnsupportedType(text))
    }

    /// Runs a verb. `inner` is the host's collective of the group.
    ///
    /// # Errors
    /// As [`Communicator::operate`] and [`Collective::run`].
    pub(crate) fn run(
        &self,
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        verb: Verb<'_>,
        parts: &Parts,
        place: &Place,
    ) -> Result<()> {
        let op = match verb {
            Verb::AllReduce(op) if parts.shard > 0 && reduction(op.undivided(), cx.dtype(), 0).is_some() => op,
            _ => return staged::run(inner, cx, verb, parts, place),
        };
        cx.stats.hierarchical.fetch_add(1, Relaxed);
        let stage = place.stage();
        let operation = Operation { hosts: self, stage: &stage, op, parts };
        match &self.inside {
            None => stage.copier(|copier| {
                let streams = [copier.down.handle(), copier.up.handle()];
                let begun = place
                    .order_after_start(&streams)
                    .and_then(|()| streams.iter().try_for_each(|stream| stage.order_after_last(*stream)));
                let outcome = begun.and_then(|()| operation.put(inner, cx, Some(copier)));
                // Also after an error: copies may be under way.
                let ended = place.mark_end(copier, outcome.is_err());
                outcome.and(ended)
            }),
            Some(inside) if inside.rank() == LEADER => inside.operate(cx, place, || {
                stage.copier(|copier| {
                    let outcome = operation.put(inner, cx, Some(copier));
                    if outcome.is_err() {
                        // The operation's end on the device comes behind copies that may be under way. The first error says more.
                        let _ = copier.order_after_copies(inside.stream());
                    }
                    outcome
                })
            }),
            Some(inside) => inside.operate(cx, place, || operation.put(inner, cx, None)),
        }
    }
}

impl Operation<'_> {
    /// Puts all pieces on the streams. The first rank of a host has the `copier`.
    fn put(&self, inner: &mut dyn Collective, cx: &OpContext<'_>, mut copier: Option<&mut Copier>) -> Result<()> {
        let shard = self.parts.shard;
        let ranges: Vec<Range<usize>> =
            (0..shard).step_by(PIECE).map(|start| start..shard.min(start + PIECE)).collect();
        let to = self.parts.to[0];
        self.reduce(cx, copier.as_deref_mut(), 0, &ranges[0])?;
        for (at, range) in ranges.iter().enumerate() {
            if let Some(next) = ranges.get(at + 1) {
                self.reduce(cx, copier.as_deref_mut(), (at + 1) % 2, next)?;
            }
            let (turn, bytes) = (at % 2, range.len());
            if let Some(copier) = copier.as_deref_mut() {
                self.hosts.leaders.combine(inner, cx, self.op, copier, (turn, bytes), (range.start, shard))?;
                // SAFETY: memory of the operation, which holds it until its end on the device. `combine` has waited for what reads it.
                unsafe { Leaders::put(self.stage, copier, turn, (to + range.start, bytes), copier.up.handle()) }?;
                if let Some(inside) = &self.hosts.inside {
                    copier.left[turn].order(inside.stream())?;
                }
            }
            if let Some(inside) = &self.hosts.inside {
                inside.call(cx, "ncclBroadcast", |nccl| nccl.broadcast(to + range.start, bytes, LEADER))?;
            }
        }
        Ok(())
    }

    /// Puts a range on the stream of the reduction, and the copy of its result on that of the copies from the device.
    fn reduce(&self, cx: &OpContext<'_>, copier: Option<&mut Copier>, turn: usize, range: &Range<usize>) -> Result<()> {
        let (mut from, to) = (self.parts.from[0] + range.start, self.parts.to[0] + range.start);
        if let Some(inside) = &self.hosts.inside {
            let how = reduction(self.op.undivided(), cx.dtype(), range.len()).expect("`run` has asked");
            // Of those that get no result NCCL takes no address.
            let target = if copier.is_some() { to } else { 0 };
            inside.call(cx, "ncclReduce", |nccl| nccl.reduce(from, target, how, LEADER))?;
            from = to;
        }
        let Some(copier) = copier else { return Ok(()) };
        let down = copier.down.handle();
        if let Some(inside) = &self.hosts.inside {
            self.hosts.reduced.record(inside.stream())?;
            self.hosts.reduced.order(down)?;
        }
        // SAFETY: memory of the operation, which holds it until its end on the device.
        unsafe { Leaders::fetch(self.stage, copier, turn, (from, range.len()), down) }
    }
}
