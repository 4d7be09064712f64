//! Weights on a device that a thread averages beside the training: [`WeightOrder`] makes the lock that covers them an order of streams, and
//! [`Averaged`] is what the averaging thread does with them.
//!
//! Who gives the lock back has an event recorded on the stream that it used; who takes it has its stream wait for the events of those
//! before. No thread waits for the device under the lock. The averaging thread has one stream: it copies the weights to a snapshot on the
//! device and corrects them under the lock, and copies between device and host without it.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};

use bagua_core::error::{Error, Result};
use bagua_core::memory::{DeviceWeights, WeightStep};
use bagua_core::types::DType;
use bagua_core::wait::lock;

use crate::context::Context;
use crate::driver_functions::CUstream;
use crate::event::Event;
use crate::kernels::{Grid, short_name};
use crate::lane_state::LaneDevice;
use crate::loaded_kernels::Kernel;

/// See the module.
pub struct WeightOrder {
    context: Arc<Context>,
    events: Mutex<Events>,
    /// What could not be recorded: when the weights are free is unknown, and the averaging ends.
    failure: OnceLock<Error>,
}

#[derive(Default)]
struct Events {
    /// Streams that used the weights since the averaging thread last did, each with the end of its use.
    used: Vec<(usize, Event)>,
    /// Events that were waited for, to be recorded again.
    spare: Vec<Event>,
    /// The averaging thread's last use.
    averaged: Option<Event>,
    /// The averaging has ended, and the device is done with its work.
    closed: bool,
}

impl WeightOrder {
    /// Of weights on this device.
    pub fn new(context: &Arc<Context>) -> WeightOrder {
        WeightOrder { context: Arc::clone(context), events: Mutex::default(), failure: OnceLock::new() }
    }

    /// An averaging of weights on this device begins, also after one that has ended.
    ///
    /// # Errors
    /// `InvalidArgument` for another device than before.
    pub fn begin(&self, context: &Arc<Context>) -> Result<()> {
        if !Arc::ptr_eq(&self.context, context) {
            let (own, other) = (self.context.device(), context.device());
            return Err(Error::InvalidArgument(format!(
                "the lock is that of weights on cuda:{own}, not on cuda:{other}"
            )));
        }
        lock(&self.events).closed = false;
        Ok(())
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Work that `stream` gets from now on comes behind that of all who had the lock. Called by who has taken it; does not wait.
    ///
    /// # Errors
    /// `NotImplemented` for a stream that is being captured; `Device`.
    pub fn enter(&self, stream: usize) -> Result<()> {
        let events = lock(&self.events);
        if events.closed {
            return Ok(());
        }
        self.context.refuse_capture(&[stream])?;
        events.used.iter().map(|(_, event)| event).chain(&events.averaged).try_for_each(|event| event.order(stream))
    }

    /// Who takes the lock next comes behind the work that `stream` has now. Called by who gives it back, before that; does not wait.
    ///
    /// # Errors
    /// `NotImplemented` for a stream that is being captured; `Device`. The averaging ends with the same error.
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
            // The handle may be that of another stream than then.
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

    /// Puts the averaging thread's work on its stream, behind that of all who had the lock before, and marks its end. Under the lock.
    fn average_on(&self, stream: CUstream, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))?;
        let mut events = lock(&self.events);
        events.used.iter().try_for_each(|(_, event)| event.order(stream))?;
        if events.averaged.is_none() {
            events.averaged = Some(Event::new(&self.context)?);
        }
        let outcome = work();
        // Also after an error: some of the work may be there.
        let recorded = events.averaged.as_ref().map_or(Ok(()), |event| event.record(stream));
        if recorded.is_ok() {
            let Events { used, spare, .. } = &mut *events;
            spare.extend(used.drain(..).map(|(_, event)| event));
        }
        outcome.and(recorded)
    }

    /// Nothing of ours uses the weights any more, now or later.
    fn close(&self) {
        let before = std::mem::replace(&mut *lock(&self.events), Events { closed: true, ..Events::default() });
        drop(before);
    }
}

/// What the averaging of one model has on its device, until the last of its weights are dropped.
pub struct Averaging {
    lane_device: Arc<LaneDevice>,
    order: Arc<WeightOrder>,
    /// Who has the weights: dropped when the device is done with them.
    owner: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Averaging {
    /// `lane_device` belongs to this averaging alone; `owner` has the memory of the weights.
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

/// Weights of one element type: see the module.
pub struct Averaged {
    /// In bytes, on the device.
    address: usize,
    count: usize,
    dtype: DType,
    /// Of the correction; `None` for elements that are only copied.
    correct: Option<(Kernel, Grid)>,
    /// Memory on the device: the snapshot and, behind it, the average.
    room: usize,
    of: Arc<Averaging>,
}

/// The average begins at a multiple of it.
const ALIGNMENT: usize = 256;

impl Averaged {
    /// `count` elements at `address`. Loads the kernel that corrects them, and takes twice their bytes of the device's memory.
    ///
    /// # Errors
    /// `InvalidArgument` for elements that are not aligned; `Unavailable` that names NVRTC where that is absent or fails; `Device`. They
    /// end the group, because the call is collective.
    ///
    /// # Safety
    /// They are memory of the averaging's device that stays valid until the owner is dropped; while the weights' lock is held, all other
    /// work on them comes before or after it as [`WeightOrder`] orders, and none writes them without the lock.
    pub unsafe fn new(of: &Arc<Averaging>, address: usize, count: usize, dtype: DType) -> Result<Averaged> {
        if !address.is_multiple_of(dtype.size()) {
            let text = format!("weights of {} at address {address:#x}, which is not aligned to them", dtype.name());
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
            // SAFETY: the promise of `new`, and memory of our own of the same size; the stream is behind all who had the lock.
            (WeightStep::Snapshot, _) => unsafe { context.copy(self.snapshot(), self.address, self.len(), stream) },
            // SAFETY: as above.
            (WeightStep::Replace, _) => unsafe { context.copy(self.address, self.average(), self.len(), stream) },
            (WeightStep::Correct, None) => Err(Error::other("these weights are only copied")),
            (WeightStep::Correct, Some(_)) if self.count == 0 => Ok(()),
            (WeightStep::Correct, Some((kernel, grid))) => {
                let [weights, average, snapshot] = [self.address, self.average(), self.snapshot()].map(|at| at as u64);
                let mut arguments = [weights, average, snapshot, self.count as u64];
                lane_device.launches.fetch_add(1, Ordering::Relaxed);
                // SAFETY: as above; the kernel is that of the element type, to which all are aligned.
                unsafe { context.launch(kernel, grid, stream, &mut arguments) }
            }
        };
        lane_device.copier(|copier| order.average_on(copier.down.handle(), || work(copier.down.handle())))
    }

    fn read_snapshot(&mut self, into: &mut [u8], go_on: &dyn Fn() -> Result<()>) -> Result<()> {
        assert_eq!(into.len(), self.len());
        let (lane_device, from) = (&self.of.lane_device, self.snapshot());
        // SAFETY: memory of our own, which is freed on this stream; the copies are waited for, or `LaneDevice::end` does so.
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
            // SAFETY: ours, from `new`; nothing that this stream gets later uses it, and no other stream does.
            unsafe { lane_device.context().free(room, copier.down.handle()) }
        });
    }
}
