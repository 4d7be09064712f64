//! The system's allocator, with the bytes that a thread holds counted. It serves all unit tests of the crate.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has allocated and not freed. Wraps where it frees another thread's.
    static HELD: Cell<usize> = const { Cell::new(0) };
    /// The most that [`HELD`] was above [`START`].
    static PEAK: Cell<usize> = const { Cell::new(0) };
    /// [`HELD`] when the measurement began.
    static START: Cell<usize> = const { Cell::new(0) };
}

/// Counts, and passes on. A reallocation counts as both blocks at once.
struct Counting;

fn add(bytes: usize) {
    HELD.set(HELD.get().wrapping_add(bytes));
    let above = HELD.get().wrapping_sub(START.get());
    // More than half of all numbers is a negative difference.
    if above <= usize::MAX / 2 {
        PEAK.set(PEAK.get().max(above));
    }
}

fn remove(bytes: usize) {
    HELD.set(HELD.get().wrapping_sub(bytes));
}

// SAFETY: every call is passed on to the system's allocator with the caller's arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        remove(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        add(new_size);
        remove(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the result of `run`, and the largest number of additional bytes that this thread held while `run` ran.
pub(super) fn peak<T>(run: impl FnOnce() -> T) -> (T, usize) {
    START.set(HELD.get());
    PEAK.set(0);
    let value = run();
    (value, PEAK.get())
}

#[test]
fn the_peak_counts_what_is_held_at_once() {
    let ((), bytes) = peak(|| {
        drop(std::hint::black_box(Vec::<u8>::with_capacity(1000)));
        let first = std::hint::black_box(vec![0_u8; 3000]);
        drop(std::hint::black_box(Vec::<u8>::with_capacity(500)));
        drop(first);
    });
    assert_eq!(bytes, 3500);
}
