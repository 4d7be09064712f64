//! Host memory of the core's own, for bytes that are copied to or from a device.

use std::cell::UnsafeCell;
use std::sync::Arc;

/// Bytes of host memory, aligned for every element type. While a [`super::Region`] of them lives they are its own; otherwise they are read and
/// written here.
#[derive(Debug)]
pub struct HostMemory {
    words: Box<[UnsafeCell<u128>]>,
    /// Bytes requested.
    len: usize,
}

// SAFETY: the words are reached by `bytes`, which has the memory alone, and by one Region, which has it alone as long as it lives.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// So many bytes, zeroed.
    pub fn new(len: usize) -> Arc<HostMemory> {
        let words = (0..len.div_ceil(size_of::<u128>())).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(HostMemory { words, len })
    }

    /// The bytes; `None` while there is a region of them.
    pub fn bytes(memory: &mut Arc<HostMemory>) -> Option<&mut [u8]> {
        let memory = Arc::get_mut(memory)?;
        // SAFETY: the words have at least as many bytes, any bytes are words, and the borrow is unique.
        Some(unsafe { std::slice::from_raw_parts_mut(memory.pointer(), memory.len) })
    }

    /// Whether it has room for elements of so many bytes, and no region.
    pub(super) fn is_free_for(memory: &mut Arc<HostMemory>, bytes: usize) -> bool {
        bytes <= memory.len && Arc::get_mut(memory).is_some()
    }

    /// The first byte.
    pub(super) fn pointer(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }
}
