//! Tests of groups of more than 16 ranks, which are threads: every verb, in place and with two buffers, in one piece
//! and in several, and the number of peers of a rank. Other types, operations and numbers of ranks are in the contract
//! tests of bagua-core.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use half::{bf16, f16};

use super::*;
use crate::error::Error;
use crate::health::GroupHealth;
use crate::stats::OpStats;
use crate::transport::{Broken, Local, Readiness, Transport, local_mesh};
use crate::types::{DType, Fingerprint, Shape};
use crate::wait::{Deadline, Doorbell};

/// Limits that are small enough for several pieces, and for rings.
const SMALL_LIMITS: Limits = Limits { chunk: 16 << 10, ring_shard: 300 };

/// Runs `act` on every rank, each in a thread.
fn on_all<T: Send>(nets: &mut [Net], act: impl Fn(usize, &mut Net) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let act = &act;
        let threads: Vec<_> =
            nets.iter_mut().enumerate().map(|(rank, net)| scope.spawn(move || act(rank, net))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn nets(n: usize, limits: Limits) -> Vec<Net> {
    local_mesh(n).into_iter().map(|mesh| Net { limits, ..Net::new(mesh) }).collect()
}

fn call(net: &mut Net, verb: Verb<'_>, dtype: DType, count: usize, io: Io<'_>) -> Result<()> {
    let health = GroupHealth::local(net.rank(), net.size());
    call_with(&health, net, verb, dtype, count, io)
}

fn call_with(
    health: &GroupHealth,
    net: &mut Net,
    verb: Verb<'_>,
    dtype: DType,
    count: usize,
    io: Io<'_>,
) -> Result<()> {
    let fingerprint = Fingerprint {
        op: verb.op(),
        root: verb.root().map(|root| root as u32),
        shape: Shape::flat(count),
        ..Fingerprint::new(verb.kind(), dtype, count)
    };
    let (deadline, extra) = (Deadline::after(Duration::from_secs(60)), &RefCell::default());
    let cx = OpContext { fingerprint, deadline, health, stats: &OpStats::default(), label: "", extra };
    net.run(&cx, verb, io)
}

/// Returns a whole number. Numbers are small enough that a sum of 70 is exact in float32, and in float16 if only the
/// final sum is rounded.
fn value(rank: usize, at: usize) -> f64 {
    ((rank * 7 + at * 13) % 97) as f64
}

fn encode(dtype: DType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    values
        .flat_map(|exact| match (dtype, exact as f32) {
            (DType::F16, x) => f16::from_f32(x).to_ne_bytes().to_vec(),
            (DType::BF16, x) => bf16::from_f32(x).to_ne_bytes().to_vec(),
            (DType::F32, x) => x.to_ne_bytes().to_vec(),
            (DType::F64, _) => exact.to_ne_bytes().to_vec(),
            (DType::U8, x) => vec![x as u32 as u8],
            (DType::I32, x) => (x as i32).to_ne_bytes().to_vec(),
            (DType::C64, x) => [x, 1.0].map(f32::to_ne_bytes).concat(),
            (other, _) => panic!("no values of {other:?}"),
        })
        .collect()
}

fn input(dtype: DType, rank: usize, count: usize) -> Vec<u8> {
    encode(dtype, (0..count).map(|at| value(rank, at)))
}

/// Returns the sum or the mean of all ranks' inputs.
fn combined(dtype: DType, op: ReduceOp, n: usize, count: usize) -> Vec<u8> {
    let of = |at| {
        let values = (0..n).map(|rank| value(rank, at));
        match op {
            ReduceOp::Avg => values.sum::<f64>() / n as f64,
            ReduceOp::Max => values.fold(0.0, f64::max),
            _ => values.sum(),
        }
    };
    let mut bytes = encode(dtype, (0..count).map(of));
    if dtype == DType::C64 {
        let imaginary = if op == ReduceOp::Avg { 1.0 } else { n as f32 };
        bytes.chunks_exact_mut(8).for_each(|x| x[4..].copy_from_slice(&imaginary.to_ne_bytes()));
    }
    bytes
}

/// Runs a verb in place or with two buffers, and returns the output.
fn run(net: &mut Net, split: bool, (verb, dtype, count): (Verb<'_>, DType, usize), src: &[u8], out: &[u8]) -> Vec<u8> {
    let mut dst = out.to_vec();
    let io = if split { Io::split(src, &mut dst) } else { Io::in_place(&mut dst) };
    call(net, verb, dtype, count, io).unwrap();
    dst
}

/// Checks every verb with `each` elements per rank. Also checks the reducing verbs with a tensor whose length is not
/// divisible by the number of ranks.
fn check_verbs(nets: &mut [Net], dtype: DType, op: ReduceOp, each: usize) {
    let n = nets.len();
    let (root, size) = (n / 2 + each % 3, dtype.size());
    let total = n * each + if each > 0 { 3 } else { 0 };
    let all: Vec<u8> = (0..n).flat_map(|rank| input(dtype, rank, each)).collect();
    let (sum, sum_of_shards) = (combined(dtype, op, n, total), combined(dtype, op, n, n * each));
    let shard = each * size;
    on_all(nets, |rank, net| {
        let what =
            |verb: &str, split: bool| format!("{verb} of {each} {dtype:?} on rank {rank} of {n}, split: {split}");
        let (mine, values) = (input(dtype, rank, each), input(dtype, rank, total));
        let place = rank * shard..(rank + 1) * shard;
        let blank = vec![0xee; n * shard];
        let mut own = blank.clone();
        own[place.clone()].copy_from_slice(&mine);
        for split in [false, true] {
            let got = run(net, split, (Verb::AllReduce(op), dtype, total), &values, &values);
            assert!(got == sum, "{}", what("all_reduce", split));

            let got = run(net, split, (Verb::Reduce { op, root }, dtype, total), &values, &values);
            assert!(got == *if rank == root { &sum } else { &values }, "{}", what("reduce", split));

            let values = input(dtype, rank, n * each);
            let out = if split { &blank[..shard] } else { &values[..] };
            let mut expected = out.to_vec();
            let at = if split { 0..shard } else { place.clone() };
            expected[at].copy_from_slice(&sum_of_shards[place.clone()]);
            let got = run(net, split, (Verb::ReduceScatter(op), dtype, n * each), &values, out);
            assert!(got == expected, "{}", what("reduce_scatter", split));

            let out = if split { &blank } else { &own };
            let got = run(net, split, (Verb::AllGather, dtype, each), &mine, out);
            assert!(got == all, "{}", what("all_gather", split));

            let got = run(net, split, (Verb::Gather { root }, dtype, each), &mine, out);
            assert!(got == *if rank == root { &all } else { out }, "{}", what("gather", split));

            let out = if split {
                &blank[..shard]
            } else if rank == root {
                &all[..]
            } else {
                &blank
            };
            let mut expected = out.to_vec();
            expected[if split { 0..shard } else { place.clone() }].copy_from_slice(&mine);
            let got = run(net, split, (Verb::Scatter { root }, dtype, each), &all, out);
            assert!(got == expected, "{}", what("scatter", split));
        }
        let mut data = mine.clone();
        call(net, Verb::Broadcast { root }, dtype, each, Io::in_place(&mut data)).unwrap();
        assert!(data == input(dtype, root, each), "{}", what("broadcast", false));
        call(net, Verb::Barrier, DType::U8, 0, Io::none()).unwrap();
    });
}

const WORLDS: [usize; 4] = [17, 24, 33, 64];

#[test]
fn every_verb_of_many_ranks_in_several_pieces_and_along_rings() {
    for n in WORLDS {
        let mut nets = nets(n, SMALL_LIMITS);
        // 16 KiB over all ranks are 64 to 240 float32 for each rank, so that the longest shards go in two to five
        // pieces.
        for (dtype, op, each) in [
            (DType::F32, ReduceOp::Avg, 7),
            (DType::C64, ReduceOp::Avg, 61),
            (DType::U8, ReduceOp::Max, 1001),
            (DType::F32, ReduceOp::Sum, 310),
        ] {
            check_verbs(&mut nets, dtype, op, each);
        }
    }
}

#[test]
fn a_tensor_of_a_megabyte_goes_along_the_ring_of_17_ranks() {
    let mut nets = nets(17, LIMITS);
    check_verbs(&mut nets, DType::F32, ReduceOp::Sum, (RING_SHARD / 4) + 5);
}

type Peers = Arc<Mutex<BTreeSet<usize>>>;

/// A stream that records its peer when bytes are sent or received.
struct Noted {
    inner: Local,
    peer: usize,
    used: Peers,
}

type Moved = std::result::Result<usize, Broken>;

impl Noted {
    fn note(&self, moved: Moved) -> Moved {
        if moved.as_ref().is_ok_and(|moved| *moved > 0) {
            self.used.lock().unwrap().insert(self.peer);
        }
        moved
    }
}

impl Transport for Noted {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Moved {
        let moved = self.inner.send(head, body);
        self.note(moved)
    }

    fn recv(&mut self, into: &mut [u8]) -> Moved {
        let moved = self.inner.recv(into);
        self.note(moved)
    }

    fn readiness(&self) -> Readiness<'_> {
        self.inner.readiness()
    }

    fn is_wire(&self) -> bool {
        self.inner.is_wire()
    }
}

/// Creates `n` ranks, and for each the set of peers to or from which it has moved bytes.
fn noted(n: usize) -> (Vec<Net>, Vec<Peers>) {
    let bells: Vec<Doorbell> = (0..n).map(|_| Doorbell::local()).collect();
    let used: Vec<Peers> = (0..n).map(|_| Arc::default()).collect();
    let mut links: Vec<Vec<Option<Box<dyn Transport>>>> = (0..n).map(|_| (0..n).map(|_| None).collect()).collect();
    for (a, b) in (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))) {
        let (left, right) = Local::pair((bells[a].clone(), bells[b].clone()), 64 << 10);
        links[a][b] = Some(Box::new(Noted { inner: left, peer: b, used: used[a].clone() }));
        links[b][a] = Some(Box::new(Noted { inner: right, peer: a, used: used[b].clone() }));
    }
    let meshes = links.into_iter().zip(bells).enumerate();
    let mesh = |(rank, (links, bell))| Mesh::new(rank, (0..n).collect(), links, Some(bell));
    (meshes.map(|each| Net { limits: SMALL_LIMITS, ..Net::new(mesh(each)) }).collect(), used)
}

#[test]
fn a_rank_of_many_exchanges_messages_with_ranks_at_distances_of_powers_of_two() {
    let op = ReduceOp::Sum;
    for n in [17, 24, 64, 100] {
        // With more ranks, a tensor that is long enough for a ring needs much memory, and a ring has two peers for any
        // n.
        let large = if n == 17 { n * RING_SHARD / 4 } else { 10_000 };
        let (mut nets, used) = noted(n);
        let root = n / 3;
        let most = 2 * n.next_power_of_two().ilog2() as usize + 2;
        let of_all_reduce = [0, 1, 5000, large];
        for (verb, counts) in [
            (Verb::Barrier, &[0][..]),
            (Verb::AllGather, &[0, 1, 200]),
            (Verb::Gather { root }, &[0, 1, 200]),
            (Verb::Scatter { root }, &[0, 1, 200]),
            (Verb::Broadcast { root }, &[0, 1, 200]),
            (Verb::ReduceScatter(op), &[0, 1, 200]),
            (Verb::AllReduce(op), &of_all_reduce),
            (Verb::Reduce { op, root }, &[0, 1, 5000]),
        ] {
            for count in counts {
                let dtypes: &[DType] = if n > 64 && verb.op().is_some() && *count < 100_000 {
                    &[DType::F32, DType::BF16]
                } else {
                    &[DType::F32]
                };
                for dtype in dtypes {
                    used.iter().for_each(|used| used.lock().unwrap().clear());
                    let whole = matches!(verb, Verb::AllReduce(_) | Verb::Reduce { .. } | Verb::Broadcast { .. });
                    let len = count * dtype.size() * if whole { 1 } else { n };
                    on_all(&mut nets, |_, net| {
                        call(net, verb, *dtype, *count, Io::in_place(&mut vec![0; len])).unwrap();
                    });
                    let doubles = matches!(verb, Verb::AllReduce(_)) && len <= SMALL;
                    for (rank, used) in used.iter().enumerate() {
                        let peers = used.lock().unwrap();
                        let what = format!("{verb:?} of {count} {dtype:?}: {peers:?} of {n} on {rank}");
                        assert!((1..=most).contains(&peers.len()), "{what}");
                        let near = |peer: &usize| [peer + n - rank, rank + n - peer].map(|d| (d % n).is_power_of_two());
                        assert!(doubles || peers.iter().all(|peer| near(peer).contains(&true)), "{what}");
                    }
                }
            }
        }
        used.iter().for_each(|used| used.lock().unwrap().clear());
        on_all(&mut nets, |_, net| call(net, Verb::AllToAll, DType::U8, 1, Io::in_place(&mut vec![0; n])).unwrap());
        assert!(used.iter().all(|used| used.lock().unwrap().len() == n - 1), "all_to_all needs every pair");
    }
}

#[test]
fn whatever_verb_of_all_ranks_another_runs_instead_a_neighbour_sees_the_difference() {
    let verbs: [(Verb<'_>, usize); 8] = [
        (Verb::Barrier, 0),
        (Verb::AllGather, 1),
        (Verb::AllGather, 100),
        (Verb::AllReduce(ReduceOp::Sum), 1),
        (Verb::AllReduce(ReduceOp::Sum), 6000),
        (Verb::AllReduce(ReduceOp::Sum), 24 * RING_SHARD / 4),
        (Verb::ReduceScatter(ReduceOp::Sum), 1),
        (Verb::ReduceScatter(ReduceOp::Sum), 100),
    ];
    let pairs = || (0..verbs.len()).flat_map(|one| (0..verbs.len()).map(move |other| (one, other)));
    for n in [17, 24] {
        // Runs every pair of different verbs, each time with one rank that calls the other verb.
        for (index, (one, other)) in pairs().filter(|(one, other)| one != other).enumerate() {
            let odd = index % n;
            let healths: Vec<_> = (0..n).map(|rank| GroupHealth::local(rank, n)).collect();
            let outcomes = on_all(&mut nets(n, SMALL_LIMITS), |rank, net| {
                let (verb, count) = verbs[if rank == odd { other } else { one }];
                let len = count * 4 * if matches!(verb, Verb::AllReduce(_)) { 1 } else { n };
                let mut data = vec![0; len];
                let outcome = call_with(&healths[rank], net, verb, DType::F32, count, Io::in_place(&mut data));
                // Report the first cause to the other ranks, as the control plane does.
                if let Err(cause) = &outcome {
                    healths.iter().for_each(|health| health.fail_from_peer(cause.clone()));
                }
                outcome
            });
            for (rank, outcome) in outcomes.iter().enumerate() {
                let what = format!("rank {odd} of {n} runs {:?}, the others {:?}", verbs[other], verbs[one]);
                assert!(matches!(outcome, Err(Error::Mismatch(_))), "{what}: {outcome:?} on rank {rank}");
            }
        }
    }
}
