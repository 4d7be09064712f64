//! Calls of the driver and of NVRTC, with the parameter types that cudarc declares and with numbers as codes.
//!
//! Only cudarc's types are used, not its functions. They return codes as a Rust enum, and a code that the enum lacks is
//! undefined behaviour: in a trial, a newer driver's code 917 was read as `CUDA_ERROR_UNKNOWN`. They load the first of
//! many names that the loader finds, even if another file is already open, which results in two drivers in one process.
//! And they panic if the library or a function is missing.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use cudarc::driver::sys::CUresult;
use cudarc::nvrtc::sys::nvrtcResult;

pub(crate) type Code = c_int;

/// cudarc's enums of codes, which are 4-byte numbers in C.
pub(crate) trait Codes {}

impl Codes for CUresult {}
impl Codes for nvrtcResult {}

/// A function as cudarc declares it.
pub(crate) trait Declared: Copy {
    /// The same function with its result as a plain number, because the library may return codes that the enum lacks.
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

/// Converts an address to the declared function.
///
/// # Safety
/// The declared function must be at this address.
pub(crate) unsafe fn function_at<D: Declared>(_declared: D, address: NonNull<c_void>) -> D::Function {
    const { assert!(size_of::<D::Function>() == size_of::<NonNull<c_void>>()) };
    // SAFETY: the result is a function pointer of the address's size, as asserted. The caller guarantees its type.
    unsafe { std::mem::transmute_copy(&address) }
}

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

/// Stands for the type of an argument, which is inferred from its parameter.
macro_rules! inferred {
    ($argument:expr) => {
        _
    };
}

/// Calls the function with this name at an address, and returns its code.
macro_rules! call_at {
    ($address:expr, $library:ident::$name:ident($($argument:expr),* $(,)?)) => {{
        let declared: unsafe fn($($crate::calls::inferred!($argument)),*) -> _ = ::cudarc::$library::sys::$name;
        $crate::calls::function_at(declared, $address)($($argument),*)
    }};
}

/// Calls a function of a library, and returns its code, or an error if the library lacks it.
macro_rules! call_in {
    ($in:expr, $library:ident::$name:ident($($argument:expr),* $(,)?)) => {
        $in.address($crate::calls::symbol!($name))
            .map(|address| $crate::calls::call_at!(address, $library::$name($($argument),*)))
    };
}

pub(crate) use {call_at, call_in, inferred, symbol};
