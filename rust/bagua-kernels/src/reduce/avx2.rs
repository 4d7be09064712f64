//! The kernels for x86-64 processors with AVX2 and F16C.
//!
//! The portable loops, compiled for 256-bit registers. Only float32 and the half types have primitives of their own: compilers do not
//! replace the integer arithmetic of float16's conversions by the two instructions that exist for them, and for bfloat16 they shuffle
//! between lanes and blend at every element.
//!
//! Non-temporal stores were slower: 7 to 13 GB/s, ordinary stores 22 to 42.

#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_GT_OQ, _CMP_LT_OQ, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128,
    _mm_storeu_si128, _mm256_add_epi16, _mm256_add_ps, _mm256_and_si256, _mm256_blend_epi16, _mm256_blendv_epi8,
    _mm256_blendv_ps, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_div_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_movemask_ps, _mm256_mul_ps,
    _mm256_or_ps, _mm256_or_si256, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_slli_epi32, _mm256_srli_epi16, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_subs_epu16,
};
use std::ops::Range;

use super::element::{BLOCK, Element, Fraction, Number, Op, Ordered, Pair, element};
use super::kernel::{PREFETCH, Work};

/// Proof that the processor has AVX2 and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    /// `None` where the processor lacks one of the two.
    #[inline]
    pub(super) fn new() -> Option<Avx2> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Avx2(()))
    }

    /// As [`Work::run`].
    #[inline]
    pub(super) fn run<E: Element, O: Op<E::Acc>>(self, op: O, work: &mut Work<'_, '_>, range: Range<usize>) {
        // SAFETY: an `Avx2` exists only where `new` found both features.
        unsafe { run::<E, O>(op, work, range) }
    }
}

// Without FMA, so that no compiler fuses a multiplication with an addition: that would round once where the portable loop rounds twice.
#[target_feature(enable = "avx2,f16c")]
fn run<E: Element, O: Op<E::Acc>>(op: O, work: &mut Work<'_, '_>, range: Range<usize>) {
    work.run::<E, O>(op, range);
}

/// Eight float32. `FUSED` says which instruction adds two of them: see [`Number::plus`] below.
///
/// Only the elements below and those of `zen4` accumulate in it, and only functions compiled with AVX2 and F16C run loops over those;
/// for `FUSED` also with FMA.
#[derive(Clone, Copy)]
pub(super) struct F32x8<const FUSED: bool = false>(__m256);

impl<const FUSED: bool> F32x8<FUSED> {
    #[inline(always)]
    pub(super) fn zero() -> Self {
        // SAFETY: AVX is there, see `F32x8`.
        F32x8(unsafe { _mm256_setzero_ps() })
    }

    #[inline(always)]
    pub(super) fn from_f16(bytes: [u8; 16]) -> Self {
        // SAFETY: F16C is there, see `F32x8`; the load reads the 16 bytes of the array and needs no alignment.
        F32x8(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast::<__m128i>())) })
    }

    /// Rounded to eight float16.
    #[inline(always)]
    pub(super) fn halves(self) -> __m128i {
        // SAFETY: F16C is there, see `F32x8`.
        unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0) }
    }

    #[inline(always)]
    fn to_f16(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: AVX is there, see `F32x8`; the store writes the 16 bytes of the array and needs no alignment.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast::<__m128i>(), self.halves()) }
        bytes
    }
}

impl<const FUSED: bool> Number for F32x8<FUSED> {
    /// Fused, this is `self * 1 + other`, which has the same bits: a multiplication by one is exact, and the sum is rounded once.
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        if FUSED {
            let mut one = 1.0_f32;
            // SAFETY: the empty instruction changes nothing; it hides the number from the compiler, which would write an addition. AVX
            // and FMA are there, see `F32x8`.
            return F32x8(unsafe {
                asm!("/* {one} */", one = inout(xmm_reg) one, options(pure, nomem, nostack, preserves_flags));
                _mm256_fmadd_ps(self.0, _mm256_set1_ps(one), other.0)
            });
        }
        // SAFETY: AVX is there, see `F32x8`.
        F32x8(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        // SAFETY: AVX is there, see `F32x8`.
        F32x8(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
}

impl<const FUSED: bool> Ordered for F32x8<FUSED> {
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        // SAFETY: AVX is there, see `F32x8`.
        unsafe {
            let less = _mm256_cmp_ps::<_CMP_LT_OQ>(other.0, self.0);
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(other.0, other.0);
            F32x8(_mm256_blendv_ps(self.0, other.0, _mm256_or_ps(less, nan)))
        }
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        // SAFETY: AVX is there, see `F32x8`.
        unsafe {
            let more = _mm256_cmp_ps::<_CMP_GT_OQ>(other.0, self.0);
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(other.0, other.0);
            F32x8(_mm256_blendv_ps(self.0, other.0, _mm256_or_ps(more, nan)))
        }
    }
}

impl<const FUSED: bool> Fraction for F32x8<FUSED> {
    #[inline(always)]
    fn count(ranks: usize) -> Self {
        // SAFETY: AVX is there, see `F32x8`.
        F32x8(unsafe { _mm256_set1_ps(ranks as f32) })
    }

    #[inline(always)]
    fn over(self, divisor: Self) -> Self {
        // SAFETY: AVX is there, see `F32x8`.
        F32x8(unsafe { _mm256_div_ps(self.0, divisor.0) })
    }
}

element!(
    /// Sixteen float32: a cache line, so that lines can be prefetched. Two Intel cores that combine 64 KiB, 1 MiB and 16 MiB, rewritten
    /// before every call, take 0.89, 0.95 and 0.97 of the time of the portable loop; from their own caches alone, as long.
    F32x16,
    64,
    Pair<F32x8>,
    Pair(F32x8::zero(), F32x8::zero()),
    from_f32,
    to_f32,
    PREFETCH
);
element!(
    /// Eight float16.
    F16x8,
    16,
    F32x8,
    F32x8::zero(),
    F32x8::from_f16,
    F32x8::to_f16,
    PREFETCH
);
element!(
    /// Sixteen bfloat16: a 32-bit word of memory holds two, of which the lower half becomes a float32 by a shift, the upper one by
    /// a mask, and no element moves to another lane.
    Bf16x16,
    32,
    Pair<F32x8>,
    Pair(F32x8::zero(), F32x8::zero()),
    from_bf16,
    to_bf16,
    PREFETCH
);

#[inline(always)]
fn from_f32(bytes: [u8; 64]) -> Pair<F32x8> {
    let (halves, _) = bytes.as_chunks::<32>();
    // SAFETY: AVX is there, see `F32x8`; each load reads the 32 bytes of an array and needs no alignment.
    let load = |half: &[u8; 32]| unsafe { F32x8(_mm256_loadu_ps(half.as_ptr().cast())) };
    Pair(load(&halves[0]), load(&halves[1]))
}

#[inline(always)]
fn to_f32(Pair(first, second): Pair<F32x8>) -> [u8; 64] {
    let mut bytes = [0; 64];
    let (halves, _) = bytes.as_chunks_mut::<32>();
    // SAFETY: AVX is there, see `F32x8`; each store writes the 32 bytes of an array and needs no alignment.
    unsafe {
        _mm256_storeu_ps(halves[0].as_mut_ptr().cast(), first.0);
        _mm256_storeu_ps(halves[1].as_mut_ptr().cast(), second.0);
    }
    bytes
}

#[inline(always)]
fn from_bf16(bytes: [u8; 32]) -> Pair<F32x8> {
    // SAFETY: AVX2 is there, see `F32x8`; the load reads the 32 bytes of the array and needs no alignment.
    unsafe {
        let words = _mm256_loadu_si256(bytes.as_ptr().cast::<__m256i>());
        let upper = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        Pair(F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))), F32x8(_mm256_castsi256_ps(upper)))
    }
}

#[inline(always)]
fn to_bf16(Pair(lower, upper): Pair<F32x8>) -> [u8; 32] {
    let mut bytes = [0; 32];
    // SAFETY: AVX2 is there, see `F32x8`; the store writes the 32 bytes of the array and needs no alignment.
    unsafe {
        let (low, high) = (_mm256_castps_si256(lower.0), _mm256_castps_si256(upper.0));
        let mut kept = upper_halves(low, high);
        // Sixteen 16-bit words are rounded at once in five instructions; rounding each register as float32 took four per register.
        let cut = _mm256_blend_epi16::<0b1010_1010>(low, _mm256_slli_epi32::<16>(high));
        // Round up where `cut` is more than half, or half while `kept` is odd: where `cut | kept & 1` is above 0x8000, which is where its
        // value minus one has the upper bit.
        let above = _mm256_or_si256(cut, _mm256_and_si256(kept, _mm256_set1_epi16(1)));
        let up = _mm256_srli_epi16::<15>(_mm256_subs_epu16(above, _mm256_set1_epi16(1)));
        kept = _mm256_add_epi16(kept, up);
        // One comparison tests both registers: it is unordered where either operand is NaN.
        if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(lower.0, upper.0)) != 0 {
            kept = quiet(lower.0, upper.0, kept);
        }
        _mm256_storeu_si256(bytes.as_mut_ptr().cast::<__m256i>(), kept);
    }
    bytes
}

/// The upper halves of the 32-bit words of both, interleaved.
#[inline(always)]
fn upper_halves(low: __m256i, high: __m256i) -> __m256i {
    // SAFETY: AVX2 is there, see `F32x8`.
    unsafe { _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high) }
}

/// `otherwise`; where an element is NaN, its upper half with the quiet bit set.
#[inline(always)]
fn quiet(lower: __m256, upper: __m256, otherwise: __m256i) -> __m256i {
    // SAFETY: AVX2 is there, see `F32x8`.
    unsafe {
        let kept = upper_halves(_mm256_castps_si256(lower), _mm256_castps_si256(upper));
        let kept = _mm256_or_si256(kept, _mm256_set1_epi16(0x0040));
        let low = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(lower, lower));
        let high = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(upper, upper));
        _mm256_blendv_epi8(otherwise, kept, upper_halves(low, high))
    }
}
