//! The kernels for AMD processors with AVX-512 (Zen 4 and later). They give the same bits as every other level.
//!
//! Measured on two Zen 4 cores, each combining its half of two tensors of 1 MiB, rewritten before every call.
//! Fastest times, as multiples of float32's here:
//!
//! | cores that share a third-level cache | float32 | float16 | bfloat16 |   | others | float32 | float16 | bfloat16 |
//! |---|---|---|---|---|---|---|---|---|
//! | `avx2`   | 0.99 | 2.21 | 1.66 | | `avx2`   | 1.22 | 1.42 | 1.27 |
//! | `avx512` | 0.99 | 1.66 | 1.43 | | `avx512` | 1.22 | 1.25 | 1.28 |
//! | here     | 1.00 | 1.12 | 1.10 | | here     | 1.00 | 1.18 | 1.14 |
//!
//! - Nothing is prefetched, because these processors find the lines themselves. If the other core's cache holds the
//!   lines, prefetching for writing as `kernel` does on Intel takes 1.15 to 1.4 times as long (with 512 bytes, 1 KiB
//!   and 2 KiB). Elsewhere it gains nothing.
//! - float16 is computed in 256-bit registers: Zen 4 converts eight elements in 0.5 cycles, but sixteen in 1.33.
//!   Additions use fused multiply-add, because plain additions use the execution units of the conversions: 2.0 ns per
//!   cache line instead of 2.6 (and 3.4 in 512-bit registers).
//! - bfloat16 is rounded by AVX512_BF16's instruction: 1.7 ns per cache line instead of 2.1.

#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid, __m512bh, __m512i, _mm256_castsi128_si256, _mm256_inserti128_si256, _mm256_storeu_si256,
    _mm512_cvtne2ps_pbh, _mm512_fpclass_ps_mask, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_permutexvar_epi16,
    _mm512_storeu_ps, _mm512_storeu_si512,
};
use std::mem::transmute;
use std::ops::Range;
use std::sync::OnceLock;

use super::avx2::F32x8;
use super::avx512::{F32x16 as Acc16, from_bf16, to_bf16};
use super::element::{BLOCK, Element, Op, Pair, element};
use super::kernel::Work;

/// Proof that the processor can execute [`run`], and that this thread does not treat subnormal numbers as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Zen4(());

impl Zen4 {
    /// Returns `None` if the processor lacks one of the features, or if this thread treats subnormal inputs as zeros
    /// (`torch.set_flush_denormal`), because [`to_bf16_by_instruction`] would then not notice them.
    #[inline]
    pub(super) fn new() -> Option<Zen4> {
        let features = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("fma");
        (features && !subnormals_are_zeros()).then_some(Zen4(()))
    }

    /// Returns true if these kernels are the fastest, which is the case on AMD's processors.
    pub(super) fn is_best() -> bool {
        // Cached, because every `cpuid` makes a virtual machine exit to its host, which takes microseconds.
        static AMD: OnceLock<bool> = OnceLock::new();
        *AMD.get_or_init(|| {
            // SAFETY: every 64-bit processor has the instruction.
            #[allow(unused_unsafe, reason = "a safe function in newer versions of Rust")]
            let vendor = unsafe { __cpuid(0) };
            [vendor.ebx, vendor.edx, vendor.ecx] == [*b"Auth", *b"enti", *b"cAMD"].map(u32::from_le_bytes)
        })
    }

    #[inline]
    pub(super) fn run<E: Element, O: Op<E::Acc>>(self, op: O, work: &mut Work<'_, '_>, range: Range<usize>) {
        // SAFETY: a `Zen4` exists only if `new` found all features. AVX2 is part of FMA and AVX-512.
        unsafe { run::<E, O>(op, work, range) }
    }
}

/// Returns the "denormals are zeros" bit of this thread's floating-point control word.
#[inline]
fn subnormals_are_zeros() -> bool {
    let mut word = 0_u32;
    // SAFETY: the instruction writes only these four bytes.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
    word & 1 << 6 != 0
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,f16c,fma")]
fn run<E: Element, O: Op<E::Acc>>(op: O, work: &mut Work<'_, '_>, range: Range<usize>) {
    work.run::<E, O>(op, range);
}

element!(F32x16, 64, Acc16, Acc16::zero(), from_f32, to_f32);
element!(
    /// Thirty-two float16 in registers of eight.
    F16x32,
    64,
    Pair<Pair<F32x8<true>>>,
    Pair(Pair(F32x8::zero(), F32x8::zero()), Pair(F32x8::zero(), F32x8::zero())),
    from_f16,
    to_f16
);
element!(
    /// Thirty-two bfloat16, two to a word as in `avx2`.
    Bf16x32,
    64,
    Pair<Acc16>,
    Pair(Acc16::zero(), Acc16::zero()),
    from_bf16,
    to_bf16_by_instruction
);

#[inline(always)]
fn from_f32(bytes: [u8; 64]) -> Acc16 {
    // SAFETY: AVX-512 F is available, see `F32x16`. The load reads the 64 bytes of the array and needs no alignment.
    Acc16(unsafe { _mm512_loadu_ps(bytes.as_ptr().cast()) })
}

#[inline(always)]
fn to_f32(acc: Acc16) -> [u8; 64] {
    let mut bytes = [0; 64];
    // SAFETY: AVX-512 F is available, see `F32x16`. The store writes the 64 bytes of the array and needs no alignment.
    unsafe { _mm512_storeu_ps(bytes.as_mut_ptr().cast(), acc.0) };
    bytes
}

#[inline(always)]
fn from_f16(bytes: [u8; 64]) -> Pair<Pair<F32x8<true>>> {
    let (quarters, _) = bytes.as_chunks::<16>();
    let load = |quarter: usize| F32x8::from_f16(quarters[quarter]);
    Pair(Pair(load(0), load(1)), Pair(load(2), load(3)))
}

/// Each store writes two converted registers. Otherwise compilers would convert and store with one instruction per
/// register and tensor, which takes two cycles.
#[inline(always)]
fn to_f16(Pair(first, second): Pair<Pair<F32x8<true>>>) -> [u8; 64] {
    let mut bytes = [0; 64];
    let (halves, _) = bytes.as_chunks_mut::<32>();
    for (half, Pair(lower, upper)) in halves.iter_mut().zip([first, second]) {
        let (mut lower, mut upper) = (lower.halves(), upper.halves());
        // SAFETY: the empty instruction changes nothing; it separates the conversions from the stores. AVX2 is
        // available, see `F32x8`. The store writes the 32 bytes of the array and needs no alignment.
        unsafe {
            asm!(
                "/* {lower} {upper} */",
                lower = inout(xmm_reg) lower,
                upper = inout(xmm_reg) upper,
                options(pure, nomem, nostack, preserves_flags),
            );
            let joined = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(lower), upper);
            _mm256_storeu_si256(half.as_mut_ptr().cast(), joined);
        }
    }
    bytes
}

/// Interleaves the lower and the upper 16 of 32 words.
const INTERLEAVE: [u16; 32] = {
    let mut order = [0; 32];
    let mut at = 0;
    while at < 32 {
        order[at as usize] = at / 2 + at % 2 * 16;
        at += 1;
    }
    order
};
/// The class of subnormal numbers, as numbered by `vfpclassps`.
const SUBNORMAL: i32 = 1 << 5;

/// Rounds with the instruction, which rounds as [`to_bf16`] does and makes NaNs quiet, but treats subnormal numbers as
/// zeros. If there are any, uses [`to_bf16`].
#[inline(always)]
fn to_bf16_by_instruction(acc: Pair<Acc16>) -> [u8; 64] {
    let Pair(lower, upper) = acc;
    let mut bytes = [0; 64];
    // SAFETY: AVX-512 F, BW and DQ and AVX512_BF16 are available, because only `run` runs loops over this element. The
    // load reads and the store writes the 64 bytes of an array, and neither needs alignment.
    unsafe {
        if _mm512_fpclass_ps_mask::<SUBNORMAL>(lower.0) | _mm512_fpclass_ps_mask::<SUBNORMAL>(upper.0) != 0 {
            return to_bf16(acc);
        }
        let rounded = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(upper.0, lower.0));
        let order = _mm512_loadu_si512(INTERLEAVE.as_ptr().cast());
        _mm512_storeu_si512(bytes.as_mut_ptr().cast(), _mm512_permutexvar_epi16(order, rounded));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::reduce::{Level, combine, combine_at};
    use crate::types::{DType, ReduceOp};

    /// Runs `work` in a thread that treats subnormal inputs as zeros and writes zeros for subnormal results.
    fn flushing(work: impl FnOnce() + Send + 'static) {
        let thread = thread::spawn(|| {
            let word: u32 = 1 << 15 | 1 << 6 | 0x1f80;
            // SAFETY: the instruction reads only these four bytes. The thread computes nothing but `work` in this mode.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
            work();
        });
        thread.join().expect("the assertions in the thread");
    }

    #[test]
    fn subnormal_halves_keep_their_bits_in_a_thread_that_flushes_subnormal_numbers() {
        flushing(|| {
            assert_eq!(Zen4::new(), None);
            for dtype in [DType::F16, DType::BF16] {
                let subnormal: Vec<u8> = (1..0x80_u16).flat_map(u16::to_ne_bytes).collect();
                for op in [ReduceOp::Min, ReduceOp::Max] {
                    let mut out = vec![0; subnormal.len()];
                    combine(dtype, op, &[Some(&subnormal), Some(&subnormal)], &mut out);
                    assert_eq!(out, subnormal, "{} of {}", op.name(), dtype.name());
                }
            }
        });
    }

    #[test]
    fn sums_of_floats_have_the_same_bits_on_every_level_in_a_thread_that_flushes_subnormal_numbers() {
        flushing(|| {
            // Small numbers of both signs, whose sums are often subnormal.
            let numbers = |seed: u16| -> Vec<u8> {
                (0..4096_u16).flat_map(|at| (at.wrapping_mul(seed) & 0x81ff).to_ne_bytes()).collect()
            };
            let (one, other) = (numbers(40_503), numbers(24_691));
            for dtype in [DType::F16, DType::BF16, DType::F32] {
                let sum = |level| {
                    let mut out = vec![0; one.len()];
                    combine_at(level, dtype, ReduceOp::Sum, &[Some(&one), Some(&other)], &mut out);
                    out
                };
                let portable = sum(Level::Portable);
                Level::available().for_each(|level| assert_eq!(sum(level), portable, "{level:?}: {}", dtype.name()));
            }
        });
    }
}
