//! Lanes of 64-bit ARM processors: four registers of NEON, which all of them have.
//!
//! Compilers do not vectorise the portable loops for them: the arithmetic of all codecs is one element at a time.

#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::array::from_fn;

use super::vector::{LANES, Lanes, lanes};
use crate::reduce::neon::{F32x8, from_f16, to_f16};

/// The bit that makes a float32 NaN quiet, as IEEE 754 requires after a conversion.
const QUIET: u32 = 0x0040_0000;

/// The bit of each lane of a register.
const BITS: [u32; 4] = [1, 2, 4, 8];

#[derive(Clone, Copy)]
pub(super) struct Quad([float32x4_t; 4]);

impl Quad {
    #[inline(always)]
    fn with(self, other: Self, each: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Quad(from_fn(|i| each(self.0[i], other.0[i])))
    }
}

/// Widens 16-bit words to 32 bits.
#[inline(always)]
fn words(halves: [u16; LANES]) -> [uint32x4_t; 4] {
    let (parts, _) = halves.as_chunks::<4>();
    // SAFETY: every processor of this target has NEON. The reads are whole arrays.
    from_fn(|i| unsafe { vmovl_u16(vld1_u16(parts[i].as_ptr())) })
}

/// Narrows 16-bit words to bytes, of at most 255.
#[inline(always)]
fn bytes_of(words: [uint16x4_t; 4]) -> [u8; LANES] {
    let mut bytes = [0; LANES];
    // SAFETY: every processor of this target has NEON. The write is the whole array.
    unsafe {
        let (low, high) = (vcombine_u16(words[0], words[1]), vcombine_u16(words[2], words[3]));
        vst1q_u8(bytes.as_mut_ptr(), vcombine_u8(vqmovn_u16(low), vqmovn_u16(high)));
    }
    bytes
}

lanes!(Quad {
    fn splat(value: f32) -> Self {
        Quad([vdupq_n_f32(value); 4])
    }
    fn from_f32(bytes: &[u8; 64]) -> Self {
        Quad(from_fn(|i| vreinterpretq_f32_u8(vld1q_u8(bytes[16 * i..][..16].as_ptr()))))
    }
    fn from_f16(bytes: &[u8; 32]) -> Self {
        let (halves, _) = bytes.as_chunks::<16>();
        let (low, high) = (from_f16(halves[0]), from_f16(halves[1]));
        let part = |values: &F32x8, begin: usize| vld1q_f32(values.0[begin..][..4].as_ptr());
        Quad([part(&low, 0), part(&low, 4), part(&high, 0), part(&high, 4)])
    }
    fn from_bf16(bytes: &[u8; 32]) -> Self {
        let (halves, _) = bytes.as_chunks::<2>();
        let words = words(from_fn(|i| u16::from_le_bytes(halves[i])));
        Quad(words.map(|word| {
            let bits = vshlq_n_u32::<16>(word);
            let value = vreinterpretq_f32_u32(bits);
            let quiet = vbicq_u32(vdupq_n_u32(QUIET), vceqq_f32(value, value));
            vreinterpretq_f32_u32(vorrq_u32(bits, quiet))
        }))
    }
    fn from_u8(bytes: &[u8; 16]) -> Self {
        Quad(words(bytes.map(u16::from)).map(|word| vcvtq_f32_u32(word)))
    }
    fn from_i8(bytes: &[u8; 16]) -> Self {
        let words = words(bytes.map(|byte| i16::from(byte.cast_signed()).cast_unsigned()));
        // The shifts extend the sign of the lower half.
        Quad(words.map(|word| {
            let shifted = vshlq_n_s32::<16>(vreinterpretq_s32_u32(word));
            vcvtq_f32_s32(vshrq_n_s32::<16>(shifted))
        }))
    }
    fn to_f32(self: Self) -> [u8; 64] {
        let mut bytes = [0; 64];
        for (part, bytes) in self.0.into_iter().zip(bytes.as_chunks_mut::<16>().0) {
            vst1q_u8(bytes.as_mut_ptr(), vreinterpretq_u8_f32(part));
        }
        bytes
    }
    fn to_f16(self: Self) -> [u8; 32] {
        let mut bytes = [0; 32];
        for (parts, bytes) in self.0.chunks(2).zip(bytes.as_chunks_mut::<16>().0) {
            let mut values = [0.0; 8];
            vst1q_f32(values.as_mut_ptr(), parts[0]);
            vst1q_f32(values[4..].as_mut_ptr(), parts[1]);
            *bytes = to_f16(F32x8(values));
        }
        bytes
    }
    fn to_bf16(self: Self) -> [u8; 32] {
        let mut bytes = [0; 32];
        for (value, bytes) in self.0.into_iter().zip(bytes.as_chunks_mut::<8>().0) {
            let bits = vreinterpretq_u32_f32(value);
            let upper = vshrq_n_u32::<16>(bits);
            let half = vaddq_u32(vandq_u32(upper, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
            let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, half));
            let quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
            let halves = vmovn_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet));
            vst1_u8(bytes.as_mut_ptr(), vreinterpret_u8_u16(halves));
        }
        bytes
    }
    fn to_u8(self: Self) -> [u8; 16] {
        bytes_of(self.0.map(|part| vqmovn_u32(vcvtq_u32_f32(part))))
    }
    fn to_i8(self: Self) -> [u8; 16] {
        // The lower byte of each word.
        let low = |part| vand_u16(vreinterpret_u16_s16(vmovn_s32(vcvtq_s32_f32(part))), vdup_n_u16(0xff));
        bytes_of(self.0.map(low))
    }
    fn plus(self: Self, other: Self) -> Self {
        self.with(other, |a, b| vaddq_f32(a, b))
    }
    fn minus(self: Self, other: Self) -> Self {
        self.with(other, |a, b| vsubq_f32(a, b))
    }
    fn times(self: Self, other: Self) -> Self {
        self.with(other, |a, b| vmulq_f32(a, b))
    }
    fn over(self: Self, other: Self) -> Self {
        self.with(other, |a, b| vdivq_f32(a, b))
    }
    fn round(self: Self) -> Self {
        Quad(self.0.map(|part| vrndnq_f32(part)))
    }
    fn abs(self: Self) -> Self {
        Quad(self.0.map(|part| vabsq_f32(part)))
    }
    fn smaller(self: Self, other: Self) -> Self {
        self.with(other, |a, b| vbslq_f32(vcltq_f32(a, b), a, b))
    }
    fn larger(self: Self, other: Self) -> Self {
        self.with(other, |a, b| vbslq_f32(vcgtq_f32(a, b), a, b))
    }
    fn largest(self: Self) -> f32 {
        let [a, b, c, d] = self.0;
        vmaxvq_f32(vmaxq_f32(vmaxq_f32(a, b), vmaxq_f32(c, d)))
    }
    fn negative(self: Self) -> u16 {
        let lanes = vld1q_u32(BITS.as_ptr());
        let bits = self.0.map(|part| vaddvq_u32(vandq_u32(vcltzq_f32(part), lanes)));
        (bits[0] | bits[1] << 4 | bits[2] << 8 | bits[3] << 12) as u16
    }
    fn select(bits: u16, ones: Self, zeros: Self) -> Self {
        let lanes = vld1q_u32(BITS.as_ptr());
        Quad(from_fn(|i| {
            let mask = vtstq_u32(vdupq_n_u32(u32::from(bits) >> (4 * i)), lanes);
            vbslq_f32(mask, ones.0[i], zeros.0[i])
        }))
    }
});
