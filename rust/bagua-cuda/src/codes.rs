//! What calls of the driver return, and the names of errors.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use crate::library::line;

/// What a call of the driver returns: 0, or the number of an error.
pub(crate) type CUresult = c_int;

/// Number of a device, as `cuDeviceGet` gives it.
pub(crate) type CUdevice = c_int;

/// `cuGetErrorName`.
pub(crate) type GetErrorName = unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult;

/// The name of an error: the driver's own, else that of the documentation for what `cuInit` may return.
pub(crate) fn error_name(get: Option<GetErrorName>, code: CUresult) -> String {
    let mut text = ptr::null();
    // SAFETY: it writes one pointer: null, or the address of a static text.
    if get.is_some_and(|get| unsafe { get(code, &raw mut text) } == 0) && !text.is_null() {
        // SAFETY: as above.
        return line(unsafe { CStr::from_ptr(text) }.to_bytes());
    }
    let name = match code {
        1 => "CUDA_ERROR_INVALID_VALUE",
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        3 => "CUDA_ERROR_NOT_INITIALIZED",
        34 => "CUDA_ERROR_STUB_LIBRARY",
        46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
        100 => "CUDA_ERROR_NO_DEVICE",
        101 => "CUDA_ERROR_INVALID_DEVICE",
        304 => "CUDA_ERROR_OPERATING_SYSTEM",
        802 => "CUDA_ERROR_SYSTEM_NOT_READY",
        803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        999 => "CUDA_ERROR_UNKNOWN",
        _ => "an error that the driver does not name",
    };
    name.to_owned()
}
