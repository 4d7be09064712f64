//! Weights on a device that a separate thread averages during training. [`WeightOrder`] extends the weight lock to
//! streams. [`Averaged`] is the part of the averaging thread.
//!
//! A thread that releases the lock records an event on the stream that it used. A thread that takes the lock lets its
//! stream wait for the earlier events. No thread waits for the device under the lock. The averaging thread has one
//! stream. Under the lock, it copies the weights to a snapshot on the device, and corrects them. It copies between
//! device and host without the lock.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};

use bagua_core::error::{Error, Result};
use bagua_core::memory::{DeviceWeights, WeightStep};
use bagua_core::types::DType;
use bagua_core::wait::lock;

use crate::context::Context;
use crate::device_lane::LaneDevice;
use crate::driver_functions::CUstream;
use crate::event::Event;
use crate::kernels::{Grid, short_name};
use crate::loaded_kernels::Kernel;

/// Orders the streams that use weights, in the order in which threads take the lock.
pub struct WeightOrder {
    context: Arc<Context>,
    events: Mutex<Events>,
    /// An event could not be recorded, so it is unknown when the weights are free. The averaging ends with this error.
    failure: OnceLock<Error>,
}

#[derive(Default)]
struct Events {
    /// Streams that used the weights since the averaging thread last did, each with the end of its use.
    used: Vec<(usize, Event)>,
    /// Events that were waited for and can be recorded again.
    spare: Vec<Event>,
    /// The end of the averaging thread's last use of the weights.
    averaged: Option<Event>,
    /// True if the averaging has ended and the device is done with its work.
    closed: bool,
}

impl WeightOrder {
    /// Creates the order for weights on this device.
    pub fn new(context: &Arc<Context>) -> WeightOrder {
        WeightOrder { context: Arc::clone(context), events: Mutex::default(), failure: OnceLock::new() }
    }

    /// Starts an averaging of weights on this device. An earlier averaging must have ended. Fails with
    /// `InvalidArgument` if the order belongs to another device.
    pub fn begin(&self, context: &Arc<Context>) -> Result<()> {
        if !Arc::ptr_eq(&self.context, context) {
            let (own, other) = (self.context.device(), context.device());
            return Err(Error::InvalidArgument(format!("the lock is for weights on cuda:{own}, not on cuda:{other}")));
        }
        lock(&self.events).closed = false;
        Ok(())
    }

    /// Returns the context of the device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Makes later work on `stream` wait for the work of all earlier lock owners. Called with the lock; does not wait.
    /// Fails with `NotImplemented` for a stream that is being captured, and `Device`.
    pub fn enter(&self, stream: usize) -> Result<()> {
        let events = lock(&self.events);
        if events.closed {
            return Ok(());
        }
        self.context.refuse_capture(&[stream])?;
        events.used.iter().map(|(_, event)| event).chain(&events.averaged).try_for_each(|event| event.order(stream))
    }

    /// Makes later lock owners wait for the work that is on `stream` now. Called while holding the lock; does not wait.
    /// Fails with `NotImplemented` for a stream that is being captured, and `Device`. The averaging ends with the same
    /// error.
    pub fn leave(&self, stream: usize) -> Result<()> {
        let recorded = self.record(stream);
        if let Err(error) = &recorded {
            let _ = self.failure.set(error.clone());
        }
        recorded
    }

    fn record(&self, stream: usize) -> Result<()> {
        let mut events = lock(&self.events);
        if events.closed {
            return Ok(());
        }
        self.context.refuse_capture(&[stream])?;
        if let Some((_, event)) = events.used.iter().find(|(user, _)| *user == stream) {
            // The handle may belong to another stream than when the event was recorded.
            event.order(stream)?;
            return event.record(stream);
        }
        let event = match events.spare.pop() {
            Some(event) => event,
            None => Event::new(&self.context)?,
        };
        event.record(stream)?;
        events.used.push((stream, event));
        Ok(())
    }

    /// Puts work on the averaging thread's stream after that of all earlier lock owners. Called with the lock.
    fn average_on(&self, stream: CUstream, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))?;
        let mut events = lock(&self.events);
        events.used.iter().try_for_each(|(_, event)| event.order(stream))?;
        if events.averaged.is_none() {
            events.averaged = Some(Event::new(&self.context)?);
        }
        let outcome = work();
        // Recorded even after an error, because some of the work may be on the stream.
        let recorded = events.averaged.as_ref().map_or(Ok(()), |event| event.record(stream));
        if recorded.is_ok() {
            let Events { used, spare, .. } = &mut *events;
            spare.extend(used.drain(..).map(|(_, event)| event));
        }
        outcome.and(recorded)
    }

    /// Stops ordering streams by the lock. The caller has made sure that no queued work uses the weights any more.
    fn close(&self) {
        let before = std::mem::replace(&mut *lock(&self.events), Events { closed: true, ..Events::default() });
        drop(before);
    }
}

/// The state of a model's averaging on its device. Exists until the last of its weights are dropped.
pub struct Averaging {
    lane_device: Arc<LaneDevice>,
    order: Arc<WeightOrder>,
    /// The owner of the weights. Dropped when the device is done with them.
    owner: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Averaging {
    /// Creates the state. `lane_device` must belong to this averaging alone. `owner` owns the memory of the weights.
    pub fn new(lane_device: Arc<LaneDevice>, order: Arc<WeightOrder>, owner: Box<dyn Any + Send>) -> Arc<Averaging> {
        Arc::new(Averaging { lane_device, order, owner: Mutex::new(Some(owner)) })
    }
}

impl Drop for Averaging {
    fn drop(&mut self) {
        let owner = lock(&self.owner).take();
        if !self.order.context.api().is_of_this_process() {
            std::mem::forget(owner);
            return;
        }
        if self.lane_device.end() {
            self.order.close();
        } else {
            std::mem::forget(owner);
        }
    }
}

/// Weights of one element type on the device, as the averaging thread sees them.
pub struct Averaged {
    address: usize,
    count: usize,
    dtype: DType,
    /// The kernel of the correction. `None` for elements that are only copied.
    correct: Option<(Kernel, Grid)>,
    /// Memory on the device: the snapshot, followed by the average.
    room: usize,
    of: Arc<Averaging>,
}

const ALIGNMENT: usize = 256;

impl Averaged {
    /// Describes `count` elements at `address`. Loads the kernel that corrects them, and allocates twice their size.
    ///
    /// # Errors
    /// `InvalidArgument` for elements that are not aligned; `Unavailable` if NVRTC is missing or fails; `Device`. These
    /// errors end the group, because the call is collective.
    ///
    /// # Safety
    /// The elements must be memory of the averaging's device that stays valid until the owner is dropped. All other
    /// work on them must be ordered by [`WeightOrder`] under the weights' lock.
    pub unsafe fn new(of: &Arc<Averaging>, address: usize, count: usize, dtype: DType) -> Result<Averaged> {
        if !address.is_multiple_of(dtype.size()) {
            let text = format!("the {} weights at address {address:#x} are not aligned to their size", dtype.name());
            return Err(Error::InvalidArgument(text));
        }
        let context = of.lane_device.context();
        let correct = match dtype {
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 => {
                let grid = Grid::of_bytes((count * dtype.size()) as u64, context.processors()?);
                Some((context.kernel(&format!("update_correct_{}", short_name(dtype)))?, grid))
            }
            _ => None,
        };
        let mut made = Averaged { address, count, dtype, correct, room: 0, of: Arc::clone(of) };
        let bytes = made.average_offset() + made.len();
        made.room = of.lane_device.copier(|copier| context.allocate(bytes, copier.down.handle()))?;
        of.lane_device.count_memory(bytes);
        Ok(made)
    }

    fn len(&self) -> usize {
        self.count * self.dtype.size()
    }

    fn average_offset(&self) -> usize {
        self.len().next_multiple_of(ALIGNMENT)
    }

    fn snapshot(&self) -> usize {
        self.room
    }

    fn average(&self) -> usize {
        self.room + self.average_offset()
    }
}

impl DeviceWeights for Averaged {
    fn under_lock(&mut self, step: WeightStep) -> Result<()> {
        let Averaging { lane_device, order, .. } = &*self.of;
        let context = lane_device.context();
        let work = |stream: CUstream| match (step, self.correct) {
            // SAFETY: guaranteed by the caller of `new`. `stream` waits for the work of all earlier owners of the lock.
            (WeightStep::Snapshot, _) => unsafe { context.copy(self.snapshot(), self.address, self.len(), stream) },
            // SAFETY: as above.
            (WeightStep::Replace, _) => unsafe { context.copy(self.address, self.average(), self.len(), stream) },
            (WeightStep::Correct, None) => Err(Error::other("these weights are only copied")),
            (WeightStep::Correct, Some(_)) if self.count == 0 => Ok(()),
            (WeightStep::Correct, Some((kernel, grid))) => {
                let [weights, average, snapshot] = [self.address, self.average(), self.snapshot()].map(|at| at as u64);
                let mut arguments = [weights, average, snapshot, self.count as u64];
                lane_device.launches.fetch_add(1, Ordering::Relaxed);
                // SAFETY: as above. The kernel is for this element type, to which all addresses are aligned.
                unsafe { context.launch(kernel, grid, stream, &mut arguments) }
            }
        };
        lane_device.copier(|copier| order.average_on(copier.down.handle(), || work(copier.down.handle())))
    }

    fn read_snapshot(&mut self, into: &mut [u8], go_on: &dyn Fn() -> Result<()>) -> Result<()> {
        assert_eq!(into.len(), self.len());
        let (lane_device, from) = (&self.of.lane_device, self.snapshot());
        // SAFETY: our own memory, freed on this stream. This call or `LaneDevice::end` waits for the copies.
        lane_device.copier(|copier| unsafe { copier.fetch(lane_device, from, into, |_| go_on()) })
    }

    fn write_average(&mut self, from: &[u8], go_on: &dyn Fn() -> Result<()>) -> Result<()> {
        assert_eq!(from.len(), self.len());
        let (lane_device, to) = (&self.of.lane_device, self.average());
        lane_device.copier(|copier| {
            let stream = copier.down.handle();
            // SAFETY: as in `read_snapshot`.
            unsafe { copier.deliver(lane_device, from, to, stream, |_| go_on()) }
        })
    }
}

impl Drop for Averaged {
    fn drop(&mut self) {
        let (lane_device, room) = (&self.of.lane_device, std::mem::take(&mut self.room));
        if room == 0 || !lane_device.context().api().is_of_this_process() {
            return;
        }
        // As in `Event::drop`.
        let _ = lane_device.copier(|copier| {
            // SAFETY: allocated in `new`. No later work uses it, on this stream or another.
            unsafe { lane_device.context().free(room, copier.down.handle()) }
        });
    }
}
