//! Lanes for every processor.

use std::array::from_fn;

use half::{bf16, f16};

use super::vector::{LANES, Lanes};

/// Sixteen float32 in memory. Compilers vectorise most loops over it, for the registers that every processor has.
#[derive(Clone, Copy)]
pub(super) struct Array([f32; LANES]);

impl Array {
    #[inline(always)]
    fn with(self, other: Self, each: impl Fn(f32, f32) -> f32) -> Self {
        Array(from_fn(|i| each(self.0[i], other.0[i])))
    }

    #[inline(always)]
    fn from<const SIZE: usize>(bytes: &[u8], each: impl Fn([u8; SIZE]) -> f32) -> Self {
        let (elements, _) = bytes.as_chunks::<SIZE>();
        Array(from_fn(|i| each(elements[i])))
    }

    #[inline(always)]
    fn to<const SIZE: usize, const ALL: usize>(self, each: impl Fn(f32) -> [u8; SIZE]) -> [u8; ALL] {
        let mut bytes = [0; ALL];
        bytes.as_chunks_mut::<SIZE>().0.iter_mut().zip(self.0).for_each(|(bytes, value)| *bytes = each(value));
        bytes
    }
}

impl Lanes for Array {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Array([value; LANES])
    }
    #[inline(always)]
    fn from_f32(bytes: &[u8; 64]) -> Self {
        Array::from(bytes, f32::from_le_bytes)
    }
    #[inline(always)]
    fn from_f16(bytes: &[u8; 32]) -> Self {
        Array::from(bytes, |half| f16::from_le_bytes(half).to_f32())
    }
    #[inline(always)]
    fn from_bf16(bytes: &[u8; 32]) -> Self {
        Array::from(bytes, |half| bf16::from_le_bytes(half).to_f32())
    }
    #[inline(always)]
    fn from_u8(bytes: &[u8; 16]) -> Self {
        Array::from(bytes, |[byte]| f32::from(byte))
    }
    #[inline(always)]
    fn from_i8(bytes: &[u8; 16]) -> Self {
        Array::from(bytes, |[byte]| f32::from(byte.cast_signed()))
    }
    #[inline(always)]
    fn to_f32(self) -> [u8; 64] {
        self.to(f32::to_le_bytes)
    }
    #[inline(always)]
    fn to_f16(self) -> [u8; 32] {
        self.to(|value| f16::from_f32(value).to_le_bytes())
    }
    #[inline(always)]
    fn to_bf16(self) -> [u8; 32] {
        self.to(|value| bf16::from_f32(value).to_le_bytes())
    }
    #[inline(always)]
    fn to_u8(self) -> [u8; 16] {
        self.to(|value| [value as u8])
    }
    #[inline(always)]
    fn to_i8(self) -> [u8; 16] {
        self.to(|value| [(value as i8).cast_unsigned()])
    }
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }
    #[inline(always)]
    fn minus(self, other: Self) -> Self {
        self.with(other, |a, b| a - b)
    }
    #[inline(always)]
    fn times(self, other: Self) -> Self {
        self.with(other, |a, b| a * b)
    }
    #[inline(always)]
    fn over(self, other: Self) -> Self {
        self.with(other, |a, b| a / b)
    }
    #[inline(always)]
    fn round(self) -> Self {
        Array(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Array(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        self.with(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        self.with(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn negative(self) -> u16 {
        self.0.iter().enumerate().fold(0, |bits, (i, value)| bits | u16::from(*value < 0.0) << i)
    }
    #[inline(always)]
    fn select(bits: u16, ones: Self, zeros: Self) -> Self {
        Array(from_fn(|i| if bits >> i & 1 == 1 { ones.0[i] } else { zeros.0[i] }))
    }
}
