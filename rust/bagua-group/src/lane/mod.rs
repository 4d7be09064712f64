//! A lane: one strictly ordered sequence of operations of a group, with streams and shared memory of its own.
//!
//! The one place where arguments are checked, operations are numbered, deadlines are set, calls are counted, and a failure
//! becomes the group's first cause.

mod check;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_mesh;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::codec::Codec;
use crate::collective::{Collective, DeviceCodec};
use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::memory::{DeviceRef, kind_of};
use crate::recorder::{LaneRecorder, Ticket};
use crate::request::{Io, OpContext, Operands, Verb};
use crate::stats::Stats;
use crate::types::{DType, Fingerprint, Shape, flags};
use crate::wait::Deadline;

/// What a caller may say about one operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Deadline; `None`: the group's default.
    pub timeout: Option<Duration>,
    /// Bucket or other label for error texts.
    pub label: &'a str,
    /// Shape of the tensor where it matters (all_reduce, reduce, broadcast); `None`: flat.
    pub shape: Option<Shape>,
    /// A digest of options that ranks must agree on, of 16 bits. A verb over exchange has its own.
    pub tag: u32,
    /// Id of the codec of a compressed collective, 0 for none; all ranks must give the same. A verb over exchange has its own.
    pub codec: u8,
    /// See [`Fingerprint::flags`].
    pub flags: u16,
}

impl Options<'_> {
    /// The group's deadline, no label, no tag, no codec.
    pub const DEFAULT: Options<'static> = Options { timeout: None, label: "", shape: None, tag: 0, codec: 0, flags: 0 };
}

impl<'a> Options<'a> {
    /// Those of an operation on a bucket; `hierarchical`: inside hosts first.
    pub fn of_bucket(label: &'a str, hierarchical: bool) -> Options<'a> {
        Options { label, flags: if hierarchical { flags::HIERARCHICAL } else { 0 }, ..Options::DEFAULT }
    }
}

/// See the module.
///
/// Invariant: an argument error leaves everything as it was, counters included; any other error has poisoned the health, so
/// that no operation follows on streams that may be in the middle of a message.
pub struct Lane {
    /// Does the work.
    collective: Box<dyn Collective>,
    /// The group's failure state: checked before each operation, set by each failure.
    health: Arc<GroupHealth>,
    /// The group's counters.
    stats: Arc<Stats>,
    /// Incarnation of the group, for fingerprints.
    epoch: u32,
    /// Which lane of the group this is, for fingerprints.
    number: u32,
    /// Deadline of operations that bring none.
    timeout: Duration,
    /// Collective operations begun; equal on all ranks that are in step.
    seq: u64,
    /// Records the operations; `None` for a lane without a process of its own, as in tests.
    recorder: Option<LaneRecorder>,
    /// The record of the next operation, which was queued.
    queued: Option<Ticket>,
}

impl Lane {
    /// A lane over a collective. `number` distinguishes the lanes of one group.
    pub fn new(
        collective: Box<dyn Collective>,
        health: Arc<GroupHealth>,
        stats: Arc<Stats>,
        epoch: u32,
        number: u32,
        timeout: Duration,
    ) -> Lane {
        Lane { collective, health, stats, epoch, number, timeout, seq: 0, recorder: None, queued: None }
    }

    /// The same lane, whose operations are recorded.
    #[must_use]
    pub fn recorded_by(mut self, recorder: LaneRecorder) -> Lane {
        self.recorder = Some(recorder);
        self
    }

    /// What records its operations.
    pub fn recorder(&self) -> Option<LaneRecorder> {
        self.recorder.clone()
    }

    /// The next operation is the one that was queued with this ticket.
    pub(super) fn expect(&mut self, ticket: Option<Ticket>) {
        self.queued = ticket;
    }

    /// The ticket that no operation has used yet.
    pub(super) fn unused_ticket(&mut self) -> Option<Ticket> {
        self.queued.take()
    }

    /// Rank in the group.
    pub fn rank(&self) -> usize {
        self.collective.rank()
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.collective.size()
    }

    /// Name of the collective.
    pub fn collective(&self) -> &'static str {
        self.collective.name()
    }

    /// The group's counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Name of the transport towards each rank.
    pub fn transports(&self) -> Vec<&'static str> {
        self.collective.transports()
    }

    /// Runs a verb; [`Verb`] says which bytes of `io` it reads and writes.
    ///
    /// # Errors
    /// `InvalidArgument` and `UnsupportedType` for arguments that do not fit, before anything is sent; otherwise the group's first
    /// cause.
    pub fn run<'a>(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        verb: Verb<'_>,
        operands: impl Into<Operands<'a>>,
    ) -> Result<()> {
        let operands = operands.into();
        let print = self.print_of(options, dtype, verb, &operands, self.size())?;
        self.check_reach(operands.io.device()?)?;
        self.perform(None, options, print, verb, operands)
    }

    /// The elements of a verb of this rank, as the fingerprint counts them, without running it.
    ///
    /// # Errors
    /// Those of [`Lane::run`] for buffers that do not fit the verb.
    pub fn check(verb: Verb<'_>, dtype: DType, io: &Io<'_>, rank: usize, size: usize) -> Result<usize> {
        check::verb(verb, dtype, io, rank, size)
    }

    /// The fingerprint of a verb, before the operation has a number. `members`: the ranks, or the hosts where each of them is one member.
    ///
    /// # Errors
    /// Those of [`Lane::run`] before anything is sent.
    pub(super) fn print_of(
        &self,
        options: &Options<'_>,
        dtype: DType,
        verb: Verb<'_>,
        Operands { io, extra }: &Operands<'_>,
        members: usize,
    ) -> Result<Fingerprint> {
        self.health.check()?;
        let count = check::verb(verb, dtype, io, self.rank(), self.size())?;
        check::members(verb, dtype, members)?;
        check::extra(verb, dtype, io, extra)?;
        let root = verb.root().map(|root| check::root(root, self.size())).transpose()?;
        let shape = if verb.compares_shapes() { options.shape.unwrap_or(Shape::flat(count)) } else { Shape::default() };
        // Over exchange, the tensor may be on a device on some ranks and on the host on others.
        let mixed = verb.is_over_exchange() && options.flags & flags::HIERARCHICAL == 0;
        let place = io.device()?;
        let device = if mixed { 0 } else { kind_of(place) };
        let (codec, tag) = check::agreed(verb, extra).unwrap_or((options.codec, options.tag));
        let (op, flags) = (verb.op(), options.flags);
        Ok(Fingerprint { op, root, shape, device, codec, tag, flags, ..Fingerprint::new(verb.kind(), dtype, count) })
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`Lane::run`].
    pub fn barrier(&mut self, options: &Options<'_>) -> Result<()> {
        // A barrier has no data; headers have to name some type.
        self.run(options, DType::U8, Verb::Barrier, Io::none())
    }

    /// See [`Collective::end`].
    pub fn end(&mut self) {
        self.collective.end();
    }

    /// See [`Collective::reaches`].
    pub fn reaches(&self, place: DeviceRef<'_>) -> bool {
        self.collective.reaches(place)
    }

    /// See [`Collective::codec_on`].
    ///
    /// # Errors
    /// As [`Collective::codec_on`].
    pub fn codec_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        self.collective.codec_on(place, codec, dtype)
    }

    /// Refuses memory that the collective does not reach, before anything is sent.
    fn check_reach(&self, place: DeviceRef<'_>) -> Result<()> {
        match place {
            Some(device) if !self.collective.reaches(place) => Err(Error::UnsupportedType(format!(
                "the tensor is on {}, and the group has no collective for that device (it has {})",
                device.name(),
                self.collective.name()
            ))),
            _ => Ok(()),
        }
    }

    /// Runs an operation with a fingerprint of [`Lane::print_of`], `by` another collective of this lane's ranks or its own: numbered, timed,
    /// counted and recorded, and its failure is the group's first cause.
    ///
    /// # Errors
    /// As [`Lane::run`].
    pub(super) fn perform(
        &mut self,
        by: Option<&mut dyn Collective>,
        options: &Options<'_>,
        print: Fingerprint,
        verb: Verb<'_>,
        Operands { io, extra }: Operands<'_>,
    ) -> Result<()> {
        // Takes a number, so it comes after all checks.
        let fingerprint = Fingerprint { epoch: self.epoch, lane: self.number, seq: next(&mut self.seq), ..print };
        let payload = io.len();
        let stats = self.stats.of(fingerprint.kind);
        stats.calls.fetch_add(1, Relaxed);
        stats.payload_bytes.fetch_add(payload as u64, Relaxed);
        let deadline = Deadline::after(options.timeout.unwrap_or(self.timeout));
        let extra = RefCell::new(extra);
        let cx = OpContext { fingerprint, deadline, health: &self.health, stats, label: options.label, extra: &extra };
        let queued = self.queued.take();
        let running = self.recorder.as_ref().and_then(|r| r.begin(queued, &fingerprint, payload, options.label));
        let result = by.unwrap_or(self.collective.as_mut()).run(&cx, verb, io).map_err(|error| {
            if error.is_argument() {
                return error;
            }
            // The error names this rank's operation also when another rank found the first cause.
            let progress = match &error {
                Error::PeerLost { progress: Some(progress), .. } | Error::Timeout { progress: Some(progress), .. } => {
                    progress.as_ref().clone()
                }
                _ => cx.progress(0, payload as u64),
            };
            self.health.fail(error).during(progress)
        });
        if let (Some(recorder), Some(running)) = (&self.recorder, running) {
            let own = || self.health.world_rank(self.health.rank());
            recorder.end(running, result.as_ref().err().map(|error| (error, own())));
        }
        result
    }
}

/// The counter, which then counts one more.
fn next(counter: &mut u64) -> u64 {
    let now = *counter;
    *counter += 1;
    now
}
