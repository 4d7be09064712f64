//! Lanes of several ranks, each a thread, over the mesh of one process.

use super::*;
use crate::collective::Net;
use crate::request::{PartLayout, PeerSelection};
use crate::transport::local_mesh;
use crate::types::ReduceOp;

const SOON: Duration = Duration::from_secs(60);
const O: &Options<'static> = &Options::DEFAULT;

/// Runs `body` on every rank of a group of `size` and returns what each rank returned.
fn world<T: Send>(size: usize, body: impl Fn(usize, &mut Lane) -> T + Sync) -> Vec<T> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = local_mesh(size)
            .into_iter()
            .enumerate()
            .map(|(rank, mesh)| {
                scope.spawn(move || {
                    let net = Box::new(Net::new(mesh));
                    let mut lane = Lane::new(net, GroupHealth::local(rank, size), Arc::default(), 1, 2, SOON);
                    body(rank, &mut lane)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_different_order_is_reported_on_both_sides_with_what_each_was_doing() {
    let errors = world(2, |rank, lane| {
        let data = &mut [0u8; 16];
        let first = if rank == 0 {
            lane.run(O, DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(data))
        } else {
            lane.run(O, DType::F32, Verb::AllGather, Io::in_place(data))
        };
        let error = first.unwrap_err();
        // The group is poisoned. The next operation returns the same error, even if both ranks would agree on it.
        assert_eq!(lane.barrier(O), Err(error.clone()));
        error
    });
    for error in errors {
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
        for text in ["rank 0 does", "rank 1 does", "all_reduce(sum)", "all_gather"] {
            assert!(error.to_string().contains(text), "{text:?} in {error}");
        }
    }
}

#[test]
fn a_different_shape_of_as_many_elements_is_a_mismatch_on_both_sides() {
    let errors = world(2, |rank, lane| {
        let shape = Some(Shape::new(if rank == 0 { &[2, 3] } else { &[3, 2] }));
        lane.run(&Options { shape, ..*O }, DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut [0; 24]))
            .unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch(_)) && text.contains("[2, 3]") && text.contains("[3, 2]"), "{text}");
    }
}

#[test]
fn an_argument_error_on_one_rank_leaves_the_ranks_in_step() {
    let sums = world(3, |rank, lane| {
        let mut data = [rank as u8 + 1; 6];
        if rank == 1 {
            assert!(
                lane.run(O, DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))
                    .unwrap_err()
                    .is_argument()
            );
        }
        lane.run(O, DType::U8, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data)).unwrap();
        data
    });
    assert_eq!(sums, [[6; 6]; 3]);
}

/// Returns the number of elements that one rank sends to another: 0 to 3.
fn count(from: usize, to: usize) -> usize {
    (from * 2 + to * 3) % 4
}

#[test]
fn all_to_all_v_delivers_uneven_parts_split_and_in_place() {
    for size in [1, 2, 3, 5] {
        world(size, |rank, lane| {
            let send_counts: Vec<usize> = (0..size).map(|to| count(rank, to)).collect();
            let recv_counts: Vec<usize> = (0..size).map(|from| count(from, rank)).collect();
            let starts = |counts: &[usize]| -> Vec<usize> {
                counts.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect()
            };
            let send_displs = starts(&send_counts);
            // The receive parts lie in reverse rank order, so that ignoring the displacements would fail the test.
            let backwards: Vec<usize> = recv_counts.iter().rev().copied().collect();
            let recv_displs: Vec<usize> = starts(&backwards).into_iter().rev().collect();
            let value = |from: usize, to: usize, index: usize| (from * 1000 + to * 100 + index) as i32;
            let src: Vec<u8> = (0..size)
                .flat_map(|to| (0..count(rank, to)).flat_map(move |i| value(rank, to, i).to_ne_bytes()))
                .collect();
            let expected: Vec<u8> = (0..size)
                .rev()
                .flat_map(|from| (0..count(from, rank)).flat_map(move |i| value(from, rank, i).to_ne_bytes()))
                .collect();
            let send = PartLayout { counts: &send_counts, displs: &send_displs };
            let recv = PartLayout { counts: &recv_counts, displs: &recv_displs };
            let mut dst = vec![0; expected.len()];
            lane.run(O, DType::I32, Verb::AllToAllV { send, recv }, Io::split(&src, &mut dst)).unwrap();
            assert_eq!(dst, expected, "rank {rank} of {size}");
            let mut both = src.clone();
            both.resize(src.len().max(expected.len()), 0);
            lane.run(O, DType::I32, Verb::AllToAllV { send, recv }, Io::in_place(&mut both)).unwrap();
            assert_eq!(both[..expected.len()], expected, "rank {rank} of {size}, in place");
        });
    }
}

#[test]
fn counts_that_do_not_meet_are_an_error_on_the_rank_that_sees_it() {
    let errors = world(2, |rank, lane| {
        let send = PartLayout { counts: &[1, 1], displs: &[0, 1] };
        let recv = PartLayout { counts: if rank == 0 { &[1, 2] } else { &[1, 1] }, displs: &[0, 1] };
        lane.run(O, DType::I32, Verb::AllToAllV { send, recv }, Io::in_place(&mut [0; 12]))
    });
    assert!(matches!(errors[0], Err(Error::Mismatch(_))), "{:?}", errors[0]);
}

#[test]
fn the_mean_of_peers_is_the_same_in_place_and_in_two_buffers() {
    for size in [1, 2, 3, 5] {
        world(size, |rank, lane| {
            let value = |rank: usize| 0.1 + 0.7 * rank as f32;
            let mut peers = vec![rank, (rank + 1) % size, (rank + size - 1) % size];
            peers.sort_unstable();
            peers.dedup();
            let mean = peers.iter().map(|rank| value(*rank)).sum::<f32>() / peers.len() as f32;
            let verb = Verb::NeighborAverage { peers: PeerSelection::Ring, round: 0 };
            let (src, mut dst) = (value(rank).to_ne_bytes(), [0; 4]);
            lane.run(O, DType::F32, verb, Io::split(&src, &mut dst)).unwrap();
            assert_eq!(f32::from_ne_bytes(dst), mean, "rank {rank} of {size}");
            let mut both = src;
            lane.run(O, DType::F32, verb, Io::in_place(&mut both)).unwrap();
            assert_eq!(both, dst, "rank {rank} of {size}, in place");
        });
    }
}

#[test]
fn a_deadline_that_passes_names_who_is_missing_and_ends_the_lane() {
    let done = std::sync::Barrier::new(2);
    world(2, |rank, lane| {
        if rank == 0 {
            let hurry = Options { timeout: Some(Duration::from_millis(30)), label: "bucket 7", ..*O };
            let error = lane.barrier(&hurry).unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
            assert!(error.to_string().contains("bucket 7"), "{error}");
            assert!(lane.barrier(O).is_err());
        }
        // Rank 1 stays silent until rank 0 has given up.
        done.wait();
    });
}
