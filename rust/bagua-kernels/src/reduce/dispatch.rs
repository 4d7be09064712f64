//! From a dtype and an operation, known at run time, to the loop compiled for them.

use super::element::{self, Element, Widen};
use super::instruction_set::{Level, run};
use super::kernel::{Before, Work};
use super::op::{self as ops, Fraction, Number, Ordered};
use crate::types::{DType, ReduceOp};

/// As [`super::combine`], on a given level.
pub(super) fn combine(level: Level, dtype: DType, op: ReduceOp, inputs: &[Option<&[u8]>], out: &mut [u8]) {
    check(dtype, inputs, out);
    work(level, dtype, op, inputs.len(), Work::Into { inputs, out });
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
    work(level, dtype, op, parts.len(), Work::Everywhere { parts, stretch, before });
}

/// `divisor` is that of an average.
fn work(level: Level, dtype: DType, op: ReduceOp, divisor: usize, work: Work<'_, '_>) {
    match dtype {
        DType::F16 => float::<element::F16>(level, op, divisor, work),
        DType::BF16 => float::<element::Bf16>(level, op, divisor, work),
        DType::F32 => float::<element::F32>(level, op, divisor, work),
        DType::F64 => float::<element::F64>(level, op, divisor, work),
        DType::U8 => integer::<element::U8, element::U8>(level, op, work),
        DType::I8 => integer::<element::I8, element::U8>(level, op, work),
        DType::I32 => integer::<element::I32, element::I32>(level, op, work),
        DType::I64 => integer::<element::I64, element::I64>(level, op, work),
        DType::Bool => boolean(level, op, work),
        DType::C64 => complex::<element::C64, element::F32>(level, op, divisor, work),
        DType::C128 => complex::<element::C128, element::F64>(level, op, divisor, work),
    }
}

/// As [`super::divide`], on a given level: an average of one input, with another divisor.
pub(super) fn divide(level: Level, dtype: DType, data: &mut [u8], divisor: usize) {
    sum_over(level, dtype, &[None], data, divisor);
}

/// As [`super::sum_over`], on a given level.
pub(super) fn sum_over(level: Level, dtype: DType, inputs: &[Option<&[u8]>], out: &mut [u8], divisor: usize) {
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

/// [`ReduceOp::check`] refuses this before every operation, so the caller made a mistake. It alone has the list of what is defined, hence
/// the wildcards below; a test runs everything that it allows.
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
        ReduceOp::Sum => run::<E, _>(level, ops::Sum, work),
        ReduceOp::Avg => average::<E>(level, divisor, work),
        ReduceOp::Product => run::<E, _>(level, ops::Product, work),
        ReduceOp::Min => run::<E, _>(level, ops::Min, work),
        ReduceOp::Max => run::<E, _>(level, ops::Max, work),
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
        run::<E, _>(level, ops::SumOverPower(divisor), work);
    } else {
        run::<E, _>(level, ops::SumOver(divisor), work);
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
        ReduceOp::Sum => run::<W, _>(level, ops::Sum, work),
        ReduceOp::Product => run::<W, _>(level, ops::Product, work),
        ReduceOp::Min => run::<E, _>(level, ops::Min, work),
        ReduceOp::Max => run::<E, _>(level, ops::Max, work),
        ReduceOp::Bor => run::<element::U8, _>(level, ops::Or, work),
        ReduceOp::Band => run::<element::U8, _>(level, ops::And, work),
        ReduceOp::Bxor => run::<element::U8, _>(level, ops::Xor, work),
        _ => refused(op),
    }
}

/// `R` is the type of the two parts: sums and their division are those of twice as many real numbers.
fn complex<E, R>(level: Level, op: ReduceOp, divisor: usize, work: Work<'_, '_>)
where
    E: Widen<Wide = E, Widest = E, Zen = E, Acc: Number>,
    R: Widen<Acc: Fraction>,
    R::Wide: Element<Acc: Fraction>,
    R::Widest: Element<Acc: Fraction>,
    R::Zen: Element<Acc: Fraction>,
{
    match op {
        ReduceOp::Sum => run::<R, _>(level, ops::Sum, work),
        ReduceOp::Avg => average::<R>(level, divisor, work),
        ReduceOp::Product => run::<E, _>(level, ops::Product, work),
        _ => refused(op),
    }
}

/// Of 0 and 1, the product and the smaller are the conjunction, the larger is the disjunction.
fn boolean(level: Level, op: ReduceOp, work: Work<'_, '_>) {
    match op {
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => run::<element::Bool, _>(level, ops::And, work),
        ReduceOp::Max | ReduceOp::Bor => run::<element::Bool, _>(level, ops::Or, work),
        ReduceOp::Bxor => run::<element::Bool, _>(level, ops::Xor, work),
        _ => refused(op),
    }
}
