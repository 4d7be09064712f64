//! Compares the kernels with an independent oracle: float64 (or 128-bit integers), one element at a time.

use half::{bf16, f16};

use super::{Level, combine, combine_at, combine_everywhere_at, divide_at};
use crate::types::{DType, ReduceOp};

/// Lengths around zero, the register and the block.
const COUNTS: [usize; 9] = [0, 1, 7, 8, 33, 511, 1023, 4097, 10_003];

fn pairs() -> impl Iterator<Item = (DType, ReduceOp)> {
    let all = |dtype| ReduceOp::ALL.into_iter().map(move |op| (dtype, op));
    DType::ALL.into_iter().flat_map(all).filter(|(dtype, op)| op.check(*dtype).is_ok())
}

/// A small random generator with a fixed seed, so that a failure repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16
    }

    /// Returns `count` elements: moderate floats, for which the oracle's error bound holds, or integers of any bits.
    fn tame(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count * dtype.size());
        for _ in 0..count {
            let value = (self.next() % 4001) as f64 / 1000.0 - 2.0;
            match dtype {
                DType::F16 => bytes.extend(f16::from_f64(value).to_ne_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f64(value).to_ne_bytes()),
                DType::F32 => bytes.extend((value as f32).to_ne_bytes()),
                DType::F64 => bytes.extend(value.to_ne_bytes()),
                DType::C64 | DType::C128 => {
                    let part = if dtype == DType::C64 { DType::F32 } else { DType::F64 };
                    bytes.extend(self.tame(part, 2));
                }
                DType::Bool => bytes.push([0, 1, 1, 2, 255, 0][(self.next() % 6) as usize]),
                _ => bytes.extend(&(self.next() << 20).rotate_left(32).to_ne_bytes()[..dtype.size()]),
            }
        }
        bytes
    }

    /// Returns arbitrary bits, including NaN, infinities and subnormals.
    fn wild(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

fn float(dtype: DType, element: &[u8]) -> f64 {
    match dtype {
        DType::F16 => f16::from_ne_bytes(element.try_into().unwrap()).to_f64(),
        DType::BF16 => bf16::from_ne_bytes(element.try_into().unwrap()).to_f64(),
        DType::F32 => f64::from(f32::from_ne_bytes(element.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(element.try_into().unwrap()),
        _ => unreachable!("{} is no float", dtype.name()),
    }
}

fn complex(dtype: DType, element: &[u8]) -> (f64, f64) {
    let part = if dtype == DType::C64 { DType::F32 } else { DType::F64 };
    let (re, im) = element.split_at(part.size());
    (float(part, re), float(part, im))
}

/// Judges a result of complex numbers, as [`judge`] does for real ones.
fn judge_complex(dtype: DType, op: ReduceOp, inputs: &[&[u8]], got: &[u8]) {
    let values: Vec<_> = inputs.iter().map(|x| complex(dtype, x)).collect();
    let sizes = values.iter().map(|(re, im)| re.hypot(*im));
    let (magnitude, (mut re, mut im)): (f64, _) = match op {
        ReduceOp::Product => {
            (sizes.product(), values.iter().copied().reduce(|(a, b), (c, d)| (a * c - b * d, a * d + b * c)).unwrap())
        }
        ReduceOp::Sum | ReduceOp::Avg => (sizes.sum(), values.iter().fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d))),
        _ => unreachable!("refused for complex numbers"),
    };
    if op == ReduceOp::Avg {
        (re, im) = (re / values.len() as f64, im / values.len() as f64);
    }
    let (got_re, got_im) = complex(dtype, got);
    let bound = 4.0 * magnitude * epsilon(dtype) * values.len() as f64;
    let off = (got_re - re).hypot(got_im - im);
    assert!(off <= bound, "{} of {}: {got_re} + {got_im}i, not {re} + {im}i", op.name(), dtype.name());
}

fn integer(dtype: DType, element: &[u8]) -> i128 {
    match dtype {
        DType::U8 => i128::from(element[0]),
        DType::I8 => i128::from(element[0] as i8),
        DType::U16 => i128::from(u16::from_ne_bytes(element.try_into().unwrap())),
        DType::I16 => i128::from(i16::from_ne_bytes(element.try_into().unwrap())),
        DType::U32 => i128::from(u32::from_ne_bytes(element.try_into().unwrap())),
        DType::I32 => i128::from(i32::from_ne_bytes(element.try_into().unwrap())),
        DType::U64 => i128::from(u64::from_ne_bytes(element.try_into().unwrap())),
        DType::I64 => i128::from(i64::from_ne_bytes(element.try_into().unwrap())),
        DType::Bool => i128::from(element[0] != 0),
        _ => unreachable!("{} is no integer", dtype.name()),
    }
}

/// Returns the distance between 1 and the next number.
fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::EPSILON.to_f64(),
        DType::BF16 => bf16::EPSILON.to_f64(),
        DType::F32 | DType::C64 => f64::from(f32::EPSILON),
        _ => f64::EPSILON,
    }
}

/// Compares one element of the result with the oracle's.
fn judge(dtype: DType, op: ReduceOp, inputs: &[&[u8]], got: &[u8]) {
    if dtype.is_complex() {
        return judge_complex(dtype, op, inputs, got);
    }
    if !dtype.is_float() {
        let values = inputs.iter().map(|x| integer(dtype, x));
        // Wraps at every step, because products can exceed 128 bits. The result is congruent either way.
        let expected = values
            .reduce(|a, b| match op {
                ReduceOp::Sum => a.wrapping_add(b),
                ReduceOp::Product => i128::from(a as i64).wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::Bor => a | b,
                ReduceOp::Band => a & b,
                ReduceOp::Bxor => a ^ b,
                ReduceOp::Avg => unreachable!("refused for integers"),
            })
            .unwrap();
        assert_eq!(got, &expected.to_le_bytes()[..dtype.size()], "{} of {}", op.name(), dtype.name());
        return;
    }
    let values: Vec<f64> = inputs.iter().map(|x| float(dtype, x)).collect();
    let size: f64 = values.iter().map(|x| x.abs()).sum();
    let (exact, magnitude) = match op {
        ReduceOp::Sum => (values.iter().sum(), size),
        ReduceOp::Avg => (values.iter().sum::<f64>() / values.len() as f64, size),
        ReduceOp::Product => (values.iter().product(), values.iter().product::<f64>().abs()),
        ReduceOp::Min => (values.iter().copied().fold(f64::INFINITY, f64::min), 0.0),
        ReduceOp::Max => (values.iter().copied().fold(f64::NEG_INFINITY, f64::max), 0.0),
        _ => unreachable!("refused for floats"),
    };
    // Half types: each step rounds as float32, and only the end rounds to 11 or 8 bits.
    let steps = if dtype.size() == 2 { f64::from(f32::EPSILON) } else { epsilon(dtype) };
    let mut bound = magnitude * steps * values.len() as f64;
    if dtype.size() == 2 && magnitude > 0.0 {
        // f16 has subnormals below 2^-14, with a distance of 2^-24.
        bound += exact.abs() * epsilon(dtype) / 2.0 + 2f64.powi(-25);
    }
    let got = float(dtype, got);
    assert!((got - exact).abs() <= bound, "{} of {}: {got}, not {exact} ± {bound}", op.name(), dtype.name());
}

/// Asserts equal bits, or a NaN on both sides if arithmetic made a NaN from NaNs (see the module's last sentence).
fn assert_same(dtype: DType, op: ReduceOp, left: &[u8], right: &[u8]) {
    if left == right {
        return;
    }
    // A complex number is compared part by part.
    let part = match dtype {
        DType::C64 => DType::F32,
        DType::C128 => DType::F64,
        real => real,
    };
    for (index, (l, r)) in left.chunks(part.size()).zip(right.chunks(part.size())).enumerate() {
        let arithmetic = matches!(op, ReduceOp::Sum | ReduceOp::Product | ReduceOp::Avg) && part.is_float();
        let both_nan = arithmetic && float(part, l).is_nan() && float(part, r).is_nan();
        assert!(l == r || both_nan, "{} of {} at {index}: {l:x?} and {r:x?}", op.name(), dtype.name());
    }
}

#[test]
fn every_type_and_operation_equals_the_oracle_at_every_size_and_any_alignment() {
    let mut random = Random(1);
    for (dtype, op) in pairs() {
        for count in COUNTS {
            for ranks in [1, 2, 3, 5] {
                // Each rank's data starts at another offset from an aligned address.
                let owned: Vec<Vec<u8>> = (0..ranks).map(|_| random.tame(dtype, count)).collect();
                let shifted: Vec<Vec<u8>> = owned
                    .iter()
                    .enumerate()
                    .map(|(r, bytes)| [&vec![0xAA; r + 1], bytes.as_slice()].concat())
                    .collect();
                let inputs: Vec<Option<&[u8]>> = shifted.iter().enumerate().map(|(r, b)| Some(&b[r + 1..])).collect();
                let mut out = vec![0xEE; count * dtype.size() + 3];
                combine(dtype, op, &inputs, &mut out[3..]);
                assert_eq!(out[..3], [0xEE; 3]);
                let size = dtype.size();
                for index in 0..count {
                    let at = index * size..(index + 1) * size;
                    let elements: Vec<&[u8]> = owned.iter().map(|bytes| &bytes[at.clone()]).collect();
                    judge(dtype, op, &elements, &out[3..][at]);
                }
            }
        }
    }
}

#[test]
fn wide_registers_change_no_bit() {
    if Level::best() == Level::Portable {
        eprintln!("skipped: this processor has no wider registers than every other");
        return;
    }
    let mut random = Random(2);
    for (dtype, op) in pairs() {
        for count in COUNTS {
            for ranks in [1, 2, 3, 4] {
                let owned: Vec<Vec<u8>> = (0..ranks).map(|_| random.wild(count * dtype.size())).collect();
                let inputs: Vec<Option<&[u8]>> = owned.iter().map(|bytes| Some(bytes.as_slice())).collect();
                let at = |level| {
                    let mut out = vec![0; count * dtype.size()];
                    combine_at(level, dtype, op, &inputs, &mut out);
                    out
                };
                let portable = at(Level::Portable);
                Level::available().for_each(|level| assert_same(dtype, op, &portable, &at(level)));
            }
        }
    }
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_float()) {
        let sum = random.wild(1003 * dtype.size());
        let at = |level| {
            let mut data = sum.clone();
            divide_at(level, dtype, &mut data, 3);
            data
        };
        let portable = at(Level::Portable);
        Level::available().for_each(|level| assert_same(dtype, ReduceOp::Avg, &portable, &at(level)));
    }
}

/// Combines all parts into every part, on a given level.
fn everywhere(level: Level, dtype: DType, op: ReduceOp, parts: &mut [&mut [u8]]) {
    combine_everywhere_at(level, dtype, op, parts, usize::MAX, &mut |_, _| {});
}

/// Asserts that every part has the portable level's bytes. Only NaNs that arithmetic made from two NaNs may differ.
fn assert_portable_everywhere(level: Level, dtype: DType, op: ReduceOp, before: &[Vec<u8>], after: &[&mut [u8]]) {
    let inputs: Vec<Option<&[u8]>> = before.iter().map(|part| Some(part.as_slice())).collect();
    let mut expected = vec![0; before[0].len()];
    combine_at(Level::Portable, dtype, op, &inputs, &mut expected);
    assert!(after.iter().all(|part| *part == &*after[0]), "{level:?}: parts differ");
    if *after[0] == expected {
        return;
    }
    assert_same(dtype, op, &expected, after[0]);
    let size = dtype.size();
    for at in (0..expected.len()).step_by(size).map(|at| at..at + size) {
        let nans = before.iter().filter(|part| float(dtype, &part[at.clone()]).is_nan()).count();
        // With three or more parts, the sum of two of them may be a NaN with other bits.
        let free = nans > 1 || nans == 1 && before.len() > 2;
        let (got, expected) = (&after[0][at.clone()], &expected[at]);
        assert!(free || got == expected, "{level:?}: {} of {}: {got:x?}, {expected:x?}", op.name(), dtype.name());
    }
}

#[test]
fn any_half_with_any_special_one_gives_the_same_bits_on_every_level() {
    // Values of either type: zeros, subnormal numbers, the smallest normal numbers, one, halves of its last place and
    // their neighbours, the largest numbers, infinities, and NaNs of both kinds and signs.
    let special: [u16; 32] = [
        0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x03ff, 0x8400, 0x3c00, 0xbc01, 0x3f80, 0x3f81, 0xbf80, 0x3b80,
        0x3b81, 0xbb7f, 0x1000, 0x1001, 0x9000, 0x4380, 0x6400, 0x7bff, 0xfbff, 0x7f7f, 0xff7f, 0x7c00, 0xff80, 0x7c01,
        0x7f81, 0x7fc1, 0xfe00, 0xffff,
    ];
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    for dtype in [DType::F16, DType::BF16] {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
            for bits in special {
                let before = [all.clone(), bits.to_ne_bytes().repeat(all.len() / 2)];
                for level in Level::available() {
                    let mut parts = before.clone();
                    let mut slices: Vec<&mut [u8]> = parts.iter_mut().map(Vec::as_mut_slice).collect();
                    everywhere(level, dtype, op, &mut slices);
                    assert_portable_everywhere(level, dtype, op, &before, &slices);
                }
            }
        }
    }
}

#[test]
fn floats_of_any_length_from_any_address_give_the_same_bits_on_every_level_and_nothing_beside_them_changes() {
    let mut random = Random(5);
    for (dtype, op) in pairs().filter(|(dtype, _)| dtype.is_float()) {
        // The last count is large enough for prefetching.
        for count in (0..=130).chain([1201]) {
            for ranks in 1..=5 {
                let before: Vec<Vec<u8>> = (0..ranks).map(|_| random.wild(count * dtype.size())).collect();
                for level in Level::available() {
                    let starts: Vec<usize> = (0..ranks).map(|rank| 1 + (count * 7 + rank * 13) % 67).collect();
                    let mut owned: Vec<Vec<u8>> =
                        before.iter().zip(&starts).map(|(part, start)| vec![0xA5; start + part.len() + 64]).collect();
                    for ((owned, part), start) in owned.iter_mut().zip(&before).zip(&starts) {
                        owned[*start..start + part.len()].copy_from_slice(part);
                    }
                    let within = |(owned, start): (_, &usize)| -> &mut [u8] {
                        let owned: &mut Vec<u8> = owned;
                        &mut owned[*start..start + count * dtype.size()]
                    };
                    let mut slices: Vec<&mut [u8]> = owned.iter_mut().zip(&starts).map(within).collect();
                    everywhere(level, dtype, op, &mut slices);
                    assert_portable_everywhere(level, dtype, op, &before, &slices);
                    let beside = owned.iter().zip(&starts).all(|(owned, start)| {
                        let (front, rest) = owned.split_at(*start);
                        front.iter().chain(&rest[count * dtype.size()..]).all(|byte| *byte == 0xA5)
                    });
                    assert!(beside, "{level:?}: {} of {count} {} wrote elsewhere", op.name(), dtype.name());
                }
            }
        }
    }
}

#[test]
fn the_old_value_of_the_output_is_read_at_its_position() {
    let mut random = Random(3);
    for (dtype, op) in pairs() {
        for (ranks, count) in [(1, 1500), (2, 3), (2, 5001), (3, 1025), (5, 9)] {
            let owned: Vec<Vec<u8>> = (0..ranks).map(|_| random.tame(dtype, count)).collect();
            let inputs: Vec<Option<&[u8]>> = owned.iter().map(|bytes| Some(bytes.as_slice())).collect();
            let mut apart = vec![0; count * dtype.size()];
            combine(dtype, op, &inputs, &mut apart);
            for position in 0..ranks {
                let mut within = inputs.clone();
                within[position] = None;
                let mut out = owned[position].clone();
                combine(dtype, op, &within, &mut out);
                assert_eq!(out, apart, "{} of {}, own position {position} of {ranks}", op.name(), dtype.name());
            }
        }
    }
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn over(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let borrowed: Vec<Option<&[u8]>> = inputs.iter().map(|bytes| Some(bytes.as_slice())).collect();
    let mut out = vec![0; inputs[0].len()];
    combine(dtype, op, &borrowed, &mut out);
    out
}

#[test]
fn sums_are_made_in_rank_order() {
    let sum = |values: [f32; 4]| over(DType::F32, ReduceOp::Sum, &values.map(|value| f32s(&[value; 17])));
    assert_eq!(sum([1e8, 1.0, -1e8, 1.0]), f32s(&[1.0; 17]));
    assert_eq!(sum([1e8, -1e8, 1.0, 1.0]), f32s(&[2.0; 17]));
}

#[test]
fn half_types_round_once_at_the_end() {
    // 2048 + 1 is a tie in float16 and rounds to 2048. If each step rounded, this would happen twice.
    let sum = over(DType::F16, ReduceOp::Sum, &[2048.0, 1.0, 1.0].map(|x| f16::from_f32(x).to_ne_bytes().repeat(19)));
    assert_eq!(sum, f16::from_f32(2050.0).to_ne_bytes().repeat(19));
    let sum = over(DType::BF16, ReduceOp::Sum, &[256.0, 1.0, 1.0].map(|x| bf16::from_f32(x).to_ne_bytes().repeat(19)));
    assert_eq!(sum, bf16::from_f32(258.0).to_ne_bytes().repeat(19));
    // The sum is beyond float16's range, but the mean is within it.
    let mean = over(DType::F16, ReduceOp::Avg, &[60000.0, 60000.0].map(|x| f16::from_f32(x).to_ne_bytes().repeat(19)));
    assert_eq!(mean, f16::from_f32(60000.0).to_ne_bytes().repeat(19));
}

#[test]
fn a_nan_of_any_rank_is_the_smallest_and_the_largest() {
    let nan = f32s(&[f32::NAN; 19]);
    let one = f32s(&[1.0; 19]);
    for op in [ReduceOp::Min, ReduceOp::Max] {
        for place in 0..3 {
            let mut inputs = vec![one.clone(); 3];
            inputs[place].clone_from(&nan);
            assert_eq!(over(DType::F32, op, &inputs), nan, "{} with rank {place}'s NaN", op.name());
        }
        let halves = [f16::ONE, f16::NAN, f16::ONE].map(|x| x.to_ne_bytes().repeat(19));
        assert_eq!(over(DType::F16, op, &halves), f16::NAN.to_ne_bytes().repeat(19));
    }
}

#[test]
fn any_nonzero_byte_is_true_and_true_is_written_as_one() {
    let inputs = [vec![0, 2, 255, 4], vec![0, 0, 1, 8]];
    let expected = [
        (ReduceOp::Product, [0, 0, 1, 1]),
        (ReduceOp::Min, [0, 0, 1, 1]),
        (ReduceOp::Max, [0, 1, 1, 1]),
        (ReduceOp::Band, [0, 0, 1, 1]),
        (ReduceOp::Bor, [0, 1, 1, 1]),
        (ReduceOp::Bxor, [0, 1, 0, 0]),
    ];
    for (op, expected) in expected {
        assert_eq!(over(DType::Bool, op, &inputs), expected, "{}", op.name());
    }
}

#[test]
fn an_average_over_a_power_of_two_is_the_quotient_bit_for_bit() {
    let mut random = Random(6);
    let sums: Vec<u8> = random.wild(40_000);
    for divisor in [1_usize, 2, 3, 4, 64, 1 << 20] {
        let divided = |dtype, expected: &dyn Fn(&[u8]) -> Vec<u8>| {
            for level in Level::available() {
                let mut data = sums.clone();
                divide_at(level, dtype, &mut data, divisor);
                for (before, after) in sums.chunks(dtype.size()).zip(data.chunks(dtype.size())) {
                    assert_eq!(after, expected(before), "{level:?}: {} {before:x?} / {divisor}", dtype.name());
                }
            }
        };
        let over = divisor as f32;
        divided(DType::F32, &|x| (f32::from_ne_bytes(x.try_into().unwrap()) / over).to_ne_bytes().to_vec());
        divided(DType::F64, &|x| (f64::from_ne_bytes(x.try_into().unwrap()) / f64::from(over)).to_ne_bytes().to_vec());
        divided(DType::F16, &|x| {
            let value = f16::from_ne_bytes(x.try_into().unwrap()).to_f32();
            f16::from_f32(value / over).to_ne_bytes().to_vec()
        });
        divided(DType::BF16, &|x| {
            let value = bf16::from_ne_bytes(x.try_into().unwrap()).to_f32();
            bf16::from_f32(value / over).to_ne_bytes().to_vec()
        });
    }
}

#[test]
fn what_is_left_everywhere_is_what_one_output_would_hold_and_each_stretch_is_announced() {
    for (dtype, op) in pairs() {
        for count in COUNTS {
            for ranks in 1..=5 {
                let mut random = Random((count * 31 + ranks) as u64);
                let before: Vec<Vec<u8>> = (0..ranks).map(|_| random.tame(dtype, count)).collect();
                let mut expected = vec![0; count * dtype.size()];
                combine(dtype, op, &before.iter().map(|part| Some(part.as_slice())).collect::<Vec<_>>(), &mut expected);
                for level in Level::available() {
                    let mut parts = before.clone();
                    let mut slices: Vec<&mut [u8]> = parts.iter_mut().map(Vec::as_mut_slice).collect();
                    let mut stretches = Vec::new();
                    combine_everywhere_at(level, dtype, op, &mut slices, 512, &mut |range, parts| {
                        let own = parts[ranks - 1][range.clone()].to_vec();
                        assert!(own == before[ranks - 1][range.clone()], "called too late");
                        stretches.push(range);
                    });
                    assert!(stretches.iter().all(|range| (1..=512).contains(&range.len())));
                    let covered: Vec<usize> = stretches.into_iter().flatten().collect();
                    assert!(covered.into_iter().eq(0..expected.len()), "not every byte once, in order");
                    assert!(parts.iter().all(|part| *part == expected), "{} of {ranks} × {}", op.name(), dtype.name());
                }
            }
        }
    }
}
