//! `Bucket`: tensors that are communicated together, and their operations.

#![allow(unsafe_code)]

use std::sync::Arc;

use bagua_core::bucket;
use bagua_core::engine as core;
use bagua_core::error::{Error, Exception, Result};
use bagua_core::memory::Device;
use bagua_core::op::{
    AsyncModelAverageOp, AutoOp, CallbackOp, CentralizedOp, CompressedOp, DecentralizedOp, ExtraTensor,
    LowPrecisionDecentralizedOp, Op,
};
use bagua_core::request::PeerSelection;
use bagua_cuda::{OperationDevice, Requested};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::address_to_region;
use crate::average::WeightLock;
use crate::codec::Codec;
use crate::cuda_call::{CudaDevice, SETTING};
use crate::errors;
use crate::handle::callable;
use crate::user_callback::call_user;

/// Named tensors of one element type that are communicated together: a list of (name, address, count, dtype, padding).
///
/// The caller promises that the addresses stay valid as long as the bucket is registered with an engine. With `device`,
/// the addresses are on that CUDA device, and `keep` is held until the device has finished with them. `collective` is a
/// value of BAGUA_CUDA_COLLECTIVE, and `check` a value of BAGUA_CUDA_CHECK.
///
/// Raises ValueError for an empty list or a repeated name, TypeError for mixed element types.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Bucket {
    pub core: core::SharedBucket,
    /// Number of tensors that can be marked ready: all except padding.
    pub markable: usize,
    /// The device of the tensors; `None` for host memory.
    pub place: Option<Arc<OperationDevice>>,
}

impl Bucket {
    /// Returns the core's device for a CUDA device. For the bucket's own device, this is the bucket's value.
    fn place_on(&self, device: &CudaDevice, keep: Option<Py<PyAny>>) -> Arc<dyn Device> {
        match &self.place {
            Some(place) if Arc::ptr_eq(place.lane_device().context(), device.context()) => {
                place.keep_always(Box::new(keep));
                Arc::clone(place) as Arc<dyn Device>
            }
            _ => device.of_bucket(Requested::default(), false, None),
        }
    }

    fn append(&self, py: Python<'_>, op: impl FnOnce() -> Result<Arc<dyn Op>>) -> PyResult<()> {
        op().and_then(|op| self.core.lock().append(op)).map_err(|e| errors::raise(py, e))
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "the signatures are Python's, and most arguments are keywords there")]
impl Bucket {
    #[new]
    #[pyo3(signature = (name, tensors, *, device=None, collective="auto", check=false, keep=None))]
    fn new(
        py: Python<'_>,
        name: &str,
        tensors: Vec<(String, usize, usize, u8, bool)>,
        device: Option<&CudaDevice>,
        collective: &str,
        check: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Bucket> {
        let markable = tensors.iter().filter(|(.., padding)| !padding).count();
        let requested = Requested::by_name(SETTING, collective).map_err(|e| errors::raise(py, e))?;
        let place = device.map(|device| device.of_bucket(requested, check, keep));
        let on = place.as_ref().map(|place| Arc::clone(place) as Arc<dyn Device>);
        let build = || -> Result<bucket::Bucket> {
            let tensors = tensors.into_iter().map(|(name, address, count, dtype, padding)| {
                let dtype = address_to_region::dtype(dtype)?;
                // SAFETY: the caller's promise in the docstring of this class.
                let region = unsafe { address_to_region::region_in(on.as_ref(), address, count, dtype) }?;
                Ok(bucket::Tensor { name, region, padding })
            });
            bucket::Bucket::new(name, tensors.collect::<Result<_>>()?)
        };
        let bucket = build().map_err(|e| errors::raise(py, e))?;
        Ok(Bucket { core: core::SharedBucket::new(bucket), markable, place })
    }

    /// Name of the bucket.
    #[getter]
    fn name(&self) -> String {
        self.core.name().to_owned()
    }

    /// Number of bytes of all tensors, padding included.
    #[getter]
    fn bytes(&self) -> usize {
        self.core.bytes()
    }

    /// Code of the element type (see `DTYPES`).
    #[getter]
    fn dtype(&self) -> u8 {
        self.core.dtype() as u8
    }

    /// Adds an all_reduce, which averages over all ranks if `average` is true and sums otherwise. With `hierarchical`,
    /// ranks of one host combine their tensors first, even if the group would not. `scattergather` has no effect,
    /// because every all_reduce here is a reduce-scatter followed by an all-gather.
    #[pyo3(signature = (average, hierarchical, scattergather))]
    fn append_centralized(
        &self,
        py: Python<'_>,
        average: bool,
        hierarchical: bool,
        scattergather: bool,
    ) -> PyResult<()> {
        self.append(py, || Ok(Arc::new(CentralizedOp::new(average, hierarchical, scattergather))))
    }

    /// Adds an all_reduce through a codec. `error_feedback` needs the extra tensor "error", with one float32 for each
    /// element except padding. The last `exact` elements, which must be padding, are added without the codec.
    ///
    /// Raises TypeError if the codec does not encode the element type, ValueError if the codec's options do not fit the
    /// number of elements.
    #[pyo3(signature = (codec, average, hierarchical, error_feedback, exact=0))]
    fn append_compressed(
        &self,
        py: Python<'_>,
        codec: &Codec,
        average: bool,
        hierarchical: bool,
        error_feedback: bool,
        exact: usize,
    ) -> PyResult<()> {
        self.append(py, || Ok(Arc::new(CompressedOp::new(codec.core(), average, hierarchical, error_feedback, exact))))
    }

    /// Adds an all_reduce with or without a codec: both are timed now and then, and the faster is kept. `exact` and
    /// errors as in append_compressed.
    #[pyo3(signature = (codec, average, hierarchical, exact=0))]
    fn append_automatic(
        &self,
        py: Python<'_>,
        codec: &Codec,
        average: bool,
        hierarchical: bool,
        exact: usize,
    ) -> PyResult<()> {
        self.append(py, || {
            let plain = CentralizedOp::new(average, hierarchical, true);
            Ok(Arc::new(AutoOp::new(plain, CompressedOp::new(codec.core(), average, hierarchical, false, exact))))
        })
    }

    /// Name of the codec that an automatic operation uses now, "" if it uses none. None without such an operation.
    fn choice(&self) -> Option<String> {
        self.core.lock().choice()
    }

    /// Adds an averaging with peers, into the extra tensor "peer_weight" of the bucket's length and type.
    ///
    /// Raises ValueError for an unknown selection, TypeError for elements without a mean.
    fn append_decentralized(&self, py: Python<'_>, peer_selection_mode: &str, hierarchical: bool) -> PyResult<()> {
        self.append(py, || {
            let selection = PeerSelection::by_name("peer selection mode", peer_selection_mode)?;
            Ok(Arc::new(DecentralizedOp::new(selection, hierarchical)))
        })
    }

    /// Adds a round of the compressed ring, with the extra tensors "weight", "left_peer_weight" and
    /// "right_peer_weight".
    ///
    /// Raises the same errors as `append_compressed`.
    fn append_low_precision_decentralized(&self, py: Python<'_>, codec: &Codec, hierarchical: bool) -> PyResult<()> {
        self.append(py, || Ok(Arc::new(LowPrecisionDecentralizedOp::new(codec.core(), hierarchical))))
    }

    /// Adds a round of asynchronous averaging of weights that are used under `lock`. On a device, the lock orders other
    /// streams with the operations on the bucket. `elsewhere` turns this off, for an averaging that runs the rounds
    /// itself.
    ///
    /// Raises TypeError if the elements are not real floating-point numbers.
    #[pyo3(signature = (lock, *, elsewhere=false))]
    fn append_asynchronous_model_average(
        &self,
        py: Python<'_>,
        lock: &WeightLock,
        elsewhere: bool,
    ) -> PyResult<AsyncModelAverage> {
        let op = Arc::new(AsyncModelAverageOp::new(lock.core()));
        self.core.lock().append(Arc::clone(&op) as Arc<dyn Op>).map_err(|e| errors::raise(py, e))?;
        if let Some(place) = self.place.as_ref().filter(|_| !elsewhere) {
            lock.follow(place);
        }
        Ok(AsyncModelAverage { core: op })
    }

    /// Copies an extra tensor of the bucket's length into the bucket. On a device, the copy is work of `stream` (None:
    /// the legacy stream). Raises ValueError while the bucket is being communicated.
    #[pyo3(signature = (name, *, stream=None))]
    fn copy_from_extra(&self, py: Python<'_>, name: &str, stream: Option<usize>) -> PyResult<()> {
        py.detach(|| self.core.lock().copy_from_extra(name, stream)).map_err(|e| errors::raise(py, e))
    }

    /// Number of times the bucket was communicated since it was registered. `set_step` sets this number.
    #[getter]
    fn step(&self) -> u64 {
        self.core.lock().step()
    }

    /// Counts communications from `step`, to resume a training. Raises ValueError while the bucket is being
    /// communicated.
    fn set_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.core.lock().set_step(step).map_err(|e| errors::raise(py, e))
    }

    /// Adds a call of `function(bucket name)` on the communication thread. No other operation waits for the GIL.
    ///
    /// If the function raises, the engine and the group fail. The next call of the engine on this rank raises
    /// BaguaError with that exception as its cause, and the other ranks get PeerRaisedError with its class and text.
    /// `clear_ops` drops the function.
    fn append_callback(&self, py: Python<'_>, function: Bound<'_, PyAny>) -> PyResult<()> {
        let function = callable(&function)?;
        let op = CallbackOp::new(move |bucket| {
            let called = Python::try_attach(|py| {
                let called = PyTuple::new(py, [bucket]).and_then(|name| call_user(function.bind(py), &name));
                called.map_err(|raised| as_core_error(py, bucket, raised))
            });
            called.unwrap_or_else(|| Err(Error::Aborted("the interpreter is shutting down".to_owned())))
        });
        self.core.lock().append(Arc::new(op)).map_err(|e| errors::raise(py, e))
    }

    /// Registers an extra tensor for the operations (peer weights, replicas, error memory), or replaces the one of the
    /// same name. The address must stay valid as long as the bucket is registered. With `device`, the address is on
    /// that device, and `keep` is held like that of the bucket.
    ///
    /// Raises ValueError while the bucket is being communicated, TypeError if the tensor is not on the bucket's device.
    #[pyo3(signature = (name, address, count, dtype, *, device=None, keep=None))]
    fn attach(
        &self,
        py: Python<'_>,
        name: &str,
        address: usize,
        count: usize,
        dtype: u8,
        device: Option<&CudaDevice>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let attach = || -> Result<()> {
            let place = device.map(|device| self.place_on(device, keep));
            let dtype = address_to_region::dtype(dtype)?;
            // SAFETY: the caller's promise in the docstring of this method.
            let region = unsafe { address_to_region::region_in(place.as_ref(), address, count, dtype) }?;
            self.core.lock().attach(ExtraTensor { name: name.to_owned(), region })
        };
        attach().map_err(|e| errors::raise(py, e))
    }

    /// Removes all operations. Raises ValueError while the bucket is being communicated.
    fn clear_ops(&self, py: Python<'_>) -> PyResult<()> {
        self.core.lock().clear_ops().map_err(|e| errors::raise(py, e))
    }

    /// Names of the operations, in the order in which they run.
    fn ops(&self) -> Vec<&'static str> {
        self.core.lock().ops()
    }
}

/// The operation of a bucket that averages weights. `takes_part` says if this rank takes part in its rounds.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct AsyncModelAverage {
    core: Arc<AsyncModelAverageOp>,
}

#[pymethods]
impl AsyncModelAverage {
    /// True if this rank's weights count and are changed.
    #[getter]
    fn takes_part(&self) -> bool {
        self.core.takes_part()
    }

    /// Makes this rank's weights count and change from the next round on, or not.
    fn set_takes_part(&self, takes_part: bool) {
        self.core.set_takes_part(takes_part);
    }
}

/// Raises ValueError if the peer selection does not exist, or does not work with this number of members.
#[pyfunction]
pub fn check_peer_selection(py: Python<'_>, peer_selection_mode: &str, members: usize) -> PyResult<()> {
    let check = PeerSelection::by_name("peer selection mode", peer_selection_mode)
        .and_then(|selection| selection.check(members));
    check.map_err(|e| errors::raise(py, e))
}

/// Converts the exception of an operation's function to an error of the core.
fn as_core_error(py: Python<'_>, bucket: &str, raised: PyErr) -> Error {
    let (kind, text) = errors::described(py, &raised);
    let message = format!("{text} (in the callback of bucket '{bucket}')");
    Error::raised(format!("{kind}: {text}"), Exception { kind, message, original: errors::keep_exception(raised) })
}
