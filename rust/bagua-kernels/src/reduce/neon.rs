//! float16 for 64-bit ARM processors. All of them have NEON and its instructions that convert four elements at once.
//!
//! Compilers vectorise the portable loops of all other types, including bfloat16. They do not vectorise float16's
//! portable conversions, which are integer arithmetic with branches.
//!
//! The conversions are written in assembly, because their intrinsics became stable only with Rust 1.94.

#![allow(unsafe_code)]

use std::arch::aarch64::{float32x4_t, uint16x8_t};
use std::arch::asm;
use std::array::from_fn;
use std::mem::transmute;

use super::element::{BLOCK, Element, Fraction, Number, Ordered, element};

/// Eight float32 in two registers. The arithmetic is per element, and the compiler vectorises it.
#[derive(Clone, Copy)]
pub(crate) struct F32x8(pub(crate) [f32; 8]);

impl F32x8 {
    #[inline(always)]
    fn with(self, other: Self, each: impl Fn(f32, f32) -> f32) -> Self {
        F32x8(from_fn(|lane| each(self.0[lane], other.0[lane])))
    }
}

impl Number for F32x8 {
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.with(other, f32::plus)
    }
    #[inline(always)]
    fn times(self, other: Self) -> Self {
        self.with(other, f32::times)
    }
}

impl Ordered for F32x8 {
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        self.with(other, f32::smaller)
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        self.with(other, f32::larger)
    }
}

impl Fraction for F32x8 {
    #[inline(always)]
    fn count(ranks: usize) -> Self {
        F32x8([f32::count(ranks); 8])
    }
    #[inline(always)]
    fn over(self, divisor: Self) -> Self {
        self.with(divisor, f32::over)
    }
}

element!(
    /// Eight float16.
    F16x8,
    16,
    F32x8,
    F32x8([0.0; 8]),
    from_f16,
    to_f16
);

#[inline(always)]
pub(crate) fn from_f16(bytes: [u8; 16]) -> F32x8 {
    let (lower, upper): (float32x4_t, float32x4_t);
    // SAFETY: every processor of this target has these instructions. They write only the two registers named as
    // outputs. The transmuted types have the same size, and any bits are a valid value.
    unsafe {
        asm!(
            "fcvtl {lower:v}.4s, {halves:v}.4h",
            "fcvtl2 {upper:v}.4s, {halves:v}.8h",
            halves = in(vreg) transmute::<[u8; 16], uint16x8_t>(bytes),
            lower = out(vreg) lower,
            upper = lateout(vreg) upper,
            options(pure, nomem, nostack, preserves_flags),
        );
        F32x8(transmute::<[float32x4_t; 2], [f32; 8]>([lower, upper]))
    }
}

#[inline(always)]
pub(crate) fn to_f16(values: F32x8) -> [u8; 16] {
    let halves: uint16x8_t;
    // SAFETY: as in `from_f16`.
    unsafe {
        let [lower, upper] = transmute::<[f32; 8], [float32x4_t; 2]>(values.0);
        // Rounds to nearest even unless this thread set another rounding mode.
        asm!(
            "fcvtn {halves:v}.4h, {lower:v}.4s",
            "fcvtn2 {halves:v}.8h, {upper:v}.4s",
            lower = in(vreg) lower,
            upper = in(vreg) upper,
            halves = out(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
        transmute::<uint16x8_t, [u8; 16]>(halves)
    }
}
