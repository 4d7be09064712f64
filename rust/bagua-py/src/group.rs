//! `Communicator`: a group's verbs by address.
//!
//! Addresses are in host memory, or with `place` on a device. Counts are in elements (of one rank's chunk, for verbs
//! that have chunks). Element types and reduce operations are codes of `bagua_core::types`. Ranks are ranks of the
//! group. Timeouts are in seconds.

#![allow(unsafe_code)]

use std::any::Any;
use std::sync::{Arc, Mutex};

use bagua_core::average as core_average;
use bagua_core::engine as core;
use bagua_core::error::{Error, Result};
use bagua_core::group::{Group, Lane, Options, Quorum};
use bagua_core::recorder::Announced;
use bagua_core::request::{PartLayout, Verb};
use bagua_core::types::Kind;
use bagua_core::wait as sync;
use bagua_cuda::{LaneDevice, Requested};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::address_to_region::{self, Operands};
use crate::arena::Arena;
use crate::average::{self, Averager, WeightLock};
use crate::codec::Codec;
use crate::cuda_call::{self, CudaCall, CudaDevice, LaneDevices};
use crate::engine::Engine;
use crate::errors::{Origin, seconds, with};
use crate::gil::{self, DropWithoutGil, Failure};
use crate::handle::Handle;
use crate::interrupt;
use crate::join_server::JoinServer;
use crate::tensor_reader::TensorReader;
use crate::verb_arguments::{self, Call, CommunicationThread, Request};

/// A group of ranks and its main lane. Verbs run in program order; a blocking verb runs on the calling thread.
///
/// The caller promises that an address stays valid until the verb has returned or its handle is done. `keep` holds any
/// object until then. Verbs raise ValueError or TypeError before anything is sent, and the classes of `bagua.errors`
/// afterwards.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Communicator {
    core: DropWithoutGil<Arc<core::Communicator>>,
    origin: Origin,
    /// State on devices of the main lane, then of the messages, then of each engine.
    lane_devices: Mutex<Vec<Arc<LaneDevices>>>,
    /// True if verbs spin before they sleep. Verbs on little memory then need not release the GIL.
    spins: bool,
}

/// Size in bytes up to which a verb may hold the GIL while it spins.
const BRIEF: usize = 64 << 10;

/// Index in `Communicator::lane_devices` of the main lane. The messages follow it.
const MAIN: usize = 0;
const MESSAGES: usize = 1;

/// Size for a verb that never keeps the GIL.
const LONG: usize = usize::MAX;

impl Communicator {
    pub fn of(core: core::Communicator) -> Communicator {
        let spins = matches!(core.transports().0, "solo" | "shm");
        let origin = Origin::new(core.group());
        let lane_devices = Mutex::new((0..2).map(|_| Arc::new(LaneDevices::new(core.group()))).collect());
        Communicator { core: DropWithoutGil::new(Arc::new(core)), origin, lane_devices, spins }
    }

    pub fn group(&self) -> &Group {
        self.core.group()
    }

    /// Runs a verb on this number of bytes on this thread.
    pub fn here(
        &self,
        py: Python<'_>,
        bytes: usize,
        verb: impl FnOnce(&mut Lane) -> Result<()> + Send,
    ) -> std::result::Result<(), Failure> {
        gil::run_verb(py, self.group(), self.spins && bytes <= BRIEF, || self.core.run(verb))
    }

    /// Runs a verb on this many bytes here, or hands the verb to the communication thread, which runs all verbs on a
    /// device. `op` describes the verb while it is queued.
    pub fn go(
        &self,
        py: Python<'_>,
        call: Call,
        place: Option<&CudaCall>,
        bytes: usize,
        op: &Announced<'_>,
        verb: impl FnOnce(&mut Lane, &Options<'_>) -> Result<()> + Send + 'static,
    ) -> PyResult<Option<Handle>> {
        if call.async_op || place.is_some() {
            gil::refuse_inside_verb(self.group()).map_err(|e| self.origin.raise(py, e))?;
            return self.submit(py, call, place, op, verb);
        }
        let options = call.options();
        let outcome = self.here(py, bytes, |lane| verb(lane, &options));
        outcome.map(|()| None).map_err(|failure| failure.raise(py, &self.origin))
    }

    fn lane_devices(&self) -> Vec<Arc<LaneDevices>> {
        sync::lock(&self.lane_devices).clone()
    }

    /// Starts messages, and waits for them unless they are asynchronous.
    fn post(
        &self,
        py: Python<'_>,
        call: Call,
        sends: Vec<core::Message>,
        receives: Vec<core::Message>,
        place: Option<&CudaCall>,
    ) -> PyResult<Option<Handle>> {
        let Call { timeout, async_op, keep, .. } = call;
        let keep: Box<dyn Any + Send> = match place {
            Some(place) => {
                py.detach(|| place.core().start()).map_err(|e| self.origin.fail(py, e))?;
                Box::new(place.core().keeper(Box::new(keep)))
            }
            None => Box::new(keep),
        };
        let posted = py.detach(|| self.core.post(sends, receives, timeout, keep));
        let mut handle = Handle::of_messages(posted.map_err(|e| self.origin.raise(py, e))?, self.origin.clone());
        if let Some(place) = place {
            handle = handle.on_device(Arc::clone(place.core()));
        }
        cuda_call::finished(py, handle, async_op)
    }
}

impl CommunicationThread for Communicator {
    fn origin(&self) -> &Origin {
        &self.origin
    }

    fn worker(&self) -> &core::LaneWorker {
        self.core.worker()
    }
}

/// Messages of one type and tag: each has a peer, an address, of memory at `place`, and a count.
///
/// # Safety
/// The promise of [`tensor`], until the messages are done.
unsafe fn messages(
    list: Vec<(Option<usize>, usize, usize)>,
    code: u8,
    tag: u32,
    place: Option<&CudaCall>,
) -> Result<Vec<core::Message>> {
    let (dtype, device) = (address_to_region::dtype(code)?, place.map(CudaCall::device));
    let message = |(peer, address, count)| {
        // SAFETY: by this function's promise.
        let data = unsafe { address_to_region::region_in(device.as_ref(), address, count, dtype) }?;
        Ok(core::Message { peer, tag, data })
    };
    list.into_iter().map(message).collect()
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "the signatures are Python's, and most arguments are keywords there")]
impl Communicator {
    /// This process's rank in the group.
    #[getter]
    fn rank(&self) -> usize {
        self.group().rank()
    }

    /// Number of ranks in the group.
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

    /// Ranks of the group on each machine, in the order of their first rank. Unlike `hosts`, also lists ranks of a
    /// machine together if they may not share memory.
    #[getter]
    fn machines(&self) -> Vec<Vec<usize>> {
        self.group().machines()
    }

    /// The IP address on which this rank listens for the others.
    #[getter]
    fn listen_host(&self) -> String {
        self.group().listen_host().to_string()
    }

    /// Number of the group's membership. 1 for a group that was joined, and larger after every `shrink`.
    #[getter]
    fn view(&self) -> u64 {
        self.group().view()
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

    /// Name of the transport to each rank, "self" for this rank.
    #[getter]
    fn transports(&self) -> Vec<&'static str> {
        self.core.transports().1
    }

    /// Runs a blocking verb (a code in `VERBS`) on plain tensors, from `src`, which may be None, to `dst`, which is
    /// modified. `root` is ignored by verbs without a root. Returns False, and does nothing, if the tensors are not
    /// plain or do not fit the verb. `run` then raises the error.
    fn try_run(
        &self,
        verb: u8,
        reader: &TensorReader,
        src: Option<&Bound<'_, PyAny>>,
        dst: &Bound<'_, PyAny>,
        op: &Bound<'_, PyAny>,
        root: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        self.plain(verb, reader, src, dst, op, root).map_or(Ok(false), |plain| self.run_plain(plain, reader, dst))
    }

    /// Starts a verb as `try_run` does, without waiting. Returns a handle, or None if it did nothing. The memory is
    /// held until the handle is done.
    fn try_begin(
        &self,
        verb: u8,
        reader: &TensorReader,
        src: Option<&Bound<'_, PyAny>>,
        dst: &Bound<'_, PyAny>,
        op: &Bound<'_, PyAny>,
        root: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Handle>> {
        self.plain(verb, reader, src, dst, op, root).map_or(Ok(None), |plain| self.begin_plain(plain, reader, src, dst))
    }

    /// Runs a verb (a code in `VERBS`) on host memory. In the following, n is the number of ranks and r a rank.
    ///
    /// `count` elements of type `dtype` (a code in `DTYPES`) are the whole tensor for all_reduce, reduce and broadcast,
    /// and one rank's shard for the other verbs. `src` and `dst` are addresses. Without `src` the verb works in place
    /// at `dst`, where shard r starts at element r * count. Otherwise all_gather and gather (on its root) write n *
    /// count elements, scatter (on its root) and reduce_scatter read n * count, and all_to_all does both. If this rank
    /// receives nothing, `dst` may be None. `op` is a code in `OPS`, and `root` a rank of the group; verbs without an
    /// operation or a root ignore them. With `async_op`, returns a handle, and `keep` is held until the handle is done.
    ///
    /// With `place` the addresses are on a device. The verb runs on the communication thread, and `keep` is held until
    /// the device is done. This thread waits for the other ranks, never for the device. When the verb has returned,
    /// later work of the call's stream runs after the verb.
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
        // SAFETY: the caller's promise in the docstring of this class.
        let mut request = unsafe { Request::new(py, self.group(), codes, device.as_ref()) }?;
        let op = request.announced();
        self.go(py, call, place, request.bytes(), &op, move |lane, options| request.run(lane, options))
    }

    /// Sends `send_counts[r]` elements, from element `send_displs[r]` of the source, to each rank r, and receives
    /// `recv_counts[r]` elements from rank r at element `recv_displs[r]` of the destination. `src_count` and
    /// `dst_count` are the elements of the whole buffers. With `src` None, works in place at `dst` and ignores
    /// `src_count`.
    #[pyo3(signature = (src, src_count, dst, dst_count, dtype, send_counts, send_displs, recv_counts, recv_displs, *,
        timeout=None, async_op=false, keep=None, place=None))]
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
        place: Option<&CudaCall>,
    ) -> PyResult<Option<Handle>> {
        let call = Call::new(None, timeout, async_op, keep)?;
        let kind = with(py, || address_to_region::dtype(dtype))?;
        let device = place.map(CudaCall::device);
        let mut operands = with(py, || {
            // SAFETY: the caller's promise in the docstring of this class.
            let region =
                |address, count| unsafe { address_to_region::region_in(device.as_ref(), address, count, kind) };
            Operands::new(src.map(|address| region(address, src_count)).transpose()?, region(dst, dst_count)?)
        })?;
        let op = verb_arguments::messages(Kind::AllToAllV, kind, src.map_or(dst_count, |_| dst_count.max(src_count)));
        let verb = move |lane: &mut Lane, options: &Options<'_>| {
            let send = PartLayout { counts: &send_counts, displs: &send_displs };
            let recv = PartLayout { counts: &recv_counts, displs: &recv_displs };
            lane.run(options, kind, Verb::AllToAllV { send, recv }, operands.io())
        };
        self.go(py, call, place, LONG, &op, verb)
    }

    /// Returns the device's side of one operation, to be passed as `place`. The operation begins after the work that
    /// `stream` and the streams of `producers` have when the verb is called. `collective` is a value of
    /// BAGUA_CUDA_COLLECTIVE. With `check` (BAGUA_CUDA_CHECK), ranks first compare their calls.
    ///
    /// Raises NotImplementedError for a stream that is being captured, ValueError for an unknown collective,
    /// DeviceError.
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
        self.lane_devices()[MAIN].call(py, &self.origin, device, stream, producers, collective, check)
    }

    /// Returns the device's side of messages, as `cuda_call` does for verbs.
    fn cuda_messages(
        &self,
        py: Python<'_>,
        device: &CudaDevice,
        stream: usize,
        producers: Vec<usize>,
    ) -> PyResult<CudaCall> {
        self.lane_devices()[MESSAGES].call(py, &self.origin, device, stream, producers, Requested::Auto.name(), false)
    }

    /// Sends and receives messages, independently of the verbs. `sends` and `recvs` are lists of (peer, address,
    /// count). The other side must use the same type, tag and count. The peer of a receive may be None, for any rank:
    /// `Handle.senders` then tells the sender. `keep` is held until all messages are done, even if Ctrl-C ends a
    /// blocking call earlier. With `place`, which `cuda_messages` returns, the addresses are on a device, and the bytes
    /// travel through host memory.
    #[pyo3(signature = (sends, recvs, dtype, *, tag=0, timeout=None, async_op=false, keep=None, place=None))]
    fn exchange(
        &self,
        py: Python<'_>,
        sends: Vec<(Option<usize>, usize, usize)>,
        recvs: Vec<(Option<usize>, usize, usize)>,
        dtype: u8,
        tag: u32,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
        place: Option<&CudaCall>,
    ) -> PyResult<Option<Handle>> {
        let call = Call::new(None, timeout, async_op, keep)?;
        // SAFETY: the caller's promise in the docstring of this class.
        let messages = |list| with(py, || unsafe { messages(list, dtype, tag, place) });
        let (sends, recvs) = (messages(sends)?, messages(recvs)?);
        self.post(py, call, sends, recvs, place)
    }

    /// Returns the group of some members, given as ranks of this group: rank r of the new group is `ranks[r]`. If this
    /// rank is not a member, returns None. Members call this in the same order, with the same ranks and name.
    fn subgroup(&self, py: Python<'_>, ranks: Vec<usize>, name: &str) -> PyResult<Option<Communicator>> {
        let (group, name) = (self.group().clone(), name.to_owned());
        let open = move || group.subgroup(&ranks, &name)?.map(core::Communicator::new).transpose();
        Ok(gil::run_released(py, self.group(), &self.origin, open)?.map(Communicator::of))
    }

    /// Leaves this group, and returns the group of the surviving ranks, with the rank in this group of each of its
    /// ranks. Every survivor calls it with the same `quorum`: "majority" or "any". `timeout` is in seconds.
    ///
    /// Raises ValueError for invalid arguments and for a sub-group, BaguaTimeoutError, which names the living ranks
    /// that have not called, PeerLostError, which names this rank, if the other ranks continued without it, and
    /// BaguaError without a quorum.
    #[pyo3(signature = (timeout=None, *, quorum="majority"))]
    fn shrink(&self, py: Python<'_>, timeout: Option<f64>, quorum: &str) -> PyResult<(Communicator, Vec<usize>)> {
        let timeout = timeout.map(|timeout| seconds("timeout", timeout)).transpose()?;
        let quorum = with(py, || match quorum {
            "majority" => Ok(Quorum::Majority),
            "any" => Ok(Quorum::Any),
            other => Err(Error::InvalidArgument(format!("quorum '{other}' is neither 'majority' nor 'any'"))),
        })?;
        let core = Arc::clone(&self.core);
        let view = interrupt::run_on_thread(py, move || core.shrink(timeout, quorum))?;
        Ok((Communicator::of(view.opened), view.ranks))
    }

    /// Allocates `nbytes` zeroed bytes for tensors. Not collective. If the tensors of a verb lie in such memory on all
    /// ranks of a host, the verb works on the peers' memory directly. The first such verb maps it.
    #[pyo3(signature = (nbytes, *, label="bagua-arena"))]
    fn arena(&self, py: Python<'_>, nbytes: usize, label: &str) -> PyResult<Arena> {
        py.detach(|| self.group().arena(nbytes, label)).map(Arena::of).map_err(|e| self.origin.raise(py, e))
    }

    /// An engine with a lane and a thread of its own. Every rank of the group calls it, in the same order.
    fn engine(&self, py: Python<'_>, name: &str) -> PyResult<Engine> {
        let group = self.group().clone();
        let open = {
            let (group, name) = (group.clone(), name.to_owned());
            move || core::Engine::new(&group, &name)
        };
        let engine = gil::run_released(py, self.group(), &self.origin, open)?;
        let lane_devices = Arc::new(LaneDevices::new(&group));
        sync::lock(&self.lane_devices).push(Arc::clone(&lane_devices));
        Ok(Engine::of(engine, group, self.origin.clone(), lane_devices))
    }

    /// Averages weights every `interval` seconds with the other ranks, through a codec if one is given. `weights` is a
    /// list of (address, count, dtype), with the same counts and dtypes on all ranks. Every rank of the group calls
    /// this, in the same order.
    ///
    /// In an elastic job, `join_server` is this rank's server: lost ranks leave the averaging, and processes that join
    /// get the average and a rank's `buffers`. `digest` is a digest of everything that must be equal on all ranks.
    ///
    /// Each entry of `weights` and `buffers` ends in a boolean, which is true for memory on the CUDA device of
    /// `device`, a tuple (device, stream, keep). The first snapshot is taken after the work that the stream has now.
    /// `keep` is held until the averager has stopped and the device is done.
    ///
    /// The caller promises that the addresses stay valid until the averager has stopped, and that the memory is used
    /// under `lock`.
    #[pyo3(signature = (name, weights, lock, interval, codec, *, buffers, join_server, digest, takes_part, device=None))]
    fn averager(
        &self,
        py: Python<'_>,
        name: &str,
        weights: Vec<average::Described>,
        lock: &WeightLock,
        interval: f64,
        codec: Option<&Codec>,
        buffers: Vec<average::Described>,
        join_server: Option<&JoinServer>,
        digest: [u8; 32],
        takes_part: bool,
        device: Option<average::OnDevice<'_>>,
    ) -> PyResult<Averager> {
        let elastic = join_server.map(|server| (server.core(), digest));
        let settings = average::settings(name, interval, codec.map(Codec::core), elastic, takes_part)?;
        let group = self.group();
        let on_device = |device: &CudaDevice| {
            // The averager's thread looks at failures of its own group.
            let lane_device = Arc::new(LaneDevice::new(device.context()));
            sync::lock(&self.lane_devices).push(Arc::new(LaneDevices::of(group, Arc::clone(&lane_device))));
            lane_device
        };
        // SAFETY: the caller's promise in the docstring of this method.
        let model = unsafe { average::model(py, (weights, buffers), lock, device, on_device) }
            .map_err(|e| self.origin.fail(py, e))?;
        let core = Arc::clone(&self.core);
        let start = move || core.run(|lane| core_average::Averager::start(core.group(), lane, model, settings));
        let core = gil::run_released(py, group, &self.origin, start)?;
        Ok(Averager::of(core, group.ranks()[group.rank()]))
    }

    /// Poisons the group on every rank. The other ranks get PeerRaisedError with this class name and text.
    fn raise_(&self, py: Python<'_>, kind: &str, message: &str) {
        py.detach(|| self.group().raise(kind, message));
    }

    /// Poisons the group on every rank with AbortedError.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.group().abort(reason));
    }

    /// Leaves the group in order, and closes every connection of this rank. Leaving the world leaves its sub-groups.
    /// Further calls do nothing.
    fn leave(&self, py: Python<'_>) {
        py.detach(|| {
            self.group().leave();
            let lane_devices = self.lane_devices();
            if !lane_devices[MAIN].all().is_empty() || !lane_devices[MESSAGES].all().is_empty() {
                // The thread frees the device's memory, which could otherwise outlive the interpreter.
                self.core.shutdown();
                lane_devices[MESSAGES].all().iter().for_each(|lane_device| _ = lane_device.end());
            }
        });
    }

    /// Raises the group's first failure, if there is one.
    fn cause(&self, py: Python<'_>) -> PyResult<()> {
        self.group().health().check().map_err(|e| self.origin.raise(py, e))
    }

    /// Returns the counters since the group was built as a dict. Times are in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = crate::stats::of(py, self.group())?;
        let (collective, transports) = self.core.transports();
        stats.set_item("collective", collective)?;
        stats.set_item("transports", transports.into_iter().enumerate().into_py_dict(py)?)?;
        stats.set_item("cuda", cuda_call::stats(py, &self.lane_devices())?)?;
        Ok(stats)
    }

    fn __repr__(&self) -> String {
        let group = self.group();
        format!("<Communicator '{}' rank {} of {}>", group.name(), group.rank(), group.size())
    }
}
