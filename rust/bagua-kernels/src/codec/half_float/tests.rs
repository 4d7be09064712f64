//! Compares the fast loops with the reference.

mod reference;

use super::super::simd::Level;
use super::super::tests::{AtLevel, compare};
use super::{Bf16, Encoded, F16, kernel};
use crate::types::DType;

macro_rules! at_level {
    ($codec:ident, $half:ty) => {
        impl AtLevel for $codec {
            fn encode_at(&self, level: Option<Level>, dtype: DType, elements: &[u8], record: &mut [u8]) -> Encoded {
                match level {
                    None => reference::encode::<$half>(dtype, elements, record),
                    Some(level) => kernel::encode::<$half>(level, dtype, elements, record),
                }
                Encoded::Finite
            }

            fn decode_at(&self, level: Option<Level>, dtype: DType, record: &[u8], elements: &mut [u8]) {
                match level {
                    None => reference::decode::<$half>(dtype, record, elements),
                    Some(level) => kernel::decode::<$half>(level, dtype, record, elements),
                }
            }
        }
    };
}

at_level!(F16, half::f16);
at_level!(Bf16, half::bf16);

#[test]
fn every_level_makes_the_bits_of_the_reference() {
    compare(&F16);
    compare(&Bf16);
}

/// All bit patterns of a half type, and float32 values around every float16 and between two of them.
#[test]
fn every_level_converts_all_bits_as_the_reference_does() {
    let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let near = |bits: u16| {
        let value = half::f16::from_bits(bits).to_f32().to_bits();
        let upper = u32::from(bits) << 16;
        [
            value,
            value ^ 1,
            value ^ 0x1000,
            value ^ 0x1001,
            value ^ 0xfff,
            upper,
            upper | 0x8000,
            upper | 0x8001,
            upper | 1,
        ]
    };
    let floats: Vec<u8> = (0..=u16::MAX).flat_map(near).flat_map(u32::to_le_bytes).collect();
    for codec in [&F16 as &dyn AtLevel, &Bf16] {
        for (dtype, elements) in [(DType::F16, &halves), (DType::BF16, &halves), (DType::F32, &floats)] {
            let same_back = |level: Level, record: &[u8]| {
                let (mut back, mut reference) = (vec![0xa5; record.len() / 2 * dtype.size()], vec![]);
                reference.resize(back.len(), 0);
                codec.decode_at(Some(level), dtype, record, &mut back);
                codec.decode_at(None, dtype, record, &mut reference);
                assert!(back == reference, "{codec:?} {} {}", dtype.name(), level.name());
            };
            let mut expected = vec![0; codec.record_len(elements.len() / dtype.size(), dtype)];
            let _ = codec.encode_at(None, dtype, elements, &mut expected);
            for level in Level::available() {
                let mut record = vec![0xa5; expected.len()];
                let _ = codec.encode_at(Some(level), dtype, elements, &mut record);
                assert!(record == expected, "{codec:?} {} {}", dtype.name(), level.name());
                same_back(level, &record);
                same_back(level, &halves);
            }
        }
    }
}
