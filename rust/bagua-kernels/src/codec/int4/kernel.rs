//! The codec in blocks of 64 elements. It gives the same bits as the reference.

use std::marker::PhantomData;

use super::super::Encoded;
use super::super::float::{Float, ForFloat, for_dtype};
use super::super::simd::{Kernel, LANES, Lanes, Level, is_zero};
use super::{BLOCK, LEVELS, SCALE, ZEROS, largest_scale};
use crate::types::DType;

const NORMAL: f32 = 1.0 / 16384.0;

const UNIT: f32 = 1.0 / 16_777_216.0;

/// Difference between the exponents of float32 and float16, at the place of the latter's exponent.
const EXPONENT: u32 = 112 << 10;

/// The bits of infinity in float16. Larger bits are those of NaN and of negative numbers.
const INFINITY: u16 = 0x7c00;

/// Rounds a finite, positive number up to a float16, at most `largest`. Returns its bits.
#[inline(always)]
fn rounded_up(step: f32, largest: u16) -> u16 {
    if step < NORMAL {
        return (step / UNIT).ceil() as u16;
    }
    ((step.to_bits() + 0x1fff) >> 13).saturating_sub(EXPONENT).min(u32::from(largest)) as u16
}

/// Returns the value of a positive, finite float16.
#[inline(always)]
fn value(scale: u16) -> f32 {
    let bits = u32::from(scale);
    if bits < 0x400 { bits as f32 * UNIT } else { f32::from_bits((bits + EXPONENT) << 13) }
}

struct Encode<'a, T> {
    largest: u16,
    elements: &'a [u8],
    scales: &'a mut [u8],
    levels: &'a mut [u8],
    element: PhantomData<T>,
}

/// Writes the levels of 64 elements and returns the bits of their scale, or `None` if an element is not finite.
#[inline(always)]
fn encode_block<T: Float, L: Lanes>(largest: u16, elements: &[u8], q: &mut [u8]) -> Option<u16> {
    let load = |i: usize| T::load_lanes::<L>(&elements[i * LANES * T::SIZE..]);
    let x = [load(0), load(1), load(2), load(3)];
    let (mut magnitude, mut sum) = (L::splat(0.0), L::splat(0.0));
    for x in x {
        magnitude = x.abs().larger(magnitude);
        sum = sum.plus(x.minus(x));
    }
    if !is_zero(sum) {
        q.fill(ZEROS);
        return None;
    }
    let scale = rounded_up(magnitude.largest() / 7.0, largest);
    let inverse = L::splat(if scale == 0 { 0.0 } else { 1.0 / value(scale) });
    let (most, least) = (L::splat(7.0), L::splat(-7.0));
    let (sixteen, both) = (L::splat(16.0), L::splat(f32::from(ZEROS)));
    for (half, q) in q.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let low = x[2 * half].times(inverse).round().smaller(most).larger(least);
        let high = x[2 * half + 1].times(inverse).round().smaller(most).larger(least);
        *q = high.times(sixteen).plus(low).plus(both).to_u8();
    }
    Some(scale)
}

impl<T: Float> Kernel for Encode<'_, T> {
    type Output = Encoded;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Encoded {
        let blocks = self.elements.chunks_exact(BLOCK * T::SIZE);
        let left = blocks.remainder();
        let mut last = [0; BLOCK * size_of::<f32>()];
        last[..left.len()].copy_from_slice(left);
        let last = (!left.is_empty()).then_some(&last[..BLOCK * T::SIZE]);
        let (levels, padding) = self.levels.split_at_mut(self.scales.len() / SCALE * LEVELS);
        padding.fill(0);
        let mut encoded = Encoded::Finite;
        let places = self.scales.as_chunks_mut::<SCALE>().0.iter_mut().zip(levels.chunks_exact_mut(LEVELS));
        for ((scale, q), elements) in places.zip(blocks.chain(last)) {
            let bits = encode_block::<T, L>(self.largest, elements, q);
            if bits.is_none() {
                encoded = Encoded::NonFinite;
            }
            *scale = bits.unwrap_or(half::f16::NAN.to_bits()).to_le_bytes();
        }
        encoded
    }
}

struct EncodeAt<'a>(Level, u16, &'a [u8], &'a mut [u8], &'a mut [u8]);

impl ForFloat for EncodeAt<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let EncodeAt(level, largest, elements, scales, levels) = self;
        level.run(Encode { largest, elements, scales, levels, element: PhantomData::<T> })
    }
}

pub(super) fn encode(level: Level, dtype: DType, elements: &[u8], scales: &mut [u8], levels: &mut [u8]) -> Encoded {
    for_dtype(dtype, EncodeAt(level, largest_scale(dtype), elements, scales, levels))
}

struct Decode<'a, T> {
    scales: &'a [u8],
    levels: &'a [u8],
    elements: &'a mut [u8],
    element: PhantomData<T>,
}

#[inline(always)]
fn decode_block<T: Float, L: Lanes>(scale: u16, q: &[u8], elements: &mut [u8]) {
    let (step, zero) = (L::splat(if scale < INFINITY { value(scale) } else { f32::NAN }), L::splat(8.0));
    for (half, q) in q.as_chunks::<LANES>().0.iter().enumerate() {
        let levels = [q.map(|q| q & 15), q.map(|q| q >> 4)];
        for (i, levels) in levels.iter().enumerate() {
            let values = L::from_u8(levels).minus(zero).times(step);
            T::store_lanes(values, &mut elements[(2 * half + i) * LANES * T::SIZE..]);
        }
    }
}

impl<T: Float> Kernel for Decode<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let mut blocks = self.elements.chunks_exact_mut(BLOCK * T::SIZE);
        let scales = self.scales.as_chunks::<SCALE>().0.iter().map(|bits| u16::from_le_bytes(*bits));
        let mut places = scales.zip(self.levels.chunks_exact(LEVELS));
        // The zip asks `blocks` first. When the blocks end, `places` still has the place of the last, partial block.
        for (elements, (scale, q)) in (&mut blocks).zip(&mut places) {
            decode_block::<T, L>(scale, q, elements);
        }
        let left = blocks.into_remainder();
        if let Some((scale, q)) = places.next() {
            let mut last = [0; BLOCK * size_of::<f32>()];
            decode_block::<T, L>(scale, q, &mut last);
            left.copy_from_slice(&last[..left.len()]);
        }
    }
}

struct DecodeAt<'a>(Level, &'a [u8], &'a [u8], &'a mut [u8]);

impl ForFloat for DecodeAt<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let DecodeAt(level, scales, levels, elements) = self;
        level.run(Decode { scales, levels, elements, element: PhantomData::<T> });
    }
}

pub(super) fn decode(level: Level, dtype: DType, scales: &[u8], levels: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, DecodeAt(level, scales, levels, elements));
}
