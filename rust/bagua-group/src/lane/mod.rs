//! A lane: one strictly ordered sequence of operations of a group, with its own streams and shared memory. Also the
//! lanes of one engine.
//!
//! Only this module checks arguments, numbers operations, sets deadlines, counts calls, and makes a failure the group's
//! first cause. `by_host` implements `hierarchical` on a flat lane.

mod by_host;
mod options;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_mesh;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::fork::{ForkFd, OwnerProcess};
use super::group::Group;
use crate::codec::Codec;
use crate::collective::{
    Collective, CollectiveFactory, DeviceCodec, Hier, Incoming, Outgoing, agreed, check_layouts, check_operands,
};
use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::memory::{Buffer, BufferMut, Device, DeviceRef, kind_of};
use crate::recorder::{LaneRecorder, Ticket};
use crate::request::{Io, Layout, OpContext, Operands, Uses, Verb};
use crate::same_ranks_as;
use crate::stats::Stats;
use crate::types::{DType, Fingerprint, Shape, flags};
use crate::wait::Deadline;
pub use options::Options;

/// One strictly ordered sequence of operations of a group.
///
/// Invariant: an argument error changes nothing, not even a counter. Any other error fails the group (`health`), so
/// that no later operation uses streams that may be in the middle of a message.
pub struct Lane {
    /// The collective that moves the data.
    collective: Box<dyn Collective>,
    /// Failure state of the group. Checked before each operation, and set by each failure.
    health: Arc<GroupHealth>,
    /// Counters of the group.
    stats: Arc<Stats>,
    /// Random number of the world group, for fingerprints.
    epoch: u32,
    /// Number of this lane in the group, for fingerprints.
    number: u32,
    /// Time limit of operations that give none.
    timeout: Duration,
    /// Number of collective operations begun. Equal on all ranks that are in step.
    seq: u64,
    /// Step of the operations that begin now, see [`Fingerprint::step`].
    step: u32,
    /// Writes this lane's operations to the flight recorder. `None` for a lane without a group, as in tests.
    recorder: Option<LaneRecorder>,
    /// The entry of the next operation in the flight recorder, if the operation was recorded when it was queued.
    queued: Option<Ticket>,
}

impl Lane {
    /// Creates a lane over a collective. `number` distinguishes the lanes of one group.
    pub fn new(
        collective: Box<dyn Collective>,
        health: Arc<GroupHealth>,
        stats: Arc<Stats>,
        epoch: u32,
        number: u32,
        timeout: Duration,
    ) -> Lane {
        Lane { collective, health, stats, epoch, number, timeout, seq: 0, step: 0, recorder: None, queued: None }
    }

    /// Returns the lane with a recorder of its operations.
    #[must_use]
    pub fn recorded_by(mut self, recorder: LaneRecorder) -> Lane {
        self.recorder = Some(recorder);
        self
    }

    /// Returns the recorder of the lane's operations.
    pub fn recorder(&self) -> Option<LaneRecorder> {
        self.recorder.clone()
    }

    /// Returns this process's rank in the group.
    pub fn rank(&self) -> usize {
        self.collective.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.collective.size()
    }

    /// Returns the name of the collective.
    pub fn collective(&self) -> &'static str {
        self.collective.name()
    }

    /// Returns the group's counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Returns the name of the transport to each rank.
    pub fn transports(&self) -> Vec<&'static str> {
        self.collective.transports()
    }

    /// Runs a verb. [`Verb`] says which bytes of `io` it reads and writes.
    ///
    /// # Errors
    /// `InvalidArgument` and `UnsupportedType` for arguments that do not fit, before anything is sent. Otherwise the
    /// group's first failure.
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

    /// Returns the number of elements of this rank's verb, as the fingerprint counts them. Does not run the verb.
    ///
    /// # Errors
    /// The errors of [`Lane::run`] for buffers that do not fit the verb.
    pub fn check(verb: Verb<'_>, dtype: DType, io: &Io<'_>, rank: usize, size: usize) -> Result<usize> {
        count_of(verb, dtype, io, rank, size)
    }

    /// Returns the fingerprint of a verb, before the operation has a number. `members` is the number of ranks, or of
    /// hosts if each host counts as one member. Returns the errors that [`Lane::run`] returns before it sends anything.
    fn print_of(
        &self,
        options: &Options<'_>,
        dtype: DType,
        verb: Verb<'_>,
        Operands { io, extra }: &Operands<'_>,
        members: usize,
    ) -> Result<Fingerprint> {
        self.health.check()?;
        let count = count_of(verb, dtype, io, self.rank(), self.size())?;
        let over_exchange = verb.is_over_exchange();
        if over_exchange {
            check_operands(verb, dtype, io, extra, members)?;
        }
        let root = verb.root().map(|root| check_root(root, self.size())).transpose()?;
        let shape = if verb.compares_shapes() { options.shape.unwrap_or(Shape::flat(count)) } else { Shape::default() };
        // In a verb over exchange, the tensor may be on a device on some ranks and on the host on other ranks.
        let mixed = over_exchange && options.flags & flags::HIERARCHICAL == 0;
        let place = io.device()?;
        let device = if mixed { 0 } else { kind_of(place) };
        let agreed = if over_exchange { agreed(verb, extra) } else { None };
        let (codec, tag) = agreed.unwrap_or((options.codec, options.tag));
        let (op, flags) = (verb.op(), options.flags);
        Ok(Fingerprint { op, root, shape, device, codec, tag, flags, ..Fingerprint::new(verb.kind(), dtype, count) })
    }

    /// Sets the step of the operations that follow, see [`Fingerprint::step`].
    pub fn set_step(&mut self, step: u32) {
        self.step = step;
    }

    /// Blocks until every rank has called `barrier`. Returns the errors of [`Lane::run`].
    pub fn barrier(&mut self, options: &Options<'_>) -> Result<()> {
        // A barrier has no data, but headers must name some type.
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

    /// See [`Collective::codec_on`]. Returns the errors of [`Collective::codec_on`].
    pub fn codec_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        self.collective.codec_on(place, codec, dtype)
    }

    /// Returns an error for memory that the collective does not reach, before anything is sent.
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

    /// Runs an operation with a fingerprint of [`Lane::print_of`]. `by` is another collective of this lane's ranks, or
    /// `None` for the lane's own. The operation is numbered, timed, counted and recorded. Its failure becomes the
    /// group's first failure. Returns the errors of [`Lane::run`].
    fn perform(
        &mut self,
        by: Option<&mut dyn Collective>,
        options: &Options<'_>,
        print: Fingerprint,
        verb: Verb<'_>,
        Operands { io, extra }: Operands<'_>,
    ) -> Result<()> {
        // This takes a number, so it must come after all checks.
        let Lane { epoch, number: lane, step, .. } = *self;
        let fingerprint = Fingerprint { epoch, lane, step, seq: next(&mut self.seq), ..print };
        let payload = io.len();
        let stats = self.stats.of(fingerprint.kind);
        stats.calls.fetch_add(1, Relaxed);
        stats.payload_bytes.fetch_add(payload as u64, Relaxed);
        let deadline = Deadline::after(options.timeout.unwrap_or(self.timeout));
        let extra = RefCell::new(extra);
        let cx = OpContext { fingerprint, deadline, health: &self.health, stats, label: options.label, extra: &extra };
        let queued = self.queued.take();
        let running = self.recorder.as_ref().map(|r| r.begin(queued, &fingerprint, payload, options.label));
        let result = by.unwrap_or(self.collective.as_mut()).run(&cx, verb, io).map_err(|error| {
            if error.is_argument() {
                return error;
            }
            // The error names this rank's operation even if another rank found the first cause.
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

/// The lanes of one engine. The first operation that needs the collectives by host connects them.
pub struct Lanes {
    /// The lane of all ranks.
    pub global: Lane,
    /// Connects the collectives by host. `None` for a lane that belongs to no [`Group`].
    group: Option<Group>,
    hosts: Option<Hier>,
    /// Devices of the buckets that are communicated on the lanes. [`Lanes::end`] notifies them.
    devices: Vec<Arc<dyn Device>>,
}

impl From<Lane> for Lanes {
    /// Returns lanes that have only the global one, for tests and benchmarks, whose lane belongs to no group.
    fn from(global: Lane) -> Lanes {
        Lanes { global, group: None, hosts: None, devices: Vec::new() }
    }
}

impl Lanes {
    /// Opens the global lane of a group. Collective. Returns the errors of [`Group::lane`].
    pub fn of(group: &Group) -> Result<Lanes> {
        Ok(Lanes { global: group.lane()?, group: Some(group.clone()), hosts: None, devices: Vec::new() })
    }

    /// Declares that the next operation was queued with this ticket, or was not queued (`None`). Returns the previous
    /// ticket if no operation has used it.
    pub fn expect(&mut self, ticket: Option<Ticket>) -> Option<Ticket> {
        std::mem::replace(&mut self.global.queued, ticket)
    }

    /// Prepares the devices of the buckets that are communicated from now on.
    ///
    /// # Errors
    /// The error of a device that cannot be prepared.
    pub fn prepare(&mut self, devices: Vec<Arc<dyn Device>>) -> Result<()> {
        devices.iter().try_for_each(|device| device.prepare())?;
        self.devices = devices;
        Ok(())
    }

    /// See [`crate::collective::Collective::end`] and [`Device::end`].
    pub fn end(&mut self) {
        self.devices.drain(..).for_each(|device| device.end());
        self.global.end();
        if let Some(hosts) = &mut self.hosts {
            hosts.end();
        }
    }

    /// True if an all_reduce, `hierarchical` or not, works on memory of this device.
    pub fn reaches(&self, place: DeviceRef<'_>, hierarchical: bool) -> bool {
        self.global.reaches(place) && (place.is_none() || !hierarchical || self.route_is_hierarchical())
    }

    /// Runs a verb on all ranks. The result is equal on all ranks.
    ///
    /// With [`flags::HIERARCHICAL`], the ranks of one host combine first, even if the collective of the global lane is
    /// flat. The result of an all_reduce then equals that of a hierarchical collective bitwise, and that of a flat one
    /// within rounding. In the verbs over exchange, each host is then one member (see [`crate::collective::Hier`]), so
    /// on one host a compressed all_reduce gives the bits of the plain one. Returns the errors of [`Lane::run`].
    pub fn run<'a>(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        verb: Verb<'_>,
        operands: impl Into<Operands<'a>>,
    ) -> Result<()> {
        if options.flags & flags::HIERARCHICAL == 0 {
            self.global.run(options, dtype, verb, operands)
        } else {
            self.run_by_host(*options, dtype, verb, operands.into())
        }
    }
}

/// A collective that works only in the process that built it. A forked child must not use it, because its descriptors
/// are closed there, and must not drop the owners of those descriptors.
///
/// The first operation on memory of a device wraps the collective with that device's.
pub(super) struct ProcessBound {
    /// Registrations that end before the collective closes the descriptors.
    fork_fds: Vec<ForkFd>,
    /// `None` only during drop.
    inner: Option<Box<dyn Collective>>,
    owner: OwnerProcess,
    /// Factories of devices whose memory no operation has used yet.
    unused: Vec<Arc<dyn CollectiveFactory>>,
    /// Ranks of each host, for the factories.
    hosts: Vec<Vec<usize>>,
}

impl ProcessBound {
    /// Binds the collective of a lane on these hosts to the process `owner`. `fork_fds` are its descriptors.
    pub(super) fn new(
        inner: Box<dyn Collective>,
        unused: Vec<Arc<dyn CollectiveFactory>>,
        hosts: Vec<Vec<usize>>,
        fork_fds: Vec<ForkFd>,
        owner: OwnerProcess,
    ) -> ProcessBound {
        ProcessBound { fork_fds, inner: Some(inner), owner, unused, hosts }
    }

    fn inner(&self) -> &dyn Collective {
        self.inner.as_deref().expect("there until drop")
    }

    /// Returns the collective for memory in this place, or an error in a forked child.
    fn checked(&mut self, place: DeviceRef<'_>) -> Result<&mut dyn Collective> {
        self.owner.check()?;
        if let Some(device) = place {
            for factory in self.unused.extract_if(.., |factory| factory.device() == device.kind()) {
                self.inner = self.inner.take().map(|inner| factory.wrap(inner, &self.hosts));
            }
        }
        Ok(self.inner.as_deref_mut().expect("there until drop"))
    }
}

impl Drop for ProcessBound {
    fn drop(&mut self) {
        if self.owner.is_current() {
            self.fork_fds.clear();
        } else {
            std::mem::forget(self.inner.take());
        }
    }
}

impl Collective for ProcessBound {
    same_ranks_as!(self => self.inner());

    fn codec_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        self.checked(place)?.codec_on(place, codec, dtype)
    }

    fn reaches(&self, place: DeviceRef<'_>) -> bool {
        let serves = |device: &Arc<dyn Device>| self.unused.iter().any(|factory| factory.device() == device.kind());
        self.inner().reaches(place) || place.is_some_and(serves)
    }

    fn average(&mut self, cx: &OpContext<'_>, inputs: &[Option<Buffer<'_>>], into: BufferMut<'_>) -> Result<()> {
        self.checked(into.device())?.average(cx, inputs, into)
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        self.checked(io.device()?)?.run(cx, verb, io)
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        let sent = sends.iter().find_map(|message| message.data.device());
        let place = sent.or_else(|| recvs.iter().find_map(|message| message.data.device()));
        let inner = self.checked(place)?;
        inner.exchange(cx, sends, recvs)
    }

    fn end(&mut self) {
        if let Ok(inner) = self.checked(None) {
            inner.end();
        }
    }
}

/// Returns the number of elements as the fingerprint counts them: of the whole tensor for [`Layout::Equal`], and of one
/// shard otherwise.
fn count_of(verb: Verb<'_>, dtype: DType, io: &Io<'_>, rank: usize, size: usize) -> Result<usize> {
    if let Some(op) = verb.op() {
        op.check(dtype)?;
    }
    if let Some(root) = verb.root() {
        check_root(root, size)?;
    }
    if let Verb::AllToAllV { send, recv } = verb {
        return check_layouts(dtype, io, (&send, &recv), rank, size).map(|()| 0);
    }
    let (layout, uses) = (verb.layout(), verb.uses(rank));
    let (src, dst) = match io {
        Io::InPlace(data) => {
            let all = dtype.elements_in(data.len(), "the buffer")?;
            return match layout {
                Layout::Equal | Layout::Parts => Ok(all),
                Layout::EqualShards | Layout::Grows | Layout::Shrinks => shard(all, size, "the buffer"),
            };
        }
        Io::Split { .. }
            if matches!(verb, Verb::Broadcast { .. } | Verb::CompressedAllReduce(_) | Verb::CompressedRing { .. }) =>
        {
            return Err(Error::InvalidArgument(format!("{} works in place, on one buffer", verb.kind().name())));
        }
        Io::Split { src, dst } => (src.len(), dst.len()),
    };
    // A buffer that is ignored may have any size, so only the used buffers are checked.
    let source = |()| dtype.elements_in(src, "the source");
    let destination = |()| dtype.elements_in(dst, "the destination");
    match (layout, uses) {
        (Layout::Equal | Layout::Parts, Uses::SourceOnly) => source(()),
        (Layout::Equal | Layout::Parts, Uses::DestinationOnly) => destination(()),
        (Layout::Equal | Layout::EqualShards | Layout::Parts, _) => {
            let (src, dst) = (source(())?, destination(())?);
            if src != dst {
                return Err(Error::InvalidArgument(format!("the source has {src} elements, the destination {dst}")));
            }
            if matches!(layout, Layout::Equal) { Ok(src) } else { shard(src, size, "the source") }
        }
        (Layout::Grows, Uses::SourceOnly) => source(()),
        (Layout::Grows, Uses::DestinationOnly) => shard(destination(())?, size, "the destination"),
        (Layout::Grows, Uses::Both) => {
            let (one, all) = (source(())?, destination(())?);
            times(one, all, size, "source", "destination").map(|()| one)
        }
        (Layout::Shrinks, Uses::DestinationOnly) => destination(()),
        (Layout::Shrinks, Uses::SourceOnly) => shard(source(())?, size, "the source"),
        (Layout::Shrinks, Uses::Both) => {
            let (all, one) = (source(())?, destination(())?);
            times(one, all, size, "destination", "source").map(|()| one)
        }
    }
}

fn shard(all: usize, size: usize, what: &str) -> Result<usize> {
    if !all.is_multiple_of(size) {
        return Err(Error::InvalidArgument(format!("{what} has {all} elements, not a multiple of the {size} ranks")));
    }
    Ok(all / size)
}

fn times(one: usize, all: usize, size: usize, small: &str, large: &str) -> Result<()> {
    if one.checked_mul(size) != Some(all) {
        return Err(Error::InvalidArgument(format!(
            "the {large} has {all} elements, not {size} times (once per rank) the {one} of the {small}"
        )));
    }
    Ok(())
}

/// Checks that `root` is a rank of a group of `size`.
fn check_root(root: usize, size: usize) -> Result<u32> {
    match u32::try_from(root) {
        Ok(code) if root < size => Ok(code),
        _ => Err(Error::InvalidArgument(format!("root {root} is not a rank of this group of {size}"))),
    }
}

/// Returns the counter's value and increments the counter.
fn next(counter: &mut u64) -> u64 {
    let now = *counter;
    *counter += 1;
    now
}
