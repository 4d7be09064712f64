//! A rank's communicator of NCCL, on one device and of one lane: from its creation to its end, and calls that are polled to their end.
//!
//! Communicators are non-blocking. After every call `ncclCommGetAsyncError` is asked until it no longer says `ncclInProgress`: the work is
//! not on the stream before, so that an event that is recorded earlier would not come after it.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use bagua_core::error::{Error, Result};
use bagua_core::request::OpContext;
use bagua_core::types::DType;
use bagua_core::wait::lock;
use nccl_sys::{
    Functions, UNIQUE_ID_BYTES, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};

use super::Nccl;
use super::watch::{Handle, Watched};
use crate::context::Context;
use crate::device::OperationDevice;
use crate::driver_functions::CUstream;
use crate::event::Event;
use crate::lane_state::{PATIENCE, Pauses, wait_until_reached};
use crate::stream::Stream;

/// A communicator that will not die within this time is left behind.
const DEATH: Duration = Duration::from_secs(5);

/// How long an operation that failed waits for the end of its work, so that its arrays can be let go of.
const SOON: Duration = Duration::from_millis(500);

/// See the module.
pub(crate) struct Communicator {
    /// Shared with the thread that watches.
    watched: Arc<Watched>,
    /// All work is on this stream, in the order of the calls.
    stream: Stream,
    /// The thread that watches; `None` once it is left behind or has ended.
    watch: Option<JoinHandle<()>>,
    rank: usize,
    ranks: usize,
    /// It was ended, in order or not.
    over: bool,
}

/// A new unique id, for rank 0.
pub(crate) fn unique_id(nccl: &Nccl, context: &Context) -> Result<[u8; UNIQUE_ID_BYTES]> {
    let functions = nccl.functions()?;
    let mut id = ncclUniqueId { internal: [0; UNIQUE_ID_BYTES] };
    let _entered = context.enter()?;
    // SAFETY: it writes one id.
    let result = unsafe { (functions.get_unique_id)(&raw mut id) };
    if result != ncclResult_t::SUCCESS {
        return Err(nccl.failure(context.device(), "ncclGetUniqueId", result));
    }
    Ok(id.internal.map(|byte| byte.cast_unsigned()))
}

impl Communicator {
    /// Joins the other ranks, which were given the same unique id.
    ///
    /// # Errors
    /// `Device`; the group's first cause; `Timeout` when not all ranks come.
    pub(crate) fn new(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        cx: &OpContext<'_>,
        (rank, ranks): (usize, usize),
        id: [u8; UNIQUE_ID_BYTES],
    ) -> Result<Communicator> {
        let functions = nccl.functions()?;
        let stream = Stream::new(context)?;
        let watched = Arc::new(Watched::new(nccl, context, cx.health.shared()));
        let shared = Arc::clone(&watched);
        let watch = Builder::new().name("bagua-nccl".to_owned()).spawn(move || shared.watch());
        let watch = Some(watch.map_err(|error| Error::system("starting a thread", error))?);
        // From here on an error ends what there is when it is dropped.
        let made = Communicator { watched, stream, watch, rank, ranks, over: false };
        let id = ncclUniqueId { internal: id.map(u8::cast_signed) };
        let number = |what: usize| i32::try_from(what).map_err(|_| Error::other("more ranks than NCCL can count"));
        let (rank, ranks) = (number(rank)?, number(ranks)?);
        let api = "ncclCommInitRankConfig";
        let begin = || -> Result<()> {
            let mut handle = lock(&made.watched.handle);
            let mut communicator: ncclComm_t = ptr::null_mut();
            let mut config = ncclConfig_t::new(false);
            let _entered = context.enter()?;
            // SAFETY: it writes one handle, and reads the id and the configuration, of which it keeps nothing.
            let result =
                unsafe { (functions.comm_init_rank_config)(&raw mut communicator, ranks, id, rank, &raw mut config) };
            if !communicator.is_null() {
                *handle = Some(Handle(communicator));
                made.watched.raw.store(communicator, Ordering::Release);
            }
            made.began(api, result)?;
            if communicator.is_null() {
                return Err(Error::other(format!("{api} made no communicator and did not say why")));
            }
            made.settle(api, communicator, || cx.check(&[], 0, 0))
        };
        begin().map_err(|error| made.watched.doom(error))?;
        Ok(made)
    }

    /// The stream of its work.
    pub(crate) fn stream(&self) -> CUstream {
        self.stream.handle()
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.watched.context
    }

    /// Refuses another device than the communicator's.
    ///
    /// # Errors
    /// `UnsupportedType`, before anything is put on a device.
    pub(crate) fn check_device(&self, place: &OperationDevice) -> Result<()> {
        let (own, other) = (self.context().device(), place.lane_device().context().device());
        if own == other {
            return Ok(());
        }
        let text = format!("the array is on cuda:{other}, and the group has its NCCL communicator on cuda:{own}");
        Err(Error::UnsupportedType(text))
    }

    /// One operation: behind the start of `place`, with its end marked by `place`. `work` puts it on the stream by
    /// [`Communicator::call`].
    ///
    /// # Errors
    /// Those of `work`, which end the communicator; the group's first cause.
    pub(crate) fn operate(
        &self,
        cx: &OpContext<'_>,
        place: &OperationDevice,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if let Some(cause) = self.watched.cause() {
            return Err(cause);
        }
        let stream = self.stream();
        let (done, lane_device) = (place.done()?, place.lane_device());
        let number = self.watched.begin(cx, &done, place.failure());
        // The last operation may have been copies on another stream, of a bucket that was gathered.
        let begun = place.order_after_start(&[stream]).and_then(|()| lane_device.order_after_last(stream));
        let outcome = begun.and_then(|()| work()).map_err(|error| self.watched.doom(error));
        if outcome.is_err() && !self.watched.wait_until_ended(SOON) {
            place.ended(false);
            return outcome;
        }
        let recorded = done.record(stream);
        place.ended(recorded.is_ok());
        if recorded.is_ok() {
            lane_device.set_last(&done);
            self.watched.on_stream(number);
        }
        outcome.and(recorded).map_err(|error| self.watched.doom(error))
    }

    /// Calls of NCCL that are one: a call, or a group of them. Returns when the work is on the stream.
    ///
    /// # Errors
    /// `Device`, the group's first cause, `Timeout`.
    pub(crate) fn call(
        &self,
        cx: &OpContext<'_>,
        api: &str,
        calls: impl FnOnce(&Calls<'_>) -> Result<()>,
    ) -> Result<()> {
        let handle = lock(&self.watched.handle);
        let Some(Handle(communicator)) = *handle else {
            return Err(self
                .watched
                .cause()
                .unwrap_or_else(|| Error::Aborted("the communicator was ended".to_owned())));
        };
        let _entered = self.watched.context.enter()?;
        calls(&Calls { owner: self, functions: self.watched.functions(), communicator })?;
        self.settle(api, communicator, || cx.check(&[], 0, 0))
    }

    /// What a call returned.
    fn began(&self, api: &str, result: ncclResult_t) -> Result<()> {
        if result == ncclResult_t::SUCCESS || result == ncclResult_t::IN_PROGRESS {
            return Ok(());
        }
        Err(self.watched.nccl.failure(self.watched.context.device(), api, result))
    }

    /// Polls until the last call is no longer in progress, as long as `go_on` says so.
    fn settle(&self, api: &str, communicator: ncclComm_t, mut go_on: impl FnMut() -> Result<()>) -> Result<()> {
        let mut pauses = Pauses::new();
        loop {
            let mut found = ncclResult_t::SUCCESS;
            // SAFETY: the communicator lives: the caller has its lock.
            let result = unsafe { (self.watched.functions().comm_get_async_error)(communicator, &raw mut found) };
            self.began("ncclCommGetAsyncError", result)?;
            self.began(api, found)?;
            if found != ncclResult_t::IN_PROGRESS {
                return Ok(());
            }
            if let Some(cause) = self.watched.cause() {
                return Err(cause);
            }
            go_on()?;
            pauses.pause();
        }
    }

    /// Ends it: in order, where nothing has failed, behind the work of `last`. Whether the device no longer does anything for it.
    pub(crate) fn end(mut self, last: Option<&Event>) -> bool {
        let ended = self.finish(last);
        if !ended {
            // The thread may still be in a call, and the stream may have work that never ends.
            drop(self.watch.take());
            std::mem::forget(self);
        }
        ended
    }

    fn finish(&mut self, last: Option<&Event>) -> bool {
        self.over = true;
        let failed = self.watched.cause().or_else(|| self.watched.failure());
        let orderly = match failed {
            Some(cause) => Err(cause),
            None => last.map_or(Ok(()), |event| wait_until_reached(event, patience())).and_then(|()| self.destroy()),
        };
        match orderly {
            Ok(()) => self.watched.stop(),
            Err(cause) => {
                self.watched.doom(cause);
                if !self.watched.wait_until_ended(DEATH) {
                    return false;
                }
            }
        }
        if let Some(watch) = self.watch.take() {
            // It does not panic; if it did, it has ended.
            let _ = watch.join();
        }
        true
    }

    /// Finalizes and destroys.
    fn destroy(&self) -> Result<()> {
        let mut handle = lock(&self.watched.handle);
        let Some(Handle(communicator)) = *handle else { return Ok(()) };
        let _entered = self.watched.context.enter()?;
        // SAFETY: the communicator lives, and the lock keeps others away.
        let result = unsafe { (self.watched.functions().comm_finalize)(communicator) };
        self.began("ncclCommFinalize", result)?;
        self.settle("ncclCommFinalize", communicator, patience())?;
        *handle = None;
        self.watched.raw.store(ptr::null_mut(), Ordering::Release);
        // SAFETY: it was finalized, and no thread can get it any more.
        let result = unsafe { (self.watched.functions().comm_destroy)(communicator) };
        self.began("ncclCommDestroy", result)
    }
}

/// Ends a wait of an orderly end.
fn patience() -> impl FnMut() -> Result<()> {
    let start = Instant::now();
    move || match start.elapsed() < PATIENCE {
        true => Ok(()),
        false => Err(Error::Aborted("the group was left before the device was done".to_owned())),
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.over || !self.watched.context.api().is_of_this_process() {
            // In a forked child nothing of it is there, its thread least of all.
            return;
        }
        if !self.finish(None) {
            drop(self.watch.take());
        }
    }
}

/// The calls that put work on the stream, with the communicator locked.
pub(crate) struct Calls<'a> {
    owner: &'a Communicator,
    functions: &'a Functions,
    communicator: ncclComm_t,
}

/// What elements are to NCCL, and how many of them one of ours is; `None` for a type that it lacks.
pub(crate) fn elements(dtype: DType) -> Option<(ncclDataType_t, usize)> {
    Some(match dtype {
        DType::F16 => (ncclDataType_t::FLOAT16, 1),
        DType::BF16 => (ncclDataType_t::BFLOAT16, 1),
        DType::F32 => (ncclDataType_t::FLOAT32, 1),
        DType::F64 => (ncclDataType_t::FLOAT64, 1),
        DType::U8 => (ncclDataType_t::UINT8, 1),
        DType::I8 => (ncclDataType_t::INT8, 1),
        DType::U32 => (ncclDataType_t::UINT32, 1),
        DType::I32 => (ncclDataType_t::INT32, 1),
        DType::U64 => (ncclDataType_t::UINT64, 1),
        DType::I64 => (ncclDataType_t::INT64, 1),
        DType::C64 => (ncclDataType_t::FLOAT32, 2),
        DType::C128 => (ncclDataType_t::FLOAT64, 2),
        _ => return None,
    })
}

/// An operation of NCCL on so many of its elements.
#[derive(Clone, Copy)]
pub(crate) struct Reduction {
    pub(crate) count: usize,
    pub(crate) dtype: ncclDataType_t,
    pub(crate) op: ncclRedOp_t,
}

/// Bytes from or to another rank.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    /// Of the first byte.
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    /// The other rank.
    pub(crate) peer: usize,
}

/// Addresses are those of the communicator's device. The callers of this module, which got them with an operation, promise that the memory
/// has the sizes that the calls mean, and that no other work or thread uses it until the operation's end on the device.
impl Calls<'_> {
    fn check(&self, api: &str, result: ncclResult_t) -> Result<()> {
        self.owner.began(api, result)
    }

    pub(crate) fn all_reduce(&self, from: usize, to: usize, how: Reduction) -> Result<()> {
        let Reduction { count, dtype, op } = how;
        let (from, to, stream) = (from as *const _, to as *mut _, self.owner.stream() as *mut _);
        // SAFETY: the promise above; stream and communicator live.
        let result = unsafe { (self.functions.all_reduce)(from, to, count, dtype, op, self.communicator, stream) };
        self.check("ncclAllReduce", result)
    }

    /// `to` is 0 on ranks that get no result.
    pub(crate) fn reduce(&self, from: usize, to: usize, how: Reduction, root: usize) -> Result<()> {
        let Reduction { count, dtype, op } = how;
        let (from, to, stream) = (from as *const _, to as *mut _, self.owner.stream() as *mut _);
        // SAFETY: as above.
        let result =
            unsafe { (self.functions.reduce)(from, to, count, dtype, op, root as i32, self.communicator, stream) };
        self.check("ncclReduce", result)
    }

    /// `how` counts what one rank gets.
    pub(crate) fn reduce_scatter(&self, from: usize, to: usize, how: Reduction) -> Result<()> {
        let Reduction { count, dtype, op } = how;
        let (from, to, stream) = (from as *const _, to as *mut _, self.owner.stream() as *mut _);
        // SAFETY: as above.
        let result = unsafe { (self.functions.reduce_scatter)(from, to, count, dtype, op, self.communicator, stream) };
        self.check("ncclReduceScatter", result)
    }

    pub(crate) fn broadcast(&self, data: usize, bytes: usize, root: usize) -> Result<()> {
        let (dtype, stream) = (ncclDataType_t::UINT8, self.owner.stream() as *mut _);
        // SAFETY: as above.
        let result = unsafe {
            let (from, to) = (data as *const _, data as *mut _);
            (self.functions.broadcast)(from, to, bytes, dtype, root as i32, self.communicator, stream)
        };
        self.check("ncclBroadcast", result)
    }

    /// `bytes` are those of one rank.
    pub(crate) fn all_gather(&self, from: usize, to: usize, bytes: usize) -> Result<()> {
        let (dtype, stream) = (ncclDataType_t::UINT8, self.owner.stream() as *mut _);
        // SAFETY: as above.
        let result = unsafe {
            (self.functions.all_gather)(from as *const _, to as *mut _, bytes, dtype, self.communicator, stream)
        };
        self.check("ncclAllGather", result)
    }

    /// Messages, which go together.
    pub(crate) fn exchange(&self, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let (dtype, stream) = (ncclDataType_t::UINT8, self.owner.stream() as *mut _);
        // SAFETY: it takes nothing.
        self.check("ncclGroupStart", unsafe { (self.functions.group_start)() })?;
        let put = || -> Result<()> {
            for Message { address, bytes, peer } in sends.iter().copied() {
                // SAFETY: as above.
                let result = unsafe {
                    (self.functions.send)(address as *const _, bytes, dtype, peer as i32, self.communicator, stream)
                };
                self.check("ncclSend", result)?;
            }
            for Message { address, bytes, peer } in recvs.iter().copied() {
                // SAFETY: as above.
                let result = unsafe {
                    (self.functions.recv)(address as *mut _, bytes, dtype, peer as i32, self.communicator, stream)
                };
                self.check("ncclRecv", result)?;
            }
            Ok(())
        };
        let outcome = put();
        // Also after an error: the thread must not stay inside a group.
        // SAFETY: it takes nothing.
        let ended = self.check("ncclGroupEnd", unsafe { (self.functions.group_end)() });
        outcome.and(ended)
    }
}
