//! Tensors in arenas: bitwise the same results as in other memory, any mixture of memory among the ranks, and freeing.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::group_world::{AT_ONCE, NEVER_SILENT, Process, mixed, world, world_with};
use bagua_collectives::{Io, Verb};
use bagua_group::{Config, Group, Lane, Options, TransportChoice};
use bagua_kernels::error::Error;
use bagua_kernels::types::{DType, Kind, ReduceOp};
use bagua_net::memory::SharedArena;
use bagua_net::platform::OPEN_DESCRIPTORS;
use bagua_net::wait::lock;
use rustix::process::{Resource, getrlimit, setrlimit};

/// A rank as a thread: a group in shared memory, and a lane by TCP for comparison.
struct Rank {
    group: Group,
    lane: Lane,
    streams: Lane,
}

impl Rank {
    fn zero_copy(&self, kind: Kind) -> u64 {
        self.group.stats().of(kind).zero_copy.load(Relaxed)
    }
}

/// Runs `act` on all of `n` ranks at the same time.
fn on_all<T: Send>(n: usize, act: impl Fn(usize, Rank) -> T + Sync) -> Vec<T> {
    let groups = world(n);
    let others = world_with(n, |config| config.transport = TransportChoice::Tcp);
    std::thread::scope(|scope| {
        let act = &act;
        let start = |(rank, (group, other)): (usize, (Group, Group))| {
            scope.spawn(move || {
                let (lane, streams) = (group.lane().unwrap(), other.lane().unwrap());
                act(rank, Rank { group, lane, streams })
            })
        };
        let threads: Vec<_> = groups.into_iter().zip(others).enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The input of a rank: small numbers in every element type, different on every rank.
fn data(rank: usize, dtype: DType, bytes: usize) -> Vec<u8> {
    let number = |at: usize| ((at * 7919 + rank * 331) % 2003) as f64 / 61.0 - 9.0;
    let values = 0..bytes / dtype.size();
    match dtype {
        DType::C64 => (0..bytes / 4).flat_map(|at| (number(at) as f32).to_le_bytes()).collect(),
        DType::C128 => (0..bytes / 8).flat_map(|at| number(at).to_le_bytes()).collect(),
        DType::F32 => values.flat_map(|at| (number(at) as f32).to_le_bytes()).collect(),
        DType::F64 => values.flat_map(|at| number(at).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|at| half::f16::from_f64(number(at)).to_le_bytes()).collect(),
        DType::BF16 => values.flat_map(|at| half::bf16::from_f64(number(at)).to_le_bytes()).collect(),
        DType::Bool => values.map(|at| u8::from((at * 31 + rank).is_multiple_of(3))).collect(),
        _ => (0..bytes).map(|at| (at * 31 + rank * 17) as u8).collect(),
    }
}

/// `len` bytes of an arena from `offset`.
#[expect(clippy::mut_from_ref, reason = "as `SharedArena::bytes_mut`")]
fn part(arena: &SharedArena, offset: usize, len: usize) -> &mut [u8] {
    // SAFETY: no test uses overlapping slices at the same time.
    let whole = unsafe { arena.bytes_mut() };
    &mut whole[offset..offset + len]
}

const OPTIONS: Options<'static> = Options::DEFAULT;

fn all_reduce(lane: &mut Lane, dtype: DType, data: &mut [u8], op: ReduceOp) {
    lane.run(&OPTIONS, dtype, Verb::AllReduce(op), Io::in_place(data)).unwrap();
}

/// The expected result: the all_reduce of all ranks' `data` over TCP.
fn by_streams(rank: &mut Rank, dtype: DType, bytes: usize, op: ReduceOp) -> Vec<u8> {
    let mut data = data(rank.group.rank(), dtype, bytes);
    all_reduce(&mut rank.streams, dtype, &mut data, op);
    data
}

fn valid_pairs() -> impl Iterator<Item = (DType, ReduceOp)> {
    let all = DType::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op)));
    all.filter(|(dtype, op)| op.check(*dtype).is_ok())
}

#[test]
fn zero_copy_results_equal_those_of_windows_and_streams_bitwise_in_every_type_and_op() {
    for n in 2..=5 {
        on_all(n, |me, mut rank| {
            let arena = rank.group.arena(1 << 20, "test").unwrap();
            let mut times = 0;
            for (dtype, op) in valid_pairs() {
                for bytes in [16_384_usize, 16_392, 40_008, 65_544] {
                    let bytes = bytes.next_multiple_of(dtype.size());
                    let expected = by_streams(&mut rank, dtype, bytes, op);
                    let mut windows = data(me, dtype, bytes);
                    all_reduce(&mut rank.lane, dtype, &mut windows, op);
                    assert!(windows == expected, "{} of {} in windows", op.name(), dtype.name());
                    let before = rank.zero_copy(Kind::AllReduce);
                    let direct = part(&arena, 24, bytes);
                    direct.copy_from_slice(&data(me, dtype, bytes));
                    all_reduce(&mut rank.lane, dtype, direct, op);
                    assert!(*direct == *expected, "{} of {} × {n}, {bytes} bytes", op.name(), dtype.name());
                    times += rank.zero_copy(Kind::AllReduce) - before;
                }
            }
            assert!(times >= 3 * valid_pairs().count() as u64, "{times} zero-copy operations");
        });
    }
}

#[test]
fn zero_copy_handles_large_and_odd_sizes() {
    on_all(3, |me, mut rank| {
        let arena = rank.group.arena(3_000_000, "test").unwrap();
        for bytes in [1_000_004, 3_000_000, 16_388] {
            let expected = by_streams(&mut rank, DType::F32, bytes, ReduceOp::Avg);
            let direct = part(&arena, 3_000_000 - bytes, bytes);
            direct.copy_from_slice(&data(me, DType::F32, bytes));
            all_reduce(&mut rank.lane, DType::F32, direct, ReduceOp::Avg);
            assert!(*direct == *expected, "{bytes} bytes");
        }
        assert_eq!(rank.zero_copy(Kind::AllReduce), 3);
    });
}

#[test]
fn zero_copy_verbs_with_chunks_and_roots_work_in_place_and_split() {
    for n in 2..=4 {
        on_all(n, |me, mut rank| {
            let chunk = 80_004;
            let (whole, f32, sum) = (n * chunk, DType::F32, ReduceOp::Sum);
            let arena = rank.group.arena(2 * whole, "test").unwrap();
            let own = me * chunk..(me + 1) * chunk;
            let mut other = vec![0; whole];
            let lane = &mut rank.lane;
            let fill = |bytes: usize| {
                let input = part(&arena, 0, bytes);
                input.copy_from_slice(&data(me, f32, bytes));
                input
            };
            let gathered: Vec<u8> = (0..n).flat_map(|r| data(r, f32, chunk)).collect();
            let transposed: Vec<u8> = (0..n).flat_map(|r| data(r, f32, whole)[own.clone()].to_vec()).collect();
            let mut reduced = data(me, f32, whole);
            all_reduce(&mut rank.streams, f32, &mut reduced, sum);

            for root in 0..n {
                let data_of_root = fill(whole);
                lane.run(&OPTIONS, f32, Verb::Broadcast { root }, Io::in_place(data_of_root)).unwrap();
                assert!(*data_of_root == *data(root, f32, whole), "broadcast");
                let input = fill(whole);
                lane.run(&OPTIONS, f32, Verb::Reduce { op: sum, root }, Io::in_place(input)).unwrap();
                assert!(*input == *if me == root { reduced.clone() } else { data(me, f32, whole) }, "reduce");
                let all = part(&arena, 0, whole);
                all[own.clone()].copy_from_slice(&data(me, f32, chunk));
                lane.run(&OPTIONS, f32, Verb::Gather { root }, Io::in_place(all)).unwrap();
                assert!(me != root || *all == *gathered, "gather");
            }
            let all = part(&arena, 0, whole);
            all.fill(0);
            all[own.clone()].copy_from_slice(&data(me, f32, chunk));
            lane.run(&OPTIONS, f32, Verb::AllGather, Io::in_place(all)).unwrap();
            assert!(*all == *gathered, "all_gather in place");
            lane.run(&OPTIONS, f32, Verb::AllGather, Io::split(fill(chunk), &mut other)).unwrap();
            assert!(other == gathered, "all_gather");
            let input = fill(whole);
            lane.run(&OPTIONS, f32, Verb::ReduceScatter(sum), Io::in_place(input)).unwrap();
            assert!(input[own.clone()] == reduced[own.clone()], "reduce_scatter in place");
            assert!(input[..own.start] == data(me, f32, whole)[..own.start], "chunks of others changed");
            let into = part(&arena, whole, chunk);
            lane.run(&OPTIONS, f32, Verb::ReduceScatter(sum), Io::split(fill(whole), into)).unwrap();
            assert!(*into == reduced[own.clone()], "reduce_scatter");
            lane.run(&OPTIONS, f32, Verb::AllToAll, Io::split(fill(whole), &mut other)).unwrap();
            assert!(other == transposed, "all_to_all");
            let input = fill(whole);
            lane.run(&OPTIONS, f32, Verb::AllToAll, Io::in_place(input)).unwrap();
            assert!(*input == *transposed, "all_to_all in place");

            let counts =
                [Kind::Broadcast, Kind::Reduce, Kind::Gather, Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll]
                    .map(|kind| rank.zero_copy(kind));
            let n = n as u64;
            assert_eq!(counts, [n, n, n, 2, 2, 1]);
        });
    }
}

#[test]
fn any_mixture_of_arenas_offsets_and_ordinary_memory_gives_the_same_result() {
    on_all(3, |me, mut rank| {
        let bytes = 700_004;
        let (first, second) = (rank.group.arena(bytes + 800, "one").unwrap(), rank.group.arena(bytes, "two").unwrap());
        let expected = by_streams(&mut rank, DType::F32, bytes, ReduceOp::Sum);
        let mut ordinary = vec![0; bytes];
        // For each rank: the first arena, the second, or ordinary memory (2), and the offset. Zero-copy needs arenas on
        // all ranks.
        let cases: [([usize; 3], [usize; 3]); 7] = [
            ([0, 0, 2], [0; 3]),
            ([2, 0, 0], [0; 3]),
            ([2, 2, 1], [0; 3]),
            ([0, 1, 0], [0; 3]),
            ([2, 2, 2], [0; 3]),
            ([0, 0, 0], [0, 64, 788]),
            ([1, 1, 1], [0; 3]),
        ];
        for (which, offset) in cases {
            let tensor = match which[me] {
                0 => part(&first, offset[me], bytes),
                1 => part(&second, offset[me], bytes),
                _ => ordinary.as_mut_slice(),
            };
            tensor.copy_from_slice(&data(me, DType::F32, bytes));
            let before = rank.zero_copy(Kind::AllReduce);
            all_reduce(&mut rank.lane, DType::F32, tensor, ReduceOp::Sum);
            assert!(*tensor == *expected, "{which:?} at {offset:?}");
            assert_eq!(rank.zero_copy(Kind::AllReduce) - before, u64::from(!which.contains(&2)));
        }
    });
}

#[test]
fn arenas_may_be_freed_and_allocated_again_and_one_rank_may_keep_its_part() {
    on_all(2, |me, mut rank| {
        let bytes = 300_000;
        let expected = by_streams(&mut rank, DType::F32, bytes, ReduceOp::Sum);
        let mut kept = None;
        for round in 0..3 {
            let arena = rank.group.arena(bytes, "again").unwrap();
            let tensor = part(&arena, 0, bytes);
            tensor.copy_from_slice(&data(me, DType::F32, bytes));
            all_reduce(&mut rank.lane, DType::F32, tensor, ReduceOp::Sum);
            assert!(*tensor == *expected, "round {round}");
            if me == 0 {
                kept = Some(arena);
            }
        }
        let mut ordinary = vec![0; bytes];
        let tensor = kept.as_ref().map_or(ordinary.as_mut_slice(), |arena| part(arena, 0, bytes));
        tensor.copy_from_slice(&data(me, DType::F32, bytes));
        all_reduce(&mut rank.lane, DType::F32, tensor, ReduceOp::Sum);
        assert!(*tensor == *expected, "the peer has freed its part");
        assert_eq!(rank.zero_copy(Kind::AllReduce), 3);
    });
}

#[test]
fn random_operations_inside_and_outside_arenas_give_correct_results() {
    on_all(4, |me, mut rank| {
        let arena = rank.group.arena(400_000, "test").unwrap();
        let mut ordinary = vec![0; 400_000];
        let mut state = 12_345_u64;
        let mut roll = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..600 {
            let most = if roll(4) == 0 { 100_000 } else { 6_000 };
            let bytes = 4 * (roll(most) + 1) as usize;
            let outside = roll(16) as usize;
            let tensor = if outside & 1 << me != 0 { &mut ordinary[..bytes] } else { part(&arena, 0, bytes) };
            tensor.copy_from_slice(&data(me, DType::I32, bytes));
            if roll(3) == 0 {
                let root = roll(4) as usize;
                rank.lane.run(&OPTIONS, DType::I32, Verb::Broadcast { root }, Io::in_place(tensor)).unwrap();
                assert!(*tensor == *data(root, DType::I32, bytes));
            } else {
                all_reduce(&mut rank.lane, DType::I32, tensor, ReduceOp::Bxor);
                let all: Vec<_> = (0..4).map(|rank| data(rank, DType::I32, bytes)).collect();
                assert!((0..bytes).all(|at| tensor[at] == all[0][at] ^ all[1][at] ^ all[2][at] ^ all[3][at]));
            }
        }
        assert!(rank.zero_copy(Kind::AllReduce) > 0 && rank.zero_copy(Kind::Broadcast) > 0);
    });
}

#[test]
fn other_lanes_and_sub_groups_are_zero_copy_on_an_arena_of_the_world() {
    on_all(3, |me, mut rank| {
        let bytes = 100_000;
        let arena = rank.group.arena(bytes, "test").unwrap();
        let mut second = rank.group.lane().unwrap();
        let tensor = part(&arena, 0, bytes);
        tensor.fill(1);
        all_reduce(&mut second, DType::U8, tensor, ReduceOp::Sum);
        assert!(tensor.iter().all(|byte| *byte == 3));
        if let Some(pair) = rank.group.subgroup(&[0, 2], "pair").unwrap() {
            let mut lane = pair.lane().unwrap();
            all_reduce(&mut lane, DType::U8, tensor, ReduceOp::Sum);
            assert!(tensor.iter().all(|byte| *byte == 6));
            assert_eq!(pair.stats().of(Kind::AllReduce).zero_copy.load(Relaxed), 1);
        }
        all_reduce(&mut rank.lane, DType::U8, tensor, ReduceOp::Max);
        assert!(tensor.iter().all(|byte| *byte == 6), "rank {me}");
    });
}

#[test]
fn without_shared_memory_an_arena_is_private_and_all_reduce_works() {
    let two_hosts = |config: &mut Config| config.host_id = ["a", "a", "b"][config.rank].to_owned();
    let by_tcp = |config: &mut Config| config.transport = TransportChoice::Tcp;
    for (groups, shared) in
        [(world_with(3, two_hosts), [true, true, false]), (world_with(3, by_tcp), [false; 3]), (world(1), [false; 3])]
    {
        let size = groups.len();
        std::thread::scope(|scope| {
            for (rank, group) in groups.iter().enumerate() {
                scope.spawn(move || {
                    let arena = group.arena(100_000, "test").unwrap();
                    let mut lane = group.lane().unwrap();
                    assert_eq!((arena.len(), arena.is_shared()), (100_000, shared[rank]));
                    let tensor = part(&arena, 0, 100_000);
                    tensor.fill(1);
                    all_reduce(&mut lane, DType::U8, tensor, ReduceOp::Sum);
                    assert!(tensor.iter().all(|byte| usize::from(*byte) == size));
                });
            }
        });
    }
}

#[test]
fn one_rank_makes_and_frees_arenas_while_the_others_do_something_else() {
    on_all(3, |me, mut rank| {
        if me == 1 {
            // No other rank makes one: a collective would end the group after its time to connect.
            let arenas: Vec<_> = (1..4).map(|pages| rank.group.arena(pages * 4096, "alone").unwrap()).collect();
            assert!(arenas.iter().all(|arena| arena.is_shared()));
            drop(arenas);
        }
        let mut data = data(me, DType::I32, 100_000);
        all_reduce(&mut rank.lane, DType::I32, &mut data, ReduceOp::Sum);
        rank.lane.barrier(&OPTIONS).unwrap();
    });
    assert!(matches!(world(2)[0].arena(usize::MAX, "test"), Err(Error::InvalidArgument(_))));
}

#[test]
fn tensors_in_arenas_of_different_sizes_and_in_any_combination_are_zero_copy() {
    on_all(3, |me, mut rank| {
        let bytes = 200_000;
        let expected = by_streams(&mut rank, DType::F32, bytes, ReduceOp::Sum);
        let arenas = [0, 1].map(|which| rank.group.arena(bytes + 10_000 * (3 * which + me), "test").unwrap());
        // By rank, which of its arenas: first both as they were made, then every other combination, twice.
        let all: Vec<[usize; 3]> = (0..8).map(|at| [at & 1, at >> 1 & 1, at >> 2 & 1]).collect();
        let cases = [[0; 3], [1; 3]].into_iter().chain(all.clone()).chain(all);
        for (times, which) in cases.enumerate() {
            let tensor = part(&arenas[which[me]], 8 * me, bytes);
            tensor.copy_from_slice(&data(me, DType::F32, bytes));
            all_reduce(&mut rank.lane, DType::F32, tensor, ReduceOp::Sum);
            assert!(*tensor == *expected, "{which:?}");
            assert_eq!(rank.zero_copy(Kind::AllReduce), 1 + times as u64);
        }
        // Both arenas of both peers, once: what was combined was mapped anew, and the former mappings are gone.
        rank.lane.barrier(&OPTIONS).unwrap();
        drop(arenas);
        rank.lane.barrier(&OPTIONS).unwrap();
    });
    assert_eq!(resident("memfd:test").0, 0);
}

#[test]
fn an_arena_has_one_descriptor_and_its_peers_have_none() {
    let _alone = lock(&DESCRIPTORS);
    on_all(3, |me, mut rank| {
        let before = descriptors("only-one");
        rank.lane.barrier(&OPTIONS).unwrap();
        let arena = rank.group.arena(100_000, "only-one").unwrap();
        let tensor = part(&arena, 0, 100_000);
        for _ in 0..2 {
            all_reduce(&mut rank.lane, DType::F32, tensor, ReduceOp::Sum);
        }
        rank.lane.barrier(&OPTIONS).unwrap();
        assert_eq!((before, descriptors("only-one"), rank.zero_copy(Kind::AllReduce)), (0, 3, 2), "rank {me}");
        rank.lane.barrier(&OPTIONS).unwrap();
    });
    assert_eq!(descriptors("only-one"), 0);
}

/// Open descriptors of arenas with this label in this process, of which every rank is a thread.
fn descriptors(label: &str) -> usize {
    let open = std::fs::read_dir(OPEN_DESCRIPTORS).unwrap();
    let targets = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().contains(label)).count()
}

#[test]
fn a_rank_that_cannot_map_the_arenas_of_its_peers_copies_with_them() {
    let ranks = [0, 1];
    let (_, processes) = mixed("arenas::entry_of_few_descriptors", 2, &ranks, Duration::from_secs(5));
    for mut process in processes {
        assert_eq!(process.read_after("ZERO-COPY "), "0, right");
        assert_eq!(process.end(), Some(0));
    }
}

#[test]
#[ignore = "the test above starts processes that run this"]
fn entry_of_few_descriptors() {
    let group = crate::group_world::join();
    let mut lane = group.lane().unwrap();
    let arena = group.arena(100_000, "test").unwrap();
    lane.barrier(&OPTIONS).unwrap();
    let mut files = Vec::new();
    if group.rank() == 1 {
        // One descriptor is left: for the connection over which that of the peer's arena would come.
        let mut limits = getrlimit(Resource::Nofile);
        limits.current = Some(std::fs::read_dir(OPEN_DESCRIPTORS).unwrap().count() as u64 + 8);
        setrlimit(Resource::Nofile, limits).unwrap();
        files.extend(std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()));
        files.pop().unwrap();
    }
    reduce_ones(&group, &mut lane, &arena);
}

fn reduce_ones(group: &Group, lane: &mut Lane, arena: &SharedArena) {
    let tensor = part(arena, 0, 100_000);
    for _ in 0..3 {
        tensor.fill(1);
        all_reduce(lane, DType::U8, tensor, ReduceOp::Sum);
        assert!(tensor.iter().all(|byte| usize::from(*byte) == group.size()));
    }
    println!("\nZERO-COPY {}, right", group.stats().of(Kind::AllReduce).zero_copy.load(Relaxed));
}

/// Held by tests that count what all ranks of this process have of one label.
static DESCRIPTORS: Mutex<()> = Mutex::new(());

/// Number of mappings of arenas with this label, and their resident kilobytes, from `/proc/self/smaps`.
fn resident(label: &str) -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = text.lines();
    let mut found: HashMap<usize, usize> = HashMap::new();
    while let Some(line) = lines.next() {
        if line.contains(label) {
            let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap().trim().trim_end_matches(" kB");
            found.insert(found.len(), rss.trim().parse().unwrap());
        }
    }
    (found.len(), found.values().sum())
}

#[test]
fn an_arena_is_populated_at_once_and_may_outlive_its_group() {
    let groups = world(2);
    let arenas: Vec<SharedArena> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            groups.iter().map(|group| scope.spawn(|| group.arena(1 << 20, "unmapped").unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(resident("unmapped"), (2, 2 << 10));
    drop(groups);
    let [first, second]: [SharedArena; 2] = arenas.try_into().unwrap();
    drop(second);
    assert_eq!(resident("unmapped"), (1, 1 << 10));
    // SAFETY: no other slice of it exists.
    unsafe { first.bytes_mut()[0] = 1 };
    drop(first);
    assert_eq!(resident("unmapped"), (0, 0));
}

#[test]
fn the_memory_of_peers_goes_with_the_own_arena_and_with_the_lane() {
    let _alone = lock(&DESCRIPTORS);
    for by_lane in [false, true] {
        on_all(2, |_, mut rank| {
            let arena = rank.group.arena(1 << 20, "of-peers").unwrap();
            let mut second = rank.group.lane().unwrap();
            for lane in [&mut rank.lane, &mut second] {
                all_reduce(lane, DType::F32, part(&arena, 0, 1 << 20), ReduceOp::Sum);
            }
            rank.lane.barrier(&OPTIONS).unwrap();
            // Each rank's own, and by each lane its peer's.
            assert_eq!(resident("of-peers"), (6, 6 << 10));
            rank.lane.barrier(&OPTIONS).unwrap();
            if by_lane {
                drop(second);
                rank.lane.barrier(&OPTIONS).unwrap();
                assert_eq!(resident("of-peers"), (4, 4 << 10));
            } else {
                drop(arena);
                rank.lane.barrier(&OPTIONS).unwrap();
                assert_eq!(resident("of-peers"), (0, 0));
            }
            rank.lane.barrier(&OPTIONS).unwrap();
        });
    }
}

#[test]
#[ignore = "the test below starts processes that run this"]
fn entry_of_processes() {
    let group = crate::group_world::join();
    let (arena, mut lane) = (group.arena(8 << 20, "test").unwrap(), group.lane().unwrap());
    let mut round = 0;
    loop {
        let tensor = part(&arena, 0, 8 << 20);
        let outcome = lane.run(&OPTIONS, DType::F32, Verb::AllReduce(ReduceOp::Avg), Io::in_place(tensor));
        if let Err(error) = outcome {
            let count = group.stats().of(Kind::AllReduce).zero_copy.load(Relaxed);
            println!("\nENDED {error:?} after {count} zero-copy operations");
            return;
        }
        round += 1;
        if round == 20 {
            println!("\nRUNNING");
        }
    }
}

#[test]
fn a_rank_that_is_killed_during_zero_copy_operations_is_lost_at_once_and_no_other_crashes() {
    for _ in 0..3 {
        let ranks = [0, 1, 2];
        let (_, processes) = mixed("arenas::entry_of_processes", 3, &ranks, NEVER_SILENT);
        let mut processes: Vec<Process> = processes;
        processes.iter_mut().for_each(|process| _ = process.read_after("RUNNING"));
        let killed = processes.remove(1);
        let begun = Instant::now();
        drop(killed);
        for mut process in processes {
            let text = process.read_after("ENDED ");
            assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
            assert!(text.contains("PeerLost") && text.contains("rank: 1"), "{text}");
            assert!(!text.ends_with("after 0 zero-copy operations"), "{text}");
            assert_eq!(process.end(), Some(0));
        }
    }
}
