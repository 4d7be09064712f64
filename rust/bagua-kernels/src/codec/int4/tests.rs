//! Compares the fast loops with the reference.

mod reference;

use super::super::simd::Level;
use super::super::tests::{AtLevel, DTYPES, compare, elements, values};
use super::{Codec, Encoded, Int4, Scratch, kernel, scales};
use crate::types::DType;

impl AtLevel for Int4 {
    fn encode_at(&self, level: Option<Level>, dtype: DType, elements: &[u8], record: &mut [u8]) -> Encoded {
        let (scales, levels) = record.split_at_mut(scales(elements.len() / dtype.size()));
        match level {
            None => reference::encode(dtype, elements, scales, levels),
            Some(level) => kernel::encode(level, dtype, elements, scales, levels),
        }
    }

    fn decode_at(&self, level: Option<Level>, dtype: DType, record: &[u8], elements: &mut [u8]) {
        let (scales, levels) = record.split_at(scales(elements.len() / dtype.size()));
        match level {
            None => reference::decode(dtype, scales, levels, elements),
            Some(level) => kernel::decode(level, dtype, scales, levels, elements),
        }
    }
}

#[test]
fn every_level_makes_the_bits_of_the_reference() {
    compare(&Int4);
}

#[test]
fn finite_elements_stay_finite_and_within_half_a_scale() {
    for dtype in DTYPES {
        let largest: f32 = if dtype == DType::F16 { 65504.0 } else { 3e38 };
        for magnitude in [largest, 458_528.0f32.min(largest), 1.0, 1e-3, 3e-7, 1e-8, 0.0] {
            let given: Vec<f32> = (0..100u16).map(|i| magnitude * (f32::from(i % 41) / 20.0 - 1.0)).collect();
            let given = elements(dtype, &given);
            let mut record = vec![0; Int4.record_len(100, dtype)];
            assert_eq!(Int4.encode(dtype, &given, &mut record, 0, &mut Scratch::default()), Encoded::Finite);
            let mut back = vec![0xa5; given.len()];
            Int4.decode(dtype, &record, &mut back).unwrap();
            for (x, y) in values(dtype, &given).into_iter().zip(values(dtype, &back)) {
                assert!(y.is_finite(), "{} {x} {y}", dtype.name());
                // The scale is rounded up, and bfloat16 rounds the decoded value by another 1 / 256.
                let bound = magnitude / 14.0 * 1.001 + 3e-8 + y.abs() / 250.0;
                assert!(magnitude > 458_528.0 || (x - y).abs() <= bound, "{} {x} {y}", dtype.name());
            }
        }
    }
}
