//! `Engine`: a queue of buckets, which are communicated on a thread of its own.

#![allow(unsafe_code)]

use std::sync::{Arc, Mutex};

use bagua_core::engine as core;
use bagua_core::error::{Error, Result};
use bagua_core::group::Group;
use bagua_core::memory::Device;
use bagua_core::types::DType;
use bagua_core::wait::lock;
use bagua_cuda::OperationDevice;
use pyo3::prelude::*;

use crate::address_to_region;
use crate::bucket::Bucket;
use crate::cuda_call::{CudaCall, CudaDevice, LaneDevices};
use crate::errors::{Origin, seconds};
use crate::gil::{self, DropWithoutGil};
use crate::handle::Handle;
use crate::interrupt;
use crate::verb_arguments::{Call, CommunicationThread, Request};

/// A strictly ordered queue of buckets with its own lane and communication thread.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Engine {
    core: DropWithoutGil<Arc<core::Engine>>,
    group: Group,
    origin: Origin,
    /// Element type and device of each registered tensor, by number, for a `mark_ready` with an address. No thread
    /// waits while it holds this mutex.
    tensors: Mutex<Vec<(DType, Option<Arc<OperationDevice>>)>>,
    lane_devices: Arc<LaneDevices>,
}

impl Engine {
    pub fn of(core: core::Engine, group: Group, origin: Origin, lane_devices: Arc<LaneDevices>) -> Engine {
        Engine { core: DropWithoutGil::new(Arc::new(core)), group, origin, tensors: Mutex::default(), lane_devices }
    }

    fn tensor(&self, number: usize) -> Option<(DType, Option<Arc<OperationDevice>>)> {
        lock(&self.tensors).get(number).cloned()
    }
}

impl CommunicationThread for Engine {
    fn origin(&self) -> &Origin {
        &self.origin
    }

    fn worker(&self) -> &core::LaneWorker {
        self.core.worker()
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "the signatures are Python's, and most arguments are keywords there")]
impl Engine {
    /// Waits for pending buckets, then replaces the buckets. The order of the list is the order of communication, equal
    /// on all ranks.
    ///
    /// Returns the names of the tensors except padding. The number of a tensor is its index in this list. Raises
    /// ValueError if a tensor name, or a tensor's memory, appears twice.
    fn register(&self, py: Python<'_>, buckets: Vec<Py<Bucket>>) -> PyResult<Vec<String>> {
        let buckets: Vec<&Bucket> = buckets.iter().map(Py::get).collect();
        let cores: Vec<_> = buckets.iter().map(|bucket| bucket.core.clone()).collect();
        for place in buckets.iter().filter_map(|bucket| bucket.place.as_ref()) {
            place.move_to(self.lane_devices.on(place.lane_device().context()));
        }
        let core = Arc::clone(&self.core);
        gil::run_released(py, &self.group, &self.origin, move || core.register(cores))?;
        let described = buckets
            .iter()
            .flat_map(|bucket| std::iter::repeat_n((bucket.core.dtype(), bucket.place.clone()), bucket.markable));
        *lock(&self.tensors) = described.collect();
        Ok(self.core.tensors())
    }

    /// Sets the training step, counted from 1, of buckets that are communicated from now on. If another rank
    /// communicates them in another step, both raise MismatchError. So do ranks of which only one has loaded a state
    /// before the step (`after_load`). Ranks do not compare steps if `step` is 0, which is the initial value.
    #[pyo3(signature = (step, after_load=false))]
    fn set_step(&self, py: Python<'_>, step: u32, after_load: bool) {
        py.detach(|| self.core.set_step(step, after_load));
    }

    /// Marks the tensor with this number as final for this step. `address` and `count` give its new location if it
    /// moved; None means the same place as before.
    ///
    /// For a tensor on a device, the bucket is communicated after the work that `stream` (None: the legacy stream) has
    /// now, and with `keep` also after that of the streams of `producers`. `keep` is held until the device is done.
    ///
    /// Raises ValueError for an unknown number or a tensor that was marked already, NotImplementedError for a stream
    /// that is being captured, and the error of the communication thread if it failed.
    #[pyo3(signature = (number, address=None, count=None, *, stream=None, producers=None, keep=None))]
    fn mark_ready(
        &self,
        py: Python<'_>,
        number: usize,
        address: Option<usize>,
        count: Option<usize>,
        stream: Option<usize>,
        producers: Option<Vec<usize>>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let mark = || -> Result<()> {
            let region = match (address, count) {
                (None, None) => None,
                // If there is no tensor with this number, the core returns the error.
                (Some(address), Some(count)) => match self.tensor(number) {
                    Some((dtype, place)) => {
                        let place = place.map(|place| place as Arc<dyn Device>);
                        // SAFETY: the caller promises for this memory what `Bucket` requires of the tensor that it
                        // replaces.
                        Some(unsafe { address_to_region::region_in(place.as_ref(), address, count, dtype) }?)
                    }
                    None => None,
                },
                _ => {
                    return Err(Error::InvalidArgument(
                        "a tensor that moved needs both its address and its count".to_owned(),
                    ));
                }
            };
            // This comes before the mark, because the last mark of a bucket starts its communication.
            if let (Some(keep), Some((_, Some(place)))) = (keep, self.tensor(number)) {
                place.keep_marked(Box::new(keep));
                let marked = producers.unwrap_or_default().into_iter().try_for_each(|stream| place.mark(Some(stream)));
                marked.map_err(|error| if error.is_argument() { error } else { self.group.health().fail(error) })?;
            }
            self.core.mark_ready(number, region, stream)
        };
        py.detach(mark).map_err(|e| self.origin.raise(py, e))
    }

    /// Waits until every scheduled bucket is done, for at most `timeout` seconds, and returns the number of buckets.
    /// Ctrl-C ends the wait.
    ///
    /// For buckets on a device, work that `stream` (None: the legacy stream) gets from now on sees the results. The
    /// device may still be working.
    ///
    /// Raises the error of the communication thread. Raises ValueError, which names the missing tensors, if only some
    /// tensors of a bucket are ready. Raises NotImplementedError for a stream that is being captured; a later wait then
    /// reports the buckets.
    #[pyo3(signature = (timeout=None, *, stream=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, stream: Option<usize>) -> PyResult<usize> {
        let timeout = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        let wait = |limit| self.core.wait_for(limit, stream);
        interrupt::wait_in_slices(py, Some(&self.origin), timeout, wait, |after| self.core.timed_out(after))
    }

    /// Returns the device's side of one operation, as `Communicator.cuda_call` does.
    #[pyo3(signature = (device, stream, producers, collective, check=false))]
    fn cuda_call(
        &self,
        py: Python<'_>,
        device: &CudaDevice,
        stream: usize,
        producers: Vec<usize>,
        collective: &str,
        check: bool,
    ) -> PyResult<CudaCall> {
        self.lane_devices.call(py, &self.origin, device, stream, producers, collective, check)
    }

    /// Names of the tensors that are not ready, of buckets that were not communicated since the last `wait`.
    fn unready(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.core.unready())
    }

    /// Ends the thread. Queued buckets fail with AbortedError. Further calls do nothing.
    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.core.shutdown());
    }

    /// A verb: see the communicator's; in order with the buckets.
    #[pyo3(signature = (verb, src, dst, count, dtype, op=0, root=0, *, shape=None, timeout=None, async_op=false, keep=None,
        place=None))]
    fn run(
        &self,
        py: Python<'_>,
        verb: u8,
        src: Option<usize>,
        dst: Option<usize>,
        count: usize,
        dtype: u8,
        op: u8,
        root: usize,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
        place: Option<&CudaCall>,
    ) -> PyResult<Option<Handle>> {
        let call = Call::new(shape, timeout, async_op, keep)?;
        let device = place.map(CudaCall::device);
        let codes = (verb, src, dst, count, dtype, op, root);
        // SAFETY: the caller of a verb promises that the memory stays valid, see `Communicator`.
        let mut request = unsafe { Request::new(py, &self.group, codes, device.as_ref()) }?;
        let op = request.announced();
        self.submit(py, call, place, &op, move |lane, options| request.run(lane, options))
    }
}
