//! Tests of the collective in shared memory. Ranks are threads, each with its own mapping, as processes have.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use super::*;
use crate::health::GroupHealth;
use crate::platform::{Processors, processors, set_processors, thread_number};
use crate::reduce::combine;
use crate::stats::OpStats;
use crate::types::{DType, Fingerprint, Shape};
use crate::wait::Deadline;

#[cfg(model)]
mod model;

/// The state of a thread that acts as a rank.
struct Rank {
    shm: Shm,
    health: Arc<GroupHealth>,
    stats: OpStats,
    seq: u64,
    limit: Duration,
}

impl Rank {
    fn print(
        &mut self,
        kind: Kind,
        dtype: DType,
        op: Option<ReduceOp>,
        root: Option<usize>,
        bytes: usize,
    ) -> Fingerprint {
        self.seq += 1;
        let count = bytes / dtype.size();
        let root = root.map(|root| root as u32);
        let shape = Shape::flat(count);
        Fingerprint { epoch: 1, lane: 2, seq: self.seq, op, root, shape, ..Fingerprint::new(kind, dtype, count) }
    }

    fn with<T>(&mut self, fingerprint: Fingerprint, run: impl FnOnce(&mut Shm, &OpContext<'_>) -> T) -> T {
        let deadline = Deadline::after(self.limit);
        let extra = &RefCell::default();
        let cx = OpContext { fingerprint, deadline, health: &self.health, stats: &self.stats, label: "", extra };
        run(&mut self.shm, &cx)
    }

    fn barrier(&mut self) -> Result<()> {
        let print = self.print(Kind::Barrier, DType::U8, None, None, 0);
        self.with(print, |shm, cx| shm.run(cx, Verb::Barrier, Io::none()))
    }
}

fn ranks_of(n: usize) -> Vec<Rank> {
    let arena = Arena::create("bagua-test", segment_len(n)).unwrap();
    let one = |index: usize| {
        let fd: OwnedFd = arena.fd().try_clone_to_owned().unwrap();
        let mut shm = Shm::new(Arc::new(Arena::from_fd(fd).unwrap()), index, (0..n).collect()).unwrap();
        shm.protocol.wind_forward(5);
        let limit = Duration::from_secs(60);
        Rank { shm, health: GroupHealth::local(index, n), stats: OpStats::default(), seq: 0, limit }
    };
    (0..n).map(one).collect()
}

/// Runs `act` as every rank of `n`, and returns the results.
fn on_all<T: Send>(n: usize, act: impl Fn(usize, Rank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let act = &act;
        let start = |(index, rank)| scope.spawn(move || act(index, rank));
        let threads: Vec<_> = ranks_of(n).into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Pseudo-random numbers, the same on every rank.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below
    }
}

/// Returns what `rank` holds at the start of operation `seed`: numbers that fit every element type and whose sums are
/// rounded.
fn data(rank: usize, seed: u64, dtype: DType, bytes: usize) -> Vec<u8> {
    let mut dice =
        Dice((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03));
    let first = dice.roll(1 << 20);
    let number = |at: usize| ((at * 7919 + first) % 2003) as f64 / 61.0 - 9.0;
    let values = 0..bytes / dtype.size();
    match dtype {
        DType::F32 => values.flat_map(|at| (number(at) as f32).to_le_bytes()).collect(),
        DType::F64 => values.flat_map(|at| number(at).to_le_bytes()).collect(),
        DType::BF16 => values.flat_map(|at| half::bf16::from_f64(number(at)).to_le_bytes()).collect(),
        _ => (0..bytes).map(|at| (at * 31 + first) as u8).collect(),
    }
}

/// Returns the combination of all ranks' bytes in `range`.
fn combined(n: usize, seed: u64, dtype: DType, op: ReduceOp, bytes: usize, range: std::ops::Range<usize>) -> Vec<u8> {
    let all: Vec<Vec<u8>> = (0..n).map(|rank| data(rank, seed, dtype, bytes)).collect();
    let mut out = vec![0; range.len()];
    combine(dtype, op, &all.iter().map(|one| Some(&one[range.clone()])).collect::<Vec<_>>(), &mut out);
    out
}

/// Runs one operation of every kind, in place and out of place, and compares all bytes.
fn one(rank: &mut Rank, verb: Kind, dtype: DType, op: ReduceOp, chunk: usize, root: usize, split: bool) {
    let (me, n) = (rank.shm.rank(), rank.shm.size());
    let chunk = chunk / dtype.size() * dtype.size();
    let seed = rank.seq;
    let whole = n * chunk;
    let at = |r: usize| r * chunk..(r + 1) * chunk;
    let joined = || (0..n).flat_map(|r| data(r, seed, dtype, chunk)).collect::<Vec<u8>>();
    // The input of the verb, and the length of its output in a separate buffer.
    let (input, out_len): (Vec<u8>, usize) = match verb {
        Kind::AllReduce | Kind::Reduce | Kind::Broadcast => (data(me, seed, dtype, chunk), chunk),
        Kind::AllGather | Kind::Gather => (data(me, seed, dtype, chunk), whole),
        Kind::Scatter | Kind::ReduceScatter => (data(me, seed, dtype, whole), chunk),
        Kind::AllToAll => (data(me, seed, dtype, whole), whole),
        _ => (Vec::new(), 0),
    };
    let expected: Option<Vec<u8>> = match verb {
        Kind::AllReduce => Some(combined(n, seed, dtype, op, chunk, 0..chunk)),
        Kind::Reduce => (me == root).then(|| combined(n, seed, dtype, op, chunk, 0..chunk)),
        Kind::Broadcast => Some(data(root, seed, dtype, chunk)),
        Kind::AllGather => Some(joined()),
        Kind::Gather => (me == root).then(joined),
        Kind::Scatter => Some(data(root, seed, dtype, whole)[at(me)].to_vec()),
        Kind::ReduceScatter => Some(combined(n, seed, dtype, op, whole, at(me))),
        Kind::AllToAll => Some((0..n).flat_map(|r| data(r, seed, dtype, whole)[at(me)].to_vec()).collect()),
        _ => None,
    };
    let print = rank.print(verb, dtype, Some(op), Some(root), chunk);
    // One byte away from any alignment.
    let mut buffer = vec![0xee; 1 + whole.max(chunk)];
    let shown: Vec<u8>;
    let run = |shm: &mut Shm, cx: &OpContext<'_>, io: Io<'_>| match verb {
        Kind::AllReduce => shm.run(cx, Verb::AllReduce(op), io),
        Kind::Reduce => shm.run(cx, Verb::Reduce { op, root }, io),
        Kind::AllGather => shm.run(cx, Verb::AllGather, io),
        Kind::Gather => shm.run(cx, Verb::Gather { root }, io),
        Kind::Scatter => shm.run(cx, Verb::Scatter { root }, io),
        Kind::ReduceScatter => shm.run(cx, Verb::ReduceScatter(op), io),
        Kind::AllToAll => shm.run(cx, Verb::AllToAll, io),
        _ => shm.run(cx, Verb::Barrier, Io::none()),
    };
    if verb == Kind::Broadcast {
        let data = &mut buffer[1..1 + chunk];
        data.copy_from_slice(&input);
        rank.with(print, |shm, cx| shm.run(cx, Verb::Broadcast { root }, Io::in_place(data))).unwrap();
        shown = data.to_vec();
    } else if split {
        let ignored = matches!(verb, Kind::Reduce | Kind::Gather) && me != root;
        let dst = &mut buffer[1..1 + if ignored { 0 } else { out_len }];
        let src = if verb == Kind::Scatter && me != root { &[][..] } else { &input[..] };
        rank.with(print, |shm, cx| run(shm, cx, Io::split(src, dst))).unwrap();
        shown = dst.to_vec();
    } else {
        let chunks = !matches!(verb, Kind::AllReduce | Kind::Reduce | Kind::Barrier);
        let data = &mut buffer[1..1 + if chunks { whole } else { input.len() }];
        let gathers = matches!(verb, Kind::AllGather | Kind::Gather);
        if gathers {
            data[at(me)].copy_from_slice(&input)
        } else {
            data.copy_from_slice(&input)
        }
        let before = data.to_vec();
        rank.with(print, |shm, cx| run(shm, cx, Io::in_place(data))).unwrap();
        if matches!(verb, Kind::Scatter | Kind::ReduceScatter) {
            let others = |it: &[u8]| [&it[..at(me).start], &it[at(me).end..]].concat();
            assert!(others(data) == others(&before), "{verb:?}: chunks of others changed");
            shown = data[at(me)].to_vec();
        } else {
            assert!(expected.is_some() || *data == before[..], "{verb:?}: a rank that gets nothing was changed");
            shown = data.to_vec();
        }
    }
    if let Some(expected) = expected {
        assert!(shown == expected, "{verb:?} of {chunk} bytes of {} on rank {me} of {n}, split {split}", dtype.name());
    }
}

const VERBS: [Kind; 9] = [
    Kind::AllReduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::AllGather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::AllToAll,
    Kind::Barrier,
];

/// Tests S1, W1 to W3, and with two ranks X1.
#[test]
fn ten_thousand_operations_of_random_verbs_and_sizes_stay_in_step() {
    for n in [2, 4] {
        on_all(n, |_, mut rank| {
            let mut dice = Dice(20_240_601);
            for _ in 0..10_000 {
                let verb = VERBS[dice.roll(VERBS.len())];
                let most = match dice.roll(200) {
                    0 => 900 << 10,
                    1..=10 => 60 << 10,
                    _ => 1500,
                };
                let (bytes, root, split) = (dice.roll(most), dice.roll(n), dice.roll(2) == 0);
                one(&mut rank, verb, DType::F32, ReduceOp::Sum, bytes, root, split);
            }
        });
    }
}

#[test]
fn late_rank_gets_a_timeout_that_names_it() {
    let begun = Barrier::new(2);
    let outcomes = on_all(3, |index, mut rank| {
        if index == 1 {
            return Ok(rank);
        }
        begun.wait();
        rank.limit = Duration::from_secs(2);
        rank.barrier().map(|()| rank)
    });
    for (index, outcome) in outcomes.into_iter().enumerate().filter(|(index, _)| *index != 1) {
        match outcome.err() {
            Some(Error::Timeout { missing, noticed_by, .. }) => assert_eq!((missing, noticed_by), (vec![1], index)),
            other => panic!("rank {index}: {other:?}"),
        }
    }
}

#[test]
fn rank_that_closes_its_memory_ends_the_waits_of_all_others() {
    let outcomes = on_all(3, |index, mut rank| {
        let mut values = vec![0; 1 << 20];
        for round in 0.. {
            if index == 2 && round == 3 {
                break;
            }
            let print = rank.print(Kind::AllReduce, DType::F32, Some(ReduceOp::Sum), None, values.len());
            let outcome =
                rank.with(print, |shm, cx| shm.run(cx, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut values)));
            if let Err(error) = outcome {
                return Some(error);
            }
        }
        None
    });
    for outcome in &outcomes[..2] {
        let error = outcome.as_ref().unwrap();
        assert!(matches!(error, Error::PeerLost { rank: 0..=2, .. }), "{error}");
    }
    assert!(outcomes[..2].iter().flatten().any(|error| matches!(error, Error::PeerLost { rank: 2, .. })));
}

#[test]
fn ranks_that_disagree_all_get_an_error_that_says_what_each_was_doing() {
    for difference in 0..4 {
        let outcomes = on_all(3, |index, mut rank| {
            one(&mut rank, Kind::AllReduce, DType::F32, ReduceOp::Sum, 1 << 20, 0, false);
            let odd = index == 1;
            let bytes = if odd && difference == 0 { 2048 } else { 1 << 20 };
            let dtype = if odd && difference == 1 { DType::F64 } else { DType::F32 };
            let kind = if odd && difference == 2 { Kind::Broadcast } else { Kind::AllReduce };
            let op = if odd && difference == 3 { ReduceOp::Max } else { ReduceOp::Sum };
            let mut values = vec![0; bytes];
            let print = rank.print(kind, dtype, Some(op), None, bytes);
            rank.with(print, |shm, cx| match kind {
                Kind::Broadcast => shm.run(cx, Verb::Broadcast { root: 0 }, Io::in_place(&mut values)),
                _ => shm.run(cx, Verb::AllReduce(op), Io::in_place(&mut values)),
            })
        });
        for (index, outcome) in outcomes.into_iter().enumerate() {
            let Err(Error::Mismatch(text)) = outcome else { panic!("rank {index}: {outcome:?}") };
            assert!(
                text.contains("rank 1 does") && text.contains("rank 0 does") || text.contains("rank 2 does"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_message_that_cannot_come_because_its_peer_is_in_a_collective_is_a_disagreement() {
    for receives in [true, false] {
        let outcomes = on_all(2, |index, mut rank| {
            one(&mut rank, Kind::AllReduce, DType::F32, ReduceOp::Sum, 1000, 0, false);
            // There is no control plane here to notify the rank in the collective, so that rank gets a short deadline.
            rank.limit = Duration::from_secs(1);
            let mut data = vec![0; 4 << 20];
            if index == 0 {
                rank.barrier()
            } else if receives {
                let fingerprint = rank.print(Kind::Send, DType::U8, None, Some(0), data.len());
                rank.with(fingerprint, |shm, cx| shm.exchange(cx, &[], &mut [Incoming::new(0, fingerprint, &mut data)]))
            } else {
                let fingerprint = rank.print(Kind::Send, DType::U8, None, Some(0), data.len());
                rank.with(fingerprint, |shm, cx| shm.exchange(cx, &[Outgoing::new(0, fingerprint, &data)], &mut []))
            }
        });
        let Err(Error::Mismatch(text)) = &outcomes[1] else { panic!("{:?}", outcomes[1]) };
        assert!(text.contains("rank 0 does barrier"), "{text}");
    }
}

#[test]
fn abort_ends_a_wait_with_its_cause() {
    on_all(2, |index, mut rank| {
        if index == 0 {
            let cause = rank.health.fail(Error::Aborted("enough".to_owned()));
            assert_eq!(rank.barrier(), Err(cause));
        }
        rank
    });
}

/// Returns the processors that this process may use. Returns `None` and prints the reason if there is only one.
fn two_processors() -> Option<Processors> {
    let allowed = processors(0).unwrap();
    let enough = allowed.count() > 1;
    if !enough {
        println!("skipped: this process may use one processor only");
    }
    enough.then_some(allowed)
}

/// Blocks until `seen` is true, and fails after a minute.
fn until(what: &str, mut seen: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !seen() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_rank_that_sleeps_for_a_peer_is_not_woken_on_the_processor_of_that_peer_and_has_its_mask_back_afterwards() {
    let Some(allowed) = two_processors() else { return };
    let mut own = allowed.iter();
    let (early, late) = (own.next().unwrap(), own.next().unwrap());
    let thread = std::sync::Mutex::new(None::<i32>);
    on_all(2, |me, mut rank| {
        rank.shm.protocol.spins = true;
        let only = Processors::only([late, early][me]);
        set_processors(&only).unwrap();
        rank.barrier().unwrap();
        if me == 1 {
            set_processors(&allowed).unwrap();
            *thread.lock().unwrap() = Some(thread_number());
        } else {
            until("no thread waits", || thread.lock().unwrap().is_some());
            let peer = thread.lock().unwrap().unwrap();
            let without = |mask: Processors| mask.contains(early) && !mask.contains(late);
            until("the mask of the rank that waits was never another", || without(processors(peer).unwrap()));
        }
        rank.barrier().unwrap();
        let expected = if me == 1 { allowed } else { only };
        assert_eq!(processors(0).unwrap(), expected);
        std::thread::scope(|scope| {
            let inherited = scope.spawn(|| processors(0).unwrap());
            assert_eq!(inherited.join().unwrap(), expected);
        });
    });
}

#[test]
fn a_rank_spins_also_for_a_peer_on_its_own_processor() {
    let Some(allowed) = two_processors() else { return };
    let only = Processors::only(allowed.iter().next().unwrap());
    on_all(2, |me, mut rank| {
        rank.shm.protocol.spins = true;
        set_processors(&only).unwrap();
        rank.barrier().unwrap();
        rank.shm.protocol.vain.set(0);
        if me == 0 {
            // Once rank 1's flag is in this rank's word, rank 1 has given up spinning and sleeps.
            let word = rank.shm.protocol.segment.arrived(0);
            until("rank 1 never slept", || word.load(std::sync::atomic::Ordering::Acquire) & protocol::SLEEPERS != 0);
        }
        rank.barrier().unwrap();
        if me == 1 {
            assert!(rank.shm.protocol.vain.get() > 0, "slept without a spin");
        }
    });
}

/// Returns the bytes of memory that the kernel has allocated for a segment.
fn touched(arena: &Arena) -> u64 {
    rustix::fs::fstat(arena.fd()).unwrap().st_blocks as u64 * 512
}

#[test]
fn memory_of_a_segment_grows_with_its_ranks_and_not_with_their_pairs() {
    for n in [16, 64, 256] {
        let arena = Arc::new(Arena::create("bagua-test", segment_len(n)).unwrap());
        let shm = |index| Shm::new(Arc::clone(&arena), index, (0..n).collect()).unwrap();
        let ranks: Vec<Shm> = (0..n).map(shm).collect();
        let links: Vec<_> = (0..n).map(|index| spare_links(&arena, index, n)).collect();
        assert_eq!(touched(&arena), 0, "set-up of {n} ranks");
        drop((ranks, links));
        // The pages that each rank has touched: one page of its own, and in both sets of rings the pages with the
        // blocks of all ranks.
        assert!(touched(&arena) <= n as u64 * 2 * 4096, "{} bytes of {n} ranks that closed", touched(&arena));
    }
}
