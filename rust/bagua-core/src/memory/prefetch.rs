//! Telling the processor what memory is needed next.

/// What lies at this address will be written soon: its cache line is fetched for that, away from the caches of others. Any address
/// will do.
#[inline(always)]
pub fn prefetch_write(place: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which cannot fault and changes nothing that a program sees; a processor that does not know it does nothing.
    // The intrinsic would compile to a hint for reading, as not all processors know this one.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) place.addr(), options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// What lies at this address will be read soon. Any address will do.
#[inline(always)]
pub fn prefetch_read(place: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
