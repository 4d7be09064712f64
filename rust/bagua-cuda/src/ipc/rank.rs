//! A rank's side of `ipc`: one operation, and the end.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bagua_core::collective::{Collective, Incoming, Io, OpContext, Outgoing, Verb};
use bagua_core::error::{Error, Result};
use bagua_core::health::Subscription;
use bagua_core::wait::lock;

use super::shared::Shared;
use super::verbs::{Operation, next, slots};
use crate::context::Context;
use crate::device::Place;
use crate::event::Event;
use crate::leaders::Leaders;
use crate::parts::{ALIGNMENT, Parts};
use crate::reduction::Reduction;
use crate::stage::{PATIENCE, Stage, wait_until_reached};
use crate::staged;
use crate::stream::Stream;

/// From so many bytes on a range is only a quarter of the tensor, where ranks have devices of their own: one range is filled while another
/// is read.
const QUARTERS: usize = 4 << 20;

/// How long a rank that has closed all memory of others waits until they have closed its own. What is open then is left to the end of the
/// process.
const CLOSING: Duration = Duration::from_secs(5);

/// How long the work of a rank whose group has failed is waited for: it may wait for a process that has died.
const SOON: Duration = Duration::from_millis(500);

/// Operations that may not be done on the device, each with where its failure is kept.
pub(super) type Running = Mutex<Vec<(Arc<Event>, Arc<OnceLock<Error>>)>>;

/// A rank's side.
pub(crate) struct Ipc {
    pub(super) context: Arc<Context>,
    /// Group ranks of this host.
    pub(super) here: Vec<usize>,
    pub(super) leaders: Leaders,
    /// Two ranks of this host have one device, which runs one process at a time.
    pub(super) one_device: bool,
    pub(super) filling: Stream,
    pub(super) taking: Stream,
    pub(super) shared: Shared,
    /// The window of the next range.
    pub(super) turn: usize,
    pub(super) running: Arc<Running>,
    /// Fails operations that wait for a rank that was lost.
    pub(super) _lost: Subscription,
    /// It was ended.
    pub(super) over: bool,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Nobody uses anything of it.
    Free,
    /// Others have memory of this rank open.
    Read,
    /// The device is not done.
    Busy,
}

impl Ipc {
    /// Ranks of this host.
    pub(super) fn ranks(&self) -> usize {
        self.here.len()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Refuses another device than that of the windows.
    ///
    /// # Errors
    /// `UnsupportedType`, before anything is put on a device.
    pub(crate) fn check_device(&self, place: &Place) -> Result<()> {
        let (own, other) = (self.context.device(), place.stage().context().device());
        if own == other {
            return Ok(());
        }
        let text = format!("the array is on cuda:{other}, and the group's windows for ipc on cuda:{own}");
        Err(Error::UnsupportedType(text))
    }

    /// Runs a verb. `inner` is the host's collective of the group.
    ///
    /// # Errors
    /// `Unavailable` that names NVRTC where a kernel is needed and cannot be compiled, before anything is sent; as [`Collective::run`].
    pub(crate) fn run(
        &mut self,
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        verb: Verb,
        parts: &Parts,
        place: &Place,
    ) -> Result<()> {
        let hier = self.leaders.hosts() > 1;
        if hier && (!matches!(verb, Verb::AllReduce(_)) || parts.shard == 0) {
            return staged::run(inner, cx, verb, parts, place);
        }
        let op = verb.op().map(|op| if hier { op.undivided() } else { op });
        let ranks = self.ranks();
        let reduction = op.map(|op| Reduction::new(&self.context, cx.dtype(), op, ranks)).transpose()?;
        let (done, stage) = (place.done()?, place.stage());
        self.running_until(&done, place.failure());
        let streams = [self.filling.handle(), self.taking.handle()];
        // The last operation may have been copies on another stream, of a bucket that was gathered.
        let begun = place
            .order_after_start(&streams)
            .and_then(|()| streams.iter().try_for_each(|stream| stage.order_after_last(*stream)));
        let outcome = begun.and_then(|()| match (hier, verb) {
            (true, _) => self.over_hosts(inner, cx, verb, parts, &stage, reduction.as_ref()),
            (false, _) => self.inside(inner, cx, verb, parts, &stage, reduction.as_ref()),
        });
        // Also after an error: some of the work may be there.
        let ended = self.mark_end(&done, outcome.is_err());
        place.ended(ended.is_ok());
        if ended.is_ok() {
            stage.set_last(&done);
        }
        outcome.and(ended)
    }

    /// Records the end of an operation. Where it went on to its end, all its work comes before that of `taking`.
    fn mark_end(&self, done: &Event, failed: bool) -> Result<()> {
        if failed {
            let filled = Event::new(&self.context)?;
            filled.record(self.filling.handle())?;
            filled.order(self.taking.handle())?;
        }
        done.record(self.taking.handle())
    }

    /// One operation of the ranks of one host, range by range.
    fn inside(
        &mut self,
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        verb: Verb,
        parts: &Parts,
        stage: &Stage,
        reduction: Option<&Reduction>,
    ) -> Result<()> {
        if self.ranks() == 1 {
            return self.alone(parts, stage, reduction);
        }
        let slots = slots(verb, self.ranks());
        let whole = match self.one_device {
            true => parts.shard,
            false => parts.shard.div_ceil(4).max(QUARTERS / 4 / slots / ALIGNMENT * ALIGNMENT).min(parts.shard),
        };
        let width = self.width(inner, cx, stage, whole, slots)?;
        let operation = self.operation(verb, parts, stage, reduction, width);
        let ranges = operation.ranges();
        let mut turn = self.turn;
        if ranges.is_empty() {
            // All ranks compare what they do.
            return self.meet(inner, cx);
        }
        operation.fill(turn, &ranges[0])?;
        for (at, range) in ranges.iter().enumerate() {
            self.meet(inner, cx)?;
            if let Some(range) = ranges.get(at + 1) {
                operation.fill(next(turn), range)?;
            }
            if operation.has_shares() {
                operation.make(turn, range)?;
                self.meet(inner, cx)?;
                operation.collect(turn, range)?;
            } else {
                operation.take(turn, range)?;
            }
            turn = next(turn);
        }
        self.turn = turn;
        Ok(())
    }

    pub(super) fn operation<'a>(
        &'a self,
        verb: Verb,
        parts: &'a Parts,
        stage: &'a Stage,
        reduction: Option<&'a Reduction>,
        width: usize,
    ) -> Operation<'a> {
        let (filling, taking) = (self.filling.handle(), self.taking.handle());
        Operation { shared: &self.shared, stage, verb, parts, reduction, width, filling, taking }
    }

    /// Bytes of a slot: as many as `whole` where windows can have so many. All ranks get the same.
    pub(super) fn width(
        &mut self,
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        stage: &Stage,
        whole: usize,
        slots: usize,
    ) -> Result<usize> {
        let whole = whole.next_multiple_of(ALIGNMENT);
        let room = self.room_for(inner, cx, stage, whole * slots)?;
        Ok(whole.min(room / slots / ALIGNMENT * ALIGNMENT).max(ALIGNMENT))
    }

    /// One operation of the only rank of a group.
    fn alone(&self, parts: &Parts, stage: &Stage, reduction: Option<&Reduction>) -> Result<()> {
        let (Some(from), Some(to), 1..) = (parts.from.first(), parts.to.first(), parts.shard) else { return Ok(()) };
        let stream = self.taking.handle();
        match reduction {
            // SAFETY: memory of the operation, which holds it until its end on the device.
            Some(reduction) => unsafe { reduction.launch(stage, stream, &[*from], *to, parts.shard) },
            None if from == to => Ok(()),
            // SAFETY: as above.
            None => unsafe { self.context.copy(*to, *from, parts.shard, stream) },
        }
    }

    /// Returns when every rank of this host has come so far, on the host.
    pub(super) fn meet(&self, inner: &mut dyn Collective, cx: &OpContext<'_>) -> Result<()> {
        if self.leaders.hosts() == 1 {
            return inner.run(cx, Verb::Barrier, Io::none());
        }
        let own = self.here[self.shared.me];
        let others = || self.here.iter().filter(|rank| **rank != own);
        let sends: Vec<_> = others().map(|rank| Outgoing::new(*rank, cx.fingerprint, &[])).collect();
        let mut recvs: Vec<_> = others().map(|rank| Incoming::new(*rank, cx.fingerprint, &mut [])).collect();
        if sends.is_empty() { Ok(()) } else { inner.exchange(cx, &sends, &mut recvs) }
    }

    /// An operation fails if a rank is lost before it is done: its work may have waited for what that rank did not do.
    fn running_until(&self, done: &Arc<Event>, failure: &Arc<OnceLock<Error>>) {
        let mut running = lock(&self.running);
        let over = running.iter().take_while(|(event, _)| event.is_reached().unwrap_or(true)).count();
        running.drain(..over);
        running.push((Arc::clone(done), Arc::clone(failure)));
    }

    /// Ends it: waits for the device and for the other ranks, for a while. Whether the device is known to be done.
    pub(crate) fn end(mut self) -> bool {
        let end = self.finish();
        if end != End::Free {
            // To the end of the process there is memory that others read, or streams whose work never ends.
            std::mem::forget(self);
        }
        end != End::Busy
    }

    fn finish(&mut self) -> End {
        self.over = true;
        if !self.drained() {
            return End::Busy;
        }
        self.shared.peers.iter_mut().for_each(|peer| drop(peer.take()));
        let Some(book) = self.shared.book.take() else { return End::Free };
        book.leave();
        if book.wait_until_left(CLOSING) { End::Free } else { End::Read }
    }

    /// Whether the device is done, or failed, which ends its work too.
    fn drained(&self) -> bool {
        let mark = || {
            let end = Event::new(&self.context)?;
            self.mark_end(&end, true)?;
            let start = Instant::now();
            let patience = || match lock(&self.running).last().is_some_and(|(_, failure)| failure.get().is_some()) {
                true => SOON,
                false => PATIENCE,
            };
            wait_until_reached(&end, || match start.elapsed() < patience() {
                true => Ok(()),
                false => Err(Error::other("the device is not done")),
            })
        };
        matches!(mark(), Ok(()) | Err(Error::Device(_)))
    }
}

impl Drop for Ipc {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        if !self.context.api().is_of_this_process() || self.finish() != End::Free {
            // In a forked child nothing of it is there; else see `end`.
            std::mem::forget(std::mem::take(&mut self.shared.windows));
            std::mem::forget(std::mem::take(&mut self.shared.peers));
        }
    }
}
