//! The primary context of a device: retained once per process, and made current around calls only.

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

/// What an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Memory of the device with this number.
    Device(i32),
    /// Managed memory, which moves between host and devices.
    Managed,
    /// Not memory of a device.
    Other,
}

/// The primary context of one device. It is never released: torch and the user's own code may use it as long as the process lives.
pub struct Context {
    api: Arc<Api>,
    /// Number of the device.
    device: i32,
    handle: CUcontext,
    /// The greatest priority of its streams.
    priority: c_int,
    kernels: Kernels,
    /// Identifiers of all devices of this process, by number, where the driver reports them.
    uuids: Vec<Option<[u8; 16]>>,
    /// Set with the first use of the device.
    nccl: OnceLock<Source>,
}

// SAFETY: a context may be made current on any thread, on several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The context is current on this thread until this is dropped; the one before is current again then.
#[must_use]
pub(crate) struct Entered<'a> {
    context: &'a Context,
    /// The thread's capture mode before.
    mode: c_int,
    /// It must be dropped on the thread that made it.
    thread: PhantomData<*mut ()>,
}

impl Context {
    /// The primary context of a device, created by this call if no other library has done so.
    pub(crate) fn retain(api: &Arc<Api>, device: i32, uuids: Vec<Option<[u8; 16]>>) -> Result<Arc<Context>> {
        let mut handle: CUcontext = ptr::null_mut();
        // SAFETY: it writes one handle; device numbers are checked by the driver.
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
            // SAFETY: it writes two ints, of the current context.
            unsafe { checked!(context, cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)) }?;
            drop(entered);
        }
        context.priority = greatest;
        Ok(Arc::new(context))
    }

    /// Number of the device.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Its identifier, equal in all processes; `None` where the driver does not report it.
    pub(crate) fn uuid(&self) -> Option<[u8; 16]> {
        usize::try_from(self.device).ok().and_then(|number| *self.uuids.get(number)?)
    }

    /// Says where NCCL is. The first that is said holds.
    pub fn find_nccl_with(&self, source: Source) {
        let _ = self.nccl.set(source);
    }

    /// Where NCCL is; `None` before [`Context::find_nccl_with`].
    pub(crate) fn nccl(&self) -> Option<&Source> {
        self.nccl.get()
    }

    pub(crate) fn api(&self) -> &Api {
        &self.api
    }

    /// The kernels that were loaded.
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The greatest priority of its streams.
    pub(crate) fn priority(&self) -> c_int {
        self.priority
    }

    /// Makes the context current. Meanwhile calls of this thread disturb no capture of another stream.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        if !self.api.is_of_this_process() {
            return Err(Error::other("this process was forked from the one that uses CUDA, and has none itself"));
        }
        // SAFETY: the context is retained.
        unsafe { checked!(self, cuCtxPushCurrent_v2(self.handle)) }?;
        let mut entered = Entered { context: self, mode: -1, thread: PhantomData };
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: it reads and writes one int.
        unsafe { checked!(self, cuThreadExchangeStreamCaptureMode((&raw mut mode).cast())) }?;
        entered.mode = mode;
        Ok(entered)
    }

    /// An error for any code but 0.
    pub(crate) fn check(&self, function: &std::ffi::CStr, code: c_int) -> Result<()> {
        self.api.check(self.device, function, code)
    }

    /// Refuses streams that are being captured into a graph; asks nothing of their captures.
    ///
    /// # Errors
    /// `NotImplemented` for a stream that is being captured, or the legacy stream while one that is ordered with it is.
    pub fn refuse_capture(&self, streams: &[usize]) -> Result<()> {
        let _entered = self.enter()?;
        for stream in streams {
            let mut status: c_int = 0;
            // SAFETY: the caller names a stream of this context; it writes one int.
            let code = unsafe { call!(self.api, cuStreamIsCapturing(*stream as _, (&raw mut status).cast())) };
            if code == CAPTURE_IMPLICIT || (code == 0 && status != 0) {
                let text = "a collective operation on a stream that is being captured into a CUDA graph";
                return Err(Error::NotImplemented(text.to_owned()));
            }
            self.check(c"cuStreamIsCapturing", code)?;
        }
        Ok(())
    }

    /// So many bytes of the device, which are there for work behind this on the stream: their address.
    pub(crate) fn allocate(&self, bytes: usize, stream: CUstream) -> Result<usize> {
        let _entered = self.enter()?;
        let mut address: CUdeviceptr = 0;
        // SAFETY: it writes one address, of the current context's device; the stream is the caller's or one of ours.
        unsafe { checked!(self, cuMemAllocAsync(&raw mut address, bytes.max(1), stream as _)) }?;
        Ok(address as usize)
    }

    /// Frees what [`Context::allocate`] has returned, when the stream has come so far.
    ///
    /// # Safety
    /// Nothing that is enqueued later uses it, on this stream or another.
    pub(crate) unsafe fn free(&self, address: usize, stream: CUstream) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { checked!(self, cuMemFreeAsync(address as CUdeviceptr, stream as _)) }
    }

    /// Sets bytes of the device to 0, on a stream.
    ///
    /// # Safety
    /// They are `bytes` of this device's memory, which live and have no other use until the stream has come so far.
    pub(crate) unsafe fn clear(&self, at: usize, bytes: usize, stream: CUstream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { checked!(self, cuMemsetD8Async(at as CUdeviceptr, 0, bytes, stream as _)) }
    }

    /// Copies within the device, on a stream.
    ///
    /// # Safety
    /// Both are `bytes` of this device's memory, which live and have no other use until the stream has come so far.
    pub unsafe fn copy(&self, to: usize, from: usize, bytes: usize, stream: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { checked!(self, cuMemcpyDtoDAsync_v2(to as CUdeviceptr, from as CUdeviceptr, bytes, stream as _)) }
    }
}

/// What an address is. Needs some context: the current one, or else `fallback`'s.
pub(crate) fn memory_at(api: &Api, address: usize, fallback: impl FnOnce() -> Result<Arc<Context>>) -> Result<Memory> {
    let mut current: CUcontext = ptr::null_mut();
    // SAFETY: it writes one handle.
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
    // SAFETY: three attributes, whose answers have 4 bytes each at most.
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
        // What goes wrong here went wrong before: the next call says so.
        if self.mode >= 0 {
            // SAFETY: it reads and writes one int.
            unsafe { call!(api, cuThreadExchangeStreamCaptureMode((&raw mut self.mode).cast())) };
        }
        let mut popped: CUcontext = ptr::null_mut();
        // SAFETY: it writes one handle, of the context that `enter` pushed on this thread.
        unsafe { call!(api, cuCtxPopCurrent_v2(&raw mut popped)) };
    }
}
