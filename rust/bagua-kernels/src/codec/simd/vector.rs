//! What a loop over lanes is written with.

use std::array::from_fn;

/// Elements of a block.
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
    /// Integral values; those below 0 become 0, those from 256 to 2^31 - 128 become 255.
    fn to_u8(self) -> [u8; 16];
    /// Integral values from -128 to 127.
    fn to_i8(self) -> [u8; 16];
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn over(self, other: Self) -> Self;
    /// Half to even.
    fn round(self) -> Self;
    fn abs(self) -> Self;
    /// `self` where it is smaller, else `other`: also where either is NaN.
    fn smaller(self, other: Self) -> Self;
    /// `self` where it is larger, else `other`: also where either is NaN.
    fn larger(self, other: Self) -> Self;
    /// Bit i is 1 where lane i is below 0.
    fn negative(self) -> u16;
    /// `ones` where the bit is 1, else `zeros`.
    fn select(bits: u16, ones: Self, zeros: Self) -> Self;

    /// The values.
    #[inline(always)]
    fn values(self) -> [f32; LANES] {
        let bytes = self.to_f32();
        let (values, _) = bytes.as_chunks();
        from_fn(|i| f32::from_le_bytes(values[i]))
    }
}

/// A loop over lanes. Its `run` is `#[inline(always)]`, as is all that it calls with lanes: a call would be compiled without the level's
/// instructions.
pub(in super::super) trait Kernel {
    /// What it returns.
    type Output;

    /// Runs it.
    fn run<L: Lanes>(self) -> Self::Output;
}
