//! `CudaDevice` and `CudaCall`: a CUDA device, and the device's side of one operation.

use std::sync::Arc;

use bagua_core::memory::Device;
use bagua_cuda::{Context, Place, Stage, Wish};
use pyo3::prelude::*;

use crate::errors;
use crate::tensor;

/// A CUDA device of this process, with its primary context: see `CudaLibraries.device`.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct CudaDevice {
    context: Arc<Context>,
    /// Of calls without a group: what they hold.
    stage: Arc<Stage>,
}

impl CudaDevice {
    pub fn of(context: Arc<Context>) -> CudaDevice {
        CudaDevice { stage: Arc::new(Stage::new(&context)), context }
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

#[pymethods]
impl CudaDevice {
    /// Number of the device in this process.
    #[getter]
    fn number(&self) -> i32 {
        self.context.device()
    }

    /// Raises NotImplementedError when one of the streams is being captured into a graph, and leaves the capture as it is.
    fn refuse_capture(&self, py: Python<'_>, streams: Vec<usize>) -> PyResult<()> {
        py.detach(|| self.context.refuse_capture(&streams)).map_err(|e| errors::raise(py, e))
    }

    /// The device's side of one call without a group, on `stream` and behind what the streams of `producers` have then.
    ///
    /// Raises NotImplementedError for a stream that is being captured, DeviceError.
    fn call(&self, py: Python<'_>, stream: usize, producers: Vec<usize>) -> PyResult<CudaCall> {
        let place = py.detach(|| Place::new(&self.stage, Wish::default(), stream, producers));
        Ok(CudaCall::of(Arc::new(place.map_err(|e| errors::raise(py, e))?)))
    }

    /// Lets go of the arrays of calls without a group that the device is done with. Does not wait.
    fn release(&self) {
        self.stage.release();
    }
}

/// The device's side of one operation: see `Communicator.cuda_call`.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct CudaCall {
    core: Arc<Place>,
}

impl CudaCall {
    pub fn of(core: Arc<Place>) -> CudaCall {
        CudaCall { core }
    }

    pub fn core(&self) -> &Arc<Place> {
        &self.core
    }

    /// As the core takes it.
    pub fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.core) as Arc<dyn Device>
    }
}

#[pymethods]
impl CudaCall {
    /// Copies `bytes` between two arrays of the device on the call's stream, behind the work of its producers and before the verb begins.
    fn copy(&self, py: Python<'_>, to: usize, from_: usize, bytes: usize) -> PyResult<()> {
        let copy = || {
            self.core.follow_producers()?;
            tensor::copy_on_device(&self.core, to, from_, bytes)
        };
        py.detach(copy).map_err(|e| errors::raise(py, e))
    }
}
