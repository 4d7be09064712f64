//! Software prefetch.

#![allow(unsafe_code)]

/// Fetches the cache line of an address into this core's cache, exclusively, for a store that follows soon. Any address is valid.
#[inline(always)]
pub fn prefetch_write(place: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch cannot fault and has no visible effect; a processor without the instruction executes a no-op. The
    // compiler's intrinsic would emit a prefetch for reading, because not all processors of this architecture know `prefetchw`.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) place.addr(), options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
