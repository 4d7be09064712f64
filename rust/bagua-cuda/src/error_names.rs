//! The names of the driver's errors.

use std::ffi::{CStr, c_char};
use std::ptr;

use cudarc::driver::sys::CUresult;

use crate::calls::Code;
use crate::shared_library::line;

pub(crate) type GetErrorName = unsafe extern "C" fn(Code, *mut *const c_char) -> Code;

const INIT_ERRORS: [CUresult; 12] = [
    CUresult::CUDA_ERROR_INVALID_VALUE,
    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    CUresult::CUDA_ERROR_NOT_INITIALIZED,
    CUresult::CUDA_ERROR_STUB_LIBRARY,
    CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUresult::CUDA_ERROR_NO_DEVICE,
    CUresult::CUDA_ERROR_INVALID_DEVICE,
    CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
    CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
    CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
    CUresult::CUDA_ERROR_UNKNOWN,
];

/// Returns the driver's name of an error, or its documented name if the driver has none and `cuInit` may return it.
pub(crate) fn error_name(get: Option<GetErrorName>, code: Code) -> String {
    let mut text = ptr::null();
    // SAFETY: the function writes one pointer: null, or the address of a static text.
    if get.is_some_and(|get| unsafe { get(code, &raw mut text) } == 0) && !text.is_null() {
        // SAFETY: as above.
        return line(unsafe { CStr::from_ptr(text) }.to_bytes());
    }
    let known = INIT_ERRORS.into_iter().find(|error| *error as Code == code);
    known.map_or_else(|| "an error that the driver does not know".to_owned(), |error| format!("{error:?}"))
}
