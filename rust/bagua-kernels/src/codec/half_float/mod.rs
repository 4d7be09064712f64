//! f16 and bf16: the elements as float16 or bfloat16, converted as in IEEE 754, half to even.
//!
//! A record has two bytes per element, and zeros up to a multiple of 32. Infinities stay infinite, values beyond the
//! largest float16 become infinite, NaN stays NaN: no such element becomes finite.

mod kernel;
#[cfg(test)]
mod tests;

use super::simd::Level;
use super::{Codec, Encoded, Scratch, aligned, check_len};
use crate::error::Result;
use crate::types::DType;

/// The codec f16.
#[derive(Clone, Copy, Debug, Default)]
pub struct F16;

/// The codec bf16.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bf16;

macro_rules! half_float {
    ($codec:ident, $id:literal, $name:literal, $half:ty) => {
        impl Codec for $codec {
            fn id(&self) -> u8 {
                $id
            }

            fn name(&self) -> &'static str {
                $name
            }

            fn record_len(&self, count: usize, _dtype: DType) -> usize {
                aligned(count * 2)
            }

            fn encode(
                &self,
                dtype: DType,
                elements: &[u8],
                record: &mut [u8],
                _draw: u64,
                _scratch: &mut Scratch,
            ) -> Encoded {
                assert_eq!(record.len(), self.record_len(elements.len() / dtype.size(), dtype), "length of the record");
                kernel::encode::<$half>(Level::best(), dtype, elements, record);
                Encoded::Finite
            }

            fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()> {
                check_len(self, dtype, record, elements)?;
                kernel::decode::<$half>(Level::best(), dtype, record, elements);
                Ok(())
            }
        }
    };
}

half_float!(F16, 2, "f16", half::f16);
half_float!(Bf16, 3, "bf16", half::bf16);
