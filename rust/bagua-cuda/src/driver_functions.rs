//! The driver's functions that operations use. The table of functions is filled when a device is first used. A call
//! returns an error if the function is missing or fails.
//!
//! Reference of the CUDA driver API: <https://docs.nvidia.com/cuda/cuda-driver-api/>.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use bagua_core::error::{DeviceFailure, Error, Result};
use cudarc::driver::sys::CUresult;

use crate::calls::{Code, symbol};
use crate::error_names::{GetErrorName, error_name};
use crate::shared_library::Library;

/// A stream, or one of the special numbers: 1 is the legacy stream, 2 is the stream of the calling thread.
pub(crate) type CUstream = usize;

pub(crate) const OUT_OF_MEMORY: Code = CUresult::CUDA_ERROR_OUT_OF_MEMORY as Code;

pub(crate) const NOT_READY: Code = CUresult::CUDA_ERROR_NOT_READY as Code;

/// The legacy stream was queried while a stream that is ordered with it is being captured.
pub(crate) const CAPTURE_IMPLICIT: Code = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as Code;

/// The process is ending, and the driver was shut down before.
const DEINITIALIZED: Code = CUresult::CUDA_ERROR_DEINITIALIZED as Code;

/// Declares [`Functions`] and how it is loaded.
macro_rules! functions {
    ($($name:ident)*) => {
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(crate) struct Functions {
            $(pub(crate) $name: NonNull<c_void>,)*
        }

        impl Functions {
            fn load(library: &Library) -> crate::error::Result<Functions> {
                Ok(Functions { $($name: library.address(symbol!($name))?,)* })
            }
        }

        // SAFETY: the library is never unloaded, and any thread may call its functions.
        unsafe impl Send for Functions {}
        // SAFETY: as above.
        unsafe impl Sync for Functions {}
    };
}

functions! {
    cuCtxGetCurrent cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuDeviceGetAttribute cuDevicePrimaryCtxRetain
    cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord cuLaunchKernel cuMemAllocAsync cuMemFreeAsync cuMemFreeHost
    cuMemHostAlloc cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemsetD8Async cuModuleGetFunction cuModuleLoadData
    cuPointerGetAttributes cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamIsCapturing cuStreamWaitEvent
    cuThreadExchangeStreamCaptureMode
}

macro_rules! call {
    ($api:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $crate::calls::call_at!($api.functions.$name, driver::$name($($argument),*))
    };
}

/// Calls a function in a context and returns an error for any code but 0.
macro_rules! checked {
    ($context:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let code = $crate::driver_functions::call!($context.api(), $name($($argument),*));
        $context.check($crate::calls::symbol!($name), code)
    }};
}

pub(crate) use {call, checked};

/// The driver's functions, and the names for their errors.
pub(crate) struct Api {
    pub(crate) functions: Functions,
    /// The library's name and file, for error texts.
    library: String,
    /// `cuGetErrorName`, if the driver has it.
    get_name: Option<GetErrorName>,
    /// Id of the process that initialised the driver.
    owner: u32,
}

impl Api {
    /// Loads the functions of a library whose driver was initialised by this process.
    pub(crate) fn load(library: &Library) -> crate::error::Result<Api> {
        // SAFETY: the signature is the driver's.
        let get_name = unsafe { library.find(c"cuGetErrorName") };
        Ok(Api { functions: Functions::load(library)?, library: library.text(), get_name, owner: std::process::id() })
    }

    /// Returns true if this process initialised the driver, false in a forked child of it.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.owner == std::process::id()
    }

    pub(crate) fn check(&self, device: i32, function: &CStr, code: Code) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.failure(device, function, code)) }
    }

    pub(crate) fn failure(&self, device: i32, function: &CStr, code: Code) -> Error {
        // `_v2` is part of the symbol but not of the function's name in the documentation.
        let api = function.to_string_lossy().trim_end_matches("_v2").to_owned();
        let name = error_name(self.get_name, code);
        let ending = if code == DEINITIALIZED { " (the process ends)" } else { "" };
        let message = format!("{}: {api} failed on device {device}: {name} ({code}){ending}", self.library);
        Error::Device(Box::new(DeviceFailure { message, api, code, name, device, harmless: false }))
    }
}

/// Marks an error because of too little memory as harmless, because no part of the operation has started.
pub(crate) fn before_anything_began(error: Error) -> Error {
    match error {
        Error::Device(mut failure) => {
            failure.harmless = failure.code == OUT_OF_MEMORY;
            Error::Device(failure)
        }
        other => other,
    }
}
