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
