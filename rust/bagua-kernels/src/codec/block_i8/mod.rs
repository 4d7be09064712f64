//! block_i8: eight signed bits per element, and one scale for each block of elements.
//!
//! A record has ceil(count / block) float32 scales, one signed byte q per element x, and zeros up to a multiple of 32:
//!
//! - scale = (largest magnitude of the block) / 127
//! - q = clamp(rint(x / scale), -127, 127), or 0 if scale is 0
//! - decoded: q * scale
//!
//! The error is at most scale / 2. Blocks limit the error that an outlier causes: Dettmers et al., "8-bit Optimizers
//! via Block-wise Quantization", 2021 (<https://arxiv.org/abs/2110.02861>), but with linear levels.
//!
//! If an element is not finite, its block has the scale NaN and q = 0. A scale that is not finite decodes to NaN.

mod kernel;
#[cfg(test)]
mod tests;

use self::kernel::SCALE;
use super::options::{CodecOption, Options};
use super::simd::Level;
use super::{Codec, Encoded, Scratch, aligned, check_len};
use crate::error::Result;
use crate::types::DType;

/// Default number of elements of a block. The scales then add 1.6 % to the bytes.
const BLOCK: i64 = 256;

/// The codec block_i8.
#[derive(Clone, Copy, Debug)]
pub struct BlockI8 {
    /// Number of elements that share a scale. At least 1.
    block: usize,
}

impl BlockI8 {
    pub(super) fn new(options: &mut Options<'_>) -> Result<BlockI8> {
        let block = options.int("block", BLOCK, 1)?;
        Ok(BlockI8 { block: usize::try_from(block).unwrap_or(usize::MAX) })
    }

    fn scales(&self, count: usize) -> usize {
        count.div_ceil(self.block) * SCALE
    }
}

impl Codec for BlockI8 {
    fn id(&self) -> u8 {
        4
    }

    fn name(&self) -> &'static str {
        "block_i8"
    }

    fn values(&self) -> Vec<(&'static str, CodecOption)> {
        vec![("block", CodecOption::Int(self.block as i64))]
    }

    fn record_len(&self, count: usize, _dtype: DType) -> usize {
        aligned(self.scales(count) + count)
    }

    fn encode(&self, dtype: DType, elements: &[u8], record: &mut [u8], _draw: u64, _scratch: &mut Scratch) -> Encoded {
        let count = elements.len() / dtype.size();
        assert_eq!(record.len(), self.record_len(count, dtype), "length of the record");
        let (scales, bytes) = record.split_at_mut(self.scales(count));
        kernel::encode(Level::best(), dtype, self.block, elements, scales, bytes)
    }

    fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()> {
        let count = check_len(self, dtype, record, elements)?;
        let (scales, bytes) = record.split_at(self.scales(count));
        kernel::decode(Level::best(), dtype, self.block, scales, bytes, elements);
        Ok(())
    }
}
