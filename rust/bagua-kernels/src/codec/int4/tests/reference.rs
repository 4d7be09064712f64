//! The codec element by element, easy to read, as a reference for the fast loops.

use half::f16;

use super::super::{BLOCK, LEVELS, SCALE, largest_scale};
use crate::codec::Encoded;
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::types::DType;

/// Returns the place of an element of a block: the byte, and the number of bits below its level.
fn place(element: usize) -> (usize, usize) {
    (element / 32 * 16 + element % 16, element % 32 / 16 * 4)
}

/// Returns the smallest float16 that is not below `step`.
fn rounded_up(step: f32, largest: f16) -> f16 {
    (0..=largest.to_bits()).map(f16::from_bits).find(|scale| scale.to_f32() >= step).unwrap_or(largest)
}

struct Encode<'a>(f16, &'a [u8], &'a mut [u8], &'a mut [u8]);

impl ForFloat for Encode<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let Encode(largest, elements, scales, levels) = self;
        levels.fill(0);
        let mut encoded = Encoded::Finite;
        let blocks = elements.chunks(BLOCK * T::SIZE);
        for ((elements, scale), q) in blocks.zip(scales.chunks_mut(SCALE)).zip(levels.chunks_mut(LEVELS)) {
            let values = || elements.chunks(T::SIZE).map(T::load);
            let finite = values().all(f32::is_finite);
            let step = match finite {
                true => rounded_up(values().map(f32::abs).fold(0.0, f32::max) / 7.0, largest),
                false => f16::NAN,
            };
            scale.copy_from_slice(&step.to_le_bytes());
            if !finite {
                encoded = Encoded::NonFinite;
            }
            for (element, x) in values().chain(std::iter::repeat(0.0)).take(BLOCK).enumerate() {
                let level = if step.to_f32() > 0.0 { (x * (1.0 / step.to_f32())).round_ties_even() } else { 0.0 };
                let (byte, shift) = place(element);
                q[byte] |= ((level.clamp(-7.0, 7.0) + 8.0) as u8) << shift;
            }
        }
        encoded
    }
}

pub(super) fn encode(dtype: DType, elements: &[u8], scales: &mut [u8], levels: &mut [u8]) -> Encoded {
    for_dtype(dtype, Encode(f16::from_bits(largest_scale(dtype)), elements, scales, levels))
}

struct Decode<'a>(&'a [u8], &'a [u8], &'a mut [u8]);

impl ForFloat for Decode<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let Decode(scales, levels, elements) = self;
        for (element, out) in elements.chunks_mut(T::SIZE).enumerate() {
            let (block, (byte, shift)) = (element / BLOCK, place(element % BLOCK));
            let scale = f16::from_le_bytes(scales[block * SCALE..][..SCALE].try_into().unwrap());
            let level = f32::from(levels[block * LEVELS + byte] >> shift & 15) - 8.0;
            let known = scale.is_finite() && scale.is_sign_positive();
            T::store(if known { level * scale.to_f32() } else { f32::NAN }, out);
        }
    }
}

pub(super) fn decode(dtype: DType, scales: &[u8], levels: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, Decode(scales, levels, elements));
}
