//! The traits for loops over lanes.

use std::array::from_fn;

/// Number of elements of a block.
pub(in super::super) const LANES: usize = 16;

/// Sixteen float32.
pub trait Lanes: Copy {
    fn splat(value: f32) -> Self;
    fn from_f32(bytes: &[u8; 64]) -> Self;
    fn from_f16(bytes: &[u8; 32]) -> Self;
    fn from_bf16(bytes: &[u8; 32]) -> Self;
    fn from_u8(bytes: &[u8; 16]) -> Self;
    fn from_i8(bytes: &[u8; 16]) -> Self;
    fn to_f32(self) -> [u8; 64];
    fn to_f16(self) -> [u8; 32];
    fn to_bf16(self) -> [u8; 32];
    /// Converts integral values. Those below 0 become 0, those from 256 to 2^31 - 128 become 255.
    fn to_u8(self) -> [u8; 16];
    /// Converts integral values from -128 to 127.
    fn to_i8(self) -> [u8; 16];
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn over(self, other: Self) -> Self;
    fn round(self) -> Self;
    fn abs(self) -> Self;
    /// Returns `self` in the lanes in which it is smaller, otherwise `other`, also if either is NaN.
    fn smaller(self, other: Self) -> Self;
    /// Returns `self` in the lanes in which it is larger, otherwise `other`, also if either is NaN.
    fn larger(self, other: Self) -> Self;
    /// Returns the largest lane. No lane may be NaN.
    fn largest(self) -> f32;
    /// Returns 1 in bit i if lane i is negative.
    fn negative(self) -> u16;
    /// Returns `ones` in the lanes whose bit is 1, otherwise `zeros`.
    fn select(bits: u16, ones: Self, zeros: Self) -> Self;

    #[inline(always)]
    fn values(self) -> [f32; LANES] {
        let bytes = self.to_f32();
        let (values, _) = bytes.as_chunks();
        from_fn(|i| f32::from_le_bytes(values[i]))
    }
}

/// A loop over lanes. Its `run` must be `#[inline(always)]`, and so must every function that it calls with lanes: a
/// call that is not inlined would be compiled without the level's instructions.
pub(in super::super) trait Kernel {
    type Output;

    fn run<L: Lanes>(self) -> Self::Output;
}

/// Implements functions of [`Lanes`] whose bodies are all unsafe for the same reason.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! lanes {
    ($type:ident { $(fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty $body:block)* }) => {
        impl Lanes for $type {
            $(
                #[inline(always)]
                fn $name($($argument: $kind),*) -> $result {
                    // SAFETY: only kernels use this type, in a function that is compiled with its instructions and that
                    // a processor without them never enters. Loads and stores access whole arrays, unaligned.
                    unsafe { $body }
                }
            )*
        }
    };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use lanes;
