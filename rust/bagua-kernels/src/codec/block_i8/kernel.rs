//! The codec in blocks of sixteen elements. It gives the same bits as the reference.

use std::marker::PhantomData;

use super::super::Encoded;
use super::super::float::{Float, ForFloat, for_dtype};
use super::super::simd::{Kernel, LANES, Lanes, Level, filled, is_zero};
use crate::types::DType;

pub(super) const SCALE: usize = size_of::<f32>();

struct Encode<'a, T> {
    block: usize,
    elements: &'a [u8],
    scales: &'a mut [u8],
    bytes: &'a mut [u8],
    element: PhantomData<T>,
}

/// Returns the levels of sixteen elements.
#[inline(always)]
fn quantize<T: Float, L: Lanes>(elements: &[u8], step: L) -> [u8; LANES] {
    let level = T::load_lanes::<L>(elements).over(step).round();
    level.smaller(L::splat(127.0)).larger(L::splat(-127.0)).to_i8()
}

/// Writes the scale and the levels of one block. Returns false if an element is not finite.
#[inline(always)]
fn encode_block<T: Float, L: Lanes>(elements: &[u8], scale: &mut [u8], q: &mut [u8]) -> bool {
    let blocks = || elements.chunks_exact(LANES * T::SIZE);
    let left = blocks().remainder();
    let (mut largest, mut sum) = (L::splat(0.0), L::splat(0.0));
    let mut measure = |x: L| {
        largest = x.abs().larger(largest);
        sum = sum.plus(x.minus(x));
    };
    for block in blocks() {
        measure(T::load_lanes(block));
    }
    // The last block is padded with zeros, which do not change the largest magnitude.
    let last = filled(left);
    measure(T::load_lanes(&last));
    if !is_zero(sum) {
        f32::store(f32::NAN, scale);
        q.fill(0);
        return false;
    }
    let step = largest.largest() / 127.0;
    f32::store(step, scale);
    if step == 0.0 {
        q.fill(0);
        return true;
    }
    let step = L::splat(step);
    let (full, end) = q.as_chunks_mut::<LANES>();
    for (block, q) in blocks().zip(full) {
        *q = quantize::<T, L>(block, step);
    }
    end.copy_from_slice(&quantize::<T, L>(&last, step)[..end.len()]);
    true
}

impl<T: Float> Kernel for Encode<'_, T> {
    type Output = Encoded;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Encoded {
        let (bytes, padding) = self.bytes.split_at_mut(self.elements.len() / T::SIZE);
        padding.fill(0);
        let mut finite = true;
        let blocks = self.elements.chunks(self.block.saturating_mul(T::SIZE));
        for ((elements, scale), q) in blocks.zip(self.scales.chunks_exact_mut(SCALE)).zip(bytes.chunks_mut(self.block))
        {
            finite &= encode_block::<T, L>(elements, scale, q);
        }
        if finite { Encoded::Finite } else { Encoded::NonFinite }
    }
}

struct EncodeAt<'a>(Level, usize, &'a [u8], &'a mut [u8], &'a mut [u8]);

impl ForFloat for EncodeAt<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let EncodeAt(level, block, elements, scales, bytes) = self;
        level.run(Encode { block, elements, scales, bytes, element: PhantomData::<T> })
    }
}

pub(super) fn encode(
    level: Level,
    dtype: DType,
    block: usize,
    elements: &[u8],
    scales: &mut [u8],
    bytes: &mut [u8],
) -> Encoded {
    for_dtype(dtype, EncodeAt(level, block, elements, scales, bytes))
}

struct Decode<'a, T> {
    block: usize,
    scales: &'a [u8],
    bytes: &'a [u8],
    elements: &'a mut [u8],
    element: PhantomData<T>,
}

impl<T: Float> Kernel for Decode<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let bytes = &self.bytes[..self.elements.len() / T::SIZE];
        let blocks = self.elements.chunks_mut(self.block.saturating_mul(T::SIZE));
        for ((elements, scale), q) in blocks.zip(self.scales.chunks_exact(SCALE)).zip(bytes.chunks(self.block)) {
            let step = f32::load(scale);
            if !step.is_finite() {
                elements.chunks_exact_mut(T::SIZE).for_each(|element| T::store(f32::NAN, element));
                continue;
            }
            let step = L::splat(step);
            let (full, end) = q.as_chunks::<LANES>();
            let mut blocks = elements.chunks_exact_mut(LANES * T::SIZE);
            for (block, q) in (&mut blocks).zip(full) {
                T::store_lanes(L::from_i8(q).times(step), block);
            }
            let left = blocks.into_remainder();
            if !left.is_empty() {
                let (mut block, mut last) = ([0; 64], [0; LANES]);
                let count = left.len() / T::SIZE;
                last[..count].copy_from_slice(&end[..count]);
                T::store_lanes(L::from_i8(&last).times(step), &mut block);
                left.copy_from_slice(&block[..left.len()]);
            }
        }
    }
}

struct DecodeAt<'a>(Level, usize, &'a [u8], &'a [u8], &'a mut [u8]);

impl ForFloat for DecodeAt<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let DecodeAt(level, block, scales, bytes, elements) = self;
        level.run(Decode { block, scales, bytes, elements, element: PhantomData::<T> });
    }
}

pub(super) fn decode(level: Level, dtype: DType, block: usize, scales: &[u8], bytes: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, DecodeAt(level, block, scales, bytes, elements));
}
