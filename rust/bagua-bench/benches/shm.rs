//! Time of an all_reduce between two ranks in shared memory. The ranks are two threads, each with its own mapping, as
//! two processes have. The average is taken in place, as for gradients, and checked before and after it is timed.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use bagua_core::collective::{Io, Shm, Verb, shm};
use bagua_core::group::{Lane, Options};
use bagua_core::health::GroupHealth;
use bagua_core::memory::Arena;
use bagua_core::types::{DType, ReduceOp};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const RANKS: usize = 2;
const KIB: usize = 1024;
const SIZES: [usize; 4] = [4 * KIB, 64 * KIB, 1024 * KIB, 16_384 * KIB];

/// Order to the second rank: number of bytes, and number of all_reduces. Closing the channel ends the rank.
type Round = (usize, u64);

fn lane(rank: usize, arena: Arena) -> Lane {
    let shm = Shm::new(Arc::new(arena), rank, (0..RANKS).collect()).expect("the segment has the length it asks for");
    Lane::new(Box::new(shm), GroupHealth::local(rank, RANKS), Arc::default(), 0, 0, Duration::from_secs(60))
}

/// Averages rank 0's ones with rank 1's twos, then the result with itself, `times` times in all. Returns the time of
/// all calls except the first.
fn round(lane: &mut Lane, bytes: usize, times: u64) -> Duration {
    let mine = if lane.rank() == 0 { 1.0f32 } else { 2.0 };
    let mut data = mine.to_ne_bytes().repeat(bytes / 4);
    let mut once = || {
        lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Avg), Io::in_place(&mut data))
            .expect("both ranks live");
    };
    once();
    let start = Instant::now();
    for _ in 0..times {
        once();
    }
    let time = start.elapsed();
    assert!(data.chunks_exact(4).all(|element| element == 1.5f32.to_ne_bytes()), "a wrong average");
    time
}

fn second_rank(mut lane: Lane, rounds: &Receiver<Round>) {
    for (bytes, times) in rounds {
        round(&mut lane, bytes, times);
    }
}

fn all_reduce(criterion: &mut Criterion) {
    let first = Arena::create("bagua-bench", shm::segment_len(RANKS)).expect("shared memory");
    let second = first.fd().try_clone_to_owned().map(Arena::from_fd).expect("a descriptor").expect("a second mapping");
    let (mut mine, theirs) = (lane(0, first), lane(1, second));
    let (ask, asked): (Sender<Round>, _) = channel();
    let peer = thread::spawn(move || second_rank(theirs, &asked));
    let mut group = criterion.benchmark_group("all_reduce/shm/float32/2");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for bytes in SIZES {
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{}KiB", bytes / KIB)), |bencher| {
            bencher.iter_custom(|times| {
                ask.send((bytes, times)).expect("the second rank lives");
                round(&mut mine, bytes, times)
            });
        });
    }
    group.finish();
    drop(ask);
    peer.join().expect("the second rank's answers were right too");
}

criterion_group!(benches, all_reduce);
criterion_main!(benches);
