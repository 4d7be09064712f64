//! Element-wise kernels, which combine the elements of several ranks.
//!
//! Read `kernel` first: it contains the loop, written once over an `element` type (its layout in memory, its
//! accumulator) and an operation. This file selects the loop for a dtype and operation known at run time, and one of
//! its compilations (`Level`) by the processor's features and vendor. `avx2`, `avx512` and `zen4` compile the same loop
//! for wider registers and add the conversions that compilers cannot vectorise. `neon` adds those of 64-bit ARM
//! processors, whose registers all loops use anyway.
//!
//! Results do not depend on that choice: nothing is reassociated, and no multiplication and addition are fused in a way
//! that rounds differently. Only the bit pattern of a NaN that arithmetic made from two NaNs may differ.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
mod kernel;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(test)]
mod tests;
mod weight_update;
#[cfg(target_arch = "x86_64")]
mod zen4;

#[cfg(target_arch = "x86_64")]
use avx2::{Avx2, Bf16x16, F16x8, F32x16};
#[cfg(target_arch = "x86_64")]
use avx512::{Avx512, Bf16x32, F16x32};
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use element::F16 as F16x8;
#[cfg(not(target_arch = "x86_64"))]
use element::{
    Bf16 as Bf16x16, Bf16 as Bf16x32, Bf16 as ZenBf16, F16 as F16x32, F16 as ZenF16, F32 as F32x16, F32 as ZenF32,
};
use element::{Bf16, Element, F16, F32, Fraction, Number, Op, Ordered, Widen};
pub use kernel::Before;
use kernel::Work;
#[cfg(target_arch = "aarch64")]
use neon::F16x8;
pub use weight_update::{correct, subtract};
#[cfg(target_arch = "x86_64")]
use zen4::{Bf16x32 as ZenBf16, F16x32 as ZenF16, F32x16 as ZenF32, Zen4};

use crate::types::{DType, ReduceOp};

/// Size in bytes of a block of [`combine_everywhere_after`]. 256 is as fast, 1 KiB 4 % slower, 4 KiB 15 %.
const STRETCH: usize = 512;

/// Computes `out = inputs[0] op inputs[1] op …`, element by element, strictly in the order given.
///
/// If `inputs[i]` is `None`, the i-th input is the old content of `out`; at most one may be `None`. f16 and bf16
/// accumulate in float32 and round once at the end. `Avg` divides the sum by `inputs.len()`. All slices must have the
/// same length, a multiple of the element size. They need no alignment. The caller must have called `op.check(dtype)`.
/// Panics if there is no input, if lengths differ, or if `op.check(dtype)` returns an error.
pub fn combine(dtype: DType, op: ReduceOp, inputs: &[Option<&[u8]>], out: &mut [u8]) {
    combine_at(Level::best(), dtype, op, inputs, out);
}

/// Computes `parts[0] op parts[1] op …`, as [`combine`] does, and writes the result to every part. Panics like
/// [`combine`].
pub fn combine_everywhere(dtype: DType, op: ReduceOp, parts: &mut [&mut [u8]]) {
    combine_everywhere_at(Level::best(), dtype, op, parts, usize::MAX, &mut |_, _| {});
}

/// Combines all parts into every part like [`combine_everywhere`], in short blocks from the first to the last. Calls
/// `before` before each block is combined, so that its memory accesses overlap with the kernel's. A processor waits for
/// several cache lines at a time, but only if the instructions that need them are close together. Panics like
/// [`combine`].
pub fn combine_everywhere_after(dtype: DType, op: ReduceOp, parts: &mut [&mut [u8]], before: &mut Before<'_>) {
    // For other numbers of parts, every block initialises accumulators in memory.
    let stretch = if matches!(parts.len(), 2 | 4) { STRETCH } else { element::BLOCK };
    combine_everywhere_at(Level::best(), dtype, op, parts, stretch, before);
}

/// Computes the sum as [`combine`] does, divided by `divisor` before rounding: an average over more ranks than inputs.
/// Panics like [`combine`], and if the dtype is neither float nor complex.
pub fn sum_over(dtype: DType, inputs: &[Option<&[u8]>], out: &mut [u8], divisor: usize) {
    sum_over_at(Level::best(), dtype, inputs, out, divisor);
}

/// Divides every element of a float tensor by `divisor`, to complete an `Avg` whose sum was computed in several steps.
/// Panics if `dtype` is not a float type, or the length is not a multiple of its size.
pub fn divide(dtype: DType, data: &mut [u8], divisor: usize) {
    divide_at(Level::best(), dtype, data, divisor);
}

fn combine_at(level: Level, dtype: DType, op: ReduceOp, inputs: &[Option<&[u8]>], out: &mut [u8]) {
    check(dtype, inputs, out);
    work(level, dtype, op, inputs.len(), Work::Into { inputs, out });
}

/// Runs [`combine_everywhere_after`] on a given level, in blocks of `stretch` bytes, a multiple of 64.
fn combine_everywhere_at(
    level: Level,
    dtype: DType,
    op: ReduceOp,
    parts: &mut [&mut [u8]],
    stretch: usize,
    before: &mut Before<'_>,
) {
    let len = parts.first().expect("there must be something to combine").len();
    assert!(len.is_multiple_of(dtype.size()), "{len} bytes of {}", dtype.name());
    assert!(parts.iter().all(|part| part.len() == len), "parts differ in length");
    work(level, dtype, op, parts.len(), Work::Everywhere { parts, stretch, before });
}

/// Runs the loop for this dtype. Averages divide by `divisor`.
fn work(level: Level, dtype: DType, op: ReduceOp, divisor: usize, work: Work<'_, '_>) {
    match dtype {
        DType::F16 => float::<F16>(level, op, divisor, work),
        DType::BF16 => float::<Bf16>(level, op, divisor, work),
        DType::F32 => float::<F32>(level, op, divisor, work),
        DType::F64 => float::<element::F64>(level, op, divisor, work),
        DType::U8 => integer::<element::U8, element::U8>(level, op, work),
        DType::I8 => integer::<element::I8, element::U8>(level, op, work),
        DType::U16 => integer::<element::U16, element::U16>(level, op, work),
        DType::I16 => integer::<element::I16, element::U16>(level, op, work),
        DType::U32 => integer::<element::U32, element::U32>(level, op, work),
        DType::I32 => integer::<element::I32, element::U32>(level, op, work),
        DType::U64 => integer::<element::U64, element::U64>(level, op, work),
        DType::I64 => integer::<element::I64, element::U64>(level, op, work),
        DType::Bool => boolean(level, op, work),
        DType::C64 => complex::<element::C64, F32>(level, op, divisor, work),
        DType::C128 => complex::<element::C128, element::F64>(level, op, divisor, work),
    }
}

/// Runs [`divide`] on a given level. A division is an average of one input, with the divisor in place of the count.
fn divide_at(level: Level, dtype: DType, data: &mut [u8], divisor: usize) {
    sum_over_at(level, dtype, &[None], data, divisor);
}

fn sum_over_at(level: Level, dtype: DType, inputs: &[Option<&[u8]>], out: &mut [u8], divisor: usize) {
    check(dtype, inputs, out);
    work(level, dtype, ReduceOp::Avg, divisor, Work::Into { inputs, out });
}

fn check(dtype: DType, inputs: &[Option<&[u8]>], out: &[u8]) {
    assert!(!inputs.is_empty(), "nothing to combine");
    assert!(out.len().is_multiple_of(dtype.size()), "{} bytes of {}", out.len(), dtype.name());
    for input in inputs.iter().flatten() {
        assert_eq!(input.len(), out.len(), "inputs and output differ in length");
    }
}

/// Panics because of a caller's mistake: [`ReduceOp::check`] rejects this operation, and must be called before. The
/// matches below have wildcards because only `check` lists the allowed operations. A test runs all of them.
fn refused(op: ReduceOp) -> ! {
    panic!("{} of this element type should have been refused", op.name())
}

fn float<E>(level: Level, op: ReduceOp, divisor: usize, work: Work<'_, '_>)
where
    E: Widen<Acc: Fraction + Ordered>,
    E::Wide: Element<Acc: Fraction + Ordered>,
    E::Widest: Element<Acc: Fraction + Ordered>,
    E::Zen: Element<Acc: Fraction + Ordered>,
{
    match op {
        ReduceOp::Sum => run::<E, _>(level, element::Sum, work),
        ReduceOp::Avg => average::<E>(level, divisor, work),
        ReduceOp::Product => run::<E, _>(level, element::Product, work),
        ReduceOp::Min => run::<E, _>(level, element::Min, work),
        ReduceOp::Max => run::<E, _>(level, element::Max, work),
        _ => refused(op),
    }
}

fn average<E>(level: Level, divisor: usize, work: Work<'_, '_>)
where
    E: Widen<Acc: Fraction>,
    E::Wide: Element<Acc: Fraction>,
    E::Widest: Element<Acc: Fraction>,
    E::Zen: Element<Acc: Fraction>,
{
    if divisor.is_power_of_two() {
        run::<E, _>(level, element::SumOverPower(divisor), work);
    } else {
        run::<E, _>(level, element::SumOver(divisor), work);
    }
}

/// `W` is the unsigned type of the same size. Its wrapping arithmetic gives the same bits, and its loop exists anyway.
/// Bitwise operations work byte by byte for the same reason.
fn integer<E, W>(level: Level, op: ReduceOp, work: Work<'_, '_>)
where
    E: Widen<Wide = E, Widest = E, Zen = E, Acc: Ordered>,
    W: Widen<Wide = W, Widest = W, Zen = W, Acc: Number>,
{
    match op {
        ReduceOp::Sum => run::<W, _>(level, element::Sum, work),
        ReduceOp::Product => run::<W, _>(level, element::Product, work),
        ReduceOp::Min => run::<E, _>(level, element::Min, work),
        ReduceOp::Max => run::<E, _>(level, element::Max, work),
        ReduceOp::Bor => run::<element::U8, _>(level, element::Or, work),
        ReduceOp::Band => run::<element::U8, _>(level, element::And, work),
        ReduceOp::Bxor => run::<element::U8, _>(level, element::Xor, work),
        _ => refused(op),
    }
}

/// `R` is the type of the two parts. Sums and averages are those of twice as many real numbers.
fn complex<E, R>(level: Level, op: ReduceOp, divisor: usize, work: Work<'_, '_>)
where
    E: Widen<Wide = E, Widest = E, Zen = E, Acc: Number>,
    R: Widen<Acc: Fraction>,
    R::Wide: Element<Acc: Fraction>,
    R::Widest: Element<Acc: Fraction>,
    R::Zen: Element<Acc: Fraction>,
{
    match op {
        ReduceOp::Sum => run::<R, _>(level, element::Sum, work),
        ReduceOp::Avg => average::<R>(level, divisor, work),
        ReduceOp::Product => run::<E, _>(level, element::Product, work),
        _ => refused(op),
    }
}

/// Among 0 and 1, the product and the minimum are the conjunction, and the maximum is the disjunction.
fn boolean(level: Level, op: ReduceOp, work: Work<'_, '_>) {
    match op {
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => run::<element::Bool, _>(level, element::And, work),
        ReduceOp::Max | ReduceOp::Bor => run::<element::Bool, _>(level, element::Or, work),
        ReduceOp::Bxor => run::<element::Bool, _>(level, element::Xor, work),
        _ => refused(op),
    }
}

/// The instructions that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// The instructions that every processor of the target has.
    Portable,
    /// 256-bit registers and the half-precision conversions of x86-64 processors since 2013.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// 512-bit registers for the half types; otherwise as [`Level::Avx2`].
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512, Avx2),
    /// 256- and 512-bit registers in the combination that is fastest on AMD's processors.
    #[cfg(target_arch = "x86_64")]
    Zen4(Zen4, Avx2),
    /// The half-precision conversions that every 64-bit ARM processor has.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// Returns the fastest level that this processor has.
    #[inline]
    fn best() -> Level {
        #[cfg(target_arch = "x86_64")]
        if Zen4::is_best()
            && let Some(zen4) = Level::zen4()
        {
            return zen4;
        }
        Level::generic().next().expect("every processor has the portable level")
    }

    #[cfg(test)]
    fn available() -> impl Iterator<Item = Level> {
        #[cfg(target_arch = "x86_64")]
        let special = Level::zen4();
        #[cfg(not(target_arch = "x86_64"))]
        let special = None;
        Level::generic().chain(special)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn zen4() -> Option<Level> {
        Zen4::new().zip(Avx2::new()).map(|(zen4, avx2)| Level::Zen4(zen4, avx2))
    }

    /// Returns the levels for processors of any vendor, widest first. The standard library caches the detection.
    #[inline]
    fn generic() -> impl Iterator<Item = Level> {
        #[cfg(target_arch = "x86_64")]
        let wide = {
            let avx2 = Avx2::new();
            let avx512 = avx2.zip(Avx512::new()).map(|(avx2, avx512)| Level::Avx512(avx512, avx2));
            avx512.into_iter().chain(avx2.map(Level::Avx2))
        };
        #[cfg(target_arch = "aarch64")]
        let wide = std::iter::once(Level::Neon);
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let wide = std::iter::empty();
        wide.chain([Level::Portable])
    }
}

impl Widen for F16 {
    type Wide = F16x8;
    type Widest = F16x32;
    type Zen = ZenF16;
}

impl Widen for Bf16 {
    type Wide = Bf16x16;
    type Widest = Bf16x32;
    type Zen = ZenBf16;
}

impl Widen for F32 {
    type Wide = F32x16;
    type Widest = Self;
    type Zen = ZenF32;
}

/// Runs the loop at the given level: first with the widest element, then with narrower ones for the rest.
fn run<E, O>(level: Level, op: O, mut work: Work<'_, '_>)
where
    E: Widen,
    O: Op<E::Acc> + Op<<E::Wide as Element>::Acc> + Op<<E::Widest as Element>::Acc> + Op<<E::Zen as Element>::Acc>,
{
    let len = work.len();
    // The sizes are known at compile time, so no loop is compiled that would never run.
    let done = match level {
        Level::Portable => 0,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(avx2) | Level::Avx512(_, avx2) | Level::Zen4(_, avx2) => {
            let mut done = 0;
            match level {
                Level::Avx512(avx512, _) if size::<E::Widest>() > size::<E>() => {
                    done = len - len % size::<E::Widest>();
                    avx512.run::<E::Widest, O>(op, &mut work, 0..done);
                }
                // An unaligned 64-byte store writes two cache lines. For float32, whose loop only loads and stores, it
                // takes 1.2 times as long as two 32-byte registers (reduce_scatter of 1 MiB in an arena).
                Level::Zen4(zen4, _) if size::<E::Zen>() > size::<E>() && (size::<E>() < 4 || work.is_aligned()) => {
                    done = len - len % size::<E::Zen>();
                    zen4.run::<E::Zen, O>(op, &mut work, 0..done);
                }
                _ => {}
            }
            let wide = len - len % size::<E::Wide>();
            if done < wide {
                avx2.run::<E::Wide, O>(op, &mut work, done..wide);
            }
            if size::<E::Wide>() > size::<E>() && wide < len {
                avx2.run::<E, O>(op, &mut work, wide..len);
            }
            len
        }
        #[cfg(target_arch = "aarch64")]
        Level::Neon if size::<E::Wide>() > size::<E>() => {
            let wide = len - len % size::<E::Wide>();
            work.run::<E::Wide, O>(op, 0..wide);
            wide
        }
        #[cfg(target_arch = "aarch64")]
        Level::Neon => 0,
    };
    if done < len {
        work.run::<E, O>(op, done..len);
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const fn size<E: Element>() -> usize {
    size_of::<E::Bytes>()
}
