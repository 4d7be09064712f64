//! Expected results of reductions: computed in float64 (i128 for integers), in rank order, element by element.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use bagua_core::types::{DType, ReduceOp};
use bagua_core::wait::lock;
use half::{bf16, f16};

/// A number that does not depend on the machine or the run.
pub fn noise(rank: usize, index: usize) -> u64 {
    let mut x =
        (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (index as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    x = (x ^ x >> 31).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 29
}

/// The longest tensors that [`input`] has made of one type and operation, by rank. Making them takes longer than
/// reducing them.
#[derive(Default)]
struct Longest {
    of: Option<(DType, ReduceOp)>,
    by_rank: HashMap<usize, Vec<u8>>,
}

static LONGEST: LazyLock<Mutex<Longest>> = LazyLock::new(Mutex::default);

/// Returns a rank's tensor. No sum or product of these values over 67 ranks overflows the type. A shorter tensor is the
/// beginning of a longer one.
pub fn input(dtype: DType, op: ReduceOp, rank: usize, count: usize) -> Vec<u8> {
    let mut longest = lock(&LONGEST);
    if longest.of != Some((dtype, op)) {
        *longest = Longest { of: Some((dtype, op)), by_rank: HashMap::new() };
    }
    let made = longest.by_rank.entry(rank).or_default();
    extend(made, dtype, op, rank, count);
    made[..count * dtype.size()].to_vec()
}

/// Adds elements until there are `count` of them.
fn extend(out: &mut Vec<u8>, dtype: DType, op: ReduceOp, rank: usize, count: usize) {
    let there = out.len() / dtype.size();
    out.reserve((count * dtype.size()).saturating_sub(out.len()));
    for index in there..count {
        let random = noise(rank, index);
        let small = match op {
            ReduceOp::Product => 1 + i64::from(random.is_multiple_of(8) && rank < 6),
            // The sum of 67 ranks stays within 127 for i8, because a rank adds about half of its largest value on
            // average.
            ReduceOp::Sum | ReduceOp::Avg => (random % if rank < 33 { 4 } else { 2 }) as i64,
            ReduceOp::Min | ReduceOp::Max => (random % 100) as i64,
            ReduceOp::Bor | ReduceOp::Band | ReduceOp::Bxor => (random % 128) as i64,
        };
        // In [0.75, 1.25): products of 67 stay within float16.
        let real = 0.75 + (random >> 11) as f64 / (1u64 << 54) as f64;
        let real = if op == ReduceOp::Product || random & 1 == 0 { real } else { -real };
        let value = match dtype {
            DType::C64 | DType::C128 => Value::Complex(real, 0.25 * real * (random % 5) as f64 / 4.0),
            _ if dtype.is_float() => Value::Real(real),
            _ => Value::Whole(small.into()),
        };
        encode(dtype, value, out);
    }
}

#[derive(Clone, Copy, Debug)]
enum Value {
    Real(f64),
    Whole(i128),
    Complex(f64, f64),
}

fn encode(dtype: DType, value: Value, out: &mut Vec<u8>) {
    match (dtype, value) {
        (DType::F16, Value::Real(x)) => out.extend(f16::from_f64(x).to_ne_bytes()),
        (DType::BF16, Value::Real(x)) => out.extend(bf16::from_f64(x).to_ne_bytes()),
        (DType::F32, Value::Real(x)) => out.extend((x as f32).to_ne_bytes()),
        (DType::F64, Value::Real(x)) => out.extend(x.to_ne_bytes()),
        (DType::C64, Value::Complex(re, im)) => [re, im].iter().for_each(|x| out.extend((*x as f32).to_ne_bytes())),
        (DType::C128, Value::Complex(re, im)) => [re, im].iter().for_each(|x| out.extend(x.to_ne_bytes())),
        (DType::U8, Value::Whole(x)) => out.push(x as u8),
        (DType::I8, Value::Whole(x)) => out.extend((x as i8).to_ne_bytes()),
        (DType::U16 | DType::I16, Value::Whole(x)) => out.extend((x as i16).to_ne_bytes()),
        (DType::U32 | DType::I32, Value::Whole(x)) => out.extend((x as i32).to_ne_bytes()),
        (DType::U64 | DType::I64, Value::Whole(x)) => out.extend((x as i64).to_ne_bytes()),
        (DType::Bool, Value::Whole(x)) => out.push((x & 1) as u8),
        (dtype, value) => panic!("{value:?} is no {dtype:?}"),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> Value {
    match dtype {
        DType::F16 => Value::Real(f16::from_ne_bytes(bytes.try_into().unwrap()).to_f64()),
        DType::BF16 => Value::Real(bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f64()),
        DType::F32 => Value::Real(f32::from_ne_bytes(bytes.try_into().unwrap()).into()),
        DType::F64 => Value::Real(f64::from_ne_bytes(bytes.try_into().unwrap())),
        DType::C64 => {
            let part = |at: usize| f32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()).into();
            Value::Complex(part(0), part(4))
        }
        DType::C128 => {
            let part = |at: usize| f64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
            Value::Complex(part(0), part(8))
        }
        DType::U8 | DType::Bool => Value::Whole(bytes[0].into()),
        DType::I8 => Value::Whole((bytes[0] as i8).into()),
        DType::U16 => Value::Whole(u16::from_ne_bytes(bytes.try_into().unwrap()).into()),
        DType::I16 => Value::Whole(i16::from_ne_bytes(bytes.try_into().unwrap()).into()),
        DType::U32 => Value::Whole(u32::from_ne_bytes(bytes.try_into().unwrap()).into()),
        DType::I32 => Value::Whole(i32::from_ne_bytes(bytes.try_into().unwrap()).into()),
        DType::U64 => Value::Whole(u64::from_ne_bytes(bytes.try_into().unwrap()).into()),
        DType::I64 => Value::Whole(i64::from_ne_bytes(bytes.try_into().unwrap()).into()),
    }
}

fn eps(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F32 | DType::C64 => f64::from(f32::EPSILON),
        _ => f64::EPSILON,
    }
}

/// Panics unless `got` is the combination of `inputs`: exactly for integers, within world * eps of the magnitudes for
/// floats.
pub fn assert_combined(what: &str, dtype: DType, op: ReduceOp, inputs: &[&[u8]], got: &[u8]) {
    let size = dtype.size();
    for (index, element) in got.chunks_exact(size).enumerate() {
        let at = index * size..(index + 1) * size;
        let first = decode(dtype, &inputs[0][at.clone()]);
        let size_of = |value: Value| match value {
            Value::Real(x) => x.abs(),
            Value::Complex(re, im) => re.hypot(im),
            Value::Whole(_) => 0.0,
        };
        let mut magnitude = size_of(first);
        let mut expected = first;
        for input in &inputs[1..] {
            let next = decode(dtype, &input[at.clone()]);
            expected = match (expected, next) {
                (Value::Real(a), Value::Real(b)) => {
                    magnitude = if op == ReduceOp::Product { magnitude * b.abs() } else { magnitude + b.abs() };
                    Value::Real(match op {
                        ReduceOp::Sum | ReduceOp::Avg => a + b,
                        ReduceOp::Product => a * b,
                        ReduceOp::Min => a.min(b),
                        ReduceOp::Max => a.max(b),
                        _ => panic!("bits of floats"),
                    })
                }
                (Value::Whole(a), Value::Whole(b)) => Value::Whole(match op {
                    ReduceOp::Sum => a + b,
                    ReduceOp::Product => a * b,
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Bor => a | b,
                    ReduceOp::Band => a & b,
                    ReduceOp::Bxor => a ^ b,
                    ReduceOp::Avg => panic!("average of integers"),
                }),
                (Value::Complex(a, b), Value::Complex(c, d)) => {
                    let next = size_of(next);
                    magnitude = if op == ReduceOp::Product { magnitude * next } else { magnitude + next };
                    match op {
                        ReduceOp::Sum | ReduceOp::Avg => Value::Complex(a + c, b + d),
                        ReduceOp::Product => Value::Complex(a * c - b * d, a * d + b * c),
                        _ => panic!("{op:?} of complex numbers"),
                    }
                }
                _ => unreachable!("one type"),
            };
        }
        match (expected, decode(dtype, element)) {
            (Value::Real(mut x), Value::Real(got)) => {
                let mut tolerance = inputs.len() as f64 * eps(dtype) * magnitude;
                if op == ReduceOp::Avg {
                    x /= inputs.len() as f64;
                    tolerance /= inputs.len() as f64;
                }
                assert!((x - got).abs() <= tolerance, "{what}: element {index} is {got}, not {x}");
            }
            (Value::Complex(mut re, mut im), Value::Complex(got_re, got_im)) => {
                // A product of two has four products and two sums.
                let mut tolerance = 4.0 * inputs.len() as f64 * eps(dtype) * magnitude;
                if op == ReduceOp::Avg {
                    let ranks = inputs.len() as f64;
                    (re, im, tolerance) = (re / ranks, im / ranks, tolerance / ranks);
                }
                let off = (re - got_re).hypot(im - got_im);
                assert!(off <= tolerance, "{what}: element {index} is {got_re} + {got_im}i, not {re} + {im}i");
            }
            (Value::Whole(x), Value::Whole(got)) => assert_eq!(got, x, "{what}: element {index}"),
            _ => unreachable!("one type"),
        }
    }
}
