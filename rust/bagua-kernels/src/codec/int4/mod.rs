//! int4: four bits per element, and one float16 scale for each block of 64 elements. 4.25 bits per element.
//!
//! A record has ceil(count / 64) float16 scales, 32 bytes of levels for each block, and zeros up to a multiple of 32.
//! The last block is filled up with elements of 0. Byte i (0 to 15) of half h (0 or 1) of a block contains the level of
//! element 32 h + i in its low four bits, and that of element 32 h + 16 + i in its high four bits, each plus 8:
//!
//! - scale = (largest magnitude of the block) / 7, rounded up to a float16, at most [`largest_scale`]
//! - q = clamp(rint(x * (1 / scale)), -7, 7), or 0 if scale is 0
//! - decoded: q * scale
//!
//! The error is at most scale / 2 for magnitudes up to 7 * 65504. Larger ones decode to that magnitude with their sign,
//! so that every finite element stays finite.
//!
//! If an element is not finite, its block has the scale NaN and q = 0. Negative or non-finite scales decode to NaN.

mod kernel;
#[cfg(test)]
mod tests;

use half::f16;

use super::simd::Level;
use super::{Codec, Encoded, Scratch, aligned, check_len};
use crate::error::Result;
use crate::types::DType;

/// Number of elements that share a scale.
const BLOCK: usize = 64;

const SCALE: usize = size_of::<f16>();

const LEVELS: usize = BLOCK / 2;

/// The byte of two elements of 0.
const ZEROS: u8 = 0x88;

/// The codec int4.
#[derive(Clone, Copy, Debug, Default)]
pub struct Int4;

/// Returns the bits of the largest scale. For float16 elements, seven times that scale must not exceed 65504.
const fn largest_scale(dtype: DType) -> u16 {
    if matches!(dtype, DType::F16) { f16::from_f32_const(9352.0).to_bits() } else { f16::MAX.to_bits() }
}

fn scales(count: usize) -> usize {
    count.div_ceil(BLOCK) * SCALE
}

impl Codec for Int4 {
    fn id(&self) -> u8 {
        8
    }

    fn name(&self) -> &'static str {
        "int4"
    }

    fn record_len(&self, count: usize, _dtype: DType) -> usize {
        aligned(count.div_ceil(BLOCK) * (SCALE + LEVELS))
    }

    fn encode(&self, dtype: DType, elements: &[u8], record: &mut [u8], _draw: u64, _scratch: &mut Scratch) -> Encoded {
        let count = elements.len() / dtype.size();
        assert_eq!(record.len(), self.record_len(count, dtype), "length of the record");
        let (scales, levels) = record.split_at_mut(scales(count));
        kernel::encode(Level::best(), dtype, elements, scales, levels)
    }

    fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()> {
        let (scales, levels) = record.split_at(scales(check_len(self, dtype, record, elements)?));
        kernel::decode(Level::best(), dtype, scales, levels, elements);
        Ok(())
    }
    fn encodes_parts(&self) -> bool {
        true
    }

    fn encode_part(&self, dtype: DType, elements: &[u8], record: &mut [u8], first: usize) -> Encoded {
        let (begin, blocks) = (first / BLOCK, (elements.len() / dtype.size()).div_ceil(BLOCK));
        let all = record.len() / (SCALE + LEVELS);
        let (scales, levels) = record.split_at_mut(all * SCALE);
        // The kernel fills what is behind the last levels with zeros.
        let end = if begin + blocks == all { levels.len() } else { (begin + blocks) * LEVELS };
        let scales = &mut scales[begin * SCALE..][..blocks * SCALE];
        kernel::encode(Level::best(), dtype, elements, scales, &mut levels[begin * LEVELS..end])
    }

    fn decodes_parts(&self) -> bool {
        true
    }

    fn decode_part(&self, dtype: DType, record: &[u8], first: usize, elements: &mut [u8]) {
        let (begin, blocks) = (first / BLOCK, (elements.len() / dtype.size()).div_ceil(BLOCK));
        let (scales, levels) = record.split_at(record.len() / (SCALE + LEVELS) * SCALE);
        let scales = &scales[begin * SCALE..][..blocks * SCALE];
        kernel::decode(Level::best(), dtype, scales, &levels[begin * LEVELS..], elements);
    }
}
