//! The functions of the driver that operations use: a table, filled when a device is used first, and calls that are errors where a
//! function is absent or fails.
//!
//! Names and numbers are those of the CUDA driver API, <https://docs.nvidia.com/cuda/cuda-driver-api/>.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};

use bagua_core::error::{DeviceFailure, Error, Result};

use crate::codes::{CUdevice, CUresult, GetErrorName, error_name};
use crate::library::Library;

/// A context of the driver.
pub(crate) type CUcontext = *mut c_void;

/// A stream, also one of the numbers that are no pointers: 1 is the legacy stream, 2 that of the calling thread.
pub(crate) type CUstream = usize;

/// An event of the driver.
pub(crate) type CUevent = *mut c_void;

/// A loaded program.
pub(crate) type CUmodule = *mut c_void;

/// A kernel of a loaded program.
pub(crate) type CUfunction = *mut c_void;

/// An address in a device's memory.
pub(crate) type CUdeviceptr = u64;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: CUresult = 2;

/// `CUDA_ERROR_NOT_READY`: what is asked for is still pending.
pub(crate) const NOT_READY: CUresult = 600;

/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`: the legacy stream was asked while a stream that is ordered with it is captured.
pub(crate) const CAPTURE_IMPLICIT: CUresult = 906;

/// The process ends, and the driver has gone before.
const DEINITIALIZED: CUresult = 4;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls of this thread disturb no capture.
pub(crate) const CAPTURE_MODE_RELAXED: c_int = 2;

/// Declares [`Functions`] and how it is filled: field, symbol, parameters.
macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal ($($parameter:ty),*);)*) => {
        /// The table.
        #[derive(Clone, Copy)]
        pub(crate) struct Functions {
            $($(#[$doc])* pub(crate) $field: unsafe extern "C" fn($($parameter),*) -> CUresult,)*
        }

        impl Functions {
            /// Asks for each function by its name.
            fn load(library: &Library) -> crate::error::Result<Functions> {
                // SAFETY: each type is the signature of the function of that name, in every driver since CUDA 12.
                unsafe { Ok(Functions { $($field: library.function($symbol)?,)* }) }
            }
        }
    };
}

functions! {
    /// The primary context of a device, which exists from then on.
    primary_context_retain = c"cuDevicePrimaryCtxRetain"(*mut CUcontext, CUdevice);
    /// The calling thread's current context, null if there is none.
    context_get_current = c"cuCtxGetCurrent"(*mut CUcontext);
    /// Makes a context current on the calling thread, above the one before.
    context_push = c"cuCtxPushCurrent_v2"(CUcontext);
    /// Takes the current context away, so that the one before is current again.
    context_pop = c"cuCtxPopCurrent_v2"(*mut CUcontext);
    /// The least and the greatest priority of streams; a smaller number is a greater priority.
    priority_range = c"cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int);
    /// Sets how calls of this thread may disturb captures, and returns how it was.
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode"(*mut c_int);
    /// A new stream, with flags and a priority.
    stream_create = c"cuStreamCreateWithPriority"(*mut CUstream, c_uint, c_int);
    /// Ends a stream when its work is done.
    stream_destroy = c"cuStreamDestroy_v2"(CUstream);
    /// Work of a stream from now on waits for an event's newest record.
    stream_wait_event = c"cuStreamWaitEvent"(CUstream, CUevent, c_uint);
    /// Whether a stream is being captured: 0 if not.
    stream_is_capturing = c"cuStreamIsCapturing"(CUstream, *mut c_int);
    /// A new event.
    event_create = c"cuEventCreate"(*mut CUevent, c_uint);
    /// Frees an event when its record was reached.
    event_destroy = c"cuEventDestroy_v2"(CUevent);
    /// The event is reached when the stream's work so far is done.
    event_record = c"cuEventRecord"(CUevent, CUstream);
    /// Whether the event's newest record was reached.
    event_query = c"cuEventQuery"(CUevent);
    /// Pinned memory of the host.
    host_alloc = c"cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
    /// Frees it.
    host_free = c"cuMemFreeHost"(*mut c_void);
    /// Copies from a device to the host, on a stream.
    copy_to_host = c"cuMemcpyDtoHAsync_v2"(*mut c_void, CUdeviceptr, usize, CUstream);
    /// Copies from the host to a device, on a stream.
    copy_to_device = c"cuMemcpyHtoDAsync_v2"(CUdeviceptr, *const c_void, usize, CUstream);
    /// Copies within a device, on a stream.
    copy_on_device = c"cuMemcpyDtoDAsync_v2"(CUdeviceptr, CUdeviceptr, usize, CUstream);
    /// Sets bytes of a device, on a stream.
    fill_on_device = c"cuMemsetD8Async"(CUdeviceptr, c_uchar, usize, CUstream);
    /// Some attributes of an address; 0 for what is not known of it.
    pointer_attributes = c"cuPointerGetAttributes"(c_uint, *mut c_int, *mut *mut c_void, CUdeviceptr);
    /// One of a device's attributes.
    device_get_attribute = c"cuDeviceGetAttribute"(*mut c_int, c_int, CUdevice);
    /// Memory of the device, which is there when a stream has come so far.
    alloc_ordered = c"cuMemAllocAsync"(*mut CUdeviceptr, usize, CUstream);
    /// Frees memory when a stream has come so far.
    free_ordered = c"cuMemFreeAsync"(CUdeviceptr, CUstream);
    /// Loads machine code into the current context.
    module_load_data = c"cuModuleLoadData"(*mut CUmodule, *const c_void);
    /// A kernel, by its name.
    module_get_function = c"cuModuleGetFunction"(*mut CUfunction, CUmodule, *const c_char);
    /// Launches a kernel: blocks in three dimensions, threads of a block likewise, dynamic shared memory, stream, arguments, nothing.
    launch_kernel = c"cuLaunchKernel"(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
}

/// The driver's functions, for errors with names.
pub(crate) struct Api {
    pub(crate) functions: Functions,
    /// What errors call the library: its name and file.
    library: String,
    /// `cuGetErrorName`, if the driver has it.
    get_name: Option<GetErrorName>,
    /// The process that initialised the driver.
    owner: u32,
}

impl Api {
    /// The table of a library whose driver was initialised by this process.
    pub(crate) fn load(library: &Library) -> crate::error::Result<Api> {
        // SAFETY: the signature is the driver's.
        let get_name = unsafe { library.find(c"cuGetErrorName") };
        Ok(Api { functions: Functions::load(library)?, library: library.text(), get_name, owner: std::process::id() })
    }

    /// Whether this is the process that initialised the driver, and no forked child of it.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.owner == std::process::id()
    }

    /// An error for any code but 0.
    pub(crate) fn check(&self, device: i32, function: &CStr, code: CUresult) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.failure(device, function, code)) }
    }

    /// The error of a call that returned this code.
    pub(crate) fn failure(&self, device: i32, function: &CStr, code: CUresult) -> Error {
        let api = function.to_string_lossy().into_owned();
        let name = error_name(self.get_name, code);
        let ending = if code == DEINITIALIZED { " (the process ends)" } else { "" };
        let message = format!("{}: {api} failed on device {device}: {name} ({code}){ending}", self.library);
        Error::Device(Box::new(DeviceFailure { message, api, code, name, device, harmless: false }))
    }
}

/// The same error; one of memory that is not there harms nobody, as nothing of the operation has begun.
pub(crate) fn before_anything_began(error: Error) -> Error {
    match error {
        Error::Device(mut failure) => {
            failure.harmless = failure.code == OUT_OF_MEMORY;
            Error::Device(failure)
        }
        other => other,
    }
}
