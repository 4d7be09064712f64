//! Speed of `reduce::combine` and `reduce::combine_everywhere` in bytes read and written per second. Every result is
//! checked once before it is timed.

use std::hint::black_box;
use std::time::Duration;

use bagua_core::reduce::{combine, combine_everywhere};
use bagua_core::types::{DType, ReduceOp};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group};
use half::{bf16, f16};

const KIB: usize = 1024;
const SIZES: [usize; 4] = [64 * KIB, 256 * KIB, 1024 * KIB, 16_384 * KIB];
const LINE: usize = 64;

/// Returns a small whole number for every index. It is exact in every type, and so is the sum of four of them.
fn number(input: usize, index: usize) -> u8 {
    ((index * 7 + input * 13) % 25) as u8
}

/// Returns `value / divisor`, which must be exact in the type.
fn element(dtype: DType, value: u8, divisor: u8) -> Vec<u8> {
    let quotient = f32::from(value) / f32::from(divisor);
    match dtype {
        DType::F16 => f16::from_f32(quotient).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(quotient).to_ne_bytes().to_vec(),
        DType::F32 => quotient.to_ne_bytes().to_vec(),
        DType::I32 => i32::from(value / divisor).to_ne_bytes().to_vec(),
        _ => unreachable!("not measured here"),
    }
}

fn numbers(dtype: DType, bytes: usize, input: usize) -> Vec<u8> {
    (0..bytes / dtype.size()).flat_map(|index| element(dtype, number(input, index), 1)).collect()
}

fn check(dtype: DType, ranks: usize, divisor: u8, out: &[u8]) {
    for (index, got) in out.chunks_exact(dtype.size()).enumerate() {
        let sum = (0..ranks).map(|input| number(input, index)).sum();
        assert_eq!(got, element(dtype, sum, divisor), "element {index} of {ranks} × {}", dtype.name());
    }
}

fn reduce(criterion: &mut Criterion) {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32] {
        for ranks in [2, 4] {
            let mut group = group(criterion, "combine", dtype, ranks);
            for bytes in SIZES {
                let bits: Vec<Vec<u8>> = (0..ranks).map(|input| numbers(dtype, bytes, input)).collect();
                let inputs: Vec<Option<&[u8]>> = bits.iter().map(|input| Some(input.as_slice())).collect();
                let mut out = vec![0; bytes];
                combine(dtype, ReduceOp::Sum, &inputs, &mut out);
                check(dtype, ranks, 1, &out);
                group.throughput(Throughput::Bytes((bytes * (ranks + 1)) as u64));
                group.bench_function(BenchmarkId::from_parameter(format!("{}KiB", bytes / KIB)), |bencher| {
                    bencher.iter(|| combine(dtype, ReduceOp::Sum, black_box(&inputs), black_box(&mut out)));
                });
            }
        }
    }
}

/// Repeated sums grow to infinity and averages stay as they are. The values do not change the time. Every part begins
/// at a cache line, as a rank's tensor does.
fn everywhere(criterion: &mut Criterion) {
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for ranks in [2, 4] {
                let mut group = group(criterion, &format!("everywhere/{}", op.name()), dtype, ranks);
                for bytes in SIZES {
                    let mut owned: Vec<Vec<u8>> = (0..ranks).map(|_| vec![0; bytes + LINE]).collect();
                    let part = |(input, owned)| -> &mut [u8] {
                        let owned: &mut Vec<u8> = owned;
                        let begin = owned.as_ptr().align_offset(LINE);
                        let part = &mut owned[begin..begin + bytes];
                        part.copy_from_slice(&numbers(dtype, bytes, input));
                        part
                    };
                    let mut parts: Vec<&mut [u8]> = owned.iter_mut().enumerate().map(part).collect();
                    combine_everywhere(dtype, op, &mut parts);
                    let divisor = if op == ReduceOp::Avg { ranks as u8 } else { 1 };
                    parts.iter().for_each(|part| check(dtype, ranks, divisor, part));
                    group.throughput(Throughput::Bytes((bytes * ranks * 2) as u64));
                    group.bench_function(BenchmarkId::from_parameter(format!("{}KiB", bytes / KIB)), |bencher| {
                        bencher.iter(|| combine_everywhere(dtype, op, black_box(&mut parts)));
                    });
                }
            }
        }
    }
}

fn group<'c>(criterion: &'c mut Criterion, what: &str, dtype: DType, ranks: usize) -> BenchmarkGroup<'c, WallTime> {
    let mut group = criterion.benchmark_group(format!("{what}/{}/{ranks}", dtype.name()));
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    group
}

criterion_group!(benches, reduce, everywhere);

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
}
