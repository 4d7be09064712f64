//! CUDA, found at run time and never linked.
//!
//! Streams, kernels and the NCCL and staged collectives join this crate with the CUDA work; until then it answers one question.

/// What of CUDA this process can load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// The driver (`libcuda.so.1`) loads.
    pub driver: bool,
    /// NCCL (`libnccl.so.2`) loads.
    pub nccl: bool,
}

/// Looks for the CUDA driver and for NCCL. Never panics, never initialises a device.
pub fn present() -> Present {
    Present { driver: driver_present(), nccl: nccl_sys::present() }
}

fn driver_present() -> bool {
    // SAFETY: the name is NUL-terminated, and a handle that dlopen returned is closed exactly once.
    unsafe {
        let handle = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
        !handle.is_null() && libc::dlclose(handle) == 0
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn looking_for_cuda_answers_the_same_twice() {
        assert_eq!(super::present(), super::present());
    }
}
