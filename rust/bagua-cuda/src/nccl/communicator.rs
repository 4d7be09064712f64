//! A rank's NCCL communicator on one device for one lane: its creation, its calls, and its end.
//!
//! Communicators are non-blocking. After every call, `ncclCommGetAsyncError` is polled until it no longer returns
//! `ncclInProgress`. Before that, the work may not be on the stream, and an event recorded then might precede it.

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
use super::watchdog::{Handle, Watched};
use crate::context::Context;
use crate::device::OperationDevice;
use crate::device_lane::{PATIENCE, Pauses, wait_until_reached};
use crate::driver_functions::CUstream;
use crate::event::Event;
use crate::stream::Stream;

/// A communicator whose abort takes longer than this is left behind.
const DEATH: Duration = Duration::from_secs(5);

/// How long a failed operation waits for the end of its work, so that its arrays can be released.
const SOON: Duration = Duration::from_millis(500);

/// A rank's NCCL communicator: see the module.
pub(crate) struct Communicator {
    watched: Arc<Watched>,
    /// All work is put on this stream, in the order of the calls.
    stream: Stream,
    /// Handle of the watching thread. `None` once the thread has ended or is left behind.
    watch: Option<JoinHandle<()>>,
    rank: usize,
    ranks: usize,
    /// True once the communicator was ended, in order or not.
    over: bool,
}

pub(crate) fn unique_id(nccl: &Nccl, context: &Context) -> Result<[u8; UNIQUE_ID_BYTES]> {
    let functions = nccl.functions()?;
    let mut id = ncclUniqueId { internal: [0; UNIQUE_ID_BYTES] };
    let _entered = context.enter()?;
    // SAFETY: the function writes one id.
    let result = unsafe { (functions.get_unique_id)(&raw mut id) };
    if result != ncclResult_t::SUCCESS {
        return Err(nccl.failure(context.device(), "ncclGetUniqueId", result));
    }
    Ok(id.internal.map(|byte| byte.cast_unsigned()))
}

impl Communicator {
    /// Joins the other ranks, which must have the same unique id. Fails with `Device`, with `Timeout` if not all ranks
    /// join, or with the group's first failure.
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
        let watch = Some(watch.map_err(|error| Error::system("cannot start a thread for NCCL", error))?);
        // From here on, dropping `made` after an error ends whatever exists.
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
            // SAFETY: the function writes one handle. It reads id and configuration, and keeps no reference to them.
            let result =
                unsafe { (functions.comm_init_rank_config)(&raw mut communicator, ranks, id, rank, &raw mut config) };
            if !communicator.is_null() {
                *handle = Some(Handle(communicator));
                made.watched.raw.store(communicator, Ordering::Release);
            }
            made.began(api, result)?;
            if communicator.is_null() {
                return Err(Error::other(format!("{api} created no communicator and gave no reason")));
            }
            made.settle(api, communicator, || cx.check(&[], 0, 0))
        };
        begin().map_err(|error| made.watched.doom(error))?;
        Ok(made)
    }

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

    /// Checks that an operation is on the communicator's device. Fails with `UnsupportedType`, before any work is put
    /// on a device.
    pub(crate) fn check_device(&self, place: &OperationDevice) -> Result<()> {
        let (own, other) = (self.context().device(), place.lane_device().context().device());
        if own == other {
            return Ok(());
        }
        let text = format!("the array is on cuda:{other}, but the group's NCCL communicator is on cuda:{own}");
        Err(Error::UnsupportedType(text))
    }

    /// Runs `work` as one operation after the start of `place`, and marks its end there. `work` uses
    /// [`Communicator::call`]. Returns an error of `work`, which ends the communicator, or the group's first failure.
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
        let number = self.watched.watch_operation(cx, &done, place.failure());
        // The last operation may have been the copies of a gathered bucket, on another stream.
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

    /// Runs one NCCL call, or a group of calls. Returns when the work is on the stream. Fails with `Device`, the
    /// group's first failure, or `Timeout`.
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

    fn began(&self, api: &str, result: ncclResult_t) -> Result<()> {
        if result == ncclResult_t::SUCCESS || result == ncclResult_t::IN_PROGRESS {
            return Ok(());
        }
        Err(self.watched.nccl.failure(self.watched.context.device(), api, result))
    }

    /// Polls until the last call is no longer in progress, or `go_on` returns an error.
    fn settle(&self, api: &str, communicator: ncclComm_t, mut go_on: impl FnMut() -> Result<()>) -> Result<()> {
        let mut pauses = Pauses::new();
        loop {
            let mut found = ncclResult_t::SUCCESS;
            // SAFETY: the communicator exists, because the caller has locked it.
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

    /// Ends the communicator, in order after the work of `last` if nothing has failed. Returns true if no work is left.
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
            // A panic of the thread needs no handling, because the thread has ended in either case.
            let _ = watch.join();
        }
        true
    }

    fn destroy(&self) -> Result<()> {
        let mut handle = lock(&self.watched.handle);
        let Some(Handle(communicator)) = *handle else { return Ok(()) };
        let _entered = self.watched.context.enter()?;
        // SAFETY: the communicator exists, and it is locked.
        let result = unsafe { (self.watched.functions().comm_finalize)(communicator) };
        self.began("ncclCommFinalize", result)?;
        self.settle("ncclCommFinalize", communicator, patience())?;
        *handle = None;
        self.watched.raw.store(ptr::null_mut(), Ordering::Release);
        // SAFETY: the communicator was finalized, and no other thread can get it any more.
        let result = unsafe { (self.watched.functions().comm_destroy)(communicator) };
        self.began("ncclCommDestroy", result)
    }
}

/// Returns a function that ends an orderly wait after a limited time.
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
            // In a forked child, neither the communicator nor its thread exists.
            return;
        }
        if !self.finish(None) {
            drop(self.watch.take());
        }
    }
}

/// The calls that put work on the stream, while the communicator is locked.
pub(crate) struct Calls<'a> {
    owner: &'a Communicator,
    functions: &'a Functions,
    communicator: ncclComm_t,
}

/// Returns NCCL's type of elements, and the number of NCCL's elements per element. `None` if NCCL lacks the type.
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

/// An operation of NCCL on `count` of its elements.
#[derive(Clone, Copy)]
pub(crate) struct Reduction {
    pub(crate) count: usize,
    pub(crate) dtype: ncclDataType_t,
    pub(crate) op: ncclRedOp_t,
}

#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) peer: usize,
}

/// Calls of the library. The addresses are on the communicator's device. The callers, who got them with an operation,
/// guarantee that the memory has the size that the calls use, and that nothing else uses it until the operation's end
/// on the device.
impl Calls<'_> {
    fn check(&self, api: &str, result: ncclResult_t) -> Result<()> {
        self.owner.began(api, result)
    }

    pub(crate) fn all_reduce(&self, from: usize, to: usize, how: Reduction) -> Result<()> {
        let Reduction { count, dtype, op } = how;
        let (from, to, stream) = (from as *const _, to as *mut _, self.owner.stream() as *mut _);
        // SAFETY: guaranteed as above. Stream and communicator exist.
        let result = unsafe { (self.functions.all_reduce)(from, to, count, dtype, op, self.communicator, stream) };
        self.check("ncclAllReduce", result)
    }

    /// Reduces to `to` on the root. `to` is 0 on all other ranks.
    pub(crate) fn reduce(&self, from: usize, to: usize, how: Reduction, root: usize) -> Result<()> {
        let Reduction { count, dtype, op } = how;
        let (from, to, stream) = (from as *const _, to as *mut _, self.owner.stream() as *mut _);
        // SAFETY: as above.
        let result =
            unsafe { (self.functions.reduce)(from, to, count, dtype, op, root as i32, self.communicator, stream) };
        self.check("ncclReduce", result)
    }

    /// Reduces, and scatters the result. `how` counts the elements that one rank gets.
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

    /// Gathers the parts of all ranks. `bytes` is the size of one part.
    pub(crate) fn all_gather(&self, from: usize, to: usize, bytes: usize) -> Result<()> {
        let (dtype, stream) = (ncclDataType_t::UINT8, self.owner.stream() as *mut _);
        // SAFETY: as above.
        let result = unsafe {
            (self.functions.all_gather)(from as *const _, to as *mut _, bytes, dtype, self.communicator, stream)
        };
        self.check("ncclAllGather", result)
    }

    pub(crate) fn exchange(&self, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let (dtype, stream) = (ncclDataType_t::UINT8, self.owner.stream() as *mut _);
        // SAFETY: the function has no arguments.
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
        // Called even after an error, because the thread must not stay inside a group.
        // SAFETY: the function has no arguments.
        let ended = self.check("ncclGroupEnd", unsafe { (self.functions.group_end)() });
        outcome.and(ended)
    }
}
