//! Asynchronous averaging of weights that threads change meanwhile: what is kept, who takes part, and how it ends.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::group_world::{until, world};
use bagua_core::average::{Averager, AveragerState, Model, Settings};
use bagua_core::codec::{self, Codec};
use bagua_core::error::Error;
use bagua_core::group::{Group, Lane};
use bagua_core::memory::{WeightLock, Weights};
use bagua_core::types::DType;
use bagua_core::wait::Waited;

const INTERVAL: Duration = Duration::from_millis(2);
const LONG: Duration = Duration::from_secs(30);

/// One rank: its weights, which only this test and the averaging use, under their lock.
struct Rank {
    rank: usize,
    averager: Averager,
    lock: Arc<WeightLock>,
    memory: *mut f32,
    count: usize,
    _lane: Lane,
    _group: Group,
}

impl Rank {
    /// Works on the weights under the lock, as the training thread.
    fn with<T>(&self, work: impl FnOnce(&mut [f32]) -> T) -> T {
        let _guard = self.lock.lock(self.rank as u64);
        // SAFETY: the memory was leaked, and is used under the lock only.
        work(unsafe { std::slice::from_raw_parts_mut(self.memory, self.count) })
    }

    fn values(&self) -> Vec<f32> {
        self.with(|weights| weights.to_vec())
    }

    fn rounds(&self) -> u64 {
        self.averager.stats().rounds
    }

    /// Returns after one whole round that began later than this call.
    fn a_round_passes(&self) {
        let now = self.rounds();
        until("two rounds", || self.rounds() >= now + 2 || self.averager.check().is_err());
        self.averager.check().unwrap();
    }

    fn abort(&self) {
        self.averager.abort();
        assert_eq!(self.averager.wait_aborted(LONG), Waited::Done(Ok(())));
    }
}

fn initial(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| (at * 37 + rank * 11) as f32 / 8.0).collect()
}

fn averaged(size: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| (0..size).map(|rank| initial(rank, count)[at]).sum::<f32>() / size as f32).collect()
}

fn plain() -> Settings {
    Settings { name: "model".to_owned(), interval: INTERVAL, codec: None, elastic: None, takes_part: true }
}

/// Runs `act` on ranks that are threads, each with an averager that has not begun its first round.
fn on_all<T: Send>(
    size: usize,
    interval: Duration,
    codec: Option<Arc<dyn Codec>>,
    act: impl Fn(&Rank, &Barrier) -> T + Sync,
) -> Vec<T> {
    on_groups(world(size), interval, codec, act)
}

/// The same on ranks of these groups.
fn on_groups<T: Send>(
    groups: Vec<Group>,
    interval: Duration,
    codec: Option<Arc<dyn Codec>>,
    act: impl Fn(&Rank, &Barrier) -> T + Sync,
) -> Vec<T> {
    on_settings(groups, |_| Settings { interval, codec: codec.clone(), ..plain() }, act)
}

/// The same with settings for each rank.
fn on_settings<T: Send>(
    groups: Vec<Group>,
    settings: impl Fn(usize) -> Settings + Sync,
    act: impl Fn(&Rank, &Barrier) -> T + Sync,
) -> Vec<T> {
    const COUNT: usize = 1000;
    let size = groups.len();
    let barrier = Barrier::new(size);
    std::thread::scope(|scope| {
        let (act, barrier, settings) = (&act, &barrier, &settings);
        let start = |(rank, group): (usize, Group)| {
            scope.spawn(move || {
                let mut lane = group.lane().unwrap();
                let lock = WeightLock::new();
                let memory = initial(rank, COUNT).leak().as_mut_ptr();
                // SAFETY: leaked, and used under the lock only.
                let weights = unsafe { Weights::new(memory.cast(), COUNT, DType::F32, Arc::clone(&lock)) }.unwrap();
                let model = Model { weights: vec![weights], buffers: vec![] };
                let started = Averager::start(&group, &mut lane, model, settings(rank));
                if started.is_err() {
                    // The other ranks wait for this rank below.
                    barrier.wait();
                }
                let averager = started.unwrap();
                let rank = Rank { rank, averager, lock, memory, count: COUNT, _lane: lane, _group: group };
                let outcome = act(&rank, barrier);
                // No rank leaves while other ranks still look at their rounds.
                barrier.wait();
                rank.averager.stop(LONG);
                outcome
            })
        };
        let threads: Vec<_> = groups.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_starts_without_taking_part_is_in_no_round_before_it_resumes() {
    let settings = |rank| Settings { interval: Duration::ZERO, takes_part: rank != 0, ..plain() };
    on_settings(world(3), settings, |rank, barrier| {
        if rank.rank == 0 {
            assert_eq!(rank.averager.stats().state, AveragerState::Stopped);
            barrier.wait();
            assert_eq!(rank.averager.stats().rounds, 0);
            assert_eq!(rank.values(), initial(0, rank.count));
            barrier.wait();
            rank.averager.resume().unwrap();
        } else {
            for _ in 0..3 {
                rank.a_round_passes();
                assert_eq!(rank.averager.stats().ranks, [1, 2]);
            }
            barrier.wait();
            barrier.wait();
        }
        until("all take part", || rank.averager.stats().ranks == [0, 1, 2]);
    });
}

#[test]
fn ranks_at_rest_become_the_average_to_the_bit() {
    for size in [1, 2, 3, 4] {
        let found = on_all(size, INTERVAL, None, |rank, _| {
            rank.a_round_passes();
            rank.values()
        });
        assert!(found.iter().all(|values| *values == averaged(size, values.len())), "{size} ranks");
    }
}

#[test]
fn a_round_keeps_the_sum_and_the_progress_that_ranks_make_meanwhile() {
    const STEPS: usize = 300;
    let size = 3;
    let found = on_all(size, INTERVAL, None, |rank, barrier| {
        for step in 0..STEPS {
            // Small integers, so that sums are exact in any order.
            rank.with(|weights| weights.iter_mut().for_each(|weight| *weight += (rank.rank + 1) as f32));
            if step % 3 == rank.rank {
                std::thread::yield_now();
            }
        }
        barrier.wait();
        rank.a_round_passes();
        (rank.values(), rank.rounds())
    });
    let progress = (1..=size).map(|each| (each * STEPS) as f32).sum::<f32>() / size as f32;
    let expected: Vec<f32> = averaged(size, found[0].0.len()).iter().map(|value| value + progress).collect();
    for (values, rounds) in &found {
        assert!(*rounds > 1);
        assert_eq!(values, &found[0].0, "equal at rest");
        for (value, expected) in values.iter().zip(&expected) {
            assert!((value - expected).abs() < 1e-2, "{value} {expected}");
        }
    }
}

#[test]
fn an_aborted_rank_is_neither_changed_nor_counted_until_it_resumes() {
    let size = 3;
    on_all(size, INTERVAL, None, |rank, barrier| {
        if rank.rank == 1 {
            rank.abort();
            assert_eq!(rank.averager.stats().state, AveragerState::Stopped);
        }
        barrier.wait();
        let before = rank.values();
        if rank.rank != 1 {
            rank.with(|weights| weights.fill(10.0 * (rank.rank + 1) as f32));
            until("a round of two", || rank.averager.stats().ranks == [0, 2]);
            rank.a_round_passes();
            assert_eq!(rank.values(), vec![20.0; rank.count]);
        }
        barrier.wait();
        if rank.rank == 1 {
            assert_eq!(rank.values(), before);
            rank.with(|weights| weights.fill(50.0));
            rank.averager.resume().unwrap();
            // Without effect.
            rank.averager.resume().unwrap();
        }
        until("a round of three", || rank.averager.stats().ranks == [0, 1, 2]);
        rank.a_round_passes();
        assert_eq!(rank.values(), vec![30.0; rank.count]);
        assert!(rank.averager.stats().view >= 3);
    });
}

#[test]
fn synchronize_makes_all_ranks_equal_long_before_the_next_round() {
    let size = 3;
    let found = on_all(size, Duration::from_secs(3600), None, |rank, _| {
        let call = rank.averager.synchronize().unwrap();
        assert_eq!(call.wait(LONG), Waited::Done(Ok(())));
        rank.values()
    });
    assert!(found.iter().all(|values| *values == averaged(size, values.len())));
}

#[test]
fn each_call_of_synchronize_is_one_round() {
    on_all(3, Duration::from_secs(3600), None, |rank, barrier| {
        for count in 1..=200 {
            let call = rank.averager.synchronize().unwrap();
            assert_eq!(call.wait(LONG), Waited::Done(Ok(())));
            // The thread looks for work before the call is given up.
            std::thread::yield_now();
            assert_eq!(rank.rounds(), count);
        }
        barrier.wait();
    });
}

#[test]
fn ranks_that_do_not_synchronize_are_named_long_before_the_next_round() {
    on_all(2, Duration::from_secs(3600), None, |rank, barrier| {
        if rank.rank == 0 {
            let call = rank.averager.synchronize().unwrap();
            until(
                "rank 1 is known not to call",
                || matches!(call.timed_out(LONG, 0), Error::Timeout { missing, .. } if missing == [1]),
            );
            assert_eq!(rank.rounds(), 0);
        }
        barrier.wait();
    });
}

#[test]
fn synchronize_names_the_ranks_that_never_call() {
    on_all(3, INTERVAL, None, |rank, barrier| {
        if rank.rank != 1 {
            let call = rank.averager.synchronize().unwrap();
            until("rank 1 is known not to call", || {
                assert_eq!(call.wait(Duration::ZERO), Waited::Pending);
                matches!(call.timed_out(LONG, rank.rank), Error::Timeout { missing, .. } if missing == [1])
            });
        }
        barrier.wait();
        // The rounds go on.
        rank.a_round_passes();
        rank.abort();
        assert!(matches!(rank.averager.synchronize().err(), Some(Error::InvalidArgument(_))));
    });
}

#[test]
fn rounds_go_on_while_a_training_pauses_for_ever() {
    on_all(2, INTERVAL, None, |rank, barrier| {
        if rank.rank == 0 {
            assert!(rank.lock.ask(7, true).wait(LONG));
            rank.lock.pause(Duration::from_millis(10));
        }
        barrier.wait();
        rank.a_round_passes();
    });
}

#[test]
fn differences_to_the_last_average_travel_through_a_codec() {
    let codec: Arc<dyn Codec> = codec::by_name("minmax_u8", &[]).unwrap();
    let size = 3;
    let found = on_all(size, INTERVAL, Some(codec), |rank, barrier| {
        rank.a_round_passes();
        barrier.wait();
        rank.with(|weights| weights.iter_mut().for_each(|weight| *weight += rank.rank as f32));
        barrier.wait();
        for _ in 0..4 {
            rank.a_round_passes();
        }
        rank.values()
    });
    for values in &found {
        assert_eq!(values, &found[0], "equal at rest");
        for (value, expected) in values.iter().zip(averaged(size, values.len())) {
            assert!((value - expected - 1.0).abs() < 0.05, "{value} {expected}");
        }
    }
}

#[test]
fn the_others_go_on_without_a_rank_that_leaves_aborted_or_not() {
    for aborts in [true, false] {
        let size = 3;
        on_all(size, INTERVAL, None, |rank, barrier| {
            rank.a_round_passes();
            barrier.wait();
            if rank.rank == 1 {
                if aborts {
                    rank.abort();
                }
                rank.averager.stop(LONG);
            }
            barrier.wait();
            let before = rank.values();
            if rank.rank == 1 {
                assert!(matches!(rank.averager.check(), Err(Error::Aborted(_))));
                assert!(rank.averager.resume().is_err());
            } else {
                rank.with(|weights| weights.fill(10.0 * (rank.rank + 1) as f32));
                until("rounds of two", || rank.averager.stats().ranks == [0, 2]);
                rank.a_round_passes();
                assert_eq!(rank.values(), vec![20.0; rank.count]);
                assert_eq!(rank.averager.synchronize().unwrap().wait(LONG), Waited::Done(Ok(())));
            }
            barrier.wait();
            if rank.rank == 1 {
                assert_eq!(rank.values(), before, "invariant 3");
            }
            if rank.rank == 2 {
                rank.averager.stop(LONG);
            }
            barrier.wait();
            if rank.rank == 0 {
                until("rank 0 is alone", || rank.averager.stats().ranks == [0]);
                rank.a_round_passes();
                assert_eq!(rank.values(), vec![20.0; rank.count]);
            }
        });
    }
}
