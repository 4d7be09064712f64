//! all_reduce of 1 KiB by ranks that begin on one processor: with ranks that move apart, and with ranks that leave
//! their placement to the kernel. A third figure is for ranks that are each bound to a processor. It shows the cost of
//! the mechanism when it has nothing to do.
//!
//! Ranks are threads, each with its own mapping, as processes have. In each round every rank makes one untimed batch of
//! calls, is moved to the first allowed processor without being bound to it, and makes the timed batches. Between two
//! batches the ranks sleep at a barrier, so that the kernel chooses their processors when it wakes them. A batch takes
//! as long as its slowest rank. Rounds of the two placements alternate.
//!
//! `cargo bench --bench shm_placement -- [--short]`

use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bagua_core::collective::{Io, Shm, Verb, shm};
use bagua_core::group::{Lane, Options};
use bagua_core::health::GroupHealth;
use bagua_core::memory::Arena;
use bagua_core::platform::{Processors, processors, set_processors};
use bagua_core::types::{DType, ReduceOp};

const BYTES: usize = 1024;
const CALLS: u32 = 200;
const BATCHES: usize = 48;
const ROUNDS: usize = 20;
/// Name of each placement, and true if the ranks move apart.
const PLACEMENTS: [(&str, bool); 2] = [("ranks move apart", true), ("left to the kernel", false)];

/// Placement of the ranks when the timed batches begin.
#[derive(Clone, Copy, PartialEq)]
enum Begin {
    /// All on the first allowed processor, and free to move.
    Together,
    /// Bound to one processor each, in turn.
    Bound,
}

impl Begin {
    fn text(self) -> &'static str {
        match self {
            Begin::Together => "begin on one processor",
            Begin::Bound => "bound to a processor each",
        }
    }

    /// Moves this thread.
    fn place(self, rank: usize) {
        let allowed = processors(0).expect("an affinity mask");
        let numbers: Vec<usize> = allowed.iter().collect();
        let own = numbers[if self == Begin::Bound { rank % numbers.len() } else { 0 }];
        set_processors(&Processors::only(own)).expect("a processor of the mask");
        if self == Begin::Together {
            set_processors(&allowed).expect("the mask as it was");
        }
    }
}

fn lane(rank: usize, ranks: usize, arena: Arena, moves: bool) -> Lane {
    let shm = Shm::new(Arc::new(arena), rank, (0..ranks).collect()).expect("the segment has the length it asks for");
    let shm = if moves { shm } else { shm.without_placement() };
    Lane::new(Box::new(shm), GroupHealth::local(rank, ranks), Arc::default(), 0, 0, Duration::from_secs(60))
}

/// One rank's round: the time of each batch.
fn batches(lane: &mut Lane, barrier: &Barrier, begin: Begin, count: usize) -> Vec<Duration> {
    let mine = if lane.rank() == 0 { 1.0f32 } else { 2.0 };
    let expected = lane.size() as f32 * 2.0 - 1.0;
    let fresh = mine.to_ne_bytes().repeat(BYTES / 4);
    let mut data = fresh.clone();
    let rank = lane.rank();
    let mut batch = || {
        barrier.wait();
        let begun = Instant::now();
        for _ in 0..CALLS {
            data.copy_from_slice(&fresh);
            lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))
                .expect("all ranks live");
        }
        let time = begun.elapsed();
        assert!(data.chunks_exact(4).all(|element| element == expected.to_ne_bytes()), "a wrong sum");
        time
    };
    batch();
    begin.place(rank);
    (0..count).map(|_| batch()).collect()
}

/// A round of a placement: microseconds per call of the slowest rank, by batch.
fn round(ranks: usize, begin: Begin, moves: bool, count: usize) -> Vec<f64> {
    let first = Arena::create("bagua-bench", shm::segment_len(ranks)).expect("shared memory");
    let slowest = Mutex::new(vec![Duration::ZERO; count]);
    let barrier = Barrier::new(ranks);
    thread::scope(|scope| {
        for rank in 0..ranks {
            let arena =
                first.fd().try_clone_to_owned().map(Arena::from_fd).expect("a descriptor").expect("another mapping");
            let (slowest, barrier) = (&slowest, &barrier);
            scope.spawn(move || {
                let times = batches(&mut lane(rank, ranks, arena, moves), barrier, begin, count);
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

fn main() {
    if bagua_bench::listed("shm_placement") {
        return;
    }
    let short = std::env::args().any(|argument| argument == "--short");
    let (rounds, count) = if short { (1, 4) } else { (ROUNDS, BATCHES) };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    println!(
        "all_reduce, float32, 1 KiB, {rounds} rounds of {count} batches of {CALLS} calls, {processors} processors"
    );
    for (ranks, begin) in [(2, Begin::Together), (4, Begin::Together), (2, Begin::Bound)] {
        let mut times: [Vec<f64>; 2] = Default::default();
        for _ in 0..rounds {
            for (times, (_, moves)) in times.iter_mut().zip(PLACEMENTS) {
                times.extend(round(ranks, begin, moves, count));
            }
        }
        for times in &mut times {
            times.sort_by(f64::total_cmp);
        }
        let best = times[0][0].min(times[1][0]);
        println!("{ranks} ranks, {}: best batch {best:.2} us per call", begin.text());
        for (times, (name, _)) in times.iter().zip(PLACEMENTS) {
            let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
            let slow = times.iter().filter(|time| **time > 3.0 * best).count() as f64 / times.len() as f64 * 100.0;
            println!(
                "  {name:<19} first tenth {:.3}, median {:.3}, last tenth {:.3}, worst {:.2} us; {slow:.1} % of the batches \
                 took more than 3 times the best",
                at(0.1),
                at(0.5),
                at(0.9),
                at(1.0)
            );
        }
    }
}
