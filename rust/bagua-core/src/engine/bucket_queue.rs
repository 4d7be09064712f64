//! The engine: a strictly ordered queue of buckets.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::handle::{Handle, timed_out};
use super::worker::{Job, LaneWorker};
use crate::bucket::{Bucket, CheckedOut};
use crate::error::{Error, Result};
use crate::group::{Group, Lane, Lanes};
use crate::health::GroupHealth;
use crate::memory::{Device, DeviceRef, Region, name_of};
use crate::op::BucketCx;
use crate::recorder::{Announced, What};
use crate::schedule::{Schedule, TensorIndex};
use crate::sync::AtomicBool;
use crate::types::{DType, compared_step};
use crate::wait::{Waited, lock, wait_once};

/// A strictly ordered queue of buckets, with its own lane and communication thread.
pub struct Engine {
    /// First field, so that the lane is dropped before the group.
    worker: LaneWorker,
    /// Keeps the group alive as long as the engine. `None` for an engine on bare lanes.
    _group: Option<Group>,
    state: Mutex<BucketProgress>,
}

#[derive(Default)]
struct BucketProgress {
    schedule: Schedule,
    buckets: Vec<SharedBucket>,
    /// By bucket: true if the bucket was sent since the last `wait`.
    went: Vec<bool>,
    /// Buckets that were sent and that no `wait` has reported yet, in order.
    pending: Vec<Pending>,
    /// Devices with results of finished buckets for which no `wait` has made its stream wait yet.
    written: Vec<Arc<dyn Device>>,
    sent: u64,
    /// The training step that all ranks compare. 0 if they do not compare steps.
    step: u32,
}

#[derive(Clone)]
struct Pending {
    /// Position among all sent buckets, starting at 1.
    number: u64,
    handle: Handle,
    device: Option<Arc<dyn Device>>,
}

impl Engine {
    /// Opens a lane and starts the thread. Collective: all ranks must call it.
    pub fn new(group: &Group, name: &str) -> Result<Engine> {
        let mut engine = Engine::over(Lanes::of(group)?, group.health().clone(), name)?;
        engine._group = Some(group.clone());
        Ok(engine)
    }

    /// Creates an engine on the lanes of a group with this health. For tests and benchmarks, whose groups are not made
    /// of processes.
    pub fn over(lanes: impl Into<Lanes>, health: Arc<GroupHealth>, name: &str) -> Result<Engine> {
        let worker = LaneWorker::over(lanes, health, &format!("engine '{name}'"));
        worker.start()?;
        Ok(Engine { worker, _group: None, state: Mutex::new(BucketProgress::default()) })
    }

    /// Waits for pending buckets, then replaces all buckets and drops the ready marks of an incomplete step.
    ///
    /// The buckets are communicated in the order given, which must be the same on all ranks.
    ///
    /// # Errors
    /// `InvalidArgument` if a tensor name appears twice, or if two tensors share memory. The error names both places,
    /// and the old buckets stay registered.
    pub fn register(&self, buckets: Vec<SharedBucket>) -> Result<()> {
        self.worker.check()?;
        wait_once(None, |limit| self.settle(limit, Follow::NoStream), |after| self.timed_out(after))?;
        let schedule = schedule_of(&buckets)?;
        check_memory(&buckets)?;
        let devices: Vec<_> = buckets.iter().filter_map(|bucket| bucket.lock().device().cloned()).collect();
        if !devices.is_empty() {
            let job: Job = Box::new(move |lanes| lanes.prepare(devices));
            self.worker.submit("the preparation of devices", job)?.wait(None)?;
        }
        buckets.iter().try_for_each(|bucket| bucket.lock().set_step(0))?;
        let mut state = self.state();
        let went = vec![false; buckets.len()];
        *state = BucketProgress { schedule, went, buckets, ..std::mem::take(&mut *state) };
        Ok(())
    }

    /// Sets the training step that ranks compare for buckets sent from now on, starting at 1. 0, the initial value,
    /// turns the check off.
    ///
    /// A mismatch is raised if another rank is in another step, or if only one of the two has just loaded a state
    /// (`after_load`).
    pub fn set_step(&self, step: u32, after_load: bool) {
        self.state().step = compared_step(step, after_load);
    }

    /// Returns the names of the registered tensors without padding. A tensor's number is its position in this list.
    pub fn tensors(&self) -> Vec<String> {
        self.state().schedule.names().map(str::to_owned).collect()
    }

    /// Marks the tensor with this number (see [`Engine::tensors`]) as final for this step: see [`Bucket::mark_ready`].
    /// Never waits for communication.
    ///
    /// # Errors
    /// The errors of [`Bucket::mark_ready`], and `InvalidArgument` if the number is unknown, or if the tensor was
    /// already marked and its bucket has not been communicated since.
    pub fn mark_ready(&self, tensor: usize, region: Option<Region>, stream: Option<usize>) -> Result<()> {
        self.worker.check()?;
        let mut state = self.state();
        let BucketProgress { schedule, buckets, .. } = &mut *state;
        let released = schedule.mark_ready(tensor, |TensorIndex { bucket, tensor }| {
            buckets[bucket].lock().mark_ready(tensor, region, stream).map_err(|error| self.failed(error))
        });
        for bucket in released? {
            // The state stays locked, so that buckets of two threads cannot overtake each other.
            if let Err(error) = self.dispatch(&mut state, bucket) {
                state.schedule.reset();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Poisons the group if an error on the calling thread is a failure of a device instead of a wrong argument.
    fn failed(&self, error: Error) -> Error {
        if error.is_argument() { error } else { self.worker.health().fail(error) }
    }

    fn dispatch(&self, state: &mut BucketProgress, bucket: usize) -> Result<()> {
        let shared = &state.buckets[bucket];
        let in_flight = shared.check_out()?;
        let device = in_flight.device().cloned();
        let what = format!("bucket '{}'", shared.name());
        let name = shared.name().to_owned();
        let op = Announced {
            what: What::Job(in_flight.memory.ops.first().map_or("no operation", |op| op.name())),
            dtype: Some(shared.dtype()),
            count: shared.bytes() / shared.dtype().size(),
            bytes: shared.bytes(),
            root: None,
            label: &name,
        };
        let stopping = self.worker.stopping();
        let step = state.step;
        let job: Job = Box::new(move |lanes| {
            lanes.global.set_step(step);
            let done = run_ops(in_flight, &stopping, lanes);
            lanes.global.set_step(0);
            done
        });
        let handle = self.worker.submit_fatal(&what, &op, job)?;
        state.sent += 1;
        let number = state.sent;
        state.pending.push(Pending { number, handle, device });
        state.went[bucket] = true;
        Ok(())
    }

    /// Blocks until every bucket that was sent is done, and returns their number. For buckets on a device, it does not
    /// wait for the device: work that is queued on the device's own stream from now on runs after the results.
    ///
    /// # Errors
    /// The first error of the step. `InvalidArgument` if a bucket is only partly ready: the error names the missing
    /// tensors, and the step starts again.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<usize> {
        wait_once(timeout, |limit| self.wait_for(limit, None), |after| self.timed_out(after))
    }

    /// Waits for the step like [`Engine::wait`], for at most `limit`. Returns `Pending` if a bucket is not done by
    /// then. Work on `stream` runs after the results: see [`Device::order`].
    pub fn wait_for(&self, limit: Duration, stream: Option<usize>) -> Waited<usize> {
        if let Err(error) = self.worker.check_process() {
            return Waited::Done(Err(error));
        }
        match self.settle(limit, Follow::Stream(stream)) {
            Waited::Pending => Waited::Pending,
            // `end_step` checks the worker only after the buckets, because a bucket's error has the same cause and says
            // more.
            Waited::Done(done) => Waited::Done(done.and_then(|done| self.end_step(done))),
        }
    }

    /// Returns the error of a wait whose timeout passed.
    pub fn timed_out(&self, after: Duration) -> Error {
        timed_out(after, self.worker.world_rank())
    }

    fn end_step(&self, done: usize) -> Result<usize> {
        let mut state = self.state();
        let missing: Vec<String> = state.schedule.blocking().into_iter().map(quoted).collect();
        if state.pending.is_empty() {
            state.went.fill(false);
        }
        // A complete step succeeds, even if a faster rank has failed in its next step. The next call returns its error.
        if done == 0 || !missing.is_empty() {
            self.worker.check()?;
        }
        if missing.is_empty() {
            return Ok(done);
        }
        state.schedule.reset();
        let verb = if missing.len() == 1 { "tensor was" } else { "tensors were" };
        Err(Error::InvalidArgument(format!(
            "{}: the step is incomplete, {} {verb} not marked ready: {}",
            self.worker.name(),
            missing.len(),
            missing.join(", ")
        )))
    }

    /// Waits for the buckets sent so far, for at most `limit`. Returns their number, or the first error among them.
    fn settle(&self, limit: Duration, follow: Follow) -> Waited<usize> {
        let (pending, written) = {
            let state = self.state();
            (state.pending.clone(), state.written.clone())
        };
        let start = Instant::now();
        let mut first = None;
        for Pending { handle, .. } in &pending {
            match handle.wait_for(limit.saturating_sub(start.elapsed())) {
                Waited::Pending => return Waited::Pending,
                Waited::Done(Ok(())) => {}
                Waited::Done(Err(error)) => {
                    first.get_or_insert(error);
                }
            }
        }
        if let (None, Follow::Stream(stream)) = (&first, &follow) {
            // This comes before the buckets count as reported. If a stream cannot be ordered after them, the next wait
            // reports them instead.
            let devices = pending.iter().filter_map(|pending| pending.device.as_ref()).chain(&written);
            for device in devices {
                if let Err(error) = device.order(*stream) {
                    return Waited::Done(Err(self.failed(error)));
                }
            }
        }
        let mut state = self.state();
        let followed = match follow {
            Follow::Stream(_) => pending.last().map_or(0, |last| last.number),
            Follow::NoStream => 0,
        };
        if followed > 0 || matches!(follow, Follow::Stream(_)) {
            state.written.retain(|device| !written.iter().any(|other| Arc::ptr_eq(device, other)));
        }
        let BucketProgress { pending, written, .. } = &mut *state;
        // Buckets that are reported here although no stream follows them are left to a later wait.
        let unfollowed = pending.iter().filter(|done| done.number > followed && done.handle.is_completed());
        written.extend(unfollowed.filter_map(|done| done.device.clone()));
        // Meanwhile another thread may have waited for some of these buckets and sent further ones.
        let before = state.pending.len();
        state.pending.retain(|pending| !pending.handle.is_completed());
        let done = before - state.pending.len();
        Waited::Done(match first {
            None => Ok(done),
            Some(error) => {
                state.schedule.reset();
                state.went.fill(false);
                Err(error)
            }
        })
    }

    /// Returns the names of the tensors that are not ready, of buckets that were not sent since the last `wait`.
    pub fn unready(&self) -> Vec<String> {
        let state = self.state();
        let waiting = (0..state.buckets.len()).filter(|bucket| !state.went[*bucket]);
        waiting.flat_map(|bucket| state.schedule.missing_in(bucket)).map(str::to_owned).collect()
    }

    /// Returns the worker. Its jobs are in order with the buckets.
    pub fn worker(&self) -> &LaneWorker {
        &self.worker
    }

    /// Runs a job on this thread, after every bucket that was sent before.
    pub fn run<T>(&self, job: impl FnOnce(&mut Lane) -> Result<T>) -> Result<T> {
        self.worker.run(|lanes| job(&mut lanes.global))
    }

    /// Ends the thread: see [`LaneWorker::shutdown`].
    pub fn shutdown(&self) {
        self.worker.shutdown();
    }

    fn state(&self) -> MutexGuard<'_, BucketProgress> {
        lock(&self.state)
    }
}

/// The work that must not start before the buckets of a wait have their results.
#[derive(Clone, Copy)]
enum Follow {
    /// No work yet. A later wait names a stream.
    NoStream,
    /// All work that is queued on this stream of the buckets' devices after the wait.
    Stream(Option<usize>),
}

/// A [`Bucket`] that its owner shares with a communication thread. Cheap to clone; all clones are the same bucket.
///
/// The lock is held only for moments: while the bucket is communicated, its memory is checked out and the lock is free.
#[derive(Clone)]
pub struct SharedBucket {
    name: Arc<str>,
    dtype: DType,
    bytes: usize,
    bucket: Arc<Mutex<Bucket>>,
}

impl SharedBucket {
    /// Shares a bucket.
    pub fn new(bucket: Bucket) -> SharedBucket {
        SharedBucket {
            name: bucket.name().into(),
            dtype: bucket.dtype(),
            bytes: bucket.bytes(),
            bucket: Arc::new(Mutex::new(bucket)),
        }
    }

    /// Returns the bucket's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the element type of all tensors.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the size of all tensors in bytes, including padding.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Locks the bucket. Hold the lock only for a moment, to access operations, extra tensors or the step.
    pub fn lock(&self) -> MutexGuard<'_, Bucket> {
        // No method of `Bucket` panics in the middle of a change.
        lock(&self.bucket)
    }

    /// Takes the bucket's memory and operations for one communication.
    fn check_out(&self) -> Result<InFlight> {
        let memory = self.lock().check_out()?;
        Ok(InFlight { bucket: self.clone(), memory })
    }
}

/// A bucket that is being communicated. Dropping it returns the memory to the bucket, so that no error, no panic and no
/// job that never ran can lose it.
struct InFlight {
    bucket: SharedBucket,
    memory: CheckedOut,
}

impl InFlight {
    fn device(&self) -> DeviceRef<'_> {
        self.memory.regions.first().and_then(Region::device)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.bucket.lock().check_in(std::mem::take(&mut self.memory));
    }
}

fn run_ops(mut in_flight: InFlight, stopping: &AtomicBool, lanes: &mut Lanes) -> Result<()> {
    let InFlight { bucket, memory } = &mut in_flight;
    let bucket = bucket.name();
    let CheckedOut { regions, extra, ops, step, padding } = memory;
    for op in &*ops {
        if stopping.load(Ordering::Acquire) {
            return Err(Error::Aborted(format!(
                "the engine was shut down before '{}' of bucket '{bucket}'",
                op.name()
            )));
        }
        let (step, padding) = (*step, *padding);
        op.run(&mut BucketCx { bucket, step, tensors: regions, padding, extra, lanes })?;
    }
    in_flight.device().map_or(Ok(()), |device| device.finish())
}

fn schedule_of(buckets: &[SharedBucket]) -> Result<Schedule> {
    let mut owners = std::collections::HashMap::new();
    let mut names = HashSet::new();
    let mut layout = Vec::with_capacity(buckets.len());
    for shared in buckets {
        if !names.insert(shared.name()) {
            return Err(Error::InvalidArgument(format!("two buckets are named '{}'", shared.name())));
        }
        let bucket = shared.lock();
        bucket.check_idle()?;
        for (name, _) in bucket.tensors().filter(|(_, padding)| !padding) {
            if let Some(other) = owners.insert(name.to_owned(), shared.name()) {
                return Err(Error::InvalidArgument(format!(
                    "tensor '{name}' is in bucket '{other}' and in bucket '{}'",
                    shared.name()
                )));
            }
        }
        layout.push(bucket.tensors().map(|(name, padding)| (name.to_owned(), padding)).collect());
    }
    Schedule::new(layout)
}

/// Returns an error if two tensors share a byte, because the results would depend on which bucket finishes last.
fn check_memory(buckets: &[SharedBucket]) -> Result<()> {
    let mut spans = Vec::new();
    for shared in buckets {
        let bucket = shared.lock();
        let regions = bucket.regions().unwrap_or_default();
        for ((name, _), region) in bucket.tensors().zip(regions).filter(|(_, region)| !region.is_empty()) {
            let place = format!("'{name}' of bucket '{}'", bucket.name());
            // Devices are compared by name, because two buckets may hold different objects for the same device.
            let device = name_of(region.device()).to_owned();
            spans.push((device, region.address(), region.address() + region.len(), place));
        }
    }
    spans.sort();
    match spans.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2) {
        None => Ok(()),
        Some(pair) => Err(Error::InvalidArgument(format!("tensors {} and {} share memory", pair[0].3, pair[1].3))),
    }
}

fn quoted(name: &str) -> String {
    format!("'{name}'")
}
