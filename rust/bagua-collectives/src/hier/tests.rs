//! Hierarchies of ranks as threads: hosts as segments, networks as streams between threads.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::error::Error;
use crate::health::GroupHealth;
use crate::memory::Arena;
use crate::shm::{Shm, segment_len, spare_links};
use crate::stats::OpStats;
use crate::transport::{Mesh, local_mesh};
use crate::types::{DType, Fingerprint, Kind, Shape};
use crate::wait::Deadline;
use crate::{Algorithm, Net};

/// Returns one `Hier` per rank. Hosts are segments, and networks are streams between threads.
fn hiers(hosts: &[&[usize]], algorithm: Algorithm) -> Vec<Hier> {
    let world = hosts.iter().map(|host| host.len()).sum();
    let mut flats: Vec<Option<Mesh>> = local_mesh(world).into_iter().map(Some).collect();
    let mut ranks: Vec<(usize, Hier)> = Vec::new();
    for (host, leaders) in hosts.iter().zip(local_mesh(hosts.len())) {
        let arena = Arc::new(Arena::create("bagua-test", segment_len(host.len())).unwrap());
        let mut leaders = Some(leaders);
        for (index, rank) in host.iter().enumerate() {
            let intra = Box::new(Shm::new(Arc::clone(&arena), index, host.to_vec()).unwrap());
            let inter = leaders.take().map(|mesh| Box::new(Net::new(mesh).with(algorithm)) as Box<dyn Collective>);
            let flat = Net::new(flats[*rank].take().unwrap());
            let hosts = hosts.iter().map(|host| host.to_vec()).collect();
            ranks.push((*rank, Hier::new(intra, inter, hosts, *rank).with_flat(flat)));
        }
    }
    ranks.sort_by_key(|(rank, _)| *rank);
    ranks.into_iter().map(|(_, hier)| hier).collect()
}

/// Runs `act` as every rank. A collective lives until all ranks are done.
fn on_all<T: Send>(hosts: &[&[usize]], act: impl Fn(usize, &mut Hier, &GroupHealth) -> T + Sync) -> Vec<T> {
    on_all_by(hosts, Algorithm::Auto, act)
}

/// Runs `act` on all ranks like [`on_all`], with an algorithm between the hosts.
fn on_all_by<T: Send>(
    hosts: &[&[usize]],
    algorithm: Algorithm,
    act: impl Fn(usize, &mut Hier, &GroupHealth) -> T + Sync,
) -> Vec<T> {
    let mut hiers = hiers(hosts, algorithm);
    let world = hiers.len();
    std::thread::scope(|scope| {
        let act = &act;
        let start = |(rank, hier)| scope.spawn(move || act(rank, hier, &GroupHealth::local(rank, world)));
        let threads: Vec<_> = hiers.iter_mut().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn print(kind: Kind, seq: u64, count: usize) -> Fingerprint {
    Fingerprint { epoch: 1, seq, shape: Shape::flat(count), ..Fingerprint::new(kind, DType::F32, count) }
}

fn with<T>(health: &GroupHealth, fingerprint: Fingerprint, run: impl FnOnce(&OpContext<'_>) -> T) -> T {
    within(60_000, health, fingerprint, run)
}

fn within<T>(millis: u64, health: &GroupHealth, fingerprint: Fingerprint, run: impl FnOnce(&OpContext<'_>) -> T) -> T {
    let deadline = Deadline::after(Duration::from_millis(millis));
    let extra = &RefCell::default();
    run(&OpContext { fingerprint, deadline, health, stats: &OpStats::default(), label: "", extra })
}

/// Returns whole numbers, for which every order of addition gives the same sum.
fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 13 + rank * 7) % 64) as f32).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

const WORLDS: [&[&[usize]]; 6] = [
    &[&[0, 1], &[2, 3]],
    &[&[0, 2], &[1, 3, 4]],
    &[&[0], &[1, 2]],
    &[&[0], &[1]],
    &[&[0, 1, 2]],
    &[&[0, 3], &[1], &[2, 4]],
];
const COUNTS: [usize; 5] = [0, 7, 20_000, 300_001, 6 * CHUNK / 4 - 1];

#[test]
fn reductions_in_stages_equal_the_sum_over_all_hosts() {
    for hosts in WORLDS {
        on_all(hosts, |rank, hier, health| {
            let n = hier.size();
            for (seq, count) in COUNTS.into_iter().enumerate() {
                let sum: Vec<f32> =
                    (0..count).map(|at| (0..n).map(|r| ((at * 13 + r * 7) % 64) as f32).sum()).collect();
                let mean: Vec<f32> = sum.iter().map(|sum| sum / n as f32).collect();
                for (op, expected) in [(ReduceOp::Sum, bytes(&sum)), (ReduceOp::Avg, bytes(&mean))] {
                    let src = bytes(&values(rank, count));
                    let mut data = src.clone();
                    let all_reduce = print(Kind::AllReduce, seq as u64, count);
                    with(health, all_reduce, |cx| hier.run(cx, Verb::AllReduce(op), Io::in_place(&mut data))).unwrap();
                    assert!(data == expected, "all_reduce of {count} in place over {hosts:?}");
                    let mut dst = vec![1; src.len()];
                    with(health, all_reduce, |cx| hier.run(cx, Verb::AllReduce(op), Io::split(&src, &mut dst)))
                        .unwrap();
                    assert!(dst == expected, "all_reduce of {count} over {hosts:?}");
                    for root in 0..n {
                        let reduce = Fingerprint { root: Some(root as u32), ..print(Kind::Reduce, seq as u64, count) };
                        let mut data = src.clone();
                        with(health, reduce, |cx| hier.run(cx, Verb::Reduce { op, root }, Io::in_place(&mut data)))
                            .unwrap();
                        assert!(
                            data == *if rank == root { &expected } else { &src },
                            "reduce to {root} over {hosts:?}"
                        );
                    }
                    let mut dst = vec![1; if rank == n - 1 { src.len() } else { 0 }];
                    let reduce = print(Kind::Reduce, seq as u64, count);
                    with(health, reduce, |cx| {
                        hier.run(cx, Verb::Reduce { op, root: n - 1 }, Io::split(&src, &mut dst))
                    })
                    .unwrap();
                    assert!(rank != n - 1 || dst == expected);
                }
            }
        });
    }
}

#[test]
fn averages_of_float16_are_finite_where_the_sums_of_hosts_are_not() {
    // 40000, and 1.2e-7, whose float16 has two significant bits.
    for bits in [0x78e2_u16, 2] {
        for hosts in WORLDS {
            on_all(hosts, |rank, hier, health| {
                let count = CHUNK / 2 + 5;
                let given = bits.to_le_bytes().repeat(count);
                let say = |kind| Fingerprint { dtype: DType::F16, ..print(kind, 0, count) };
                let (mut all, mut one) = (vec![0; given.len()], given.clone());
                let op = ReduceOp::Avg;
                let run = |hier: &mut Hier, verb, io, kind| with(health, say(kind), |cx| hier.run(cx, verb, io));
                run(hier, Verb::AllReduce(op), Io::split(&given, &mut all), Kind::AllReduce).unwrap();
                run(hier, Verb::Reduce { op, root: 1 }, Io::in_place(&mut one), Kind::Reduce).unwrap();
                let far = |found: &[u8]| {
                    let found = found.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
                    found.map(|found| found.abs_diff(bits)).max()
                };
                // Tolerance in units in the last place: 0 if all hosts have the same number of ranks.
                let allowed = u16::from(hosts.iter().any(|host| host.len() != hosts[0].len()));
                assert!(far(&all) <= Some(allowed), "{:?} from {bits} over {hosts:?}", far(&all));
                assert!(far(&one) <= Some(allowed), "reduce: {:?} from {bits} on {rank} over {hosts:?}", far(&one));
            });
        }
    }
}

#[test]
fn every_algorithm_between_hosts_takes_chunks_in_stages() {
    for algorithm in Algorithm::ALL {
        on_all_by(WORLDS[5], algorithm, |rank, hier, health| {
            let count = 4 * CHUNK / 4 + 5;
            let mut data = bytes(&values(rank, count));
            let say = print(Kind::AllReduce, 0, count);
            with(health, say, |cx| hier.run(cx, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))).unwrap();
            let sum = |at| (0..5).map(|r| ((at * 13 + r * 7) % 64) as f32).sum();
            assert!(data == bytes(&(0..count).map(sum).collect::<Vec<f32>>()), "{}", algorithm.name());
        });
    }
}

#[test]
fn every_rank_can_be_the_root_of_a_broadcast() {
    for hosts in WORLDS {
        on_all(hosts, |rank, hier, health| {
            for (seq, count) in COUNTS.into_iter().enumerate() {
                for root in 0..hier.size() {
                    let mut data = bytes(&values(rank, count));
                    let say = Fingerprint { root: Some(root as u32), ..print(Kind::Broadcast, seq as u64, count) };
                    with(health, say, |cx| hier.run(cx, Verb::Broadcast { root }, Io::in_place(&mut data))).unwrap();
                    assert!(data == bytes(&values(root, count)), "from {root} over {hosts:?}");
                }
            }
        });
    }
}

#[test]
fn a_difference_between_hosts_is_seen_by_the_leaders() {
    let outcomes = on_all(WORLDS[0], |rank, hier, health| {
        let count = if rank < 2 { 100 } else { 200 };
        let mut data = bytes(&values(rank, count));
        let say = print(Kind::AllReduce, 0, count);
        // Without a control plane, ranks that wait for their leader run into a short deadline.
        within(300, health, say, |cx| hier.run(cx, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data)))
    });
    for leader in [0, 2] {
        assert!(matches!(outcomes[leader], Err(Error::Mismatch(_))), "{:?}", outcomes[leader]);
    }
}

#[test]
fn a_segment_carries_streams_of_its_own_beside_the_collective() {
    let arena = Arc::new(Arena::create("bagua-test", segment_len(2)).unwrap());
    std::thread::scope(|scope| {
        for index in 0..2 {
            let arena = Arc::clone(&arena);
            scope.spawn(move || {
                let mut shm = Shm::new(Arc::clone(&arena), index, vec![0, 1]).unwrap();
                let (links, bell) = spare_links(&arena, index, 2);
                let mut flat = Net::new(Mesh::new(index, vec![0, 1], links, Some(bell)));
                let health = GroupHealth::local(index, 2);
                for round in 0..20 {
                    for collective in [&mut shm as &mut dyn Collective, &mut flat] {
                        let mut data = bytes(&values(index, 50_000));
                        let say = print(Kind::AllReduce, round, 50_000);
                        with(&health, say, |cx| {
                            collective.run(cx, Verb::AllReduce(ReduceOp::Max), Io::in_place(&mut data))
                        })
                        .unwrap();
                        let both = values(0, 50_000).into_iter().zip(values(1, 50_000));
                        assert!(data == bytes(&both.map(|(left, right)| left.max(right)).collect::<Vec<_>>()));
                    }
                }
            });
        }
    });
}
