//! From a dtype and an operation, known at run time, to the loop compiled for them.

use super::element::{Bf16, Bool, C64, C128, Element, F16, F32, F64, I8, I32, I64, U8};
use super::instruction_set::{Level, Widen, run};
use super::kernel::{Before, Work};
use super::op::{And, Fraction, Max, Min, Number, Or, Ordered, Product, Sum, SumOver, SumOverPower, Xor};
use crate::types::{DType, ReduceOp};

/// As [`super::combine`], on a given level.
pub(super) fn combine(level: Level, dtype: DType, op: ReduceOp, inputs: &[Option<&[u8]>], out: &mut [u8]) {
    check(dtype, inputs, out);
    work(level, dtype, op, Work::Into { inputs, out });
}

/// As [`super::combine_everywhere_after`], on a given level and in blocks of `stretch` bytes, a multiple of 64.
pub(super) fn combine_everywhere(
    level: Level,
    dtype: DType,
    op: ReduceOp,
    parts: &mut [&mut [u8]],
    stretch: usize,
    before: &mut Before<'_>,
) {
    let len = parts.first().expect("something to combine").len();
    assert!(len.is_multiple_of(dtype.size()), "{len} bytes of {}", dtype.name());
    assert!(parts.iter().all(|part| part.len() == len), "parts differ in length");
    work(level, dtype, op, Work::Everywhere { parts, stretch, before });
}

fn work(level: Level, dtype: DType, op: ReduceOp, work: Work<'_, '_>) {
    match dtype {
        DType::F16 => float::<F16>(level, op, work),
        DType::BF16 => float::<Bf16>(level, op, work),
        DType::F32 => float::<F32>(level, op, work),
        DType::F64 => float::<F64>(level, op, work),
        DType::U8 => integer::<U8, U8>(level, op, work),
        DType::I8 => integer::<I8, U8>(level, op, work),
        DType::I32 => integer::<I32, I32>(level, op, work),
        DType::I64 => integer::<I64, I64>(level, op, work),
        DType::Bool => boolean(level, op, work),
        DType::C64 => complex::<C64, F32>(level, op, work),
        DType::C128 => complex::<C128, F64>(level, op, work),
    }
}

/// As [`super::divide`], on a given level: an average of one input, with another divisor.
pub(super) fn divide(level: Level, dtype: DType, data: &mut [u8], divisor: usize) {
    sum_over(level, dtype, &[None], data, divisor);
}

/// As [`super::sum_over`], on a given level.
pub(super) fn sum_over(level: Level, dtype: DType, inputs: &[Option<&[u8]>], out: &mut [u8], divisor: usize) {
    check(dtype, inputs, out);
    let work = Work::Into { inputs, out };
    match dtype {
        DType::F16 => average::<F16>(level, divisor, work),
        DType::BF16 => average::<Bf16>(level, divisor, work),
        DType::F32 | DType::C64 => average::<F32>(level, divisor, work),
        DType::F64 | DType::C128 => average::<F64>(level, divisor, work),
        DType::U8 | DType::I8 | DType::I32 | DType::I64 | DType::Bool => refused(ReduceOp::Avg),
    }
}

fn check(dtype: DType, inputs: &[Option<&[u8]>], out: &[u8]) {
    assert!(!inputs.is_empty(), "nothing to combine");
    assert!(out.len().is_multiple_of(dtype.size()), "{} bytes of {}", out.len(), dtype.name());
    for input in inputs.iter().flatten() {
        assert_eq!(input.len(), out.len(), "inputs and output differ in length");
    }
}

/// [`ReduceOp::check`] refuses this before every operation, so the caller made a mistake.
fn refused(op: ReduceOp) -> ! {
    panic!("{} of this element type should have been refused", op.name())
}

fn float<E>(level: Level, op: ReduceOp, work: Work<'_, '_>)
where
    E: Widen<Acc: Fraction + Ordered>,
    E::Wide: Element<Acc: Fraction + Ordered>,
    E::Widest: Element<Acc: Fraction + Ordered>,
    E::Zen: Element<Acc: Fraction + Ordered>,
{
    match op {
        ReduceOp::Sum => run::<E, _>(level, Sum, work),
        ReduceOp::Avg => average::<E>(level, work.ranks(), work),
        ReduceOp::Product => run::<E, _>(level, Product, work),
        ReduceOp::Min => run::<E, _>(level, Min, work),
        ReduceOp::Max => run::<E, _>(level, Max, work),
        ReduceOp::Bor | ReduceOp::Band | ReduceOp::Bxor => refused(op),
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
        run::<E, _>(level, SumOverPower(divisor), work);
    } else {
        run::<E, _>(level, SumOver(divisor), work);
    }
}

/// `W` is the type of the wrapping arithmetic: `E` itself, or one of the same size that gives the same bits and whose loop exists
/// anyway. Bitwise operations work byte by byte for the same reason.
fn integer<E, W>(level: Level, op: ReduceOp, work: Work<'_, '_>)
where
    E: Widen<Wide = E, Widest = E, Zen = E, Acc: Ordered>,
    W: Widen<Wide = W, Widest = W, Zen = W, Acc: Number>,
{
    match op {
        ReduceOp::Sum => run::<W, _>(level, Sum, work),
        ReduceOp::Product => run::<W, _>(level, Product, work),
        ReduceOp::Min => run::<E, _>(level, Min, work),
        ReduceOp::Max => run::<E, _>(level, Max, work),
        ReduceOp::Bor => run::<U8, _>(level, Or, work),
        ReduceOp::Band => run::<U8, _>(level, And, work),
        ReduceOp::Bxor => run::<U8, _>(level, Xor, work),
        ReduceOp::Avg => refused(op),
    }
}

/// `R` is the type of the two parts: sums and their division are those of twice as many real numbers.
fn complex<E, R>(level: Level, op: ReduceOp, work: Work<'_, '_>)
where
    E: Widen<Wide = E, Widest = E, Zen = E, Acc: Number>,
    R: Widen<Acc: Fraction>,
    R::Wide: Element<Acc: Fraction>,
    R::Widest: Element<Acc: Fraction>,
    R::Zen: Element<Acc: Fraction>,
{
    match op {
        ReduceOp::Sum => run::<R, _>(level, Sum, work),
        ReduceOp::Avg => average::<R>(level, work.ranks(), work),
        ReduceOp::Product => run::<E, _>(level, Product, work),
        ReduceOp::Min | ReduceOp::Max | ReduceOp::Bor | ReduceOp::Band | ReduceOp::Bxor => refused(op),
    }
}

/// Of 0 and 1, the product and the smaller are the conjunction, the larger is the disjunction.
fn boolean(level: Level, op: ReduceOp, work: Work<'_, '_>) {
    match op {
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => run::<Bool, _>(level, And, work),
        ReduceOp::Max | ReduceOp::Bor => run::<Bool, _>(level, Or, work),
        ReduceOp::Bxor => run::<Bool, _>(level, Xor, work),
        ReduceOp::Sum | ReduceOp::Avg => refused(op),
    }
}
