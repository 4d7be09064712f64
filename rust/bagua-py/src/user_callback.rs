//! Calling a user's function on a thread that Python did not start.
//!
//! Before Python 3.14, a thread that asks for the GIL while the interpreter shuts down is ended by `pthread_exit`,
//! which unwinds the thread's stack. Rust frames, including PyO3's, cannot be unwound in this way: the process would
//! abort. If this happens to a function in [`call_user`], the thread sleeps for ever instead.
#![allow(unsafe_code)]

use std::thread;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

unsafe extern "C-unwind" {
    // The declaration is PyO3's, except that the function may unwind: unwinding through other functions aborts.
    fn PyObject_CallObject(callable: *mut ffi::PyObject, arguments: *mut ffi::PyObject) -> *mut ffi::PyObject;
}

/// Calls a function and drops what it returns.
pub fn call_user(function: &Bound<'_, PyAny>, arguments: &Bound<'_, PyTuple>) -> PyResult<()> {
    // SAFETY: both are references to living objects, the thread is attached, and the result is a new reference, or null
    // with an exception set.
    let result = unsafe {
        let result = call_or_sleep(function.as_ptr(), arguments.as_ptr());
        Bound::from_owned_ptr_or_err(function.py(), result)
    };
    result.map(drop)
}

/// Calls `PyObject_CallObject` in its own frame, in which only [`Sleep`] is dropped.
#[inline(never)]
unsafe fn call_or_sleep(callable: *mut ffi::PyObject, arguments: *mut ffi::PyObject) -> *mut ffi::PyObject {
    let sleep = Sleep;
    // SAFETY: as the caller says.
    let result = unsafe { PyObject_CallObject(callable, arguments) };
    std::mem::forget(sleep);
    result
}

/// A guard that never returns from its drop, which stops an unwinding.
struct Sleep;

impl Drop for Sleep {
    fn drop(&mut self) {
        loop {
            thread::park();
        }
    }
}
