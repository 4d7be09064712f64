//! Calls of the driver and of NVRTC, with the parameters that cudarc declares and with numbers as codes.
//!
//! cudarc's own functions are not called, only their types are used. They return codes as a Rust enum, and a code that the enum lacks is
//! undefined behaviour: in a trial 917 of a newer driver was read as `CUDA_ERROR_UNKNOWN`. They take the first of many names that the
//! loader finds, `libcuda.so` before `libcuda.so.1`, also where another file was opened before: two drivers in one process. And they panic
//! where the library or a function is absent.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use cudarc::driver::sys::CUresult;
use cudarc::nvrtc::sys::nvrtcResult;

/// What a call returns: 0, or the number of an error.
pub(crate) type Code = c_int;

/// cudarc's enums of codes, which are numbers of 4 bytes in C.
pub(crate) trait Codes {}

impl Codes for CUresult {}
impl Codes for nvrtcResult {}

/// A function as cudarc declares it.
pub(crate) trait Declared: Copy {
    /// The library's function: the same parameters, and a number as result.
    type Function: Copy;
}

macro_rules! declared {
    ($($parameter:ident)*) => {
        impl<R: Codes, $($parameter),*> Declared for unsafe fn($($parameter),*) -> R {
            type Function = unsafe extern "C" fn($($parameter),*) -> Code;
        }
    };
}

declared!(A);
declared!(A B);
declared!(A B C);
declared!(A B C D);
declared!(A B C D E F);
declared!(A B C D E F G H I J K);

/// The function at an address.
///
/// # Safety
/// It is the function that is declared.
pub(crate) unsafe fn function_at<D: Declared>(_declared: D, address: NonNull<c_void>) -> D::Function {
    const { assert!(size_of::<D::Function>() == size_of::<NonNull<c_void>>()) };
    // SAFETY: a function pointer, of the address's size, as was asserted; the caller's promise.
    unsafe { std::mem::transmute_copy(&address) }
}

/// The name of a function, as the loader wants it.
macro_rules! symbol {
    ($name:ident) => {
        const {
            match ::std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            }
        }
    };
}

/// The type of an argument is that of its parameter.
macro_rules! inferred {
    ($argument:expr) => {
        _
    };
}

/// Calls the function of this name at an address; its code.
macro_rules! call_at {
    ($address:expr, $library:ident::$name:ident($($argument:expr),* $(,)?)) => {{
        let declared: unsafe fn($($crate::calls::inferred!($argument)),*) -> _ = ::cudarc::$library::sys::$name;
        $crate::calls::function_at(declared, $address)($($argument),*)
    }};
}

/// Calls a function of a library; its code, or the error that the library lacks it.
macro_rules! call_in {
    ($in:expr, $library:ident::$name:ident($($argument:expr),* $(,)?)) => {
        $in.address($crate::calls::symbol!($name))
            .map(|address| $crate::calls::call_at!(address, $library::$name($($argument),*)))
    };
}

pub(crate) use {call_at, call_in, inferred, symbol};
