//! Elements as float32 values: one trait for the three element types that codecs encode.

use half::{bf16, f16};

use super::simd::Lanes;
use crate::types::DType;

/// An element type in memory.
pub trait Float: Copy + 'static {
    /// Size of an element in bytes.
    const SIZE: usize;

    /// Returns the value of the element at the start of `bytes`.
    fn load(bytes: &[u8]) -> f32;

    /// Writes the element nearest to `value` (half to even) to the start of `bytes`.
    fn store(value: f32, bytes: &mut [u8]);

    /// Returns the values of the sixteen elements in `bytes`.
    fn load_lanes<L: Lanes>(bytes: &[u8]) -> L;

    /// Writes the elements nearest to sixteen values, as [`Float::store`] does for one.
    fn store_lanes<L: Lanes>(values: L, bytes: &mut [u8]);
}

macro_rules! float {
    ($type:ty, $size:literal, $load:expr, $store:expr, $from:ident, $to:ident) => {
        impl Float for $type {
            const SIZE: usize = $size;

            #[inline(always)]
            fn load(bytes: &[u8]) -> f32 {
                let mut own = [0; $size];
                own.copy_from_slice(&bytes[..$size]);
                $load(<$type>::from_le_bytes(own))
            }

            #[inline(always)]
            fn store(value: f32, bytes: &mut [u8]) {
                bytes[..$size].copy_from_slice(&$store(value).to_le_bytes());
            }

            #[inline(always)]
            fn load_lanes<L: Lanes>(bytes: &[u8]) -> L {
                L::$from(bytes.first_chunk().expect("sixteen elements"))
            }

            #[inline(always)]
            fn store_lanes<L: Lanes>(values: L, bytes: &mut [u8]) {
                *bytes.first_chunk_mut().expect("sixteen elements") = values.$to();
            }
        }
    };
}

float!(f32, 4, |value: f32| value, |value: f32| value, from_f32, to_f32);
float!(f16, 2, f16::to_f32, f16::from_f32, from_f16, to_f16);
float!(bf16, 2, bf16::to_f32, bf16::from_f32, from_bf16, to_bf16);

/// A generic function that [`for_dtype`] calls for an element type known only at run time.
pub trait ForFloat {
    /// Result of the function.
    type Output;

    /// Runs the function for elements of type `T`.
    fn run<T: Float>(self) -> Self::Output;
}

/// Runs `work` for this element type. Panics for a type that [`super::Codec::check`] rejects.
pub fn for_dtype<W: ForFloat>(dtype: DType, work: W) -> W::Output {
    match dtype {
        DType::F32 => work.run::<f32>(),
        DType::F16 => work.run::<f16>(),
        DType::BF16 => work.run::<bf16>(),
        _ => unreachable!("codecs reject {} before they encode", dtype.name()),
    }
}
