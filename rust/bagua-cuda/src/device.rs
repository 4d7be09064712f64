//! A device for the core, one value per operation or bucket. It knows when the operation may start and when it is done.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bagua_core::coded;
use bagua_core::error::{Error, Result};
use bagua_core::memory::{Device, DeviceRef, Stamp};
use bagua_core::wait::{Waited, lock};

use crate::device_lane::{Copier, LaneDevice, Use, wait_until_reached};
use crate::driver_functions::before_anything_began;
use crate::event::Event;

/// Kind of a CUDA device in fingerprints, as numbered by DLPack.
pub const KIND: u8 = 2;

/// The legacy stream, as numbered by DLPack.
const LEGACY: usize = 1;

coded! {
    /// The collective that the caller requests: the value of `BAGUA_CUDA_COLLECTIVE`.
    #[derive(Default)]
    #[allow(missing_docs)]
    Requested {
        #[default]
        Auto = 0, "auto";
        Nccl = 1, "nccl";
        Staged = 2, "staged";
    }
}

/// A value of `state`: no work was started on the device.
const NOTHING_BEGAN: u8 = 0;
/// A value of `state`: [`OperationDevice::done`] was recorded after all copies.
const RECORDED: u8 = 1;
/// A value of `state`: recording `done` failed, so it is unknown when the device is done.
const LOST: u8 = 2;

/// The state of an operation that has not started.
#[derive(Default)]
struct Marks {
    /// Events that the operation waits for. If tensors were marked, with the stream on which they were.
    start: Vec<(Option<usize>, Arc<Event>)>,
    /// Events that were waited for and can be recorded again.
    spare: Vec<Arc<Event>>,
    /// Objects to keep until the device is done with the operation.
    kept: Vec<Box<dyn Any + Send>>,
}

/// The device of an operation, or of the tensors of a bucket.
pub struct OperationDevice {
    name: String,
    /// State of the lane that runs the operations. For a bucket, registration with another engine replaces it.
    lane_device: Mutex<Arc<LaneDevice>>,
    /// For a bucket that is being registered: state of the new engine's lane.
    next_lane_device: Mutex<Option<Arc<LaneDevice>>>,
    pub(crate) requested: Requested,
    stream: usize,
    /// Streams besides the caller's that have work on the arrays.
    producers: Vec<usize>,
    marks: Mutex<Marks>,
    /// Event recorded after the operation's last copy. Created when it is needed.
    done: Mutex<Option<Arc<Event>>>,
    state: AtomicU8,
    /// For a bucket: the owner of the tensors.
    owner: Mutex<Vec<Box<dyn Any + Send>>>,
    /// Set if the operation fails on the device after its call has returned.
    failure: Arc<OnceLock<Error>>,
    /// True if the ranks compare their calls before putting work on the device: `BAGUA_CUDA_CHECK`.
    pub(crate) check: bool,
    /// For a bucket: number of its last registration with an engine, counted over the process. 0 before the first.
    registration: AtomicU64,
}

static REGISTRATIONS: AtomicU64 = AtomicU64::new(0);

impl OperationDevice {
    /// Creates the device of an operation that starts after the work of `stream` and `producers`. Fails with
    /// `NotImplemented` for a stream that is being captured, and `Device`.
    pub fn new(
        lane_device: &Arc<LaneDevice>,
        requested: Requested,
        stream: usize,
        producers: Vec<usize>,
    ) -> Result<OperationDevice> {
        lane_device.release();
        lane_device.context().refuse_capture(&[stream])?;
        lane_device.context().refuse_capture(&producers)?;
        let done = Arc::new(Event::new(lane_device.context())?);
        Ok(OperationDevice::unused(lane_device, requested, (stream, producers), Some(done), Vec::new()))
    }

    /// Creates the device of a bucket's tensors, without using it yet. Drops `owner` when the device is done with them.
    pub fn of_bucket(
        lane_device: &Arc<LaneDevice>,
        requested: Requested,
        owner: Box<dyn Any + Send>,
    ) -> OperationDevice {
        OperationDevice::unused(lane_device, requested, (LEGACY, Vec::new()), None, vec![owner])
    }

    /// Creates a device on which no operation was started.
    fn unused(
        lane_device: &Arc<LaneDevice>,
        requested: Requested,
        (stream, producers): (usize, Vec<usize>),
        done: Option<Arc<Event>>,
        owner: Vec<Box<dyn Any + Send>>,
    ) -> OperationDevice {
        OperationDevice {
            name: format!("cuda:{}", lane_device.context().device()),
            requested,
            stream,
            producers,
            marks: Mutex::default(),
            done: Mutex::new(done),
            lane_device: Mutex::new(Arc::clone(lane_device)),
            next_lane_device: Mutex::default(),
            state: AtomicU8::new(NOTHING_BEGAN),
            owner: Mutex::new(owner),
            failure: Arc::default(),
            check: false,
            registration: AtomicU64::new(0),
        }
    }

    /// Sets whether all ranks first compare their calls over the host.
    #[must_use]
    pub fn checked(mut self, check: bool) -> OperationDevice {
        self.check = check;
        self
    }

    /// Returns the number of the bucket's last registration, or `None` for operations.
    pub(crate) fn registration(&self) -> Option<u64> {
        Some(self.registration.load(Ordering::Relaxed)).filter(|number| *number != 0)
    }

    /// Returns the state of the lane on the device.
    pub fn lane_device(&self) -> Arc<LaneDevice> {
        Arc::clone(&lock(&self.lane_device))
    }

    /// Sets the lane that the bucket's next registration uses.
    pub fn move_to(&self, lane_device: Arc<LaneDevice>) {
        *lock(&self.next_lane_device) = Some(lane_device);
    }

    /// Keeps `what` as long as the owner of the bucket's tensors.
    pub fn keep_always(&self, what: Box<dyn Any + Send>) {
        lock(&self.owner).push(what);
    }

    /// Keeps `what` until the device is done with the bucket's current or next communication.
    pub fn keep_marked(&self, what: Box<dyn Any + Send>) {
        lock(&self.marks).kept.push(what);
    }

    /// Makes the operation start after the work that is on the streams now. Never waits for the device. Fails with
    /// `Device`.
    pub fn start(&self) -> Result<()> {
        let lane_device = self.lane_device();
        let mut start = Vec::with_capacity(1 + self.producers.len());
        for stream in self.producers.iter().chain([&self.stream]) {
            let event = Event::new(lane_device.context())?;
            event.record(*stream)?;
            start.push((None, Arc::new(event)));
        }
        lock(&self.marks).start = start;
        Ok(())
    }

    /// Makes the caller's stream wait for the work that is on the producers' streams now. Fails with `Device`.
    pub fn follow_producers(&self) -> Result<()> {
        for stream in &self.producers {
            let event = Event::new(self.lane_device().context())?;
            event.record(*stream)?;
            event.order(self.stream)?;
        }
        Ok(())
    }

    /// Copies within the device on the caller's stream.
    ///
    /// # Safety
    /// The conditions of [`crate::context::Context::copy`].
    pub unsafe fn copy(&self, to: usize, from: usize, bytes: usize) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.lane_device().context().copy(to, from, bytes, self.stream) }
    }

    /// Puts work on the caller's stream after the work of the producers, and marks its end on the device. Returns the
    /// errors of `work`, and `Device`.
    pub(crate) fn on_stream(&self, work: impl FnOnce(usize) -> Result<()>) -> Result<()> {
        self.follow_producers()?;
        let outcome = work(self.stream);
        // Recorded even after an error, because some of the work may be on the stream.
        let recorded = self.done().and_then(|done| done.record(self.stream));
        self.ended(recorded.is_ok());
        outcome.and(recorded)
    }

    /// Makes our streams wait for the operation's start. `streams` must be all that the operation uses, because later
    /// calls have no effect until a tensor is marked.
    pub(crate) fn order_after_start(&self, streams: &[usize]) -> Result<()> {
        let mut marks = lock(&self.marks);
        for (_, event) in &marks.start {
            streams.iter().try_for_each(|stream| event.order(*stream))?;
        }
        let Marks { start, spare, .. } = &mut *marks;
        // An event that others also use must not be recorded again.
        spare.extend(start.drain(..).map(|(_, event)| event).filter(|event| Arc::strong_count(event) == 1));
        Ok(())
    }

    pub(crate) fn done(&self) -> Result<Arc<Event>> {
        let mut done = lock(&self.done);
        match &*done {
            Some(done) => Ok(Arc::clone(done)),
            None => Ok(Arc::clone(done.insert(Arc::new(Event::new(self.lane_device().context())?)))),
        }
    }

    /// Marks the operation's end on the device: behind the copies to it and, if `running`, behind those from it.
    pub(crate) fn mark_end(&self, copier: &mut Copier, running: bool) -> Result<()> {
        let mark = || {
            if running {
                copier.arrived[0].record(copier.down.handle())?;
                copier.arrived[0].order(copier.up.handle())?;
            }
            let done = self.done()?;
            done.record(copier.up.handle())?;
            self.lane_device().set_last(&done);
            Ok(())
        };
        let marked = mark();
        self.ended(marked.is_ok());
        marked
    }

    /// Runs `work`, which uses the lane's streams. Marks the operation's end on the device even if `work` fails.
    pub(crate) fn on_lane<T>(&self, work: impl FnOnce(&LaneDevice, &mut Copier) -> Result<T>) -> Result<T> {
        let lane_device = self.lane_device();
        lane_device.copier(|copier| {
            let begun = self.order_after_start(&[copier.down.handle(), copier.up.handle()]);
            let outcome = begun.and_then(|()| work(&lane_device, copier));
            if outcome.is_err() {
                // The error of `work` says more. `mark_end` stores its own error in the state.
                let _ = self.mark_end(copier, true);
            }
            outcome
        })
    }

    /// Returns the place of an error that occurs on the device after the call has returned.
    pub(crate) fn failure(&self) -> &Arc<OnceLock<Error>> {
        &self.failure
    }

    fn failed(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Sets whether `done` was recorded behind all copies.
    pub(crate) fn ended(&self, recorded: bool) {
        self.state.store(if recorded { RECORDED } else { LOST }, Ordering::Release);
    }

    /// Keeps what the operation uses until the device is done with it. Called on the communication thread at the end.
    pub fn keep(&self, what: Box<dyn Any + Send>) {
        match self.state.load(Ordering::Acquire) {
            NOTHING_BEGAN => drop(what),
            RECORDED => match &*lock(&self.done) {
                Some(done) => self.lane_device().hold(done, what),
                None => drop(what),
            },
            _ => std::mem::forget(what),
        }
    }

    /// Keeps `what` until the returned value is dropped, and then until the device is done with the operation.
    pub fn keeper(self: &Arc<OperationDevice>, what: Box<dyn Any + Send>) -> Keeper {
        Keeper { place: Arc::clone(self), kept: Some(what) }
    }

    /// Makes work that is put on `stream` (`None`: the call's) after this see the result. Does not wait for the device.
    /// Fails with `NotImplemented` for a stream that is being captured, `Device`, or the failure on the device.
    pub fn order(&self, stream: Option<usize>) -> Result<()> {
        let stream = stream.unwrap_or(self.stream);
        self.lane_device().context().refuse_capture(&[stream])?;
        self.failed()?;
        // A callback may have put work on a stream and marked it with an event that no operation has waited for.
        lock(&self.marks).start.iter().try_for_each(|(_, event)| event.order(stream))?;
        let done = lock(&self.done).clone();
        done.map_or(Ok(()), |done| done.order(stream))
    }

    /// Returns true if the device is done. Called after the operation.
    pub fn is_done(&self) -> bool {
        self.failure.get().is_some() || lock(&self.done).as_ref().is_none_or(|done| done.is_reached().unwrap_or(true))
    }

    /// Waits until the device is done, for at most `limit`. Called after the operation.
    pub fn wait_for(&self, limit: Duration) -> Waited<()> {
        let start = std::time::Instant::now();
        let mut late = false;
        let done = lock(&self.done).clone();
        let waited = done.map_or(Ok(()), |done| {
            wait_until_reached(&done, || {
                late = start.elapsed() >= limit;
                if late { Err(Error::other("late")) } else { self.failed() }
            })
        });
        if late && waited.is_err() { Waited::Pending } else { Waited::Done(waited.and_then(|()| self.failed())) }
    }
}

struct TimedMark {
    event: Event,
    lane_device: Arc<LaneDevice>,
}

impl Stamp for TimedMark {
    fn seconds_to(&self, later: &dyn Stamp) -> Result<f64> {
        let later: &dyn Any = later;
        let later: &TimedMark = later.downcast_ref().ok_or_else(|| Error::other("a mark of another device"))?;
        wait_until_reached(&later.event, || self.lane_device.check())?;
        self.event.seconds_to(&later.event)
    }
}

/// Keeps an object for a device: see [`OperationDevice::keeper`].
pub struct Keeper {
    place: Arc<OperationDevice>,
    kept: Option<Box<dyn Any + Send>>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(what) = self.kept.take() {
            self.place.keep(what);
        }
    }
}

/// Returns the CUDA device of a core's reference, or `None` for the host and for other devices.
pub(crate) fn place_of(device: DeviceRef<'_>) -> Option<&OperationDevice> {
    let device: &dyn Any = &**device?;
    device.downcast_ref()
}

impl std::fmt::Debug for OperationDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Device for OperationDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> u8 {
        KIND
    }

    unsafe fn copy_to_host(&self, from: NonNull<u8>, into: &mut [u8]) -> Result<()> {
        self.on_lane(|lane_device, copier| {
            lane_device.order_after_last(copier.down.handle())?;
            // SAFETY: guaranteed by the caller. The copies are waited for, or their end is marked.
            unsafe { copier.fetch(lane_device, from.as_ptr() as usize, into, |_| lane_device.check()) }
        })
    }

    unsafe fn copy_from_host(&self, from: &[u8], to: NonNull<u8>) -> Result<()> {
        self.on_lane(|lane_device, copier| {
            let up = copier.up.handle();
            lane_device.order_after_last(up)?;
            // SAFETY: as above.
            unsafe { copier.deliver(lane_device, from, to.as_ptr() as usize, up, |_| lane_device.check()) }?;
            copier.left.iter().try_for_each(|left| wait_until_reached(left, || lane_device.check()))
        })
    }

    fn prepare(&self) -> Result<()> {
        if let Some(next) = lock(&self.next_lane_device).take() {
            let done = lock(&self.done).take();
            // Copies of the old lane may still be running.
            lock(&self.marks).start.extend(done.map(|done| (None, done)));
            *lock(&self.lane_device) = next;
        }
        self.registration.store(REGISTRATIONS.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.lane_device().prepare()
    }

    fn mark(&self, stream: Option<usize>) -> Result<()> {
        let (lane_device, stream) = (self.lane_device(), stream.unwrap_or(self.stream));
        lane_device.context().refuse_capture(&[stream])?;
        let mut marks = lock(&self.marks);
        if let Some((_, event)) = marks.start.iter().find(|(of, _)| *of == Some(stream)) {
            // The handle may belong to another stream than when the event was recorded.
            event.order(stream)?;
            return event.record(stream);
        }
        let event = match marks.spare.pop() {
            Some(event) => event,
            None => Arc::new(Event::new(lane_device.context()).map_err(before_anything_began)?),
        };
        event.record(stream)?;
        marks.start.push((Some(stream), event));
        Ok(())
    }

    fn order(&self, stream: Option<usize>) -> Result<()> {
        OperationDevice::order(self, stream)
    }

    fn is_ready(&self) -> Result<bool> {
        for (_, event) in &lock(&self.marks).start {
            if !event.is_reached()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn stamp(&self) -> Result<Option<Box<dyn Stamp>>> {
        let event = self.on_lane(|lane_device, copier| {
            let event = Event::timed(lane_device.context())?;
            lane_device.order_after_last(copier.up.handle())?;
            event.record(copier.up.handle())?;
            self.mark_end(copier, false)?;
            Ok(event)
        })?;
        Ok(Some(Box::new(TimedMark { event, lane_device: self.lane_device() })))
    }

    fn finish(&self) -> Result<()> {
        let lane_device = self.lane_device();
        lane_device.release();
        let (marked, kept) = {
            let mut marks = lock(&self.marks);
            (!marks.start.is_empty(), std::mem::take(&mut marks.kept))
        };
        if marked {
            // None of our operations has waited for these marks, for example of work in a callback.
            self.on_lane(|_, copier| self.mark_end(copier, false))?;
        }
        if !kept.is_empty() {
            let end = lane_device.copier(|copier| {
                let end = Event::new(lane_device.context())?;
                end.record(copier.up.handle()).map(|()| end)
            });
            match end {
                Ok(end) => lane_device.hold(&Arc::new(end), Box::new(kept)),
                Err(error) => {
                    std::mem::forget(kept);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn end(&self) {
        let drained = self.lane_device().end();
        if !drained {
            self.ended(false);
        }
        let Marks { kept, .. } = std::mem::take(&mut *lock(&self.marks));
        match self.state.load(Ordering::Acquire) {
            LOST => std::mem::forget(kept),
            _ => self.state.store(NOTHING_BEGAN, Ordering::Release),
        }
        lock(&self.done).take();
    }

    unsafe fn gather(&self, from: &[(NonNull<u8>, usize)]) -> Result<Option<NonNull<u8>>> {
        self.on_lane(|lane_device, copier| {
            let down = copier.down.handle();
            lane_device.order_after_last(down)?;
            let first = copier.room(lane_device, Use::Gathered, from.iter().map(|(_, len)| len).sum())?;
            let mut at = first;
            for (piece, len) in from {
                // SAFETY: guaranteed by the caller. The room is ours and large enough.
                unsafe { lane_device.context().copy(at, piece.as_ptr() as usize, *len, down) }?;
                at += len;
            }
            // The next step may fail before it puts work on the device.
            self.mark_end(copier, true)?;
            Ok(NonNull::new(first as *mut u8))
        })
    }

    unsafe fn scatter(&self, to: &[(NonNull<u8>, usize)]) -> Result<()> {
        self.on_lane(|lane_device, copier| {
            let up = copier.up.handle();
            // The operation in between may have used a stream of another library.
            lane_device.order_after_last(up)?;
            let mut at = copier.room(lane_device, Use::Gathered, to.iter().map(|(_, len)| len).sum())?;
            for (piece, len) in to {
                // SAFETY: as in `gather`.
                unsafe { lane_device.context().copy(piece.as_ptr() as usize, at, *len, up) }?;
                at += len;
            }
            self.mark_end(copier, false)
        })
    }

    fn room(&self, len: usize) -> Result<NonNull<u8>> {
        // If the memory exists already, nothing is put on the device: only the first step may take the marks.
        let address = match self.lane_device().copier(|copier| Ok(copier.has_room(Use::Steps, len)))? {
            Some(address) => address,
            None => self.on_lane(|lane_device, copier| {
                // The steps of the last operation may have used a stream of another library.
                lane_device.order_after_last(copier.up.handle())?;
                let address = copier.room(lane_device, Use::Steps, len)?;
                self.mark_end(copier, true)?;
                Ok(address)
            })?,
        };
        NonNull::new(address as *mut u8).ok_or_else(|| Error::other("memory of a device at address 0"))
    }

    unsafe fn copy_in_operation(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize) -> Result<()> {
        self.on_lane(|lane_device, copier| {
            let up = copier.up.handle();
            lane_device.order_after_last(up)?;
            // SAFETY: guaranteed by the caller.
            unsafe { lane_device.context().copy(to.as_ptr() as usize, from.as_ptr() as usize, len, up) }?;
            self.mark_end(copier, false)
        })
    }

    unsafe fn copy_within(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize, stream: Option<usize>) -> Result<()> {
        OperationDevice::order(self, stream)?;
        let (from, to) = (from.as_ptr() as usize, to.as_ptr() as usize);
        // SAFETY: guaranteed by the caller.
        unsafe { self.lane_device().context().copy(to, from, len, stream.unwrap_or(self.stream)) }
    }
}

impl Drop for OperationDevice {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut lock(&self.marks).kept);
        let owner = std::mem::take(&mut *lock(&self.owner));
        if !owner.is_empty() {
            self.keep(Box::new((owner, kept)));
            // If the lane has ended, no later call releases it.
            self.lane_device().release();
        }
    }
}
