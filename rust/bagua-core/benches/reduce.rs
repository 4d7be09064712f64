//! Speed of `reduce::combine` in bytes read and written per second. Every answer is checked once before it is timed.

use std::hint::black_box;
use std::time::Duration;

use bagua_core::reduce::combine;
use bagua_core::types::{DType, ReduceOp};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};

const KIB: usize = 1024;
const SIZES: [usize; 4] = [64 * KIB, 512 * KIB, 4096 * KIB, 16_384 * KIB];

/// A small whole number at every index: exact in every type, and so is the sum of four of them.
fn number(input: usize, index: usize) -> u8 {
    ((index * 7 + input * 13) % 25) as u8
}

fn element(dtype: DType, value: u8) -> Vec<u8> {
    match dtype {
        DType::F16 => f16::from(value).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from(value).to_ne_bytes().to_vec(),
        DType::F32 => f32::from(value).to_ne_bytes().to_vec(),
        DType::I32 => i32::from(value).to_ne_bytes().to_vec(),
        DType::F64 | DType::U8 | DType::I8 | DType::I64 | DType::Bool => unreachable!("not measured here"),
    }
}

fn reduce(criterion: &mut Criterion) {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32] {
        for ranks in [2, 4] {
            let mut group = criterion.benchmark_group(format!("combine/{}/{ranks}", dtype.name()));
            group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
            for bytes in SIZES {
                let count = bytes / dtype.size();
                let bits: Vec<Vec<u8>> = (0..ranks)
                    .map(|input| (0..count).flat_map(|index| element(dtype, number(input, index))).collect())
                    .collect();
                let inputs: Vec<Option<&[u8]>> = bits.iter().map(|input| Some(input.as_slice())).collect();
                let mut out = vec![0; bytes];
                combine(dtype, ReduceOp::Sum, &inputs, &mut out);
                for (index, got) in out.chunks_exact(dtype.size()).enumerate() {
                    let sum = (0..ranks).map(|input| number(input, index)).sum();
                    assert_eq!(got, element(dtype, sum), "element {index} of {ranks} × {}", dtype.name());
                }
                group.throughput(Throughput::Bytes((bytes * (ranks + 1)) as u64));
                group.bench_function(BenchmarkId::from_parameter(format!("{}KiB", bytes / KIB)), |bencher| {
                    bencher.iter(|| combine(dtype, ReduceOp::Sum, black_box(&inputs), black_box(&mut out)));
                });
            }
        }
    }
}

criterion_group!(benches, reduce);
criterion_main!(benches);
