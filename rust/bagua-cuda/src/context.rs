//! The primary context of a device. It is retained once per process, and current only around calls.

use std::ffi::{c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, OnceLock};

use bagua_core::error::{Error, Result};
use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUmemorytype, CUpointer_attribute, CUstreamCaptureMode};

use crate::calls::symbol;
use crate::driver_functions::{Api, CAPTURE_IMPLICIT, CUstream, call, checked};
use crate::loaded_kernels::Kernels;
use crate::nccl::Source;

/// The kind of memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Memory of the device with this number.
    Device(i32),
    /// Managed memory, which moves between host and devices.
    Managed,
    /// Any other memory.
    Other,
}

/// The primary context of a device. It is never released, because torch and the user's code may use it until the end.
pub struct Context {
    api: Arc<Api>,
    device: i32,
    handle: CUcontext,
    /// The greatest priority of the device's streams.
    priority: c_int,
    kernels: Kernels,
    /// Identifiers of this process's devices, by device number. `None` if the driver does not report one.
    uuids: Vec<Option<[u8; 16]>>,
    /// Source of NCCL, set when the device is first used.
    nccl: OnceLock<Source>,
}

// SAFETY: a context may be current on several threads at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Keeps the context current on this thread. Dropping it makes the previous context current again.
#[must_use]
pub(crate) struct Entered<'a> {
    context: &'a Context,
    /// Capture mode that this thread had before the context was entered. Restored on drop.
    mode: c_int,
    /// Keeps the value on the thread that created it, because contexts are current per thread.
    thread: PhantomData<*mut ()>,
}

impl Context {
    /// Retains the primary context of a device, and creates it if no other library has done so.
    pub(crate) fn retain(api: &Arc<Api>, device: i32, uuids: Vec<Option<[u8; 16]>>) -> Result<Arc<Context>> {
        let mut handle: CUcontext = ptr::null_mut();
        // SAFETY: the function writes one handle. The driver checks the device number.
        let code = unsafe { call!(api, cuDevicePrimaryCtxRetain(&raw mut handle, device)) };
        api.check(device, symbol!(cuDevicePrimaryCtxRetain), code)?;
        let mut context = Context {
            api: Arc::clone(api),
            device,
            handle,
            priority: 0,
            kernels: Kernels::default(),
            uuids,
            nccl: OnceLock::new(),
        };
        let (mut least, mut greatest) = (0, 0);
        {
            let entered = context.enter()?;
            // SAFETY: the function writes two ints, and uses the current context.
            unsafe { checked!(context, cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)) }?;
            drop(entered);
        }
        context.priority = greatest;
        Ok(Arc::new(context))
    }

    /// Returns the number of the device.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Returns the device's identifier, which is the same in all processes, or `None` if the driver does not report it.
    pub(crate) fn uuid(&self) -> Option<[u8; 16]> {
        usize::try_from(self.device).ok().and_then(|number| *self.uuids.get(number)?)
    }

    /// Sets the source of NCCL. Later calls have no effect.
    pub fn find_nccl_with(&self, source: Source) {
        let _ = self.nccl.set(source);
    }

    pub(crate) fn nccl(&self) -> Option<&Source> {
        self.nccl.get()
    }

    pub(crate) fn api(&self) -> &Api {
        &self.api
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(crate) fn priority(&self) -> c_int {
        self.priority
    }

    /// Makes the context current. Until the result is dropped, calls of this thread do not disturb captures of streams.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        if !self.api.is_of_this_process() {
            return Err(Error::other("CUDA cannot be used in a forked child of the process that initialised it"));
        }
        // SAFETY: the context is retained.
        unsafe { checked!(self, cuCtxPushCurrent_v2(self.handle)) }?;
        let mut entered = Entered { context: self, mode: -1, thread: PhantomData };
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: the function reads and writes one int.
        unsafe { checked!(self, cuThreadExchangeStreamCaptureMode((&raw mut mode).cast())) }?;
        entered.mode = mode;
        Ok(entered)
    }

    pub(crate) fn check(&self, function: &std::ffi::CStr, code: c_int) -> Result<()> {
        self.api.check(self.device, function, code)
    }

    /// Checks that no stream is being captured into a graph, without affecting captures. Fails with `NotImplemented` if
    /// one is, or for the legacy stream if a stream that is ordered with it is being captured.
    pub fn refuse_capture(&self, streams: &[usize]) -> Result<()> {
        let _entered = self.enter()?;
        for stream in streams {
            let mut status: c_int = 0;
            // SAFETY: the caller names a stream of this context. The function writes one int.
            let code = unsafe { call!(self.api, cuStreamIsCapturing(*stream as _, (&raw mut status).cast())) };
            if code == CAPTURE_IMPLICIT || (code == 0 && status != 0) {
                let text = "a stream that is being captured into a CUDA graph cannot be used";
                return Err(Error::NotImplemented(text.to_owned()));
            }
            self.check(c"cuStreamIsCapturing", code)?;
        }
        Ok(())
    }

    /// Allocates bytes of the device for later work on the stream, and returns their address.
    pub(crate) fn allocate(&self, bytes: usize, stream: CUstream) -> Result<usize> {
        let _entered = self.enter()?;
        let mut address: CUdeviceptr = 0;
        // SAFETY: the function writes one address. The current context and the stream belong to this device.
        unsafe { checked!(self, cuMemAllocAsync(&raw mut address, bytes.max(1), stream as _)) }?;
        Ok(address as usize)
    }

    /// Frees memory from [`Context::allocate`] after the work that is on the stream now.
    ///
    /// # Safety
    /// No work that is queued later may use the memory, on this stream or another.
    pub(crate) unsafe fn free(&self, address: usize, stream: CUstream) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: guaranteed by the caller.
        unsafe { checked!(self, cuMemFreeAsync(address as CUdeviceptr, stream as _)) }
    }

    /// Sets bytes of the device to 0, on a stream.
    ///
    /// # Safety
    /// The conditions of [`Context::copy`].
    pub(crate) unsafe fn clear(&self, at: usize, bytes: usize, stream: CUstream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        // SAFETY: guaranteed by the caller.
        unsafe { checked!(self, cuMemsetD8Async(at as CUdeviceptr, 0, bytes, stream as _)) }
    }

    /// Copies within the device, on a stream.
    ///
    /// # Safety
    /// Both ranges must be memory of this device that stays allocated, and is not used
    /// otherwise, until the work on the stream is done.
    pub unsafe fn copy(&self, to: usize, from: usize, bytes: usize, stream: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        // SAFETY: guaranteed by the caller.
        unsafe { checked!(self, cuMemcpyDtoDAsync_v2(to as CUdeviceptr, from as CUdeviceptr, bytes, stream as _)) }
    }
}

/// Returns the kind of memory at an address. Needs a context: uses the current one, or `fallback`'s if there is none.
pub(crate) fn memory_at(api: &Api, address: usize, fallback: impl FnOnce() -> Result<Arc<Context>>) -> Result<Memory> {
    let mut current: CUcontext = ptr::null_mut();
    // SAFETY: the function writes one handle.
    let code = unsafe { call!(api, cuCtxGetCurrent(&raw mut current)) };
    api.check(0, c"cuCtxGetCurrent", code)?;
    let fallback = if current.is_null() { Some(fallback()?) } else { None };
    let _entered = fallback.as_ref().map(|context| context.enter()).transpose()?;
    let (mut kind, mut managed, mut ordinal): (c_uint, c_uint, c_int) = (0, 0, 0);
    let mut wanted = [
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    ];
    let mut answers: [*mut c_void; 3] = [(&raw mut kind).cast(), (&raw mut managed).cast(), (&raw mut ordinal).cast()];
    // SAFETY: the answer to each of the three attributes has at most 4 bytes.
    let code = unsafe {
        call!(api, cuPointerGetAttributes(3, wanted.as_mut_ptr(), answers.as_mut_ptr(), address as CUdeviceptr))
    };
    api.check(0, c"cuPointerGetAttributes", code)?;
    Ok(match (kind, managed) {
        (_, managed) if managed & 1 != 0 => Memory::Managed,
        (kind, _) if kind == CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint => Memory::Device(ordinal),
        _ => Memory::Other,
    })
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.device)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let api = self.context.api();
        // If this call fails, an earlier call has failed too, and the next call reports that error.
        if self.mode >= 0 {
            // SAFETY: the function reads and writes one int.
            unsafe { call!(api, cuThreadExchangeStreamCaptureMode((&raw mut self.mode).cast())) };
        }
        let mut popped: CUcontext = ptr::null_mut();
        // SAFETY: the function writes one handle, of the context that `enter` pushed on this thread.
        unsafe { call!(api, cuCtxPopCurrent_v2(&raw mut popped)) };
    }
}
