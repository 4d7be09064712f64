//! Sixteen float32 at a time, on the widest registers that the processor has.
//!
//! The fast loop of a codec is a [`Kernel`], written once over [`Lanes`]. [`Level::run`] compiles it for each
//! instruction level and selects one by the processor's features. Every level gives the same bits: no operations are
//! fused or reassociated. If an instruction treats NaN or values out of range specially, the function says so or its
//! callers never pass such values.

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use portable::Array;
pub(super) use vector::{Kernel, LANES, Lanes};

/// The instructions that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Loops that compilers vectorise, with the instructions that every processor of the target has.
    Portable,
    /// NEON, which every processor of the target has.
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Level {
    /// Returns the widest level that this processor has.
    pub(super) fn best() -> Level {
        Level::available().next().expect("every processor has the portable level")
    }

    /// Returns all levels that this processor has, widest first. The standard library caches the detection.
    pub(super) fn available() -> impl Iterator<Item = Level> {
        #[cfg(target_arch = "x86_64")]
        let wide = {
            let avx512 = x86::Avx512::new().map(Level::Avx512);
            avx512.into_iter().chain(x86::Avx2::new().map(Level::Avx2))
        };
        #[cfg(target_arch = "aarch64")]
        let wide = [Level::Neon].into_iter();
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let wide = std::iter::empty();
        wide.chain([Level::Portable])
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => "avx512",
        }
    }

    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Level::Portable => kernel.run::<Array>(),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => kernel.run::<neon::Quad>(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(avx2) => avx2.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(avx512) => avx512.run(kernel),
        }
    }
}

/// Pads the last elements of a slice, fewer than sixteen, with zeros.
#[inline(always)]
pub(super) fn filled(left: &[u8]) -> [u8; 64] {
    let mut block = [0; 64];
    block[..left.len()].copy_from_slice(left);
    block
}

/// Returns true if all lanes of a sum of x - x are 0, which means that every x was finite.
#[inline(always)]
pub(super) fn is_zero<L: Lanes>(differences: L) -> bool {
    // `smaller` makes 1 of NaN, and leaves 0.
    differences.smaller(L::splat(1.0)).minus(L::splat(1.0)).negative() == u16::MAX
}
