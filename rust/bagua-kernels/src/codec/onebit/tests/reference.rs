//! The codec element by element, easy to read, as a reference for the fast loops.

use super::super::kernel::{SCALE, SUMS, mean};
use crate::codec::Encoded;
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::types::DType;

struct Encode<'a>(&'a [u8], &'a mut [u8]);

impl ForFloat for Encode<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let Encode(elements, record) = self;
        let values = || elements.chunks_exact(T::SIZE).map(T::load);
        let (scale, bits) = record.split_at_mut(SCALE);
        bits.fill(0);
        let mut sums = [0.0; SUMS];
        for (i, x) in values().enumerate() {
            sums[i % SUMS] += f64::from(x.abs());
        }
        // A sum of finite float32 is always finite in float64.
        let mean = mean(&sums, elements.len() / T::SIZE);
        if !values().all(f32::is_finite) {
            f32::store(f32::NAN, scale);
            return Encoded::NonFinite;
        }
        f32::store(mean, scale);
        for (i, x) in values().enumerate() {
            bits[i / 8] |= u8::from(x < 0.0) << (i % 8);
        }
        Encoded::Finite
    }
}

pub(super) fn encode(dtype: DType, elements: &[u8], record: &mut [u8]) -> Encoded {
    for_dtype(dtype, Encode(elements, record))
}

struct Decode<'a>(&'a [u8], &'a mut [u8]);

impl ForFloat for Decode<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let Decode(record, elements) = self;
        let (scale, bits) = record.split_at(SCALE);
        let scale = f32::load(scale);
        for (i, element) in elements.chunks_exact_mut(T::SIZE).enumerate() {
            let negative = bits[i / 8] >> (i % 8) & 1 == 1;
            let value = if negative { -scale } else { scale };
            T::store(if scale.is_finite() { value } else { f32::NAN }, element);
        }
    }
}

pub(super) fn decode(dtype: DType, record: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, Decode(record, elements));
}
