//! Compares the fast loops with the reference.

mod reference;

use super::super::simd::Level;
use super::super::tests::{AtLevel, compare};
use super::{BlockI8, Codec, Encoded, kernel};
use crate::types::DType;

impl AtLevel for BlockI8 {
    fn encode_at(&self, level: Option<Level>, dtype: DType, elements: &[u8], record: &mut [u8]) -> Encoded {
        let (scales, bytes) = record.split_at_mut(self.scales(elements.len() / dtype.size()));
        match level {
            None => reference::encode(dtype, self.block, elements, scales, bytes),
            Some(level) => kernel::encode(level, dtype, self.block, elements, scales, bytes),
        }
    }

    fn decode_at(&self, level: Option<Level>, dtype: DType, record: &[u8], elements: &mut [u8]) {
        let (scales, bytes) = record.split_at(self.scales(elements.len() / dtype.size()));
        match level {
            None => reference::decode(dtype, self.block, scales, bytes, elements),
            Some(level) => kernel::decode(level, dtype, self.block, scales, bytes, elements),
        }
    }
}

#[test]
fn every_level_makes_the_bits_of_the_reference() {
    for block in [1, 16, 19, 64, 256, usize::MAX] {
        let codec = BlockI8 { block };
        assert!(codec.record_len(100, DType::F32) > 0);
        compare(&codec);
    }
}
