//! What the lock-free parts are made of: atomics, locks, futexes, the clocks, words and bytes of shared memory.
//!
//! In every build but one these are the standard library's and the kernel's, and what only the model checker needs is empty. Under
//! `--cfg model` they are those of the model checker loom, so that the models (`make model`) run the product's own code. `loom` is
//! not the name of the cfg because tokio takes its sockets away where that is set.

mod ticks;

pub use ticks::{Scale, TickClock};

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

    use std::time::Duration;

    /// How often a spin looks before it reads the clock. Models do not spin: they look, and lie down.
    pub const SPINS: u32 = 32;

    /// The size of a buffer in shared memory. Models have small ones, so that few bytes fill them.
    pub const fn buffer_len(bytes: usize) -> usize {
        bytes
    }

    /// How long a wait lasts that is no part of a model.
    pub const fn patience(time: Duration) -> Duration {
        time
    }

    /// Notes that these bytes are those of a file, which may be mapped more than once.
    #[inline(always)]
    pub fn mapped(_file: std::os::fd::BorrowedFd<'_>, _bytes: *const u8, _len: usize) {}

    /// A 4-byte word of shared memory.
    #[inline(always)]
    pub fn word(memory: &AtomicU32) -> &AtomicU32 {
        memory
    }

    /// An 8-byte word of shared memory.
    #[inline(always)]
    pub fn long(memory: &AtomicU64) -> &AtomicU64 {
        memory
    }

    /// Notes that this thread is about to read bytes of shared memory.
    #[inline(always)]
    pub fn reads(_bytes: &[u8]) {}

    /// Notes that this thread is about to write bytes of shared memory.
    #[inline(always)]
    pub fn writes(_bytes: &[u8]) {}

    /// Waiting for a word to change. Works across processes on shared memory.
    pub mod futex {
        pub use crate::platform::{futex_wait as wait, futex_wake as wake};
    }
}
