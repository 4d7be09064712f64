//! `Communicator`: a group's verbs by address.
//!
//! Addresses are those of host memory, counts are elements (of one rank's chunk in the verbs that have chunks), element types and
//! reduce operations are the codes of `bagua_core::types`, ranks are ranks of the group, timeouts are seconds.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bagua_core::engine as core;
use bagua_core::error::{Error, Result};
use bagua_core::group::{Chunks, Group, Lane, Options};
use bagua_core::memory::Region;
use bagua_core::types::Shape;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arena::Arena;
use crate::engine::{Engine, Handle};
use crate::errors::{self, seconds};
use crate::tensor::{self, Operands};
use crate::tensor_reader::TensorReader;
use crate::waiting::{self, Kept};

/// A group of ranks and its main lane: every verb runs in program order, a blocking one on the calling thread.
///
/// The caller promises that an address stays valid until the verb has returned or its handle is done. `keep` holds any object
/// until then. Verbs raise ValueError or TypeError before anything is sent, and the classes of `bagua.errors` afterwards.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Communicator {
    core: Kept<Arc<core::Communicator>>,
    /// Its verbs wait by spinning first, so that those on little memory need not release the GIL.
    spins: bool,
}

/// A verb on more bytes than this may take longer than the GIL should be held.
const BRIEF: usize = 64 << 10;

/// Of a verb that never keeps the GIL.
const LONG: usize = usize::MAX;

/// What every verb takes besides its operands.
struct Ask {
    shape: Option<Shape>,
    timeout: Option<Duration>,
    async_op: bool,
    keep: Option<Py<PyAny>>,
}

impl Ask {
    fn new(shape: Option<Vec<usize>>, timeout: Option<f64>, async_op: bool, keep: Option<Py<PyAny>>) -> PyResult<Ask> {
        let timeout = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        Ok(Ask { shape: shape.as_deref().map(Shape::new), timeout, async_op, keep })
    }
}

impl Communicator {
    pub fn of(core: core::Communicator) -> Communicator {
        let spins = matches!(core.transports().0, "solo" | "shm");
        Communicator { core: Kept::new(Arc::new(core)), spins }
    }

    pub fn group(&self) -> &Group {
        self.core.group()
    }

    /// Runs a verb on so many bytes on this thread.
    pub fn here(&self, py: Python<'_>, bytes: usize, verb: impl FnOnce(&mut Lane) -> Result<()> + Send) -> Result<()> {
        let run = || self.core.run(verb);
        if self.spins && bytes <= BRIEF {
            waiting::brief(self.group(), run)
        } else {
            waiting::without_gil(py, self.group(), run)
        }
    }

    /// Runs a verb on so many bytes here, or hands it to the communication thread.
    fn go(
        &self,
        py: Python<'_>,
        ask: Ask,
        bytes: usize,
        verb: impl FnOnce(&mut Lane, &Options<'_>) -> Result<()> + Send + 'static,
    ) -> PyResult<Option<Handle>> {
        let Ask { shape, timeout, async_op, keep } = ask;
        let options = Options { timeout, shape, label: "" };
        if !async_op {
            let outcome = self.here(py, bytes, |lane| verb(lane, &options));
            return waiting::raised(py, outcome).map(|()| None);
        }
        let job = move |lane: &mut Lane| {
            let outcome = verb(lane, &options);
            // Without the GIL: PyO3 puts the reference aside, and the next call from Python drops it.
            drop(keep);
            outcome
        };
        let handle = py.detach(|| self.core.submit(Box::new(job))).map_err(|e| errors::raise(py, e))?;
        Ok(Some(Handle::of(handle)))
    }

    /// Operands for a verb whose buffers have `src_parts` and `dst_parts` chunks of `count` elements.
    fn operands(
        &self,
        src: Option<usize>,
        dst: usize,
        count: usize,
        code: u8,
        parts: (usize, usize),
    ) -> Result<Operands> {
        let dtype = tensor::dtype(code)?;
        let src = src.map(|address| tensor::chunks_on_loan(address, count, parts.0, dtype)).transpose()?;
        Operands::new(src, tensor::chunks_on_loan(dst, count, parts.1, dtype)?)
    }
}

/// An address with its peer and its count, on loan.
fn messages(list: Vec<(usize, usize, usize)>, code: u8) -> Result<Vec<(usize, Region)>> {
    let dtype = tensor::dtype(code)?;
    list.into_iter().map(|(peer, address, count)| Ok((peer, tensor::on_loan(address, count, dtype)?))).collect()
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "the signatures are Python's, and most arguments are keywords there")]
impl Communicator {
    /// This process's rank in the group.
    #[getter]
    fn rank(&self) -> usize {
        self.group().rank()
    }

    /// Number of ranks.
    #[getter]
    fn size(&self) -> usize {
        self.group().size()
    }

    /// Name of the group.
    #[getter]
    fn name(&self) -> String {
        self.group().name().to_owned()
    }

    /// World ranks of the members, by group rank.
    #[getter]
    fn ranks(&self) -> Vec<usize> {
        self.group().ranks().to_vec()
    }

    /// Group ranks on each host, hosts in the order of their first rank.
    #[getter]
    fn hosts(&self) -> Vec<Vec<usize>> {
        self.group().hosts()
    }

    /// Default deadline of an operation, in seconds.
    #[getter]
    fn timeout(&self) -> f64 {
        self.group().timeout().as_secs_f64()
    }

    /// Name of the collective in use: "solo", "shm", "net" or "hier".
    #[getter]
    fn collective(&self) -> &'static str {
        self.core.transports().0
    }

    /// Name of the transport towards each rank, "self" for this one.
    #[getter]
    fn transports(&self) -> Vec<&'static str> {
        self.core.transports().1
    }

    /// A blocking verb (by its code in `bagua_core::types::Kind`) on plain tensors: from `src`, which may be None, to `dst`, which then has
    /// changed. `root` is the root or the peer of those that have one. False, and nothing was done, where the tensors are not plain or do
    /// not fit the verb: ask by address then, which says what is wrong.
    fn at_once(
        &self,
        verb: u8,
        reader: &TensorReader,
        src: Option<&Bound<'_, PyAny>>,
        dst: &Bound<'_, PyAny>,
        op: &Bound<'_, PyAny>,
        root: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        self.on_plain_tensors(verb, reader, src, dst, op, root)
    }

    /// Every rank gets the combination of all. `src` None: in place at `dst`.
    #[pyo3(signature = (src, dst, count, dtype, op, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        src: Option<usize>,
        dst: usize,
        count: usize,
        dtype: u8,
        op: u8,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let (kind, op) = with(py, || Ok((tensor::dtype(dtype)?, tensor::reduce_op(op)?)))?;
        let mut operands = with(py, || self.operands(src, dst, count, dtype, (1, 1)))?;
        self.go(py, ask, operands.bytes(), move |lane, options| lane.all_reduce(options, kind, operands.io(), op))
    }

    /// Rank `root` gets the combination of all. `src` None: in place at `dst`, which stays as it is on the other ranks.
    #[pyo3(signature = (src, dst, count, dtype, op, root, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn reduce(
        &self,
        py: Python<'_>,
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
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let (kind, op) = with(py, || Ok((tensor::dtype(dtype)?, tensor::reduce_op(op)?)))?;
        let mut operands = with(py, || match (src, dst) {
            (None, None) => Err(Error::InvalidArgument("reduce needs a source or a destination".to_owned())),
            (Some(_), None) if self.group().rank() == root => {
                Err(Error::InvalidArgument("reduce needs a destination on its root".to_owned()))
            }
            (src, Some(dst)) => self.operands(src, dst, count, dtype, (1, 1)),
            (src, None) => self.operands(src, 0, count, dtype, (1, 0)),
        })?;
        self.go(py, ask, operands.bytes(), move |lane, options| lane.reduce(options, kind, operands.io(), op, root))
    }

    /// Every rank gets rank `root`'s elements, in place at `address`.
    #[pyo3(signature = (address, count, dtype, root, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        address: usize,
        count: usize,
        dtype: u8,
        root: usize,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let mut data = with(py, || tensor::on_loan(address, count, kind))?;
        self.go(py, ask, data.len(), move |lane, options| lane.broadcast(options, kind, data.bytes_mut(), root))
    }

    /// Every rank gets every rank's chunk of `count` elements, at rank * count of `dst`. `src` None: the own chunk is there already.
    #[pyo3(signature = (src, dst, count, dtype, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        src: Option<usize>,
        dst: usize,
        count: usize,
        dtype: u8,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let mut operands = with(py, || self.operands(src, dst, count, dtype, (1, self.group().size())))?;
        self.go(py, ask, operands.bytes(), move |lane, options| lane.all_gather(options, kind, operands.io()))
    }

    /// Rank `root` gets every rank's chunk of `count` elements, at rank * count of `dst`. `src` None: `dst` has room for all chunks
    /// on every rank, and the own chunk is there already. `dst` may be None on the others when there is a `src`.
    #[pyo3(signature = (src, dst, count, dtype, root, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn gather(
        &self,
        py: Python<'_>,
        src: Option<usize>,
        dst: Option<usize>,
        count: usize,
        dtype: u8,
        root: usize,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let (rank, size) = (self.group().rank(), self.group().size());
        let mut operands = with(py, || match (src, dst) {
            (None, None) => Err(Error::InvalidArgument("gather needs a source or a destination".to_owned())),
            (Some(_), None) if rank == root => {
                Err(Error::InvalidArgument("gather needs a destination on its root".to_owned()))
            }
            (Some(_), Some(dst)) if rank != root => self.operands(src, dst, count, dtype, (1, 0)),
            (src, Some(dst)) => self.operands(src, dst, count, dtype, (1, size)),
            (src, None) => self.operands(src, 0, count, dtype, (1, 0)),
        })?;
        self.go(py, ask, operands.bytes(), move |lane, options| lane.gather(options, kind, operands.io(), root))
    }

    /// Every rank gets its chunk of `count` elements of rank `root`'s, which lie at rank * count.
    ///
    /// In place, `src` None: `dst` has room for all chunks on every rank, and the own chunk lands at rank * count of it. Otherwise
    /// `dst` has room for one chunk, and `src` holds all of them; a rank that is not the root passes 0 (it is not read).
    #[pyo3(signature = (src, dst, count, dtype, root, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        src: Option<usize>,
        dst: usize,
        count: usize,
        dtype: u8,
        root: usize,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let (rank, size) = (self.group().rank(), self.group().size());
        let parts = match src {
            None => (0, size),
            Some(_) if rank == root => (size, 1),
            Some(_) => (0, 1),
        };
        let mut operands = with(py, || self.operands(src, dst, count, dtype, parts))?;
        self.go(py, ask, operands.bytes(), move |lane, options| lane.scatter(options, kind, operands.io(), root))
    }

    /// Rank r gets the combination of all ranks' chunk r of `count` elements. `src` None: `dst` holds all chunks, and the result
    /// lands at rank * count of it; otherwise `src` holds all chunks and `dst` has room for one.
    #[pyo3(signature = (src, dst, count, dtype, op, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        src: Option<usize>,
        dst: usize,
        count: usize,
        dtype: u8,
        op: u8,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let (kind, op) = with(py, || Ok((tensor::dtype(dtype)?, tensor::reduce_op(op)?)))?;
        let size = self.group().size();
        let parts = if src.is_some() { (size, 1) } else { (0, size) };
        let mut operands = with(py, || self.operands(src, dst, count, dtype, parts))?;
        self.go(py, ask, operands.bytes(), move |lane, options| lane.reduce_scatter(options, kind, operands.io(), op))
    }

    /// Rank r gets chunk r (`count` elements) of every rank, in rank order. `src` None: in place at `dst`.
    #[pyo3(signature = (src, dst, count, dtype, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        src: Option<usize>,
        dst: usize,
        count: usize,
        dtype: u8,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let size = self.group().size();
        let mut operands = with(py, || self.operands(src, dst, count, dtype, (size, size)))?;
        self.go(py, ask, operands.bytes(), move |lane, options| lane.all_to_all(options, kind, operands.io()))
    }

    /// Rank r gets `send_counts[r]` elements from `send_displs[r]` of every rank's source, at `recv_displs` of its destination.
    /// `src_count` and `dst_count` are the elements of the whole buffers. `src` None: in place at `dst` (`src_count` is not used).
    #[pyo3(signature = (src, src_count, dst, dst_count, dtype, send_counts, send_displs, recv_counts, recv_displs, *,
        timeout=None, async_op=false, keep=None))]
    fn all_to_all_v(
        &self,
        py: Python<'_>,
        src: Option<usize>,
        src_count: usize,
        dst: usize,
        dst_count: usize,
        dtype: u8,
        send_counts: Vec<usize>,
        send_displs: Vec<usize>,
        recv_counts: Vec<usize>,
        recv_displs: Vec<usize>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(None, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let mut operands = with(py, || {
            let src = src.map(|address| tensor::on_loan(address, src_count, kind)).transpose()?;
            Operands::new(src, tensor::on_loan(dst, dst_count, kind)?)
        })?;
        self.go(py, ask, LONG, move |lane, options| {
            let send = Chunks { counts: &send_counts, displs: &send_displs };
            let recv = Chunks { counts: &recv_counts, displs: &recv_displs };
            lane.all_to_all_v(options, kind, operands.io(), send, recv)
        })
    }

    /// One message to rank `to`.
    #[pyo3(signature = (address, count, dtype, to, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn send(
        &self,
        py: Python<'_>,
        address: usize,
        count: usize,
        dtype: u8,
        to: usize,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let data = with(py, || tensor::on_loan(address, count, kind))?;
        self.go(py, ask, LONG, move |lane, options| lane.send(options, kind, data.bytes(), to))
    }

    /// One message from rank `from_`.
    #[pyo3(signature = (address, count, dtype, from_, *, shape=None, timeout=None, async_op=false, keep=None))]
    fn recv(
        &self,
        py: Python<'_>,
        address: usize,
        count: usize,
        dtype: u8,
        from_: usize,
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(shape, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let mut data = with(py, || tensor::on_loan(address, count, kind))?;
        self.go(py, ask, LONG, move |lane, options| lane.recv(options, kind, data.bytes_mut(), from_))
    }

    /// Many messages at once, in both directions: lists of (peer, address, count).
    #[pyo3(signature = (sends, recvs, dtype, *, timeout=None, async_op=false, keep=None))]
    fn exchange(
        &self,
        py: Python<'_>,
        sends: Vec<(usize, usize, usize)>,
        recvs: Vec<(usize, usize, usize)>,
        dtype: u8,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Option<Handle>> {
        let ask = Ask::new(None, timeout, async_op, keep)?;
        let kind = with(py, || tensor::dtype(dtype))?;
        let (sends, mut recvs) = with(py, || Ok((messages(sends, dtype)?, messages(recvs, dtype)?)))?;
        self.go(py, ask, LONG, move |lane, options| {
            let sends: Vec<(usize, &[u8])> = sends.iter().map(|(peer, data)| (*peer, data.bytes())).collect();
            let mut recvs: Vec<(usize, &mut [u8])> =
                recvs.iter_mut().map(|(peer, data)| (*peer, data.bytes_mut())).collect();
            lane.exchange(options, kind, &sends, &mut recvs)
        })
    }

    /// Returns when every rank has called it.
    #[pyo3(signature = (*, timeout=None, async_op=false))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>, async_op: bool) -> PyResult<Option<Handle>> {
        let ask = Ask::new(None, timeout, async_op, None)?;
        self.go(py, ask, 0, |lane, options| lane.barrier(options))
    }

    /// The group of some members, given as ranks of this group; None when this rank is not among them. The members call it in the
    /// same order, with the same ranks and name.
    fn subgroup(&self, py: Python<'_>, ranks: Vec<usize>, name: &str) -> PyResult<Option<Communicator>> {
        let opened = waiting::blocking(py, self.group(), || {
            self.group().subgroup(&ranks, name)?.map(core::Communicator::new).transpose()
        })?;
        Ok(opened.map(Communicator::of))
    }

    /// Memory for tensors, `nbytes` on every rank, zeroed. Verbs on tensors that lie in it on all ranks of a host work on the peers'
    /// memory in place. Every rank of the group calls it, in the same order, with the same size.
    #[pyo3(signature = (nbytes, *, label="bagua-arena"))]
    fn arena(&self, py: Python<'_>, nbytes: usize, label: &str) -> PyResult<Arena> {
        waiting::blocking(py, self.group(), || self.group().arena(nbytes, label)).map(Arena::of)
    }

    /// An engine with a lane and a thread of its own. Every rank of the group calls it, in the same order.
    fn engine(&self, py: Python<'_>, name: &str) -> PyResult<Engine> {
        let group = self.group().clone();
        let engine = waiting::blocking(py, self.group(), || core::Engine::new(&group, name))?;
        Ok(Engine::of(engine, group))
    }

    /// Poisons the group on every rank: the others get PeerRaisedError with this class name and text.
    fn raise_(&self, py: Python<'_>, kind: &str, message: &str) {
        py.detach(|| self.group().raise(kind, message));
    }

    /// Poisons the group on every rank with AbortedError.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.group().abort(reason));
    }

    /// Says goodbye and closes every connection of this rank. Idempotent; leaving the world leaves its sub-groups.
    fn leave(&self, py: Python<'_>) {
        py.detach(|| self.group().leave());
    }

    /// Raises the group's first failure, if there is one.
    fn cause(&self, py: Python<'_>) -> PyResult<()> {
        self.group().health().check().map_err(|e| errors::raise(py, e))
    }

    /// Counters since the group was built: a plain dict, times in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let group = self.group();
        let ops = PyDict::new(py);
        for (kind, counts) in group.stats().snapshot() {
            let shown = PyDict::new(py);
            shown.set_item("calls", counts.calls)?;
            shown.set_item("zero_copy", counts.zero_copy)?;
            shown.set_item("payload_bytes", counts.payload_bytes)?;
            shown.set_item("wire_bytes_sent", counts.wire_bytes_sent)?;
            shown.set_item("wire_bytes_received", counts.wire_bytes_received)?;
            shown.set_item("wait_s", counts.wait_s)?;
            shown.set_item("reduce_s", counts.reduce_s)?;
            shown.set_item("encode_s", counts.encode_s)?;
            ops.set_item(kind.name(), shown)?;
        }
        let (collective, transports) = self.core.transports();
        let by_rank = PyDict::new(py);
        for (rank, transport) in transports.into_iter().enumerate() {
            by_rank.set_item(rank, transport)?;
        }
        let stats = PyDict::new(py);
        stats.set_item("rank", group.rank())?;
        stats.set_item("size", group.size())?;
        stats.set_item("collective", collective)?;
        stats.set_item("transports", by_rank)?;
        stats.set_item("connections_refused", group.stats().connections_refused.load(Relaxed))?;
        stats.set_item("peers_seen", group.peers_seen())?;
        stats.set_item("ops", ops)?;
        Ok(stats)
    }

    fn __repr__(&self) -> String {
        let group = self.group();
        format!("<Communicator '{}' rank {} of {}>", group.name(), group.rank(), group.size())
    }
}

/// Checks of arguments: core errors become Python's.
fn with<T>(py: Python<'_>, check: impl FnOnce() -> Result<T>) -> PyResult<T> {
    check().map_err(|e| errors::raise(py, e))
}
