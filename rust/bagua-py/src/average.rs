//! `WeightLock` and `Averager`: asynchronous averaging of a model's weights.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bagua_core::average as core;
use bagua_core::codec::Codec;
use bagua_core::error::{Error, Progress, Result};
use bagua_core::group::Door;
use bagua_core::memory::{self, Owner};
use bagua_core::wait::{Waited, wait_in_slices};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{self, seconds};
use crate::gil::DropWithoutGil;
use crate::interrupt;
use crate::tensor;

/// The number of the calling thread among the owners of weight locks.
fn this_thread() -> Owner {
    static THREADS: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: Cell<Option<Owner>> = const { Cell::new(None) });
    NUMBER.get().unwrap_or_else(|| {
        let number = THREADS.fetch_add(1, Relaxed);
        NUMBER.set(Some(number));
        number
    })
}

/// The lock of one model's weights, between its training, its averaging and its user: first come, first served.
///
/// Without effect in a forked child, where nothing averages.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct WeightLock {
    core: Arc<memory::WeightLock>,
    /// The process that made it.
    owner: u32,
    /// Nanoseconds that threads of Python have waited for it.
    waited: AtomicU64,
}

impl WeightLock {
    pub fn core(&self) -> Arc<memory::WeightLock> {
        Arc::clone(&self.core)
    }

    fn is_foreign(&self) -> bool {
        std::process::id() != self.owner
    }

    fn take(&self, py: Python<'_>, training: bool) -> PyResult<()> {
        if self.is_foreign() {
            return Ok(());
        }
        let mut request = self.core.ask(this_thread(), training);
        if request.wait(Duration::ZERO) {
            return Ok(());
        }
        let begin = Instant::now();
        let taken = interrupt::wait_in_slices(py, None, |slice, between| {
            let wait = |limit| if request.wait(limit) { Waited::Done(Ok(())) } else { Waited::Pending };
            wait_in_slices(None, slice, wait, between, |_| Error::other("a wait without a limit"))
        });
        self.waited.fetch_add(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
        taken
    }
}

#[pymethods]
impl WeightLock {
    #[new]
    fn new() -> WeightLock {
        WeightLock { core: memory::WeightLock::new(), owner: std::process::id(), waited: AtomicU64::new(0) }
    }

    /// Takes it for this thread, which may have it already. Waits without the GIL, and hears Ctrl-C.
    fn lock(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py, false)
    }

    /// Gives one `lock` of this thread back. Raises BaguaError on a thread that does not hold it.
    fn unlock(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_foreign() {
            return Ok(());
        }
        self.core.unlock(this_thread()).map_err(|e| errors::raise(py, e))
    }

    /// Takes it for the training, from whichever thread; counts once. Ends a pause.
    fn begin_training(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py, true)
    }

    /// Lets others take it after `limit` seconds, unless the training goes on before.
    fn pause_training(&self, limit: f64) -> PyResult<()> {
        let limit = seconds("limit", limit)?;
        if !self.is_foreign() {
            self.core.pause(limit);
        }
        Ok(())
    }

    /// Ends the training's hold; without effect when others have taken it.
    fn end_training(&self) {
        if !self.is_foreign() {
            self.core.end_training();
        }
    }

    /// True while this thread uses it: a wait for a round would then never end.
    fn is_used_here(&self) -> bool {
        !self.is_foreign() && self.core.is_used_by(this_thread())
    }

    /// Seconds that threads have waited for it.
    #[getter]
    fn waited(&self) -> f64 {
        Duration::from_nanos(self.waited.load(Relaxed)).as_secs_f64()
    }
}

/// Averages the weights of one model with those of the other ranks, on a thread of its own.
///
/// Every method but `stop` and `stats` raises what failed on that thread.
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
    /// Nothing failed so far.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.core.check().map_err(|e| errors::raise(py, e))
    }

    /// This rank takes part no more. Waits for at most `timeout` seconds until nothing writes to its weights any more.
    fn abort(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        self.core.abort();
        let timed_out = |after| self.timed_out(after, "the end of a round of averaging");
        interrupt::wait_in_slices(py, None, |slice, between| {
            wait_in_slices(Some(timeout), slice, |limit| self.core.wait_aborted(limit), between, timed_out)
        })
    }

    /// This rank takes part from the next round on.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        self.core.resume().map_err(|e| errors::raise(py, e))
    }

    /// One round of all ranks that take part with their locks held throughout. BaguaTimeoutError names those that never called.
    fn synchronize(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        let call = self.core.synchronize().map_err(|e| errors::raise(py, e))?;
        let timed_out = |after| call.timed_out(after, self.rank);
        interrupt::wait_in_slices(py, None, |slice, between| {
            wait_in_slices(Some(timeout), slice, |limit| call.wait(limit), between, timed_out)
        })
    }

    /// Waits for at most `timeout` seconds until a newcomer's weights are the average of a round in which its own did not count.
    fn wait_joined(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        let timed_out = |after| self.timed_out(after, "the first round of averaging");
        interrupt::wait_in_slices(py, None, |slice, between| {
            wait_in_slices(Some(timeout), slice, |limit| self.core.wait_joined(limit), between, timed_out)
        })
    }

    /// The caller's count of forwards, which a newcomer takes over from the job.
    #[getter]
    fn forwards(&self) -> u64 {
        self.core.forwards()
    }

    /// Sets the caller's count of forwards.
    fn set_forwards(&self, forwards: u64) {
        self.core.set_forwards(forwards);
    }

    /// The optimizer made a step.
    fn count_step(&self) {
        self.core.count_step();
    }

    /// Ends the thread; a round in progress may end first, for at most `timeout` seconds. Idempotent.
    fn stop(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        py.detach(|| self.core.stop(timeout));
        Ok(())
    }

    /// Numbers of this rank; durations in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.core.stats());
        let dict = PyDict::new(py);
        let state = match stats.state {
            core::State::Running => "running",
            core::State::Stopped => "stopped",
        };
        dict.set_item("state", state)?;
        dict.set_item("view", stats.view)?;
        dict.set_item("ranks", stats.ranks)?;
        dict.set_item("rounds", stats.rounds)?;
        dict.set_item("round_s", stats.round.as_secs_f64())?;
        dict.set_item("staleness", stats.staleness)?;
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

/// The settings of an averager, from Python's.
pub fn settings(
    name: &str,
    interval: f64,
    codec: Option<Arc<dyn Codec>>,
    elastic: Option<(Arc<Door>, [u8; 32])>,
) -> PyResult<core::Settings> {
    let elastic = elastic.map(|(door, digest)| core::Elastic { door, digest });
    Ok(core::Settings { name: name.to_owned(), interval: seconds("interval", interval)?, codec, elastic })
}

/// Memory that is used under a lock: a list of (address, count, dtype).
pub fn weights_at(py: Python<'_>, list: Vec<(usize, usize, u8)>, lock: &WeightLock) -> PyResult<Vec<memory::Weights>> {
    let one = |(address, count, dtype)| tensor::weights_at(address, count, tensor::dtype(dtype)?, lock.core());
    list.into_iter().map(one).collect::<Result<_>>().map_err(|e| errors::raise(py, e))
}
