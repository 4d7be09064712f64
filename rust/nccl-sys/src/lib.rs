//! NCCL, found at run time and never linked.
//!
//! The table of functions joins this crate together with the CUDA collectives; until then it answers one question.

use std::ffi::CStr;

/// The names under which NCCL is installed, most specific first. `libnccl.so.2` is what torch's packages ship.
const NAMES: [&CStr; 2] = [c"libnccl.so.2", c"libnccl.so"];

/// True when the dynamic loader can find NCCL in this process.
pub fn present() -> bool {
    NAMES.iter().any(|name| {
        // SAFETY: `name` is NUL-terminated, and a handle that dlopen returned is closed exactly once.
        unsafe {
            let handle = libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
            !handle.is_null() && libc::dlclose(handle) == 0
        }
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn asking_for_nccl_answers_instead_of_panicking() {
        assert_eq!(super::present(), super::present());
    }
}
