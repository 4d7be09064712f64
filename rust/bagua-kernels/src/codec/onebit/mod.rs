//! onebit: the sign of each element, and one magnitude for all of them.
//!
//! A record has the mean magnitude in float32, one bit per element, and zeros up to a multiple of 32. Bit i % 8 of byte
//! i / 8 is 1 if element i is negative. Elements decode to plus or minus the mean magnitude. Source: Seide et al.,
//! "1-Bit Stochastic Gradient Descent", Interspeech 2014; the scale is from Karimireddy et al., "Error Feedback Fixes
//! SignSGD", 2019 (<https://arxiv.org/abs/1901.09847>). In both, the caller must add the error to the next step's
//! elements.
//!
//! The mean has the same bits on every processor: element i is added to the float64 sum i % 16, the sums are added in
//! order, and the result is divided by the count.
//!
//! If an element is not finite, the scale is NaN and all bits are 0. A scale that is not finite decodes to NaN.

mod kernel;
#[cfg(test)]
mod tests;

use self::kernel::SCALE;
use super::simd::Level;
use super::{Codec, Encoded, Scratch, aligned, check_len};
use crate::error::Result;
use crate::types::DType;

/// The codec onebit.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneBit;

impl Codec for OneBit {
    fn id(&self) -> u8 {
        7
    }

    fn name(&self) -> &'static str {
        "onebit"
    }

    fn record_len(&self, count: usize, _dtype: DType) -> usize {
        if count == 0 { 0 } else { aligned(SCALE + count.div_ceil(8)) }
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
            kernel::decode(Level::best(), dtype, record, elements);
        }
        Ok(())
    }
}
