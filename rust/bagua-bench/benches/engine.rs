//! Overhead of the engine over the collectives: choosing the next bucket (`schedule`), and handing buckets to the
//! communication thread until they are reported done (`engine`), with an operation that does nothing in a world of one
//! rank.

use std::sync::Arc;
use std::time::Duration;

use bagua_core::bucket::{Bucket, Tensor};
use bagua_core::collective::Solo;
use bagua_core::engine::{Engine, SharedBucket};
use bagua_core::group::Lane;
use bagua_core::health::GroupHealth;
use bagua_core::memory::Region;
use bagua_core::op::NoOp;
use bagua_core::schedule::Schedule;
use bagua_core::types::DType;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// (buckets, tensors in each): a message, a small model, a large one with its many small parameters.
const MODELS: [(usize, usize); 3] = [(1, 1), (8, 10), (40, 50)];

fn name(bucket: usize, tensor: usize) -> String {
    format!("layers.{bucket}.block.{tensor}.weight")
}

/// Returns the numbers of the tensors in the order in which a backward pass marks them. Buckets come in order, and the
/// tensors of each bucket come backwards. If the last bucket came first, nothing could be sent until the end.
fn marks(buckets: usize, tensors: usize) -> Vec<usize> {
    (0..buckets).flat_map(|bucket| (0..tensors).rev().map(move |tensor| bucket * tensors + tensor)).collect()
}

fn schedule(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule/step");
    for (buckets, tensors) in MODELS {
        let names = |bucket| (0..tensors).map(|tensor| (name(bucket, tensor), false)).collect();
        let mut schedule = Schedule::new((0..buckets).map(names).collect()).expect("names differ");
        let marks = marks(buckets, tensors);
        group.throughput(Throughput::Elements(marks.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{buckets}x{tensors}")), |bencher| {
            bencher.iter(|| {
                let went: usize =
                    marks.iter().map(|mark| schedule.mark_ready(*mark, |_| Ok(())).expect("in turn").len()).sum();
                assert_eq!(went, buckets);
            });
        });
    }
    group.finish();
}

/// Memory that outlives the engine.
fn region() -> Region {
    let leaked: &'static mut [f32] = vec![0.0; 16].leak();
    // SAFETY: leaked, so valid for ever, and no other code reads it.
    unsafe { Region::new(leaked.as_mut_ptr().cast(), leaked.len(), DType::F32) }.expect("small")
}

fn engine(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("engine/step");
    group.measurement_time(Duration::from_secs(2));
    for (buckets, tensors) in MODELS {
        let health = GroupHealth::local(0, 1);
        let lane = Lane::new(Box::new(Solo::new()), health.clone(), Arc::default(), 0, 0, Duration::from_secs(60));
        let engine = Engine::over(lane, health, "bench").expect("a thread");
        let bucket = |bucket: usize| {
            let tensor = |tensor| Tensor { name: name(bucket, tensor), region: region(), padding: false };
            let shared = Bucket::new(&format!("bucket {bucket}"), (0..tensors).map(tensor).collect());
            let shared = SharedBucket::new(shared.expect("one dtype"));
            shared.lock().append(Arc::new(NoOp)).expect("not in flight");
            shared
        };
        engine.register((0..buckets).map(bucket).collect()).expect("names differ");
        let marks = marks(buckets, tensors);
        group.throughput(Throughput::Elements(marks.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{buckets}x{tensors}")), |bencher| {
            bencher.iter(|| {
                marks.iter().for_each(|mark| engine.mark_ready(*mark, None, None).expect("in turn"));
                assert_eq!(engine.wait(None).expect("nothing can fail"), buckets);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, schedule, engine);
criterion_main!(benches);
