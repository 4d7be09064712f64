//! The kernels for x86-64 processors with AVX2 and F16C.
//!
//! They are the portable loops, compiled for 256-bit registers. Only float32 and the half types have their own
//! conversions. Compilers do not replace float16's portable conversions, which are integer arithmetic, by the two
//! instructions for them. For bfloat16 they shuffle between lanes and blend at every element.
//!
//! Non-temporal stores were slower: 7 to 13 GB/s, compared with 22 to 42 GB/s for ordinary stores.

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
    /// Returns `None` if the processor lacks AVX2 or F16C.
    #[inline]
    pub(super) fn new() -> Option<Avx2> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Avx2(()))
    }

    #[inline]
    pub(super) fn run<E: Element, O: Op<E::Acc>>(self, op: O, work: &mut Work<'_, '_>, range: Range<usize>) {
        // SAFETY: an `Avx2` exists only if `new` found both features.
        unsafe { run::<E, O>(op, work, range) }
    }
}

// Without FMA, because a compiler that fuses operations would round once where the portable loop rounds twice.
#[target_feature(enable = "avx2,f16c")]
fn run<E: Element, O: Op<E::Acc>>(op: O, work: &mut Work<'_, '_>, range: Range<usize>) {
    work.run::<E, O>(op, range);
}

/// Eight float32. `FUSED` selects the instruction for additions: see [`Number::plus`] below.
///
/// The accumulator of the elements below and of some in `zen4`. Only functions compiled with AVX2 and F16C, and with
/// FMA if `FUSED`, run loops over these elements.
#[derive(Clone, Copy)]
pub(super) struct F32x8<const FUSED: bool = false>(__m256);

impl<const FUSED: bool> F32x8<FUSED> {
    #[inline(always)]
    pub(super) fn zero() -> Self {
        // SAFETY: AVX is available, see `F32x8`.
        F32x8(unsafe { _mm256_setzero_ps() })
    }

    #[inline(always)]
    pub(super) fn from_f16(bytes: [u8; 16]) -> Self {
        // SAFETY: F16C is available, see `F32x8`. The load reads the 16 bytes of the array and needs no alignment.
        F32x8(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast::<__m128i>())) })
    }

    /// Returns the values rounded to float16.
    #[inline(always)]
    pub(super) fn halves(self) -> __m128i {
        // SAFETY: F16C is available, see `F32x8`.
        unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0) }
    }

    #[inline(always)]
    fn to_f16(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: AVX is available, see `F32x8`. The store writes the 16 bytes of the array and needs no alignment.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast::<__m128i>(), self.halves()) }
        bytes
    }
}

impl<const FUSED: bool> Number for F32x8<FUSED> {
    /// If `FUSED`, computes `self * 1 + other`, which has the same bits: multiplying by one is exact.
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        if FUSED {
            let mut one = 1.0_f32;
            // SAFETY: the empty instruction changes nothing. It hides the number from the compiler, which would
            // otherwise emit an addition. AVX and FMA are available, see `F32x8`.
            return F32x8(unsafe {
                asm!("/* {one} */", one = inout(xmm_reg) one, options(pure, nomem, nostack, preserves_flags));
                _mm256_fmadd_ps(self.0, _mm256_set1_ps(one), other.0)
            });
        }
        // SAFETY: AVX is available, see `F32x8`.
        F32x8(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        // SAFETY: AVX is available, see `F32x8`.
        F32x8(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
}

impl<const FUSED: bool> Ordered for F32x8<FUSED> {
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        // SAFETY: AVX is available, see `F32x8`.
        unsafe {
            let less = _mm256_cmp_ps::<_CMP_LT_OQ>(other.0, self.0);
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(other.0, other.0);
            F32x8(_mm256_blendv_ps(self.0, other.0, _mm256_or_ps(less, nan)))
        }
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        // SAFETY: AVX is available, see `F32x8`.
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
        // SAFETY: AVX is available, see `F32x8`.
        F32x8(unsafe { _mm256_set1_ps(ranks as f32) })
    }

    #[inline(always)]
    fn over(self, divisor: Self) -> Self {
        // SAFETY: AVX is available, see `F32x8`.
        F32x8(unsafe { _mm256_div_ps(self.0, divisor.0) })
    }
}

element!(
    /// Sixteen float32: a cache line, so that lines can be prefetched. Measured on two Intel cores that combine 64 KiB,
    /// 1 MiB and 16 MiB: 0.89, 0.95 and 0.97 of the portable loop's time if the data is rewritten before every call,
    /// and the same time if each core finds it in its own caches.
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
    /// Sixteen bfloat16. A 32-bit word holds two of them: a shift turns the lower one into a float32, a mask the upper
    /// one. No element moves to another lane.
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
    // SAFETY: AVX is available, see `F32x8`. Each load reads the 32 bytes of an array and needs no alignment.
    let load = |half: &[u8; 32]| unsafe { F32x8(_mm256_loadu_ps(half.as_ptr().cast())) };
    Pair(load(&halves[0]), load(&halves[1]))
}

#[inline(always)]
fn to_f32(Pair(first, second): Pair<F32x8>) -> [u8; 64] {
    let mut bytes = [0; 64];
    let (halves, _) = bytes.as_chunks_mut::<32>();
    // SAFETY: AVX is available, see `F32x8`. Each store writes the 32 bytes of an array and needs no alignment.
    unsafe {
        _mm256_storeu_ps(halves[0].as_mut_ptr().cast(), first.0);
        _mm256_storeu_ps(halves[1].as_mut_ptr().cast(), second.0);
    }
    bytes
}

#[inline(always)]
fn from_bf16(bytes: [u8; 32]) -> Pair<F32x8> {
    // SAFETY: AVX2 is available, see `F32x8`. The load reads the 32 bytes of the array and needs no alignment.
    unsafe {
        let words = _mm256_loadu_si256(bytes.as_ptr().cast::<__m256i>());
        let upper = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        Pair(F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))), F32x8(_mm256_castsi256_ps(upper)))
    }
}

#[inline(always)]
fn to_bf16(Pair(lower, upper): Pair<F32x8>) -> [u8; 32] {
    let mut bytes = [0; 32];
    // SAFETY: AVX2 is available, see `F32x8`. The store writes the 32 bytes of the array and needs no alignment.
    unsafe {
        let (low, high) = (_mm256_castps_si256(lower.0), _mm256_castps_si256(upper.0));
        let mut kept = upper_halves(low, high);
        // Five instructions round sixteen 16-bit words at once. As float32, each register would take four.
        let cut = _mm256_blend_epi16::<0b1010_1010>(low, _mm256_slli_epi32::<16>(high));
        // Rounds up if `cut` is more than half, or is half and `kept` is odd. That is the case if `cut | kept & 1` is
        // above 0x8000, or in other words, if that value minus one has the upper bit set.
        let above = _mm256_or_si256(cut, _mm256_and_si256(kept, _mm256_set1_epi16(1)));
        let up = _mm256_srli_epi16::<15>(_mm256_subs_epu16(above, _mm256_set1_epi16(1)));
        kept = _mm256_add_epi16(kept, up);
        // One comparison tests both registers, because it is unordered if either operand is NaN.
        if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(lower.0, upper.0)) != 0 {
            kept = quiet(lower.0, upper.0, kept);
        }
        _mm256_storeu_si256(bytes.as_mut_ptr().cast::<__m256i>(), kept);
    }
    bytes
}

/// Returns the upper halves of the 32-bit words of both, interleaved.
#[inline(always)]
fn upper_halves(low: __m256i, high: __m256i) -> __m256i {
    // SAFETY: AVX2 is available, see `F32x8`.
    unsafe { _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high) }
}

/// Returns the upper half with the quiet bit set for elements that are NaN, and `otherwise` for all others.
#[inline(always)]
fn quiet(lower: __m256, upper: __m256, otherwise: __m256i) -> __m256i {
    // SAFETY: AVX2 is available, see `F32x8`.
    unsafe {
        let kept = upper_halves(_mm256_castps_si256(lower), _mm256_castps_si256(upper));
        let kept = _mm256_or_si256(kept, _mm256_set1_epi16(0x0040));
        let low = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(lower, lower));
        let high = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(upper, upper));
        _mm256_blendv_epi8(otherwise, kept, upper_halves(low, high))
    }
}
