//! Idle streams are closed when descriptors run short. Alone in its file, because the limit is that of the whole process.

mod group_world;

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use bagua_collectives::{Io, Verb};
use bagua_group::{Group, Lane, Options, TransportChoice};
use bagua_kernels::error::{Error, Result};
use bagua_kernels::types::{DType, Kind, ReduceOp};
use bagua_net::platform::OPEN_DESCRIPTORS;
use group_world::{until, world_with};
use rustix::process::{Resource, Rlimit, setrlimit};

const RANKS: usize = 4;

/// The groups of two ranks.
const PAIRS: [[usize; 2]; 6] = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2]];

/// Descriptors of the two streams of a pair, both ends of which are in this process.
const OF_PAIR: u64 = 2 * 2;

/// What one rank has of a pair.
struct Pair {
    group: Group,
    lane: Lane,
}

impl Pair {
    fn sum(&mut self, value: i32) -> Result<()> {
        let options = Options { timeout: Some(Duration::from_secs(20)), ..Options::default() };
        self.sum_with(&options, value)
    }

    /// Both ranks have the same value. The message is divided between streams, so that both open.
    fn sum_with(&mut self, options: &Options<'_>, value: i32) -> Result<()> {
        let mut data = value.to_le_bytes().repeat(20_000);
        self.lane.run(options, DType::I32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))?;
        assert!(data.chunks(4).all(|element| element == (2 * value).to_le_bytes()), "a wrong sum");
        Ok(())
    }

    /// Streams opened, and closed.
    fn streams(&self) -> (u64, u64) {
        (self.group.stats().data_opened.load(SeqCst), self.group.stats().data_closed.load(SeqCst))
    }
}

/// The pairs of a rank, in the order of `PAIRS`.
fn pairs(group: &Group) -> Vec<Pair> {
    let pair = |ranks: &[usize; 2]| {
        let group = group.subgroup(ranks, "pair").unwrap()?;
        let lane = group.lane().unwrap();
        Some(Pair { group, lane })
    };
    PAIRS.iter().filter_map(pair).collect()
}

fn both(left: &mut Pair, right: &mut Pair, sum: impl Fn(&mut Pair) -> Result<()> + Sync) -> [Result<()>; 2] {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| sum(right));
        [sum(left), other.join().unwrap()]
    })
}

fn succeed(left: &mut Pair, right: &mut Pair, value: i32) {
    both(left, right, |pair| pair.sum(value)).into_iter().for_each(Result::unwrap);
}

fn open() -> u64 {
    std::fs::read_dir(OPEN_DESCRIPTORS).unwrap().count() as u64 - 1
}

/// Sets both limits of the process.
fn limit(descriptors: u64) {
    setrlimit(Resource::Nofile, Rlimit { current: Some(descriptors), maximum: Some(descriptors) }).unwrap();
}

#[test]
fn idle_streams_are_closed_when_descriptors_run_short_and_those_in_use_are_not() {
    let groups = world_with(RANKS, |config| config.transport = TransportChoice::Tcp);
    let mut ranks: Vec<Vec<Pair>> = groups.iter().map(pairs).collect();
    let before = open();
    // Two pairs work at the same time; each rank opens its streams before it has closed the oldest.
    let allowed = before + 4 * OF_PAIR;
    limit(allowed);

    // All pairs need more than there are, in each round.
    std::thread::scope(|scope| {
        for pairs in &mut ranks {
            scope.spawn(|| {
                for value in 0..4 {
                    pairs.iter_mut().for_each(|pair| pair.sum(value).unwrap());
                }
            });
        }
    });
    assert!(open() <= allowed);
    let [zero, one, two, three] = &mut ranks[..] else { unreachable!("as many ranks") };
    let [of_0_1, of_0_2, of_0_3] = &mut zero[..] else { unreachable!("its pairs") };
    let [of_1_0, of_1_3, _] = &mut one[..] else { unreachable!("its pairs") };
    let [of_2_3, of_2_0, _] = &mut two[..] else { unreachable!("its pairs") };
    let [of_3_2, of_3_1, of_3_0] = &mut three[..] else { unreachable!("its pairs") };
    let all = [&of_0_1, &of_0_2, &of_0_3, &of_1_0, &of_1_3, &of_2_3, &of_2_0];
    let (opened, closed) =
        all.iter().map(|pair| pair.streams()).fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    assert!(opened > 2 * all.len() as u64, "some opened again: {opened}");
    assert!(closed >= opened - (allowed - before), "{closed} of {opened}");

    // The peer is in the middle of an operation: its streams stay open while others are closed, and its bytes are there.
    succeed(of_0_1, of_1_0, 1);
    let (of_peer, streams) = (of_1_0.group.clone(), of_0_1.streams());
    let begun = || of_peer.stats().of(Kind::AllReduce).calls.load(SeqCst);
    let before_it = begun();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| of_1_0.sum(2));
        until("rank 1 has begun", || begun() > before_it);
        for value in 0..3 {
            succeed(of_0_2, of_2_0, value);
            succeed(of_0_3, of_3_0, value);
            succeed(of_2_3, of_3_2, value);
        }
        assert_eq!(of_0_1.streams(), streams);

        // Streams in use are not closed: the operation that needs descriptors fails, with the reason.
        limit(before + OF_PAIR + 1);
        let short = Options { timeout: Some(Duration::from_secs(4)), ..Options::default() };
        for outcome in both(of_1_3, of_3_1, |pair| pair.sum_with(&short, 1)) {
            let Err(Error::System { message, .. }) = &outcome else { panic!("{outcome:?}") };
            assert!(message.contains("file descriptors") && message.contains("ulimit"), "{message}");
        }
        assert_eq!(of_0_1.streams(), streams);
        of_0_1.sum(2).unwrap();
        waiting.join().unwrap().unwrap();
    });
    succeed(of_0_1, of_1_0, 3);
}
