//! all_reduce of 1 KiB by ranks that begin on one processor: with ranks that move apart, and with ranks that leave their placement
//! to the kernel.
//!
//! Ranks are threads, each with a mapping of its own, as processes have. In each round every rank is bound to the first allowed
//! processor, released again, and calls all_reduce in batches; between two batches the ranks sleep at a barrier, so that the kernel
//! chooses their processors when it wakes them. A batch takes as long as its slowest rank. Rounds of the two ways alternate.
//!
//! `cargo bench --bench shm_placement -- [--short]`

use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bagua_core::collective::{Io, Shm, Verb, shm};
use bagua_core::group::{Lane, Options};
use bagua_core::health::GroupHealth;
use bagua_core::memory::Arena;
use bagua_core::types::{DType, ReduceOp};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const BYTES: usize = 1024;
const CALLS: u32 = 200;
const BATCHES: usize = 48;
const ROUNDS: usize = 5;
/// Whether the ranks move apart.
const WAYS: [(&str, bool); 2] = [("ranks move apart", true), ("left to the kernel", false)];

fn lane(rank: usize, ranks: usize, arena: Arena, moves: bool) -> Lane {
    let shm = Shm::new(Arc::new(arena), rank, (0..ranks).collect()).expect("the segment has the length it asks for");
    let shm = if moves { shm } else { shm.without_placement() };
    Lane::new(Box::new(shm), GroupHealth::local(rank, ranks), Arc::default(), 0, 0, Duration::from_secs(60))
}

/// Moves this thread to its first allowed processor; it may use all of them again afterwards.
fn begin_on_the_first_processor() {
    let allowed = sched_getaffinity(None).expect("an affinity mask");
    let mut only = CpuSet::new();
    only.set((0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).expect("a processor"));
    sched_setaffinity(None, &only).expect("a processor of the mask");
    sched_setaffinity(None, &allowed).expect("the mask as it was");
}

/// One rank's round: the time of each batch.
fn batches(lane: &mut Lane, barrier: &Barrier, count: usize) -> Vec<Duration> {
    let mine = if lane.rank() == 0 { 1.0f32 } else { 2.0 };
    let expected = lane.size() as f32 * 2.0 - 1.0;
    let mut data = vec![0; BYTES];
    let mut batch = |first: bool| {
        if first {
            begin_on_the_first_processor();
        }
        barrier.wait();
        let begun = Instant::now();
        for _ in 0..CALLS {
            data.copy_from_slice(&mine.to_ne_bytes().repeat(BYTES / 4));
            lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))
                .expect("all ranks live");
        }
        let time = begun.elapsed();
        assert!(data.chunks_exact(4).all(|element| element == expected.to_ne_bytes()), "a wrong sum");
        time
    };
    (0..count).map(|number| batch(number == 0)).collect()
}

/// A round of a way: microseconds per call of the slowest rank, by batch.
fn round(ranks: usize, moves: bool, count: usize) -> Vec<f64> {
    let first = Arena::create("bagua-bench", shm::segment_len(ranks)).expect("shared memory");
    let slowest = Mutex::new(vec![Duration::ZERO; count]);
    let barrier = Barrier::new(ranks);
    thread::scope(|scope| {
        for rank in 0..ranks {
            let arena =
                first.fd().try_clone_to_owned().map(Arena::from_fd).expect("a descriptor").expect("another mapping");
            let (slowest, barrier) = (&slowest, &barrier);
            scope.spawn(move || {
                let times = batches(&mut lane(rank, ranks, arena, moves), barrier, count);
                let mut slowest = slowest.lock().expect("no rank failed");
                for (slowest, time) in slowest.iter_mut().zip(times) {
                    *slowest = time.max(*slowest);
                }
            });
        }
    });
    let times = slowest.into_inner().expect("no rank failed");
    times.iter().map(|time| time.as_secs_f64() * 1e6 / f64::from(CALLS)).collect()
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn main() {
    let short = std::env::args().any(|argument| argument == "--short");
    let (rounds, count) = if short { (1, 4) } else { (ROUNDS, BATCHES) };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    println!("all_reduce, float32, 1 KiB, {count} batches of {CALLS} calls a round, {processors} processors");
    for ranks in [2, 4] {
        let mut times: [Vec<Vec<f64>>; 2] = Default::default();
        for _ in 0..rounds {
            for (way, (_, moves)) in WAYS.iter().enumerate() {
                times[way].push(round(ranks, *moves, count));
            }
        }
        let best = times.iter().flatten().flatten().copied().fold(f64::INFINITY, f64::min);
        println!("{ranks} ranks, best batch of all {best:.2} us per call");
        for (way, (name, _)) in WAYS.iter().enumerate() {
            let all = times[way].concat();
            let worst = all.iter().copied().fold(0.0, f64::max);
            let by_round = times[way].iter().map(|round| round.iter().filter(|time| **time > 3.0 * best).count());
            println!(
                "  {name:<19} median {:>6.2} us, worst {worst:>7.2} us, above 3 times the best, by round: {:?} of {count}",
                median(&all),
                by_round.collect::<Vec<_>>()
            );
        }
    }
}
