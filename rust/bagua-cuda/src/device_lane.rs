//! The state of a lane on a device: its streams, its pinned memory, and the arrays of operations that are not done.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use bagua_core::error::{Error, Result};
use bagua_core::health::GroupHealth;
use bagua_core::request::OpContext;
use bagua_core::stats::Counter;
use bagua_core::types::Kind;
use bagua_core::wait::lock;

use crate::context::Context;
use crate::driver_functions::{CUstream, before_anything_began};
use crate::event::Event;
use crate::memory::Pinned;
use crate::stream::Stream;

/// Size in bytes of a piece, which is copied while the host sends another one. A lane's pinned memory is four pieces.
pub(crate) const PIECE: usize = 4 << 20;

/// Name of the collective over host memory.
pub(crate) const STAGED: &str = "staged";

/// How long a wait for the device polls without a pause.
const SPIN: Duration = Duration::from_micros(50);

/// The longest pause between two polls.
const PAUSE: Duration = Duration::from_millis(1);

/// How long the end of a lane waits for copies. Memory that is still in use then is never freed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);

/// How the ranks of a lane combine arrays on devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Name of the collective.
    pub collective: &'static str,
    /// The reason for the choice.
    pub why: String,
}

/// Counters of a lane on a device, since the lane state was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of kernels launched.
    pub launches: u64,
    /// Number of bytes copied from the device.
    pub to_host_bytes: u64,
    /// Number of bytes copied to the device.
    pub to_device_bytes: u64,
    /// Size of the lane's pinned memory in bytes.
    pub pinned_bytes: u64,
    /// Size of the lane's memory on the device in bytes.
    pub device_bytes: u64,
}

/// An object that an operation keeps, and the event after which the device no longer uses it.
type Held = (Arc<Event>, Box<dyn Any + Send>);

/// The state of a lane on a device.
pub struct LaneDevice {
    context: Arc<Context>,
    /// The choice of the ranks, set by the lane's first operation on a device.
    pub(crate) choice: OnceLock<Choice>,
    pub(crate) to_host: AtomicU64,
    pub(crate) to_device: AtomicU64,
    pub(crate) launches: AtomicU64,
    pinned: AtomicU64,
    room: AtomicU64,
    /// The group's failure state, which ends waits for the device. `None` without a group.
    health: Option<Arc<GroupHealth>>,
    /// Streams and pinned memory, locked by the thread that runs the lane's operations.
    buffers: Mutex<Buffers>,
    held: Mutex<Vec<Held>>,
    last: Mutex<Option<Arc<Event>>>,
}

/// The streams and the pinned memory. Created by the first operation.
enum Buffers {
    None,
    Some(Box<Copier>),
    Gone,
}

/// The streams and the pinned memory of a lane.
pub(crate) struct Copier {
    context: Arc<Context>,
    /// Stream for copies from the device.
    pub(crate) down: Stream,
    /// Stream for copies to the device.
    pub(crate) up: Stream,
    /// Pinned memory for pieces from the device, used alternately.
    pub(crate) input: [Pinned; 2],
    /// Pinned memory for pieces to the device, used alternately.
    pub(crate) output: [Pinned; 2],
    /// Events that are reached when the input of the same index is filled.
    pub(crate) arrived: [Event; 2],
    /// Events that are reached when the output of the same index may be used again.
    pub(crate) left: [Event; 2],
    /// Memory of the device, by its use: address and size in bytes.
    rooms: [Option<(usize, usize)>; 2],
    nonfinite: Vec<(Kind, Arc<NonFinite>)>,
}

/// Number of non-finite records in a lane's operations of one kind. Kernels count them in pinned memory, so that the
/// host can read the number at any time. The last value stays when that memory is freed.
#[derive(Default)]
struct NonFinite {
    pinned: Mutex<Option<Pinned>>,
    last: AtomicU64,
}

impl NonFinite {
    fn close(&self) {
        self.last.store(self.value(), Ordering::Relaxed);
        lock(&self.pinned).take();
    }
}

impl Counter for NonFinite {
    fn value(&self) -> u64 {
        lock(&self.pinned).as_ref().map_or_else(|| self.last.load(Ordering::Relaxed), |pinned| u64::from(pinned.word()))
    }
}

impl std::fmt::Debug for NonFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NonFinite({})", self.value())
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Use {
    /// Gathers tensors that are not adjacent.
    Gathered,
    /// Keeps data between the steps of an operation.
    Steps,
}

impl Copier {
    fn new(context: &Arc<Context>) -> Result<Copier> {
        let pinned = || Pinned::new(context, PIECE);
        let event = || Event::new(context);
        Ok(Copier {
            down: Stream::new(context)?,
            up: Stream::new(context)?,
            input: [pinned()?, pinned()?],
            output: [pinned()?, pinned()?],
            arrived: [event()?, event()?],
            left: [event()?, event()?],
            rooms: [None; 2],
            nonfinite: Vec::new(),
            context: Arc::clone(context),
        })
    }

    /// Returns the address of the memory for a use, if it has at least this number of bytes.
    pub(crate) fn has_room(&self, of: Use, bytes: usize) -> Option<usize> {
        self.rooms[of as usize].filter(|(_, len)| *len >= bytes).map(|(address, _)| address)
    }

    /// Returns the address of memory for a use. It is the same in each call unless more bytes are needed. Work on
    /// `down`, and work that follows it, can use the memory. Work on `up` comes after all earlier uses.
    pub(crate) fn room(&mut self, lane_device: &LaneDevice, of: Use, bytes: usize) -> Result<usize> {
        if let Some(address) = self.has_room(of, bytes) {
            return Ok(address);
        }
        let before = self.rooms[of as usize].map_or(0, |(_, len)| len);
        self.free_room(of)?;
        let address = self.context.allocate(bytes, self.down.handle())?;
        self.rooms[of as usize] = Some((address, bytes));
        lane_device.room.fetch_add(bytes.wrapping_sub(before) as u64, Ordering::Relaxed);
        Ok(address)
    }

    /// Frees the memory of one use behind the work of `up`, which comes after the work of `down` on it.
    fn free_room(&mut self, of: Use) -> Result<()> {
        let Some((address, _)) = self.rooms[of as usize].take() else { return Ok(()) };
        // SAFETY: the memory is from `room`, and no work that is queued later uses it.
        unsafe { self.context.free(address, self.up.handle()) }
    }

    /// Returns the address of the number of non-finite records in operations of this kind.
    pub(crate) fn nonfinite(&mut self, cx: &OpContext<'_>) -> Result<usize> {
        let kind = cx.fingerprint.kind;
        if let Some((_, known)) = self.nonfinite.iter().find(|(known, _)| *known == kind)
            && let Some(pinned) = &*lock(&known.pinned)
        {
            return Ok(pinned.address());
        }
        let pinned = Pinned::new(&self.context, size_of::<u32>())?;
        let address = pinned.address();
        let counter = Arc::new(NonFinite { pinned: Mutex::new(Some(pinned)), last: AtomicU64::new(0) });
        cx.stats.also_nonfinite(Arc::clone(&counter) as Arc<dyn Counter>);
        self.nonfinite.push((kind, counter));
        Ok(address)
    }

    /// Copies bytes of the device to the host through pinned memory, after the work of `down`. `go_on` may end it.
    ///
    /// # Safety
    /// The bytes at `from` must be memory of the device that stays allocated until the copy is done.
    pub(crate) unsafe fn fetch(
        &mut self,
        lane_device: &LaneDevice,
        from: usize,
        into: &mut [u8],
        mut go_on: impl FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let (total, down) = (into.len(), self.down.handle());
        let begin = |copier: &mut Copier, number: usize| -> Result<()> {
            let start = number * PIECE;
            if start < total {
                // SAFETY: guaranteed by the caller.
                unsafe { copier.input[number % 2].fill(0..PIECE.min(total - start), from + start, down) }?;
                copier.arrived[number % 2].record(down)?;
            }
            Ok(())
        };
        begin(self, 0)?;
        for (number, piece) in into.chunks_mut(PIECE).enumerate() {
            // Two pinned buffers take turns. The buffer of the next piece is free, because its last piece was read.
            begin(self, number + 1)?;
            wait_until_reached(&self.arrived[number % 2], || go_on((number * PIECE) as u64))?;
            piece.copy_from_slice(self.input[number % 2].bytes(piece.len()));
        }
        lane_device.to_host.fetch_add(total as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Copies bytes to the device through pinned memory, on a stream of the lane. `from` may be reused when it returns.
    ///
    /// # Safety
    /// The bytes at `to` must be memory of the device that is allocated and not used otherwise until the copy is done.
    pub(crate) unsafe fn deliver(
        &mut self,
        lane_device: &LaneDevice,
        from: &[u8],
        to: usize,
        stream: CUstream,
        mut go_on: impl FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        for (number, piece) in from.chunks(PIECE).enumerate() {
            let (turn, done) = (number % 2, number * PIECE);
            wait_until_reached(&self.left[turn], || go_on(done as u64))?;
            self.output[turn].bytes_mut(piece.len()).copy_from_slice(piece);
            // SAFETY: guaranteed by the caller.
            unsafe { self.output[turn].spill(0..piece.len(), to + done, stream) }?;
            self.left[turn].record(stream)?;
        }
        lane_device.to_device.fetch_add(from.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Waits for a limited time until the work that is on both streams now is done.
    fn drain(&self) -> Result<()> {
        let (down, up) = (Event::new(&self.context)?, Event::new(&self.context)?);
        down.record(self.down.handle())?;
        up.record(self.up.handle())?;
        let start = Instant::now();
        let patience = || match start.elapsed() < PATIENCE {
            true => Ok(()),
            false => Err(Error::other("the device is not done")),
        };
        wait_until_reached(&down, patience)?;
        wait_until_reached(&up, patience)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.nonfinite.iter().for_each(|(_, counter)| counter.close());
        for of in [Use::Gathered, Use::Steps] {
            // As in `Event::drop`.
            let _ = self.free_room(of);
        }
    }
}

impl LaneDevice {
    /// Creates the state of a lane that uses this device. Does not use the device yet.
    pub fn new(context: &Arc<Context>) -> LaneDevice {
        LaneDevice {
            context: Arc::clone(context),
            choice: OnceLock::new(),
            to_host: AtomicU64::new(0),
            to_device: AtomicU64::new(0),
            launches: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            room: AtomicU64::new(0),
            health: None,
            buffers: Mutex::new(Buffers::None),
            held: Mutex::default(),
            last: Mutex::default(),
        }
    }

    /// Creates the state like [`LaneDevice::new`], for a lane of a group with this failure state.
    pub fn of_group(context: &Arc<Context>, health: Arc<GroupHealth>) -> LaneDevice {
        let mut lane_device = LaneDevice::new(context);
        lane_device.health = Some(health);
        lane_device
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.health.as_ref().map_or(Ok(()), |health| health.check())
    }

    /// Returns the context of the device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the choice, or `None` before the first operation.
    pub fn choice(&self) -> Option<&Choice> {
        self.choice.get()
    }

    /// Returns the counters.
    pub fn counts(&self) -> Counts {
        Counts {
            launches: self.launches.load(Ordering::Relaxed),
            to_host_bytes: self.to_host.load(Ordering::Relaxed),
            to_device_bytes: self.to_device.load(Ordering::Relaxed),
            pinned_bytes: self.pinned.load(Ordering::Relaxed),
            device_bytes: self.room.load(Ordering::Relaxed),
        }
    }

    /// Creates the streams and the pinned memory if they do not exist. Called before any part of the operation is sent.
    /// Fails with `Device`, which is harmless if there is too little memory.
    pub fn prepare(&self) -> Result<()> {
        self.release();
        if self.choice().is_some_and(|choice| choice.collective != STAGED) {
            return Ok(());
        }
        self.copier(|_| Ok(())).map_err(before_anything_began)
    }

    pub(crate) fn count_memory(&self, bytes: usize) {
        self.room.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Runs `work` with exclusive use of the streams and the pinned memory.
    pub(crate) fn copier<T>(&self, work: impl FnOnce(&mut Copier) -> Result<T>) -> Result<T> {
        let mut buffers: MutexGuard<'_, Buffers> = lock(&self.buffers);
        if matches!(*buffers, Buffers::None) {
            *buffers = Buffers::Some(Box::new(Copier::new(&self.context)?));
            self.pinned.store(4 * PIECE as u64, Ordering::Relaxed);
        }
        match &mut *buffers {
            Buffers::Some(copier) => work(copier),
            Buffers::None | Buffers::Gone => Err(Error::Aborted("the group was left".to_owned())),
        }
    }

    /// Frees the pinned memory of a lane that does not need it. An operation that needs it creates it again.
    pub(crate) fn unprepare(&self) {
        let mut buffers = lock(&self.buffers);
        // Pinned memory is kept while the lane holds the gathered tensors of the first operation.
        if matches!(&*buffers, Buffers::Some(copier) if copier.rooms.iter().all(Option::is_none)) {
            *buffers = Buffers::None;
            self.pinned.store(0, Ordering::Relaxed);
        }
    }

    /// Makes one of our streams wait for the end of the last operation.
    pub(crate) fn order_after_last(&self, stream: CUstream) -> Result<()> {
        lock(&self.last).as_ref().map_or(Ok(()), |last| last.order(stream))
    }

    pub(crate) fn last(&self) -> Option<Arc<Event>> {
        lock(&self.last).clone()
    }

    pub(crate) fn set_last(&self, end: &Arc<Event>) {
        *lock(&self.last) = Some(Arc::clone(end));
    }

    /// Keeps all objects of operations forever, because it is unknown when the device is done with them.
    pub(crate) fn forget(&self) {
        std::mem::forget(std::mem::take(&mut *lock(&self.held)));
    }

    /// Keeps an object until an event is reached.
    pub(crate) fn hold(&self, until: &Arc<Event>, what: Box<dyn Any + Send>) {
        lock(&self.held).push((Arc::clone(until), what));
    }

    /// Releases objects that the device is done with. Does not wait.
    pub fn release(&self) {
        let mut done = Vec::new();
        let mut held = lock(&self.held);
        let mut at = 0;
        while at < held.len() {
            // A device that returned an error no longer runs our work.
            if held[at].0.is_reached().unwrap_or(true) { done.push(held.swap_remove(at)) } else { at += 1 }
        }
        drop(held);
        // Dropped without the lock, because dropping may run arbitrary code.
        drop(done);
    }

    /// Waits for the device for a limited time and frees everything. Called on the thread that ran the operations,
    /// after the last one. Returns true if the device is known to be done.
    pub fn end(&self) -> bool {
        let mut drained = true;
        let before = std::mem::replace(&mut *lock(&self.buffers), Buffers::Gone);
        if let Buffers::Some(copier) = before {
            // The last operation may have used the room on a stream of another library.
            match self.order_after_last(copier.up.handle()).and_then(|()| copier.drain()) {
                // A device that failed no longer uses the memory either.
                Ok(()) | Err(Error::Device(_)) => drop(copier),
                Err(_) => {
                    drained = false;
                    std::mem::forget(copier);
                    self.forget();
                }
            }
        }
        self.pinned.store(0, Ordering::Relaxed);
        self.room.store(0, Ordering::Relaxed);
        lock(&self.last).take();
        self.release();
        drained
    }
}

impl Drop for LaneDevice {
    fn drop(&mut self) {
        if self.context.api().is_of_this_process() {
            self.end();
        } else if let Buffers::Some(copier) = std::mem::replace(&mut *lock(&self.buffers), Buffers::Gone) {
            std::mem::forget(copier);
        }
    }
}

impl std::fmt::Debug for LaneDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LaneDevice({:?})", self.context)
    }
}

/// The pauses between polls for an event that comes soon.
pub(crate) struct Pauses {
    start: Instant,
    next: Duration,
}

impl Pauses {
    pub(crate) fn new() -> Pauses {
        Pauses { start: Instant::now(), next: Duration::from_micros(20) }
    }

    /// Sleeps between two polls. The first pauses only let other threads run.
    pub(crate) fn pause(&mut self) {
        if self.start.elapsed() < SPIN {
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.next);
            self.next = PAUSE.min(self.next * 2);
        }
    }
}

/// Waits for the device by polling on this thread, so that `go_on` can end the wait with an error.
pub(crate) fn wait_until_reached(event: &Event, mut go_on: impl FnMut() -> Result<()>) -> Result<()> {
    let mut pauses = Pauses::new();
    while !event.is_reached()? {
        go_on()?;
        pauses.pause();
    }
    Ok(())
}
