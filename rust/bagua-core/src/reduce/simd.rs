//! The kernels for x86-64 processors with AVX2 and F16C.
//!
//! Every loop here is the portable one, compiled for wider registers; only the half-precision types supply primitives of their own.
//! No compiler turns the integer arithmetic of float16's conversions into the two instructions that exist for them, and for
//! bfloat16 it shuffles between lanes and blends at every element.
//!
//! Not here, because nothing was gained on a machine that has them: 512-bit registers (f32 at 20 GB/s in the second-level cache with
//! either width, at 16 GB/s from the peer's) and non-temporal stores (7 to 13 GB/s, ordinary ones 22 to 42).

#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_GT_OQ, _CMP_LT_OQ, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128,
    _mm_storeu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_blend_epi16, _mm256_blendv_epi8,
    _mm256_blendv_ps, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_div_ps, _mm256_loadu_si256, _mm256_movemask_ps, _mm256_mul_ps, _mm256_or_ps, _mm256_or_si256,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_storeu_si256,
};

use super::Before;
use super::element::Element;
use super::kernel::{self, BLOCK};
use super::op::{Fraction, Number, Op, Ordered};

/// Proof that the processor has AVX2 and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    /// `None` where the processor lacks one of the two.
    #[inline]
    pub(super) fn new() -> Option<Avx2> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Avx2(()))
    }

    /// As [`super::combine`].
    pub(super) fn combine<E, O>(self, op: O, inputs: &[Option<&[u8]>], out: &mut [u8])
    where
        E: Element,
        O: Op<E::Acc> + Op<<E::Wide as Element>::Acc>,
    {
        // SAFETY: an `Avx2` exists only where `new` found both features.
        unsafe { combine::<E, O>(op, inputs, out) }
    }

    /// As [`super::combine_everywhere`].
    pub(super) fn combine_everywhere<E, O>(
        self,
        op: O,
        parts: &mut [&mut [u8]],
        stretch: usize,
        before: &mut Before<'_>,
    ) where
        E: Element,
        O: Op<E::Acc> + Op<<E::Wide as Element>::Acc>,
    {
        // SAFETY: an `Avx2` exists only where `new` found both features.
        unsafe { combine_everywhere::<E, O>(op, parts, stretch, before) }
    }
}

/// As [`super::combine`]: the wide element as far as it goes, and its narrow twin for the rest.
// No FMA here: a fused multiply-add rounds once where the portable loop rounds twice.
#[target_feature(enable = "avx2,f16c")]
fn combine<E, O>(op: O, inputs: &[Option<&[u8]>], out: &mut [u8])
where
    E: Element,
    O: Op<E::Acc> + Op<<E::Wide as Element>::Acc>,
{
    let wide = size_of::<<E::Wide as Element>::Bytes>();
    let whole = out.len() - out.len() % wide;
    kernel::combine::<E::Wide, O>(op, inputs, out, 0..whole);
    // Known at compile time, so that there is no second copy of a loop that never has a rest.
    if wide > size_of::<E::Bytes>() {
        let rest = whole..out.len();
        kernel::combine::<E, O>(op, inputs, out, rest);
    }
}

/// As [`super::combine_everywhere`], wide element and narrow twin as above.
#[target_feature(enable = "avx2,f16c")]
fn combine_everywhere<E, O>(op: O, parts: &mut [&mut [u8]], stretch: usize, before: &mut Before<'_>)
where
    E: Element,
    O: Op<E::Acc> + Op<<E::Wide as Element>::Acc>,
{
    let wide = size_of::<<E::Wide as Element>::Bytes>();
    let len = parts[0].len();
    let whole = len - len % wide;
    kernel::combine_everywhere::<E::Wide, O>(op, parts, 0..whole, stretch, before);
    if wide > size_of::<E::Bytes>() {
        kernel::combine_everywhere::<E, O>(op, parts, whole..len, stretch, before);
    }
}

/// Eight float16, accumulated in eight float32.
///
/// Only [`combine`] above names it (as `F16::Wide`): all that its methods do happens where AVX2 and F16C are there.
pub(super) struct F16x8;

/// Accumulators of [`F16x8`].
#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);

impl Element for F16x8 {
    type Bytes = [u8; 16];
    type Acc = F32x8;
    type Wide = F16x8;
    type Block = [F32x8; BLOCK / 16];

    #[inline(always)]
    fn block() -> Self::Block {
        // SAFETY: AVX is there, see `F16x8`.
        [F32x8(unsafe { _mm256_setzero_ps() }); BLOCK / 16]
    }

    #[inline(always)]
    fn units(bytes: &[u8]) -> &[[u8; 16]] {
        bytes.as_chunks().0
    }

    #[inline(always)]
    fn units_mut(bytes: &mut [u8]) -> &mut [[u8; 16]] {
        bytes.as_chunks_mut().0
    }

    #[inline(always)]
    fn load(bytes: [u8; 16]) -> F32x8 {
        // SAFETY: F16C is there, see `F16x8`; the load reads the 16 bytes of the array and needs no alignment.
        F32x8(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast::<__m128i>())) })
    }

    #[inline(always)]
    fn store(acc: F32x8) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: F16C is there, see `F16x8`; the store writes the 16 bytes of the array and needs no alignment.
        unsafe {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(acc.0);
            _mm_storeu_si128(bytes.as_mut_ptr().cast::<__m128i>(), halves);
        }
        bytes
    }
}

impl Number for F32x8 {
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        // SAFETY: AVX is there, see `F16x8`.
        F32x8(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        // SAFETY: AVX is there, see `F16x8`.
        F32x8(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
}

impl Ordered for F32x8 {
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        // SAFETY: AVX is there, see `F16x8`.
        unsafe {
            let less = _mm256_cmp_ps::<_CMP_LT_OQ>(other.0, self.0);
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(other.0, other.0);
            F32x8(_mm256_blendv_ps(self.0, other.0, _mm256_or_ps(less, nan)))
        }
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        // SAFETY: AVX is there, see `F16x8`.
        unsafe {
            let more = _mm256_cmp_ps::<_CMP_GT_OQ>(other.0, self.0);
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(other.0, other.0);
            F32x8(_mm256_blendv_ps(self.0, other.0, _mm256_or_ps(more, nan)))
        }
    }
}

impl Fraction for F32x8 {
    #[inline(always)]
    fn count(ranks: usize) -> Self {
        // SAFETY: AVX is there, see `F16x8`.
        F32x8(unsafe { _mm256_set1_ps(ranks as f32) })
    }

    #[inline(always)]
    fn over(self, divisor: Self) -> Self {
        // SAFETY: AVX is there, see `F16x8`.
        F32x8(unsafe { _mm256_div_ps(self.0, divisor.0) })
    }
}

/// Sixteen bfloat16, accumulated in sixteen float32.
///
/// A 32-bit word of memory holds two: the lower half becomes a float32 by a shift, the upper one by a mask, and nothing ever moves
/// to another lane. As [`F16x8`], only [`combine`] names it (as `Bf16::Wide`).
pub(super) struct Bf16x16;

/// Accumulators of [`Bf16x16`]: of the lower halves, and of the upper ones.
#[derive(Clone, Copy)]
pub(super) struct Pair(F32x8, F32x8);

impl Element for Bf16x16 {
    type Bytes = [u8; 32];
    type Acc = Pair;
    type Wide = Bf16x16;
    type Block = [Pair; BLOCK / 32];

    #[inline(always)]
    fn block() -> Self::Block {
        // SAFETY: AVX is there, see `Bf16x16`.
        let zero = F32x8(unsafe { _mm256_setzero_ps() });
        [Pair(zero, zero); BLOCK / 32]
    }

    #[inline(always)]
    fn units(bytes: &[u8]) -> &[[u8; 32]] {
        bytes.as_chunks().0
    }

    #[inline(always)]
    fn units_mut(bytes: &mut [u8]) -> &mut [[u8; 32]] {
        bytes.as_chunks_mut().0
    }

    #[inline(always)]
    fn load(bytes: [u8; 32]) -> Pair {
        // SAFETY: AVX2 is there, see `Bf16x16`; the load reads the 32 bytes of the array and needs no alignment.
        unsafe {
            let words = _mm256_loadu_si256(bytes.as_ptr().cast::<__m256i>());
            let upper = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            Pair(F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))), F32x8(_mm256_castsi256_ps(upper)))
        }
    }

    #[inline(always)]
    fn store(Pair(lower, upper): Pair) -> [u8; 32] {
        let mut bytes = [0; 32];
        // SAFETY: AVX2 is there, see `Bf16x16`; the store writes the 32 bytes of the array and needs no alignment.
        unsafe {
            let (mut low, mut high) = (rounded(lower.0), rounded(upper.0));
            // One look for both: a comparison is unordered where either side is NaN.
            if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(lower.0, upper.0)) != 0 {
                (low, high) = (quiet(lower.0, low), quiet(upper.0, high));
            }
            let words = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high);
            _mm256_storeu_si256(bytes.as_mut_ptr().cast::<__m256i>(), words);
        }
        bytes
    }
}

/// The bits of float32, rounded to nearest even in the upper half: `element::bf16_bits` but for NaN.
#[inline(always)]
fn rounded(value: __m256) -> __m256i {
    // SAFETY: AVX2 is there, see `Bf16x16`.
    unsafe {
        let bits = _mm256_castps_si256(value);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)))
    }
}

/// `otherwise`, but where `value` is NaN its own bits, made quiet.
#[inline(always)]
fn quiet(value: __m256, otherwise: __m256i) -> __m256i {
    // SAFETY: AVX2 is there, see `Bf16x16`.
    unsafe {
        let kept = _mm256_or_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
        _mm256_blendv_epi8(otherwise, kept, nan)
    }
}

impl Number for Pair {
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Pair(self.0.plus(other.0), self.1.plus(other.1))
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        Pair(self.0.times(other.0), self.1.times(other.1))
    }
}

impl Ordered for Pair {
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        Pair(self.0.smaller(other.0), self.1.smaller(other.1))
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        Pair(self.0.larger(other.0), self.1.larger(other.1))
    }
}

impl Fraction for Pair {
    #[inline(always)]
    fn count(ranks: usize) -> Self {
        Pair(F32x8::count(ranks), F32x8::count(ranks))
    }

    #[inline(always)]
    fn over(self, divisor: Self) -> Self {
        Pair(self.0.over(divisor.0), self.1.over(divisor.1))
    }
}
