//! `WeightLock` and `Averager`: asynchronous averaging of a model's weights.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bagua_core::average as core;
use bagua_core::codec::Codec;
use bagua_core::error::{Error, Progress, Result};
use bagua_core::group::JoinServer;
use bagua_core::memory::{self, Device, Owner};
use bagua_core::wait::{Waited, lock};
use bagua_cuda::{Averaging, LaneDevice, OperationDevice, WeightOrder};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::address_to_region;
use crate::cuda_call::CudaDevice;
use crate::errors::{self, seconds};
use crate::gil::DropWithoutGil;
use crate::interrupt;

/// Returns the number by which weight locks identify the calling thread.
fn this_thread() -> Owner {
    static THREADS: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: Cell<Option<Owner>> = const { Cell::new(None) });
    NUMBER.get().unwrap_or_else(|| {
        let number = THREADS.fetch_add(1, Relaxed);
        NUMBER.set(Some(number));
        number
    })
}

/// The legacy stream, by DLPack's number.
const LEGACY: usize = 1;

/// The lock of one model's weights. The training, the averaging and the user's code take it in the order in which they
/// ask for it.
///
/// For weights on a CUDA device, the lock also orders streams: work that the new holder puts on its `stream` runs after
/// the work of the earlier holders, and a holder that releases the lock names the stream of its own work. None is the
/// legacy stream. No thread waits for the device. Taking the lock with a stream that is being captured raises
/// NotImplementedError and leaves the lock free. Releasing the lock frees it even if the call raises.
///
/// The lock has no effect in a forked child, because nothing averages there.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct WeightLock {
    core: Arc<memory::WeightLock>,
    order: OnceLock<Arc<WeightOrder>>,
    /// The devices of buckets whose operations take the lock.
    places: Mutex<Vec<Arc<OperationDevice>>>,
    /// The process that created the lock.
    owner: u32,
    /// Nanoseconds that Python's threads have waited for the lock.
    waited: AtomicU64,
}

impl WeightLock {
    pub fn core(&self) -> Arc<memory::WeightLock> {
        Arc::clone(&self.core)
    }

    /// Makes the lock order streams with the operations on a bucket's tensors from now on.
    pub fn follow(&self, place: &Arc<OperationDevice>) {
        lock(&self.places).push(Arc::clone(place));
    }

    fn is_foreign(&self) -> bool {
        std::process::id() != self.owner
    }

    fn take(&self, py: Python<'_>, training: bool, stream: Option<usize>) -> PyResult<()> {
        if self.is_foreign() {
            return Ok(());
        }
        self.take_on_host(py, training)?;
        let ordered = self.on_device(py, |order| order.enter(stream.unwrap_or(LEGACY)), |place| place.order(stream));
        if ordered.is_err() {
            if training { self.core.end_training() } else { drop(self.core.unlock(this_thread())) }
        }
        ordered
    }

    /// Orders the next holder's work after the work that the holder's `stream` has now.
    fn leave(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        self.on_device(py, |order| order.leave(stream.unwrap_or(LEGACY)), |place| Device::mark(&**place, stream))
    }

    fn on_device(
        &self,
        py: Python<'_>,
        of_weights: impl FnOnce(&WeightOrder) -> Result<()> + Send,
        of_bucket: impl Fn(&Arc<OperationDevice>) -> Result<()> + Send,
    ) -> PyResult<()> {
        let (order, places) = (self.order.get(), lock(&self.places).clone());
        if order.is_none() && places.is_empty() {
            return Ok(());
        }
        let done = py.detach(|| {
            order.map_or(Ok(()), |order| of_weights(order))?;
            places.iter().try_for_each(of_bucket)
        });
        done.map_err(|e| errors::raise(py, e))
    }

    fn take_on_host(&self, py: Python<'_>, training: bool) -> PyResult<()> {
        let mut request = self.core.ask(this_thread(), training);
        if request.wait(Duration::ZERO) {
            return Ok(());
        }
        let begin = Instant::now();
        let wait = |limit| if request.wait(limit) { Waited::Done(Ok(())) } else { Waited::Pending };
        let taken = interrupt::wait_in_slices(py, None, None, wait, |_| Error::other("a wait without a limit"));
        self.waited.fetch_add(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
        taken
    }
}

#[pymethods]
impl WeightLock {
    #[new]
    fn new() -> WeightLock {
        WeightLock {
            core: memory::WeightLock::new(),
            order: OnceLock::new(),
            places: Mutex::default(),
            owner: std::process::id(),
            waited: AtomicU64::new(0),
        }
    }

    /// Takes the lock for this thread, which may hold it already. Waits without the GIL; Ctrl-C ends the wait.
    #[pyo3(signature = (*, stream=None))]
    fn lock(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        self.take(py, false, stream)
    }

    /// Releases the lock once for this thread. Raises BaguaError on a thread that does not hold it.
    #[pyo3(signature = (*, stream=None))]
    fn unlock(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        if self.is_foreign() {
            return Ok(());
        }
        let left = self.leave(py, stream);
        self.core.unlock(this_thread()).map_err(|e| errors::raise(py, e))?;
        left
    }

    /// Takes the lock for the training, on any thread. Further calls only remove the time limit of `pause_training`.
    #[pyo3(signature = (*, stream=None))]
    fn begin_training(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        self.take(py, true, stream)
    }

    /// Lets other threads take the lock after `limit` seconds, unless the training continues before.
    #[pyo3(signature = (limit, *, stream=None))]
    fn pause_training(&self, py: Python<'_>, limit: f64, stream: Option<usize>) -> PyResult<()> {
        let limit = seconds("limit", limit)?;
        if self.is_foreign() {
            return Ok(());
        }
        let left = self.leave(py, stream);
        self.core.pause(limit);
        left
    }

    /// Ends the training's hold of the lock. Has no effect if another thread has taken the lock.
    #[pyo3(signature = (*, stream=None))]
    fn end_training(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        if self.is_foreign() {
            return Ok(());
        }
        let left = self.leave(py, stream);
        self.core.end_training();
        left
    }

    /// Makes work that `stream` gets from now on run after the work of all who held the lock before. Takes no lock.
    #[pyo3(signature = (*, stream=None))]
    fn order(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        if self.is_foreign() {
            return Ok(());
        }
        self.on_device(py, |order| order.enter(stream.unwrap_or(LEGACY)), |place| place.order(stream))
    }

    /// Orders the next holder's work after the work that `stream` has now, without releasing the lock. Call it after a
    /// time in which no other thread used the weights, so that no lock was needed.
    #[pyo3(signature = (*, stream=None))]
    fn mark(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        if self.is_foreign() {
            return Ok(());
        }
        self.leave(py, stream)
    }

    /// True while this thread uses the weights. A wait for a round on this thread would then never end.
    fn is_used_here(&self) -> bool {
        !self.is_foreign() && self.core.is_used_by(this_thread())
    }

    /// Seconds that threads have waited for the lock.
    #[getter]
    fn waited(&self) -> f64 {
        Duration::from_nanos(self.waited.load(Relaxed)).as_secs_f64()
    }
}

/// Averages the weights of a model with those of the other ranks, on its own thread.
///
/// If that thread fails, every method except `stop` and `stats` raises its error.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Averager {
    core: DropWithoutGil<core::Averager>,
    /// Rank in the job.
    rank: usize,
}

impl Averager {
    pub fn of(core: core::Averager, rank: usize) -> Averager {
        Averager { core: DropWithoutGil::new(core), rank }
    }
}

#[pymethods]
impl Averager {
    /// Raises the error of the averaging thread, if it has failed.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.core.check().map_err(|e| errors::raise(py, e))
    }

    /// Ends this rank's part in the averaging. Waits for at most `timeout` seconds until nothing writes to its weights.
    fn abort(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        self.core.abort();
        let timed_out = |after| self.timed_out(after, "the end of a round of averaging");
        interrupt::wait_in_slices(py, None, Some(timeout), |limit| self.core.wait_aborted(limit), timed_out)
    }

    /// Takes part in the averaging again from the next round on.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        self.core.resume().map_err(|e| errors::raise(py, e))
    }

    /// Runs one round of averaging in which every participating rank holds its locks throughout. Raises
    /// BaguaTimeoutError, which names the ranks that did not call.
    fn synchronize(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        let call = self.core.synchronize().map_err(|e| errors::raise(py, e))?;
        let timed_out = |after| call.timed_out(after, self.rank);
        interrupt::wait_in_slices(py, None, Some(timeout), |limit| call.wait(limit), timed_out)
    }

    /// Waits for at most `timeout` seconds until a joining rank has an average without its own weights.
    fn wait_joined(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        let timed_out = |after| self.timed_out(after, "the first round of averaging");
        interrupt::wait_in_slices(py, None, Some(timeout), |limit| self.core.wait_joined(limit), timed_out)
    }

    /// The caller's count of forward passes, which a joining rank takes over from the job.
    #[getter]
    fn forwards(&self) -> u64 {
        self.core.forwards()
    }

    /// Sets the caller's count of forward passes.
    fn set_forwards(&self, forwards: u64) {
        self.core.set_forwards(forwards);
    }

    /// Counts a step of the optimizer.
    fn count_step(&self) {
        self.core.count_step();
    }

    /// Ends the thread. A round in progress may end first, for at most `timeout` seconds. Further calls do nothing.
    fn stop(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        py.detach(|| self.core.stop(timeout));
        Ok(())
    }

    /// Statistics of this rank's averaging. Durations are in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.core.stats());
        let dict = PyDict::new(py);
        let state = match stats.state {
            core::AveragerState::Running => "running",
            core::AveragerState::Stopped => "stopped",
        };
        dict.set_item("state", state)?;
        dict.set_item("view", stats.view)?;
        dict.set_item("ranks", stats.ranks)?;
        dict.set_item("rounds", stats.rounds)?;
        dict.set_item("round_s", stats.round.as_secs_f64())?;
        dict.set_item("staleness", stats.staleness)?;
        dict.set_item("unaveraged_steps", stats.unaveraged_steps)?;
        dict.set_item("payload_bytes", stats.payload_bytes)?;
        dict.set_item("wire_bytes_sent", stats.wire_bytes_sent)?;
        dict.set_item("wire_bytes_received", stats.wire_bytes_received)?;
        dict.set_item("lost", stats.lost)?;
        dict.set_item("joined", stats.joined)?;
        Ok(dict)
    }
}

impl Averager {
    fn timed_out(&self, after: Duration, what: &str) -> Error {
        let progress = Progress { what: what.to_owned(), ..Progress::default() };
        Error::Timeout { after, missing: Vec::new(), noticed_by: self.rank, progress: Some(Box::new(progress)) }
    }
}

/// Returns the settings of an averager, from Python's arguments.
pub fn settings(
    name: &str,
    interval: f64,
    codec: Option<Arc<dyn Codec>>,
    elastic: Option<(Arc<JoinServer>, [u8; 32])>,
    takes_part: bool,
) -> PyResult<core::Settings> {
    let elastic = elastic.map(|(server, digest)| core::Elastic { server, digest });
    Ok(core::Settings { name: name.to_owned(), interval: seconds("interval", interval)?, codec, takes_part, elastic })
}

/// Memory that is used under a lock: address, count, element type, and True if it is on the averaging's device.
pub type Described = (usize, usize, u8, bool);

/// The device of an averaging, as Python passes it: the device, the stream with the last work on the weights, and the
/// owner of the weights.
pub type OnDevice<'py> = (PyRef<'py, CudaDevice>, usize, Py<PyAny>);

/// Returns the memory of a model. `lane_device` is the averaging's state on the device, if the model is on one.
///
/// # Errors
/// The errors of [`address_to_region::weights_in`], and `NotImplemented` for a stream that is being captured.
///
/// # Safety
/// The conditions of [`address_to_region::weights_in`], for all of the memory.
pub unsafe fn model(
    py: Python<'_>,
    (weights, buffers): (Vec<Described>, Vec<Described>),
    lock: &WeightLock,
    device: Option<OnDevice<'_>>,
    lane_device: impl FnOnce(&CudaDevice) -> Arc<LaneDevice>,
) -> Result<core::Model> {
    let averaging = device.map(|(device, stream, keep)| -> Result<Arc<Averaging>> {
        let order = lock.order.get_or_init(|| Arc::new(WeightOrder::new(device.context())));
        order.begin(device.context())?;
        // The training has used the weights without the lock so far.
        order.leave(stream)?;
        Ok(Averaging::new(lane_device(&device), Arc::clone(order), Box::new(keep)))
    });
    let (averaging, core) = (averaging.transpose()?, lock.core());
    let one = |(address, count, dtype, on_device)| {
        let dtype = address_to_region::dtype(dtype)?;
        let averaging = averaging.as_ref().filter(|_| on_device);
        // SAFETY: by this function's promise.
        unsafe { address_to_region::weights_in(averaging, address, count, dtype, Arc::clone(&core)) }
    };
    let all = |list: Vec<Described>| list.into_iter().map(one).collect::<Result<_>>();
    // Released, because the kernels may have to be compiled.
    py.detach(|| Ok(core::Model { weights: all(weights)?, buffers: all(buffers)? }))
}
