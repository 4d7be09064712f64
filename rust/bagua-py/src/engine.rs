//! `Engine`, `Bucket` and `Handle`: what runs on a communication thread.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bagua_core::bucket;
use bagua_core::collective::gossip::PeerSelection;
use bagua_core::engine as core;
use bagua_core::error::{Error, Result};
use bagua_core::group::{Group, Lane, Options};
use bagua_core::op::{
    AsyncModelAverageOp, AutoOp, CallbackOp, CentralizedOp, CompressedOp, DecentralizedOp, ExtraTensor,
    LowPrecisionDecentralizedOp, Op,
};
use bagua_core::recorder::Announced;
use bagua_core::types::DType;
use bagua_core::wait::{lock, wait_in_slices};
use bagua_cuda::Place;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::average::WeightLock;
use crate::call_user::call_user;
use crate::codec::Codec;
use crate::errors::{self, Origin, seconds};
use crate::gil::{self, DropWithoutGil};
use crate::interrupt;
use crate::request::{Call, Request};
use crate::tensor;

/// The outcome of an asynchronous operation, now or later.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Handle {
    core: core::Handle,
    /// The group of the operation; `None` for one that had nothing to do.
    origin: Option<Origin>,
    /// Of received messages: who sent them.
    senders: Option<core::Senders>,
    /// Of an operation on a device: when the device is done.
    device: Option<Arc<Place>>,
}

impl Handle {
    pub fn of(core: core::Handle, origin: Option<Origin>) -> Handle {
        Handle { core, origin, senders: None, device: None }
    }

    /// The handle of messages.
    pub fn of_messages(posted: core::Posted, origin: Origin) -> Handle {
        Handle { core: posted.handle, origin: Some(origin), senders: Some(posted.senders), device: None }
    }

    /// The handle of an operation on a device.
    pub fn on_device(self, place: Arc<Place>) -> Handle {
        Handle { device: Some(place), ..self }
    }

    /// After `finish`: work that the stream (None: the call's) gets from now on sees the result.
    pub fn order(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        let Some(place) = &self.device else { return Ok(()) };
        py.detach(|| place.order(stream)).map_err(|e| self.failed(py, e))
    }

    /// The exception for a failure of the device, which the group's other ranks hear of.
    fn failed(&self, py: Python<'_>, error: Error) -> PyErr {
        match &self.origin {
            Some(origin) => origin.fail(py, error),
            None => errors::raise(py, error),
        }
    }

    pub fn finish(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        let origin = self.origin.as_ref();
        interrupt::wait_in_slices(py, origin, |slice, between| self.core.wait_in_slices(timeout, slice, between))
    }
}

#[pymethods]
impl Handle {
    /// Waits until the operation is done, at most `timeout` seconds (None: until its own deadline ends it). Ctrl-C ends the wait.
    ///
    /// Of an operation on a device, work that `stream` (None: the call's) gets from now on sees the result; the device may still have work.
    ///
    /// Raises BaguaTimeoutError when `timeout` passes, which leaves the operation running; NotImplementedError for a stream that is being
    /// captured; else what the operation raises.
    #[pyo3(signature = (timeout=None, *, stream=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, stream: Option<usize>) -> PyResult<()> {
        let timeout = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        self.finish(py, timeout)?;
        self.order(py, stream)
    }

    /// Waits until the operation is done, on its device too, at most `timeout` seconds. Ctrl-C ends the wait. Raises as `wait`.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let start = Instant::now();
        let timeout = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        self.finish(py, timeout)?;
        let Some(place) = &self.device else { return Ok(()) };
        let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
        let rank = self.origin.as_ref().map_or(0, Origin::rank);
        let late = move |_| Error::Timeout {
            after: timeout.unwrap_or_default(),
            missing: vec![],
            noticed_by: rank,
            progress: None,
        };
        interrupt::wait_in_slices(py, self.origin.as_ref(), |slice, between| {
            wait_in_slices(left, slice, |limit| place.wait_for(limit), between, late)
        })
    }

    /// Ranks of the group that sent the messages that were received, in the order of the receives; None for a message that has not come.
    fn senders(&self) -> Vec<Option<usize>> {
        let senders = self.senders.iter().flat_map(|senders| senders.iter());
        senders.map(|rank| Some(rank.load(Ordering::Acquire)).filter(|rank| *rank != core::NOBODY)).collect()
    }

    /// Calls `callback(error)` when the operation is done, exactly once: `error` is None, or the exception that `wait` raises.
    ///
    /// When the operation is done already, the call happens here. Otherwise it happens on the thread "bagua-callbacks", which
    /// calls the callbacks of all handles of the process one after another: a callback may block and start operations, and
    /// only other callbacks wait for it. An exception of a callback goes to `sys.unraisablehook`; only one that is no Exception
    /// (KeyboardInterrupt, SystemExit) is raised here, when the call happens here.
    ///
    /// Raises TypeError for what is not callable, BaguaError in a forked child while the operation is pending.
    #[pyo3(signature = (callback, /))]
    fn then(&self, py: Python<'_>, callback: Bound<'_, PyAny>) -> PyResult<()> {
        let later = callable(&callback)?;
        let origin = self.origin.clone();
        let call_later = move |result: &Result<()>| {
            // Without an interpreter, which has shut down then, there is nothing to call.
            let _ = Python::try_attach(|py| {
                let callback = later.into_bound(py);
                if let Err(raised) = call_with(&callback, origin.as_ref(), result) {
                    raised.write_unraisable(py, Some(&callback));
                }
            });
        };
        // With the GIL: no thread waits for the GIL while it holds a lock of a handle or of the queue of callbacks.
        let added = self.core.add_callback(call_later).map_err(|e| errors::raise(py, e))?;
        match added.map(|(_, result)| call_with(&callback, self.origin.as_ref(), &result)) {
            Some(Err(raised)) if raised.is_instance_of::<PyException>(py) => {
                raised.write_unraisable(py, Some(&callback));
                Ok(())
            }
            Some(called) => called,
            None => Ok(()),
        }
    }

    /// True when the operation is done, well or not, and its device with it.
    fn is_completed(&self, py: Python<'_>) -> bool {
        self.core.is_completed() && self.device.as_ref().is_none_or(|place| py.detach(|| place.is_done()))
    }

    /// The handle of an operation that had nothing to do.
    #[staticmethod]
    fn completed() -> Handle {
        Handle::of(core::Handle::completed(Ok(())), None)
    }
}

/// Calls a callback with the error of an operation, or None.
fn call_with(callback: &Bound<'_, PyAny>, origin: Option<&Origin>, result: &Result<()>) -> PyResult<()> {
    let py = callback.py();
    let exception = |error: &Error| match origin {
        Some(origin) => origin.raise(py, error.clone()),
        None => errors::raise(py, error.clone()),
    };
    let error = result.as_ref().err().map(|error| exception(error).into_value(py));
    call_user(callback, &PyTuple::new(py, [error])?)
}

/// A reference to a callable. TypeError for anything else.
fn callable(object: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    if !object.is_callable() {
        let text = format!("{} is not callable", object.repr()?);
        return Err(errors::raise(object.py(), Error::UnsupportedType(text)));
    }
    Ok(object.clone().unbind())
}

/// Waits until every callback that was given to `Handle.then` has returned. For the end of a program, after its groups were left.
///
/// Raises BaguaError when some have not after `timeout` seconds, ValueError in a callback, which would wait for itself.
#[pyfunction]
pub fn wait_for_callbacks(py: Python<'_>, timeout: f64) -> PyResult<()> {
    let timeout = seconds("timeout", timeout)?;
    let timed_out = |after: Duration| {
        Error::other(format!("a callback of a handle has not returned after {:.1} s", after.as_secs_f64()))
    };
    interrupt::wait_in_slices(py, None, |slice, between| {
        wait_in_slices(Some(timeout), slice, core::wait_for_callbacks, between, timed_out)
    })
}

/// Named tensors of one element type that travel together: a list of (name, address, count, dtype, padding).
///
/// The caller promises that the addresses stay valid as long as the bucket is registered with an engine.
/// Raises ValueError for an empty list or a repeated name, TypeError for mixed element types.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Bucket {
    core: core::SharedBucket,
    /// How many of its tensors can be marked ready: all but padding.
    markable: usize,
}

impl Bucket {
    fn append(&self, py: Python<'_>, op: impl FnOnce() -> Result<Arc<dyn Op>>) -> PyResult<()> {
        op().and_then(|op| self.core.append(op)).map_err(|e| errors::raise(py, e))
    }
}

#[pymethods]
impl Bucket {
    #[new]
    fn new(py: Python<'_>, name: &str, tensors: Vec<(String, usize, usize, u8, bool)>) -> PyResult<Bucket> {
        let markable = tensors.iter().filter(|(.., padding)| !padding).count();
        let build = || -> Result<bucket::Bucket> {
            let tensors = tensors.into_iter().map(|(name, address, count, dtype, padding)| {
                let region = tensor::region_at(address, count, tensor::dtype(dtype)?)?;
                Ok(bucket::Tensor { name, region, padding })
            });
            bucket::Bucket::new(name, tensors.collect::<Result<_>>()?)
        };
        let bucket = build().map_err(|e| errors::raise(py, e))?;
        Ok(Bucket { core: core::SharedBucket::new(bucket), markable })
    }

    /// Its name.
    #[getter]
    fn name(&self) -> String {
        self.core.name().to_owned()
    }

    /// Bytes of all tensors, padding included.
    #[getter]
    fn bytes(&self) -> usize {
        self.core.bytes()
    }

    /// Code of the element type.
    #[getter]
    fn dtype(&self) -> u8 {
        self.core.dtype() as u8
    }

    /// Adds an all_reduce: the average of all ranks, or the sum. `hierarchical` combines inside hosts first, also where the group would
    /// go flat; `scattergather` changes nothing, as every route is a reduce-scatter followed by an all-gather.
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

    /// Adds an all_reduce through a codec. `error_feedback` needs the extra tensor "error": a float32 for each element, padding left
    /// out.
    ///
    /// Raises TypeError for an element type that the codec does not encode, ValueError for a codec whose options do not fit the
    /// number of elements.
    fn append_compressed(
        &self,
        py: Python<'_>,
        codec: &Codec,
        average: bool,
        hierarchical: bool,
        error_feedback: bool,
    ) -> PyResult<()> {
        self.append(py, || Ok(Arc::new(CompressedOp::new(codec.core(), average, hierarchical, error_feedback))))
    }

    /// Adds an all_reduce with or without a codec: both ways are timed now and then, and the faster is kept. Raises as
    /// append_compressed.
    fn append_automatic(&self, py: Python<'_>, codec: &Codec, average: bool, hierarchical: bool) -> PyResult<()> {
        self.append(py, || {
            let plain = CentralizedOp::new(average, hierarchical, true);
            Ok(Arc::new(AutoOp::new(plain, CompressedOp::new(codec.core(), average, hierarchical, false))))
        })
    }

    /// The codec that an automatic operation uses now, "" for none; None without such an operation.
    fn choice(&self) -> Option<String> {
        self.core.choice()
    }

    /// Adds an averaging with peers, into the extra tensor "peer_weight" of the bucket's length and type.
    ///
    /// Raises ValueError for an unknown selection, TypeError for elements without a mean.
    fn append_decentralized(&self, py: Python<'_>, peer_selection_mode: &str, hierarchical: bool) -> PyResult<()> {
        self.append(py, || {
            let selection = PeerSelection::by_name(peer_selection_mode)?;
            Ok(Arc::new(DecentralizedOp::new(selection, hierarchical)))
        })
    }

    /// Adds a round of the compressed ring, with the extra tensors "weight", "left_peer_weight" and "right_peer_weight".
    ///
    /// Raises as append_compressed.
    fn append_low_precision_decentralized(&self, py: Python<'_>, codec: &Codec, hierarchical: bool) -> PyResult<()> {
        self.append(py, || Ok(Arc::new(LowPrecisionDecentralizedOp::new(codec.core(), hierarchical))))
    }

    /// Adds a round of asynchronous model averaging, of weights that are used under `lock`.
    ///
    /// Raises TypeError for elements that are not real floating-point numbers.
    fn append_asynchronous_model_average(&self, py: Python<'_>, lock: &WeightLock) -> PyResult<AsyncModelAverage> {
        let op = Arc::new(AsyncModelAverageOp::new(lock.core()));
        self.core.append(Arc::clone(&op) as Arc<dyn Op>).map_err(|e| errors::raise(py, e))?;
        Ok(AsyncModelAverage { core: op })
    }

    /// Copies an extra tensor of the bucket's length into the bucket. Raises ValueError while the bucket is being communicated.
    fn copy_from_extra(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| self.core.copy_from_extra(name)).map_err(|e| errors::raise(py, e))
    }

    /// How often it was communicated, since it was registered or since a step was set.
    #[getter]
    fn step(&self) -> u64 {
        self.core.step()
    }

    /// Counts communications from `step` on, to resume a training. Raises ValueError while the bucket is being communicated.
    fn set_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.core.set_step(step).map_err(|e| errors::raise(py, e))
    }

    /// Adds a call of `function(bucket name)` on the communication thread: the one operation that waits for the GIL.
    ///
    /// An exception in it fails the engine and the group, naming its class and text. `clear_ops` lets go of the function.
    fn append_callback(&self, py: Python<'_>, function: Bound<'_, PyAny>) -> PyResult<()> {
        let function = callable(&function)?;
        let op = CallbackOp::new(move |bucket| {
            let called = Python::try_attach(|py| {
                let called = PyTuple::new(py, [bucket]).and_then(|name| call_user(function.bind(py), &name));
                called.map_err(|e| as_core_error(py, &e))
            });
            called.unwrap_or_else(|| Err(Error::Aborted("the interpreter is shutting down".to_owned())))
        });
        self.core.append(Arc::new(op)).map_err(|e| errors::raise(py, e))
    }

    /// Registers a tensor of the operations beside the bucket's own (peer weights, replicas, error memory); one of the same name is
    /// replaced. The address stays valid as long as the bucket is registered. Raises ValueError while the bucket is being
    /// communicated.
    fn attach(&self, py: Python<'_>, name: &str, address: usize, count: usize, dtype: u8) -> PyResult<()> {
        let attach = || -> Result<()> {
            let region = tensor::region_at(address, count, tensor::dtype(dtype)?)?;
            self.core.attach(ExtraTensor { name: name.to_owned(), region })
        };
        attach().map_err(|e| errors::raise(py, e))
    }

    /// Removes all operations. Raises ValueError while the bucket is being communicated.
    fn clear_ops(&self, py: Python<'_>) -> PyResult<()> {
        self.core.clear_ops().map_err(|e| errors::raise(py, e))
    }

    /// Names of the operations, in the order in which they run.
    fn ops(&self) -> Vec<&'static str> {
        self.core.ops()
    }
}

/// A bucket's operation that averages weights: whether this rank takes part in its rounds.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct AsyncModelAverage {
    core: Arc<AsyncModelAverageOp>,
}

#[pymethods]
impl AsyncModelAverage {
    /// True when this rank's weights count and are changed.
    #[getter]
    fn takes_part(&self) -> bool {
        self.core.takes_part()
    }

    /// Says so for the rounds from the next one on.
    fn set_takes_part(&self, takes_part: bool) {
        self.core.set_takes_part(takes_part);
    }
}

/// Refuses a way to choose peers that does not exist, or does not work among so many members: ValueError.
#[pyfunction]
pub fn check_peer_selection(py: Python<'_>, peer_selection_mode: &str, members: usize) -> PyResult<()> {
    let check = PeerSelection::by_name(peer_selection_mode).and_then(|selection| selection.check(members));
    check.map_err(|e| errors::raise(py, e))
}

/// A Python exception as an error that the core can send to other threads and ranks.
fn as_core_error(py: Python<'_>, raised: &PyErr) -> Error {
    let class = raised.get_type(py).name().map_or_else(|_| "an exception".to_owned(), |name| name.to_string());
    Error::other(format!("{class}: {}", raised.value(py)))
}

/// One strictly ordered queue of buckets with a lane and a communication thread of its own.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Engine {
    core: DropWithoutGil<Arc<core::Engine>>,
    group: Group,
    /// The group, for its errors.
    origin: Origin,
    /// Element type of each registered tensor by number, for `mark_ready` with an address. Never locked while waiting.
    dtypes: Mutex<Vec<DType>>,
}

impl Engine {
    pub fn of(core: core::Engine, group: Group, origin: Origin) -> Engine {
        Engine { core: DropWithoutGil::new(Arc::new(core)), group, origin, dtypes: Mutex::default() }
    }

    fn dtypes(&self) -> MutexGuard<'_, Vec<DType>> {
        lock(&self.dtypes)
    }

    fn go(
        &self,
        py: Python<'_>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
        op: &Announced<'_>,
        verb: impl FnOnce(&mut Lane) -> Result<()> + Send + 'static,
    ) -> PyResult<Option<Handle>> {
        let job = move |lane: &mut Lane| {
            let outcome = verb(lane);
            drop(keep);
            outcome
        };
        let core = py.detach(|| self.core.submit_op(op, job)).map_err(|e| self.origin.raise(py, e))?;
        let handle = Handle::of(core, Some(self.origin.clone()));
        if async_op {
            return Ok(Some(handle));
        }
        handle.finish(py, None)?;
        Ok(None)
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "the signatures are Python's, and most arguments are keywords there")]
impl Engine {
    /// Waits for what is pending, then replaces the buckets. Their order is the order of communication, equal on all ranks.
    ///
    /// Returns the names of the tensors, padding left out: a tensor's index in this list is its number. Raises ValueError for a
    /// tensor name, or the memory of a tensor, that appears twice.
    fn register(&self, py: Python<'_>, buckets: Vec<Py<Bucket>>) -> PyResult<Vec<String>> {
        let buckets: Vec<&Bucket> = buckets.iter().map(Py::get).collect();
        let cores: Vec<_> = buckets.iter().map(|bucket| bucket.core.clone()).collect();
        gil::run_released(py, &self.group, &self.origin, || self.core.register(cores))?;
        *self.dtypes() =
            buckets.iter().flat_map(|bucket| std::iter::repeat_n(bucket.core.dtype(), bucket.markable)).collect();
        Ok(self.core.tensors())
    }

    /// The values of the tensor with this number are final for this step. `address` and `count` say where it is now, if it moved.
    ///
    /// Raises ValueError for an unknown number or a tensor that was marked already, and what went wrong on the communication thread.
    #[pyo3(signature = (number, address=None, count=None))]
    fn mark_ready(&self, py: Python<'_>, number: usize, address: Option<usize>, count: Option<usize>) -> PyResult<()> {
        let mark = || -> Result<()> {
            let region = match (address, count) {
                (None, None) => None,
                // The core refuses an unknown number.
                (Some(address), Some(count)) => match self.dtypes().get(number) {
                    Some(dtype) => Some(tensor::region_at(address, count, *dtype)?),
                    None => None,
                },
                _ => {
                    return Err(Error::InvalidArgument(
                        "a tensor that moved needs both its address and its count".to_owned(),
                    ));
                }
            };
            self.core.mark_ready(number, region)
        };
        py.detach(mark).map_err(|e| self.origin.raise(py, e))
    }

    /// Waits until every scheduled bucket is done, at most `timeout` seconds, and returns how many were. Hears Ctrl-C.
    ///
    /// Raises what went wrong; ValueError names the tensors that are missing of a bucket that is partly ready.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<usize> {
        let timeout = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        let origin = Some(&self.origin);
        interrupt::wait_in_slices(py, origin, |slice, between| self.core.wait_in_slices(timeout, slice, between))
    }

    /// Names of the tensors that are not ready, of buckets that were not communicated since the last `wait`.
    fn unready(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.core.unready())
    }

    /// Ends the thread: what is queued fails with AbortedError. Idempotent.
    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.core.shutdown());
    }

    /// A verb: see the communicator's; in order with the buckets.
    #[pyo3(signature = (verb, src, dst, count, dtype, op=0, root=0, *, shape=None, timeout=None, async_op=false, keep=None))]
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
    ) -> PyResult<Option<Handle>> {
        let Call { shape, timeout, async_op, keep } = Call::new(shape, timeout, async_op, keep)?;
        let mut request = Request::new(py, &self.group, (verb, src, dst, count, dtype, op, root), None)?;
        let op = request.announced();
        self.go(py, async_op, keep, &op, move |lane| request.run(lane, &Options { timeout, shape, ..Options::DEFAULT }))
    }
}
