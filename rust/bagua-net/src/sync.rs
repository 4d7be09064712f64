//! Building blocks of the lock-free code: atomics, locks, futexes, clocks, and words and bytes of shared memory.
//!
//! Normal builds use the standard library and the kernel, and the hooks for the model checker do nothing. Builds with
//! `--cfg model` use the model checker loom instead, so that the models (`make model`) run the product's own code. The
//! cfg is not called `loom` because tokio removes its sockets under that name.

mod tick_clock;

pub use tick_clock::{Scale, TickClock};

#[cfg(model)]
mod loom;
#[cfg(model)]
pub mod model;
#[cfg(model)]
pub use loom::*;

#[cfg(not(model))]
pub use machine::*;

#[cfg(not(model))]
mod machine {
    pub use std::hint::spin_loop;
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
    pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub use std::time::Instant;

    /// Number of checks in a spin between two readings of the clock. Models do not spin; they check once and sleep.
    pub const SPINS: u32 = 32;

    /// Returns the size of a buffer in shared memory. Models use small buffers, so that a few bytes fill them.
    pub const fn buffer_len(bytes: usize) -> usize {
        bytes
    }

    /// Tells the model checker that these bytes belong to a file, which may be mapped more than once.
    #[inline(always)]
    pub fn mapped(_file: std::os::fd::BorrowedFd<'_>, _bytes: *const u8, _len: usize) {}

    /// Returns a 4-byte word of shared memory as an atomic.
    #[inline(always)]
    pub fn word(memory: &AtomicU32) -> &AtomicU32 {
        memory
    }

    /// Returns an 8-byte word of shared memory as an atomic.
    #[inline(always)]
    pub fn long(memory: &AtomicU64) -> &AtomicU64 {
        memory
    }

    /// Tells the model checker that this thread is about to read these bytes of shared memory.
    #[inline(always)]
    pub fn reads(_bytes: &[u8]) {}

    /// Tells the model checker that this thread is about to write these bytes of shared memory.
    #[inline(always)]
    pub fn writes(_bytes: &[u8]) {}

    /// Waits for a word to change. Works across processes if the word is in shared memory.
    pub mod futex {
        pub use crate::platform::{futex_wait as wait, futex_wake as wake};
    }
}
