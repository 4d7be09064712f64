//! Host memory owned by the core, for bytes that are copied to or from a device.

use std::cell::UnsafeCell;
use std::sync::Arc;

/// A block of host memory, aligned for every element type. While a [`super::Region`] of the block exists, only the
/// region accesses the bytes. Otherwise [`HostMemory::bytes`] does.
#[derive(Debug)]
pub struct HostMemory {
    words: Box<[UnsafeCell<u128>]>,
    /// Number of bytes requested.
    len: usize,
}

// SAFETY: only two things access the words: `bytes`, which checks that it is alone, and at most one Region, which is
// alone while it lives.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates this number of zeroed bytes.
    pub fn new(len: usize) -> Arc<HostMemory> {
        let words = (0..len.div_ceil(size_of::<u128>())).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(HostMemory { words, len })
    }

    /// Returns the bytes, or `None` while a region of them exists.
    pub fn bytes(memory: &mut Arc<HostMemory>) -> Option<&mut [u8]> {
        let memory = Arc::get_mut(memory)?;
        // SAFETY: the words have at least `len` bytes, any bytes are valid words, and the borrow is unique.
        Some(unsafe { std::slice::from_raw_parts_mut(memory.pointer(), memory.len) })
    }

    /// True if the block is large enough and no region of it exists.
    pub(super) fn is_free_for(memory: &mut Arc<HostMemory>, bytes: usize) -> bool {
        bytes <= memory.len && Arc::get_mut(memory).is_some()
    }

    pub(super) fn pointer(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }
}
