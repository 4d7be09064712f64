//! Software prefetch.

#![allow(unsafe_code)]

/// Fetches an address's cache line exclusively into this core's cache, for a store that follows. Any address is valid.
#[inline(always)]
pub fn prefetch_write(place: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch cannot fault and has no visible effect. A processor without the instruction ignores it. The
    // compiler's intrinsic would prefetch for reading, because not all processors have `prefetchw`.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) place.addr(), options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
