//! Streams between hosts: when they open, how many there are, and the algorithms of all_reduce over them.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use crate::group_world::{AT_ONCE, NEVER_SILENT, mixed_over, run_commands, try_world, until, world_with};
use bagua_collectives::{Algorithm, Io, Verb};
use bagua_group::{Bootstrap, Config, Group, Lane, Options, TransportChoice};
use bagua_kernels::error::Error;
use bagua_kernels::types::{DType, ReduceOp};
use rustix::process::Signal;

fn sum(groups: &[Group]) {
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| {
                let mut lane: Lane = group.lane().unwrap();
                let mut data = (lane.rank() as f32 + 1.0).to_le_bytes().repeat(500_000);
                lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))
                    .unwrap();
                let total = (1..=groups.len()).sum::<usize>() as f32;
                assert!(data.chunks(4).all(|element| element == total.to_le_bytes()));
            });
        }
    });
}

#[test]
fn ranks_with_different_numbers_of_streams_agree_on_the_smaller_one() {
    sum(&world_with(3, |config| {
        config.transport = TransportChoice::Tcp;
        config.streams_per_peer = [1, 2, 5][config.rank];
    }));
}

#[test]
fn a_rank_that_reads_nothing_for_longer_than_the_heartbeat_timeout_is_not_lost() {
    let groups = world_with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.heartbeat_timeout = Duration::from_secs(5);
    });
    let add = |lane: &mut Lane| {
        // More than the kernels of both ends hold.
        let mut data = vec![0; 64 << 20];
        lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data)).unwrap();
    };
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || {
                let mut lane = group.lane().unwrap();
                add(&mut lane);
                if group.rank() == 1 {
                    // The other rank's bytes wait for so long.
                    std::thread::sleep(Duration::from_secs(12));
                }
                add(&mut lane);
            });
        }
    });
}

#[test]
fn an_invalid_number_of_streams_is_refused_before_any_connection() {
    for streams in [0, 65] {
        let config = Config { streams_per_peer: streams, ..Config::new(0, 1) };
        let error = Bootstrap::bind(config).map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(text) if text.contains("between 1 and 64")), "{error}");
    }
}

#[test]
fn an_algorithm_is_found_by_its_name() {
    let named = |name| Algorithm::by_name("algorithm", name);
    assert!(Algorithm::ALL.into_iter().all(|algorithm| named(algorithm.name()) == Ok(algorithm)));
    let unknown = "no algorithm 'Ring'; known: auto, direct, ring, doubling, halving";
    assert_eq!(named("Ring"), Err(Error::InvalidArgument(unknown.to_owned())));
}

#[test]
fn every_configured_algorithm_sums_correctly() {
    for algorithm in Algorithm::ALL {
        sum(&world_with(3, |config| {
            config.transport = TransportChoice::Tcp;
            config.algorithm = algorithm;
        }));
    }
}

#[test]
fn ranks_with_different_algorithms_fail_with_a_mismatch_that_names_both() {
    let outcomes = try_world(2, |config| {
        config.algorithm = [Algorithm::Auto, Algorithm::Ring][config.rank];
    });
    for outcome in outcomes {
        let error = outcome.map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::Mismatch(text) if text.contains("ring") && text.contains("auto")), "{error}");
    }
}

#[test]
#[ignore = "the other tests start processes that run this"]
fn entry_of_processes() {
    run_commands();
}

/// Data connections of a rank: opened so far, and closed.
fn streams(group: &Group) -> (u64, u64) {
    (group.stats().data_opened.load(SeqCst), group.stats().data_closed.load(SeqCst))
}

fn tcp_world(size: usize) -> Vec<Group> {
    world_with(size, |config| config.transport = TransportChoice::Tcp)
}

/// Runs an operation on every rank at the same time.
fn together<T: Send>(lanes: &mut [Lane], run: impl Fn(usize, &mut Lane) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let start = |(rank, lane)| scope.spawn(move || run(rank, lane));
        let threads: Vec<_> = lanes.iter_mut().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn lanes(groups: &[Group]) -> Vec<Lane> {
    groups.iter().map(|group| group.lane().unwrap()).collect()
}

#[test]
fn a_lane_has_no_stream_before_its_first_operation_and_closes_its_streams_when_it_ends() {
    let groups = tcp_world(3);
    // One after the other: no rank waits for another one.
    let mut used = lanes(&groups);
    let unused = lanes(&groups);
    assert!(groups.iter().all(|group| streams(group) == (0, 0)));
    assert_eq!(used[0].transports(), ["self", "tcp", "tcp"]);
    for _ in 0..2 {
        together(&mut used, |_, lane| lane.barrier(&Options::default()).unwrap());
        assert!(groups.iter().all(|group| streams(group) == (2, 0)), "a stream to each of two peers, once");
    }
    drop(unused);
    drop(used);
    assert!(groups.iter().all(|group| streams(group) == (2, 2)));
}

#[test]
fn streams_beyond_the_first_open_with_the_first_message_that_is_divided_between_streams() {
    let groups = world_with(3, |config| {
        config.transport = TransportChoice::Tcp;
        config.streams_per_peer = 3;
    });
    let mut lanes = lanes(&groups);
    let mut broadcast = |bytes: usize| {
        together(&mut lanes, |rank, lane| {
            let sent: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            let mut data = if rank == 0 { sent.clone() } else { vec![0; bytes] };
            lane.run(&Options::default(), DType::U8, Verb::Broadcast { root: 0 }, Io::in_place(&mut data)).unwrap();
            assert!(data == sent);
        });
        groups.iter().map(streams).collect::<Vec<_>>()
    };
    let undivided = 48 << 10;
    for bytes in [0, undivided] {
        assert_eq!(broadcast(bytes), [(2, 0), (1, 0), (1, 0)], "{bytes}");
    }
    for bytes in [undivided + 1, 10 << 20, 1] {
        assert_eq!(broadcast(bytes), [(6, 0), (3, 0), (3, 0)], "{bytes}");
    }
}

#[test]
fn an_all_reduce_of_many_ranks_opens_further_streams_along_the_ring_only() {
    let ranks = 17;
    let groups = tcp_world(ranks);
    let mut lanes = lanes(&groups);
    let mut sum = |bytes: usize| {
        together(&mut lanes, |_, lane| {
            let mut data = 1u32.to_le_bytes().repeat(bytes / 4);
            lane.run(&Options::default(), DType::U32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data)).unwrap();
            assert!(data.chunks(4).all(|element| element == (ranks as u32).to_le_bytes()));
        });
        groups.iter().map(|group| streams(group).0).max().unwrap()
    };
    // Doubling uses a stream to each of log2 n ranks, to the neighbours, and to the rank whose values are added first.
    let small = sum(4 << 10);
    assert!(small <= 4 + 2 + 1, "{small}");
    // A ring: the second to two of them.
    let large = sum(ranks * (64 << 10));
    assert!(large <= small + 2, "{large} after {small}");
}

#[test]
fn an_all_reduce_along_a_ring_opens_streams_to_two_peers_only() {
    let groups = world_with(5, |config| {
        config.transport = TransportChoice::Tcp;
        config.algorithm = Algorithm::Ring;
    });
    let mut lanes = lanes(&groups);
    together(&mut lanes, |rank, lane| {
        let mut data = (rank as f32 + 1.0).to_le_bytes().repeat(1000);
        lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data)).unwrap();
        assert!(data.chunks(4).all(|element| element == 15f32.to_le_bytes()));
    });
    assert!(groups.iter().all(|group| streams(group) == (2, 0)));
    // The streams to the others open when they are needed, beside those that are open.
    together(&mut lanes, |_, lane| lane.barrier(&Options::default()).unwrap());
    assert!(groups.iter().all(|group| streams(group) == (4, 0)));
}

#[test]
fn ranks_that_run_different_operations_get_a_mismatch_although_they_open_different_streams() {
    let groups = tcp_world(3);
    let outcomes = together(&mut lanes(&groups), |rank, lane| {
        let mut data = [0; 4];
        // The barrier of rank 1 asks for a stream to rank 2, which asks for none to rank 1.
        let verb = if rank == 1 { Verb::Barrier } else { Verb::Broadcast { root: 0 } };
        let io = if rank == 1 { Io::none() } else { Io::in_place(&mut data) };
        lane.run(&Options::default(), DType::U8, verb, io)
    });
    let Err(Error::Mismatch(text)) = &outcomes[1] else { panic!("{outcomes:?}") };
    assert!(text.contains("rank 1 does barrier") && text.contains("rank 0 does broadcast"), "{text}");
}

#[test]
fn a_rank_that_does_not_come_while_streams_open_is_named_in_a_timeout() {
    // In both directions, the higher rank dials. The two ranks meet long before the deadline, even on a busy machine.
    let options = Options { timeout: Some(Duration::from_secs(8)), label: "bucket 7", ..Options::default() };
    let come_without = |absent| {
        let groups = tcp_world(3);
        let mut lanes = lanes(&groups);
        let outcomes = together(&mut lanes, |rank, lane| (rank != absent).then(|| lane.barrier(&options)));
        for outcome in outcomes.into_iter().flatten() {
            let Err(Error::Timeout { missing, progress: Some(progress), .. }) = &outcome else { panic!("{outcome:?}") };
            assert_eq!((missing.as_slice(), progress.label.as_str()), (&[absent][..], "bucket 7"));
            assert!(progress.what.contains("barrier"), "{progress:?}");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| come_without(0));
        come_without(2);
    });
}

#[test]
fn a_rank_that_leaves_or_raises_while_streams_open_is_named() {
    for by_leaving in [false, true] {
        let groups = tcp_world(2);
        let mut lane = groups[0].lane().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || lane.barrier(&Options::default()));
            if by_leaving {
                groups[1].leave()
            } else {
                groups[1].raise("ValueError", "bad number")
            }
            match waiting.join().unwrap().unwrap_err() {
                Error::PeerLost { rank: 1, reason, .. } if by_leaving => assert_eq!(reason, "it left the group"),
                Error::PeerRaised { rank: 1, .. } if !by_leaving => {}
                other => panic!("{other:?}"),
            }
        });
    }
}

#[test]
fn a_rank_that_is_killed_while_streams_open_is_named_at_once() {
    for (killed, survivor) in [(0, 1), (1, 0)] {
        let (groups, processes) =
            mixed_over(TransportChoice::Tcp, "streams::entry_of_processes", 2, &[killed], NEVER_SILENT);
        let mut lane = groups[0].lane().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || lane.barrier(&Options::default()));
            if survivor > killed {
                until("the stream has been opened to the peer", || streams(&groups[0]).0 == 1);
            }
            let start = Instant::now();
            processes[0].signal(Signal::KILL);
            let error = waiting.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank, .. } if rank == killed), "{error:?}");
            assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
        });
    }
}
