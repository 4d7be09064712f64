//! The half types for x86-64 processors with AVX-512 F and BW: as in `avx2`, with twice as many elements per register.
//! AMD's processors use `zen4` instead.
//!
//! Measured on two Intel cores, each combining its half of two ranks' 1 MiB, rewritten before every call, as
//! multiples of float32's time: bfloat16 1.24 with `avx2` and 1.03 here, float16 1.26 and 1.03.
//!
//! All other types stay with `avx2`; float32 gained only 2 %. Two instructions were tried on Intel and rejected.
//! AVX512_BF16's rounding of float32 to bfloat16 treats subnormal numbers as zeros; even without a correction for that,
//! it was not faster than the seven instructions below. AVX512_FP16's addition gives the same bits for two ranks and
//! was 10 % faster, but it gives other bits for more ranks and for averages whose sum overflows.

#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m256i, __m512, __m512i, _CMP_GT_OQ, _CMP_LT_OQ, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm256_loadu_si256,
    _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi256_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cmpgt_epu16_mask, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_div_ps, _mm512_inserti64x4,
    _mm512_loadu_si512, _mm512_mask_blend_epi16, _mm512_mask_blend_ps, _mm512_mask_sub_epi16, _mm512_maskz_mov_epi32,
    _mm512_movepi16_mask, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_si512, _mm512_ternarylogic_epi32,
};
use std::ops::Range;

use super::element::{BLOCK, Element, Fraction, Number, Op, Ordered, Pair, element};
use super::kernel::{PREFETCH, Work};

/// Proof that the processor has AVX-512 F and BW.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx512(());

impl Avx512 {
    /// Returns `None` if the processor lacks AVX-512 F or BW.
    #[inline]
    pub(super) fn new() -> Option<Avx512> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")).then_some(Avx512(()))
    }

    #[inline]
    pub(super) fn run<E: Element, O: Op<E::Acc>>(self, op: O, work: &mut Work<'_, '_>, range: Range<usize>) {
        // SAFETY: an `Avx512` exists only if `new` found both features.
        unsafe { run::<E, O>(op, work, range) }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn run<E: Element, O: Op<E::Acc>>(op: O, work: &mut Work<'_, '_>, range: Range<usize>) {
    work.run::<E, O>(op, range);
}

/// Sixteen float32, the accumulator of the elements below and of some in `zen4`. Only functions compiled with AVX-512 F
/// and BW run loops over them.
#[derive(Clone, Copy)]
pub(super) struct F32x16(pub(super) __m512);

impl F32x16 {
    #[inline(always)]
    pub(super) fn zero() -> Self {
        // SAFETY: AVX-512 F is available, see `F32x16`.
        F32x16(unsafe { _mm512_setzero_ps() })
    }
}

impl Number for F32x16 {
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        // SAFETY: AVX-512 F is available, see `F32x16`.
        F32x16(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        // SAFETY: AVX-512 F is available, see `F32x16`.
        F32x16(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
}

impl Ordered for F32x16 {
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        // SAFETY: AVX-512 F is available, see `F32x16`.
        unsafe {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(other.0, self.0);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(other.0, other.0);
            F32x16(_mm512_mask_blend_ps(less | nan, self.0, other.0))
        }
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        // SAFETY: AVX-512 F is available, see `F32x16`.
        unsafe {
            let more = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(other.0, self.0);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(other.0, other.0);
            F32x16(_mm512_mask_blend_ps(more | nan, self.0, other.0))
        }
    }
}

impl Fraction for F32x16 {
    #[inline(always)]
    fn count(ranks: usize) -> Self {
        // SAFETY: AVX-512 F is available, see `F32x16`.
        F32x16(unsafe { _mm512_set1_ps(ranks as f32) })
    }

    #[inline(always)]
    fn over(self, divisor: Self) -> Self {
        // SAFETY: AVX-512 F is available, see `F32x16`.
        F32x16(unsafe { _mm512_div_ps(self.0, divisor.0) })
    }
}

element!(
    /// Thirty-two float16: a cache line. With sixteen, the compiler converted again for every store.
    F16x32,
    64,
    Pair<F32x16>,
    Pair(F32x16::zero(), F32x16::zero()),
    from_f16,
    to_f16,
    PREFETCH
);
element!(
    /// Thirty-two bfloat16, two to a word as in `avx2`.
    Bf16x32,
    64,
    Pair<F32x16>,
    Pair(F32x16::zero(), F32x16::zero()),
    from_bf16,
    to_bf16,
    PREFETCH
);

#[inline(always)]
fn from_f16(bytes: [u8; 64]) -> Pair<F32x16> {
    let (halves, _) = bytes.as_chunks::<32>();
    // SAFETY: AVX-512 F is available, see `F32x16`. Each load reads the 32 bytes of an array and needs no alignment.
    let load = |half: &[u8; 32]| unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(half.as_ptr().cast::<__m256i>())) };
    Pair(F32x16(load(&halves[0])), F32x16(load(&halves[1])))
}

#[inline(always)]
fn to_f16(Pair(first, second): Pair<F32x16>) -> [u8; 64] {
    let mut bytes = [0; 64];
    // SAFETY: AVX-512 F is available, see `F32x16`. The store writes the 64 bytes of the array and needs no alignment.
    unsafe {
        let first = _mm512_castsi256_si512(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(first.0));
        let second = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(second.0);
        let halves = _mm512_inserti64x4::<1>(first, second);
        _mm512_storeu_si512(bytes.as_mut_ptr().cast::<__m512i>(), halves);
    }
    bytes
}

#[inline(always)]
pub(super) fn from_bf16(bytes: [u8; 64]) -> Pair<F32x16> {
    // SAFETY: AVX-512 F is available, see `F32x16`. The load reads the 64 bytes of the array and needs no alignment.
    unsafe {
        let words = _mm512_loadu_si512(bytes.as_ptr().cast::<__m512i>());
        let upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        Pair(F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))), F32x16(_mm512_castsi512_ps(upper)))
    }
}

#[inline(always)]
pub(super) fn to_bf16(Pair(lower, upper): Pair<F32x16>) -> [u8; 64] {
    let mut bytes = [0; 64];
    // SAFETY: AVX-512 F and BW are available, see `F32x16`. The store writes the array's 64 bytes, unaligned.
    unsafe {
        let (low, high) = (_mm512_castps_si512(lower.0), _mm512_castps_si512(upper.0));
        let mut kept = upper_halves(low, high);
        let cut = _mm512_mask_blend_epi16(UPPER, low, _mm512_slli_epi32::<16>(high));
        // As in `avx2`: round up if this is above 0x8000.
        let above = _mm512_ternarylogic_epi32::<OR_AND>(cut, kept, _mm512_set1_epi16(1));
        let up = _mm512_cmpgt_epu16_mask(above, _mm512_set1_epi16(i16::MIN));
        kept = _mm512_mask_sub_epi16(kept, up, kept, _mm512_set1_epi16(-1));
        // One comparison tests both registers, because it is unordered if either operand is NaN.
        if _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lower.0, upper.0) != 0 {
            kept = quiet(lower.0, upper.0, kept);
        }
        _mm512_storeu_si512(bytes.as_mut_ptr().cast::<__m512i>(), kept);
    }
    bytes
}

/// Selects the upper half of every 32-bit word.
const UPPER: u32 = 0xaaaa_aaaa;
/// The truth table of `a | b & c`.
const OR_AND: i32 = 0xf8;

/// Returns the upper halves of the 32-bit words of `low` and `high`, interleaved.
#[inline(always)]
fn upper_halves(low: __m512i, high: __m512i) -> __m512i {
    // SAFETY: AVX-512 F and BW are available, see `F32x16`.
    unsafe { _mm512_mask_blend_epi16(UPPER, _mm512_srli_epi32::<16>(low), high) }
}

/// Returns the upper half with the quiet bit set for elements that are NaN, and `otherwise` for all others.
#[inline(always)]
fn quiet(lower: __m512, upper: __m512, otherwise: __m512i) -> __m512i {
    // SAFETY: AVX-512 F and BW are available, see `F32x16`.
    unsafe {
        let ones = _mm512_set1_epi32(-1);
        let low = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lower, lower), ones);
        let high = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(upper, upper), ones);
        let nan = _mm512_movepi16_mask(upper_halves(low, high));
        let kept = upper_halves(_mm512_castps_si512(lower), _mm512_castps_si512(upper));
        _mm512_mask_blend_epi16(nan, otherwise, _mm512_or_si512(kept, _mm512_set1_epi16(0x0040)))
    }
}
