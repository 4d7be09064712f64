//! Compares the fast loops with the reference.

mod reference;

use super::super::simd::Level;
use super::super::tests::{AtLevel, compare};
use super::{Encoded, MinMaxU8, kernel};
use crate::types::DType;

impl AtLevel for MinMaxU8 {
    fn encode_at(&self, level: Option<Level>, dtype: DType, elements: &[u8], record: &mut [u8]) -> Encoded {
        match level {
            None => reference::encode(dtype, elements, record),
            Some(level) => kernel::encode(level, dtype, elements, record),
        }
    }

    fn decode_at(&self, level: Option<Level>, dtype: DType, record: &[u8], elements: &mut [u8]) {
        match level {
            None => reference::decode(dtype, record, elements),
            Some(level) => kernel::decode(level, dtype, record, 0, elements),
        }
    }
}

#[test]
fn every_level_makes_the_bits_of_the_reference() {
    compare(&MinMaxU8);
}

#[test]
fn parts_of_a_record_have_the_bits_of_the_whole() {
    use super::super::{Codec, PART, Scratch};
    let elements: Vec<u8> = (0..2 * PART + 77).flat_map(|i| ((i * 37 % 1001) as f32 - 500.0).to_le_bytes()).collect();
    let mut record = vec![0; MinMaxU8.record_len(elements.len() / 4, DType::F32)];
    let encoded = MinMaxU8.encode(DType::F32, &elements, &mut record, 0, &mut Scratch::default());
    assert_eq!(encoded, Encoded::Finite);
    let (mut whole, mut parts) = (vec![0; elements.len()], vec![0; elements.len()]);
    MinMaxU8.decode(DType::F32, &record, &mut whole).unwrap();
    for (number, part) in parts.chunks_mut(4 * PART).enumerate() {
        MinMaxU8.decode_part(DType::F32, &record, number * PART, part);
    }
    assert_eq!(whole, parts);
}
