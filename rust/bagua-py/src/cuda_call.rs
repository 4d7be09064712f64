//! `CudaDevice` and `CudaCall`: a CUDA device, and the device's side of one operation.

#![allow(unsafe_code)]

use std::sync::{Arc, Mutex};

use bagua_core::group::Group;
use bagua_core::health::GroupHealth;
use bagua_core::memory::Device;
use bagua_core::wait::lock;
use bagua_cuda::{Context, Counts, LaneDevice, OperationDevice, Requested};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{self, Origin};
use crate::handle::Handle;

/// Name of the setting that chooses a collective on devices, for error texts.
pub const SETTING: &str = "value of BAGUA_CUDA_COLLECTIVE";

/// A CUDA device of this process, with its primary context: see `CudaLibraries.device`.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct CudaDevice {
    context: Arc<Context>,
    lane_device: Arc<LaneDevice>,
}

impl CudaDevice {
    pub fn of(context: Arc<Context>) -> CudaDevice {
        CudaDevice { lane_device: Arc::new(LaneDevice::new(&context)), context }
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the device of a bucket's tensors until an engine registers the bucket. `owner` keeps the tensors alive.
    pub fn of_bucket(&self, requested: Requested, check: bool, owner: Option<Py<PyAny>>) -> Arc<OperationDevice> {
        Arc::new(OperationDevice::of_bucket(&self.lane_device, requested, Box::new(owner)).checked(check))
    }
}

#[pymethods]
impl CudaDevice {
    /// Number of the device in this process.
    #[getter]
    fn number(&self) -> i32 {
        self.context.device()
    }

    /// Raises NotImplementedError if one of the streams is being captured into a graph. The capture continues.
    fn refuse_capture(&self, py: Python<'_>, streams: Vec<usize>) -> PyResult<()> {
        py.detach(|| self.context.refuse_capture(&streams)).map_err(|e| errors::raise(py, e))
    }

    /// Returns the device's side of one call without a group. The call runs on `stream`, after the work that the
    /// streams of `producers` have now.
    ///
    /// Raises NotImplementedError for a stream that is being captured, DeviceError.
    fn call(&self, py: Python<'_>, stream: usize, producers: Vec<usize>) -> PyResult<CudaCall> {
        let place = py.detach(|| OperationDevice::new(&self.lane_device, Requested::default(), stream, producers));
        Ok(CudaCall::of(Arc::new(place.map_err(|e| errors::raise(py, e))?)))
    }

    /// Drops the arrays of calls without a group that the device has finished with. Does not wait.
    fn release(&self) {
        self.lane_device.release();
    }
}

/// State of one lane on each device that the lane has used.
pub struct LaneDevices {
    /// Failure state of the group, which ends waits for a device.
    health: Arc<GroupHealth>,
    list: Mutex<Vec<Arc<LaneDevice>>>,
}

impl LaneDevices {
    pub fn new(group: &Group) -> LaneDevices {
        LaneDevices { health: Arc::clone(group.health()), list: Mutex::default() }
    }

    /// Returns the state of a thread that has a lane of its own.
    pub fn of(group: &Group, lane_device: Arc<LaneDevice>) -> LaneDevices {
        LaneDevices { health: Arc::clone(group.health()), list: Mutex::new(vec![lane_device]) }
    }

    /// Returns the state on every device that the lane has used.
    pub fn all(&self) -> Vec<Arc<LaneDevice>> {
        lock(&self.list).clone()
    }

    /// Returns the lane's state on a device.
    pub fn on(&self, context: &Arc<Context>) -> Arc<LaneDevice> {
        let mut list = lock(&self.list);
        let known = list.iter().find(|lane_device| Arc::ptr_eq(lane_device.context(), context));
        match known {
            Some(lane_device) => Arc::clone(lane_device),
            None => {
                let lane_device = Arc::new(LaneDevice::of_group(context, Arc::clone(&self.health)));
                list.push(Arc::clone(&lane_device));
                lane_device
            }
        }
    }

    /// Implements `Communicator.cuda_call`.
    #[expect(clippy::too_many_arguments, reason = "those of the call from Python")]
    pub fn call(
        &self,
        py: Python<'_>,
        origin: &Origin,
        device: &CudaDevice,
        stream: usize,
        producers: Vec<usize>,
        collective: &str,
        check: bool,
    ) -> PyResult<CudaCall> {
        let requested = Requested::by_name(SETTING, collective).map_err(|e| errors::raise(py, e))?;
        let lane_device = self.on(device.context());
        let place = py
            .detach(|| OperationDevice::new(&lane_device, requested, stream, producers))
            .map_err(|e| origin.fail(py, e))?;
        Ok(CudaCall::of(Arc::new(place.checked(check))))
    }
}

/// Returns the handle of an asynchronous call. Otherwise waits until the ranks' part is done, makes the call's stream
/// wait for the device's part, and returns None.
pub fn finished(py: Python<'_>, handle: Handle, async_op: bool) -> PyResult<Option<Handle>> {
    if async_op {
        return Ok(Some(handle));
    }
    handle.finish(py, None)?;
    handle.order(py, None).map(|()| None)
}

/// Returns the counters of several lanes of a group, or None before one of them has used a device. The collective
/// is None if the ranks have not chosen one, because they only used codecs or copies.
pub fn stats<'py>(py: Python<'py>, lanes: &[Arc<LaneDevices>]) -> PyResult<Option<Bound<'py, PyDict>>> {
    let lane_devices: Vec<_> = lanes.iter().flat_map(|lane| lane.all()).collect();
    let used = |counts: Counts| counts.launches + counts.to_host_bytes + counts.to_device_bytes > 0;
    let chosen = lane_devices.iter().find(|lane_device| lane_device.choice().is_some());
    let Some(first) = chosen.or_else(|| lane_devices.iter().find(|lane_device| used(lane_device.counts()))) else {
        return Ok(None);
    };
    let choice = first.choice();
    let counts: Vec<_> = lane_devices.iter().map(|lane_device| lane_device.counts()).collect();
    let sum = |each: fn(&Counts) -> u64| counts.iter().map(each).sum::<u64>();
    let stats = PyDict::new(py);
    stats.set_item("collective", choice.map(|choice| choice.collective))?;
    stats.set_item("why", choice.map(|choice| &choice.why))?;
    stats.set_item("device", first.context().device())?;
    stats.set_item("launches", sum(|counts| counts.launches))?;
    stats.set_item("to_host_bytes", sum(|counts| counts.to_host_bytes))?;
    stats.set_item("to_device_bytes", sum(|counts| counts.to_device_bytes))?;
    stats.set_item("pinned_bytes", sum(|counts| counts.pinned_bytes))?;
    stats.set_item("device_bytes", sum(|counts| counts.device_bytes))?;
    Ok(Some(stats))
}

/// The device's side of one operation, as `Communicator.cuda_call` returns it.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct CudaCall {
    core: Arc<OperationDevice>,
}

impl CudaCall {
    pub fn of(core: Arc<OperationDevice>) -> CudaCall {
        CudaCall { core }
    }

    pub fn core(&self) -> &Arc<OperationDevice> {
        &self.core
    }

    /// Returns the core's device.
    pub fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.core) as Arc<dyn Device>
    }
}

#[pymethods]
impl CudaCall {
    /// Copies `bytes` between two arrays of the device, on the call's stream: after the work of the producers, and
    /// before the verb begins. The caller promises that both addresses stay valid until the device is done.
    fn copy(&self, py: Python<'_>, to: usize, from_: usize, bytes: usize) -> PyResult<()> {
        let copy = || {
            self.core.follow_producers()?;
            // SAFETY: the caller's promise in the docstring of this method, for memory of this call's device.
            unsafe { self.core.copy(to, from_, bytes) }
        };
        py.detach(copy).map_err(|e| errors::raise(py, e))
    }
}
