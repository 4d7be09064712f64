//! minmax_u8, the original's "MinMaxUInt8": eight bits between the smallest and the largest element.
//!
//! A record has min and max in the element type (-0 as +0), zeros up to byte 32, one byte q per element x, and zeros up
//! to a multiple of 32. An element x is encoded as q and decoded as (q + lower) / scale:
//!
//! - scale = 255 / (max - min + 1e-7), upper = rint(max * scale), lower = upper - 255
//! - q = clamp(min(rint(x * scale), upper) - lower, 0, 255)
//!
//! The error is at most range / 510 on ordinary data. Source: the original's `bagua_kernels.cu`, described in section
//! 2.6 of the specification. In addition, q is clamped at both ends.
//!
//! If an element, max - min, max * scale or min * scale is not finite, min and max are NaN and every q is 0.

mod kernel;
mod record;
#[cfg(test)]
mod tests;

use self::record::HEADER;
use super::simd::Level;
use super::{Codec, Encoded, Scratch, aligned, check_len};
use crate::error::Result;
use crate::types::DType;

/// The codec minmax_u8.
#[derive(Clone, Copy, Debug, Default)]
pub struct MinMaxU8;

impl Codec for MinMaxU8 {
    fn id(&self) -> u8 {
        1
    }

    fn name(&self) -> &'static str {
        "minmax_u8"
    }

    fn record_len(&self, count: usize, _dtype: DType) -> usize {
        if count == 0 { 0 } else { HEADER + aligned(count) }
    }

    fn encode(&self, dtype: DType, elements: &[u8], record: &mut [u8], _draw: u64, _scratch: &mut Scratch) -> Encoded {
        assert_eq!(record.len(), self.record_len(elements.len() / dtype.size(), dtype), "length of the record");
        if elements.is_empty() {
            return Encoded::Finite;
        }
        kernel::encode(Level::best(), dtype, elements, record)
    }

    fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()> {
        if check_len(self, dtype, record, elements)? > 0 {
            kernel::decode(Level::best(), dtype, record, 0, elements);
        }
        Ok(())
    }

    fn decodes_parts(&self) -> bool {
        true
    }

    fn decode_part(&self, dtype: DType, record: &[u8], first: usize, elements: &mut [u8]) {
        kernel::decode(Level::best(), dtype, record, first, elements);
    }
}
