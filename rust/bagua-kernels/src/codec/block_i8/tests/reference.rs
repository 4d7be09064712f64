//! The codec element by element, easy to read, as a reference for the fast loops.

use super::super::kernel::SCALE;
use crate::codec::Encoded;
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::types::DType;

struct Encode<'a> {
    block: usize,
    elements: &'a [u8],
    scales: &'a mut [u8],
    bytes: &'a mut [u8],
}

impl ForFloat for Encode<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let (bytes, padding) = self.bytes.split_at_mut(self.elements.len() / T::SIZE);
        let mut encoded = Encoded::Finite;
        let blocks = self.elements.chunks(self.block.saturating_mul(T::SIZE));
        for ((elements, scale), q) in blocks.zip(self.scales.chunks_exact_mut(SCALE)).zip(bytes.chunks_mut(self.block))
        {
            let values = || elements.chunks_exact(T::SIZE).map(T::load);
            if !values().all(f32::is_finite) {
                f32::store(f32::NAN, scale);
                q.fill(0);
                encoded = Encoded::NonFinite;
                continue;
            }
            let largest = values().map(f32::abs).fold(0.0, f32::max);
            let step = largest / 127.0;
            f32::store(step, scale);
            for (q, x) in q.iter_mut().zip(values()) {
                let level = if step == 0.0 { 0.0 } else { (x / step).round_ties_even().clamp(-127.0, 127.0) };
                *q = (level as i8).cast_unsigned();
            }
        }
        padding.fill(0);
        encoded
    }
}

pub(super) fn encode(dtype: DType, block: usize, elements: &[u8], scales: &mut [u8], bytes: &mut [u8]) -> Encoded {
    for_dtype(dtype, Encode { block, elements, scales, bytes })
}

struct Decode<'a> {
    block: usize,
    scales: &'a [u8],
    bytes: &'a [u8],
    elements: &'a mut [u8],
}

impl ForFloat for Decode<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let blocks = self.elements.chunks_mut(self.block.saturating_mul(T::SIZE));
        for ((elements, scale), q) in blocks.zip(self.scales.chunks_exact(SCALE)).zip(self.bytes.chunks(self.block)) {
            let step = f32::load(scale);
            for (element, q) in elements.chunks_exact_mut(T::SIZE).zip(q) {
                // The sign of 0 * infinity depends on the processor.
                let value = if step.is_finite() { f32::from(q.cast_signed()) * step } else { f32::NAN };
                T::store(value, element);
            }
        }
    }
}

pub(super) fn decode(dtype: DType, block: usize, scales: &[u8], bytes: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, Decode { block, scales, bytes, elements });
}
