//! The codec element by element, easy to read, as a reference for the fast loops.

use super::super::record::{HEADER, levels};
use crate::codec::Encoded;
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::types::DType;

struct Encode<'a>(&'a [u8], &'a mut [u8]);

impl ForFloat for Encode<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let Encode(elements, record) = self;
        let (header, body) = record.split_at_mut(HEADER);
        let values = || elements.chunks_exact(T::SIZE).map(T::load);
        let (mut min, mut max, mut finite) = (f32::INFINITY, f32::NEG_INFINITY, true);
        for x in values() {
            finite &= x.is_finite();
            min = if x < min { x } else { min };
            max = if x > max { x } else { max };
        }
        header.fill(0);
        let Some(levels) = levels(min, max).filter(|_| finite) else {
            T::store(f32::NAN, header);
            T::store(f32::NAN, &mut header[T::SIZE..]);
            body.fill(0);
            return Encoded::NonFinite;
        };
        // Adding 0 turns -0 into +0.
        T::store(min + 0.0, header);
        T::store(max + 0.0, &mut header[T::SIZE..]);
        let count = elements.len() / T::SIZE;
        for (q, x) in body.iter_mut().zip(values()) {
            let level = (x * levels.scale).round_ties_even().min(levels.upper);
            *q = (level - levels.lower()).clamp(0.0, 255.0) as u8;
        }
        body[count..].fill(0);
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
        let (min, max) = (T::load(record), T::load(&record[T::SIZE..]));
        let out = elements.chunks_exact_mut(T::SIZE);
        match levels(min, max) {
            None => out.for_each(|element| T::store(f32::NAN, element)),
            Some(levels) => {
                for (q, element) in record[HEADER..].iter().zip(out) {
                    T::store((f32::from(*q) + levels.lower()) / levels.scale, element);
                }
            }
        }
    }
}

pub(super) fn decode(dtype: DType, record: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, Decode(record, elements));
}
