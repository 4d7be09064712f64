//! The codec in blocks of sixteen elements. It gives the same bits as the reference.

use std::marker::PhantomData;

use super::super::Encoded;
use super::super::float::{Float, ForFloat, for_dtype};
use super::super::simd::{Kernel, LANES, Lanes, Level, filled};
use crate::types::DType;

pub(super) const SCALE: usize = size_of::<f32>();

pub(super) const SUMS: usize = 16;

/// Returns the mean of `count` magnitudes from their partial sums.
pub(super) fn mean(sums: &[f64; SUMS], count: usize) -> f32 {
    (sums.iter().fold(0.0, |all, sum| all + sum) / count as f64) as f32
}

const _: () = assert!(SUMS == LANES);

struct Encode<'a, T>(&'a [u8], &'a mut [u8], PhantomData<T>);

impl<T: Float> Kernel for Encode<'_, T> {
    type Output = Encoded;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Encoded {
        let Encode(elements, record, _) = self;
        let (scale, bits) = record.split_at_mut(SCALE);
        let blocks = elements.chunks_exact(LANES * T::SIZE);
        let last = filled(blocks.remainder());
        // The length is 28 bytes plus a multiple of 32, so it is even.
        let (pairs, _) = bits.as_chunks_mut::<2>();
        let mut sums = [0.0; SUMS];
        let mut at = 0;
        for block in blocks {
            let x = T::load_lanes::<L>(block);
            add(&mut sums, x);
            pairs[at] = x.negative().to_le_bytes();
            at += 1;
        }
        // The padding is zeros, which add nothing and have the bit 0.
        let x = T::load_lanes::<L>(&last);
        add(&mut sums, x);
        if let Some(pair) = pairs.get_mut(at) {
            *pair = x.negative().to_le_bytes();
            at += 1;
        }
        let mean = mean(&sums, elements.len() / T::SIZE);
        // In float64, a sum of float32 elements is finite exactly if all elements are finite.
        if !sums.iter().all(|sum| sum.is_finite()) {
            f32::store(f32::NAN, scale);
            bits.fill(0);
            return Encoded::NonFinite;
        }
        pairs[at..].as_flattened_mut().fill(0);
        f32::store(mean, scale);
        Encoded::Finite
    }
}

#[inline(always)]
fn add<L: Lanes>(sums: &mut [f64; SUMS], x: L) {
    let magnitudes = x.abs().values();
    for i in 0..SUMS {
        sums[i] += f64::from(magnitudes[i]);
    }
}

struct EncodeAt<'a>(Level, &'a [u8], &'a mut [u8]);

impl ForFloat for EncodeAt<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let EncodeAt(level, elements, record) = self;
        level.run(Encode(elements, record, PhantomData::<T>))
    }
}

/// Encodes at least one element into a record of the right length.
pub(super) fn encode(level: Level, dtype: DType, elements: &[u8], record: &mut [u8]) -> Encoded {
    for_dtype(dtype, EncodeAt(level, elements, record))
}

struct Decode<'a, T>(&'a [u8], &'a mut [u8], PhantomData<T>);

impl<T: Float> Kernel for Decode<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Decode(record, elements, _) = self;
        let (scale, bits) = record.split_at(SCALE);
        let scale = f32::load(scale);
        if !scale.is_finite() {
            elements.chunks_exact_mut(T::SIZE).for_each(|element| T::store(f32::NAN, element));
            return;
        }
        let (plus, minus) = (L::splat(scale), L::splat(-scale));
        let full = elements.len() / (LANES * T::SIZE);
        let mut blocks = elements.chunks_exact_mut(LANES * T::SIZE);
        for (block, bits) in (&mut blocks).zip(bits.as_chunks::<2>().0) {
            T::store_lanes(L::select(u16::from_le_bytes(*bits), minus, plus), block);
        }
        let left = blocks.into_remainder();
        if !left.is_empty() {
            let mut block = [0; 64];
            let byte = |at: usize| bits.get(2 * full + at).copied().unwrap_or(0);
            T::store_lanes(L::select(u16::from_le_bytes([byte(0), byte(1)]), minus, plus), &mut block);
            left.copy_from_slice(&block[..left.len()]);
        }
    }
}

struct DecodeAt<'a>(Level, &'a [u8], &'a mut [u8]);

impl ForFloat for DecodeAt<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let DecodeAt(level, record, elements) = self;
        level.run(Decode(record, elements, PhantomData::<T>));
    }
}

/// Decodes a record of at least one element and the right length.
pub(super) fn decode(level: Level, dtype: DType, record: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, DecodeAt(level, record, elements));
}
