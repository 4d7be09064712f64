//! Invariant 4 of `codec`: no allocation once warm. Alone in its file, as it counts the allocations of the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use bagua_kernels::codec::{NAMES, Scratch, by_name, chunks};
use bagua_kernels::types::DType;

thread_local! {
    /// Allocations of this thread.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counted.
struct Counting;

// SAFETY: every call is passed on to the system's allocator with the caller's arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn no_codec_allocates_once_its_scratch_memory_is_warm() {
    const COUNT: usize = 3000;
    let elements: Vec<u8> = (0..COUNT).flat_map(|i| (i as f32 - 1500.0).to_le_bytes()).collect();
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(vec![0u8; 100]));
    assert_eq!(ALLOCATIONS.get(), before + 1, "the allocator counts");
    for name in NAMES {
        let codec = by_name(name, &[]).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let elements = &elements[..COUNT * dtype.size()];
            let mut records = vec![0; chunks::records_len(&*codec, dtype, COUNT, 3).unwrap()];
            let mut back = vec![0; elements.len()];
            let mut scratch = Scratch::default();
            for call in 0..3 {
                let before = ALLOCATIONS.get();
                let _ = chunks::encode(&*codec, dtype, elements, 3, &mut records, || call, &mut scratch).unwrap();
                chunks::decode(&*codec, dtype, &records, 3, &mut back).unwrap();
                assert!(call == 0 || ALLOCATIONS.get() == before, "{name} {}", dtype.name());
            }
        }
    }
}
