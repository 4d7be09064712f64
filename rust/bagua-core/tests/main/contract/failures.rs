//! Invariants 3 and 4 of `bagua_core::collective`: nothing is used before it is checked, and every wait ends. There is
//! no control plane, and each rank has a health of its own.

use std::sync::Barrier;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bagua_core::collective::{Incoming, Io, Net, Outgoing, Verb};
use bagua_core::error::{Error, Result};
use bagua_core::health::GroupHealth;
use bagua_core::stats::Stats;
use bagua_core::transport::frame::Header;
use bagua_core::transport::{Mesh, Transport};
use bagua_core::types::{DType, Fingerprint, Kind, ReduceOp, Shape};

use super::world::{
    Ends, Rank, Ranks, Say, bundled, each, each_leaving, local, local_ends, mixed, tcp, tcp_ends, tls, tls_ends, world,
};

const EVERY: [Ranks; 5] = [local, tcp, tls, mixed, bundled];
/// Far below the deadline of an operation: what ends within it has not waited for that.
const SOON: Duration = Duration::from_secs(20);

fn all_reduce(rank: &mut Rank, say: Say) -> Result<()> {
    let op = say.op.unwrap_or(ReduceOp::Sum);
    let mut data = vec![0; say.count * say.dtype.size()];
    rank.call(Say { op: Some(op), ..say }, |x, cx| x.run(cx, Verb::AllReduce(op), Io::in_place(&mut data)))
}

fn floats(count: usize) -> Say {
    Say::new(Kind::AllReduce, DType::F32, count)
}

#[test]
fn a_rank_that_leaves_is_lost_to_the_others_within_a_second() {
    for ranks in EVERY {
        for count in [1, 1 << 20] {
            let outcomes = each_leaving(world(ranks, 3), |r, rank| {
                let start = Instant::now();
                let first = all_reduce(rank, floats(count));
                let second = if r == 2 { Ok(()) } else { all_reduce(rank, floats(count)) };
                (first, second, start.elapsed())
            });
            for (r, (first, second, _)) in outcomes.iter().enumerate() {
                assert_eq!(*first, Ok(()), "rank {r}");
                assert_eq!(second.is_ok(), r == 2, "rank {r}");
            }
            // The second rank to notice may blame the first rank. Only a health of the whole group would name the rank
            // that left.
            let blamed: Vec<_> = outcomes.iter().filter_map(|(_, second, _)| second.clone().err()).collect();
            assert!(blamed.iter().any(|e| matches!(e, Error::PeerLost { rank: 2, .. })), "{blamed:?}");
            assert!(blamed.iter().all(|e| matches!(e, Error::PeerLost { .. })), "{blamed:?}");
            assert!(outcomes.iter().all(|(_, _, time)| *time < SOON));
        }
    }
}

/// A rank 0 of 2 whose peer is the test itself, at the other end of the stream.
fn rank_and_raw_peer(ends: Ends) -> (Rank, Box<dyn Transport>) {
    let [(mine, bell), (theirs, _)] = ends();
    let mesh = Mesh::new(0, vec![0, 1], vec![None, Some(mine)], Some(bell));
    let collective = Box::new(Net::new(mesh));
    (Rank { collective, health: GroupHealth::local(0, 2), stats: Stats::default(), seq: 0 }, theirs)
}

fn send_all(peer: &mut dyn Transport, bytes: &[u8]) {
    assert_eq!(peer.send(bytes, &[]), Ok(bytes.len()), "a few bytes fit into any stream");
}

fn header(kind: Kind, count: usize, body: usize) -> Header {
    let (dtype, shape) = (DType::U8, Shape::flat(count));
    let fingerprint = Fingerprint { epoch: 1, shape, ..Fingerprint::new(kind, dtype, count) };
    Header::whole(fingerprint, 0, body, 0)
}

fn receive(rank: &mut Rank, into: &mut [u8]) -> Result<()> {
    rank.call(Say::new(Kind::Send, DType::U8, into.len()), |x, cx| {
        x.exchange(cx, &[], &mut [Incoming::new(1, cx.fingerprint, into)])
    })
}

#[test]
fn a_peer_that_goes_in_the_middle_of_a_message_is_lost_and_the_error_says_how_far_it_came() {
    for ends in [local_ends, tcp_ends, tls_ends] as [Ends; 3] {
        let (mut rank, mut peer) = rank_and_raw_peer(ends);
        send_all(peer.as_mut(), &header(Kind::Send, 100, 100).encode());
        send_all(peer.as_mut(), &[7; 60]);
        drop(peer);
        let start = Instant::now();
        let error = receive(&mut rank, &mut [0; 100]).unwrap_err();
        assert!(start.elapsed() < SOON);
        let Error::PeerLost { rank: 1, noticed_by: 0, progress: Some(progress), .. } = error else { panic!("{error}") };
        assert_eq!((progress.done, progress.total), (60, 100));
        assert!(progress.what.contains("send/recv"), "{}", progress.what);
    }
}

#[test]
fn a_peer_that_sent_its_part_and_left_is_not_blamed() {
    for ends in [local_ends, tcp_ends, tls_ends] as [Ends; 3] {
        let (mut rank, mut peer) = rank_and_raw_peer(ends);
        send_all(peer.as_mut(), &header(Kind::Send, 3, 3).encode());
        send_all(peer.as_mut(), &[7, 8, 9]);
        rank.health.depart(1);
        drop(peer);
        let mut into = [0; 3];
        assert_eq!(receive(&mut rank, &mut into), Ok(()));
        assert_eq!(into, [7, 8, 9]);
        let error = receive(&mut rank, &mut into).unwrap_err();
        assert!(error.to_string().contains("lost rank 1 on localhost: it left the group"), "{error}");
    }
}

#[test]
fn a_wait_for_a_rank_that_says_goodbye_ends_although_its_stream_is_open() {
    std::thread::scope(|scope| {
        for ends in [local_ends, tcp_ends, tls_ends] as [Ends; 3] {
            scope.spawn(move || {
                let (mut rank, _peer) = rank_and_raw_peer(ends);
                let health = rank.health.clone();
                let waiting = std::thread::spawn(move || receive(&mut rank, &mut [0; 3]));
                health.depart(1);
                let error = waiting.join().unwrap().unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
            });
        }
    });
}

#[test]
fn garbage_on_a_stream_is_an_error_that_names_the_peer() {
    for ends in [local_ends, tcp_ends, tls_ends] as [Ends; 3] {
        let (mut rank, mut peer) = rank_and_raw_peer(ends);
        send_all(
            peer.as_mut(),
            b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: a browser whose name is longer than a header of this protocol\r\n\r\n",
        );
        let mut into = [0; 100];
        let error = receive(&mut rank, &mut into).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch(_)), "{text}");
        assert!(text.contains("rank 1 does no message of this protocol"), "{text}");
        assert_eq!(into, [0; 100], "bytes of an unchecked message were used");
    }
}

#[test]
fn a_message_of_another_length_or_step_is_refused_before_a_byte_of_it_is_used() {
    for (bad, says) in [
        (header(Kind::Send, 100, 101), "with 101 bytes instead of 100"),
        (Header { part: 3, ..header(Kind::Send, 100, 100) }, "in step 3 instead of 0"),
    ] {
        let (mut rank, mut peer) = rank_and_raw_peer(local_ends);
        send_all(peer.as_mut(), &bad.encode());
        send_all(peer.as_mut(), &[7; 101]);
        let mut into = [0; 100];
        let error = receive(&mut rank, &mut into).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!(into, [0; 100], "bytes of an unchecked message were used");
    }
}

#[test]
fn ranks_that_disagree_both_see_what_the_other_does() {
    let say = floats(1000);
    let other: [(&str, Say); 6] = [
        ("all_gather", Say { kind: Kind::AllGather, ..say }),
        ("barrier", Say { kind: Kind::Barrier, count: 0, ..say }),
        ("float64", Say { dtype: DType::F64, ..say }),
        ("[999]", Say { count: 999, ..say }),
        ("all_reduce(max)", Say { op: Some(ReduceOp::Max), ..say }),
        ("[3000000]", Say { count: 3_000_000, ..say }),
    ];
    for ranks in EVERY {
        for (text, other) in other {
            let outcomes = each(&mut world(ranks, 2), |r, rank| match if r == 0 { say.kind } else { other.kind } {
                Kind::AllGather => {
                    let mut all = vec![0; 8000];
                    rank.call(other, |x, cx| x.run(cx, Verb::AllGather, Io::in_place(&mut all)))
                }
                Kind::Barrier => rank.call(other, |x, cx| x.run(cx, Verb::Barrier, Io::none())),
                _ => all_reduce(rank, if r == 0 { say } else { other }),
            });
            for (r, outcome) in outcomes.into_iter().enumerate() {
                let Err(Error::Mismatch(found)) = outcome else { panic!("rank {r}, {text}: {outcome:?}") };
                assert!(found.starts_with(&format!("rank {r} does ")), "{found}");
                assert!(found.contains(text) && found.contains("all_reduce(sum) number 0 of float32[1000]"), "{found}");
            }
        }
    }
}

#[test]
fn a_late_rank_gets_named_in_a_timeout() {
    for ranks in EVERY {
        for count in [1, 1 << 20] {
            let (limit, begun) = (Duration::from_secs(1), Barrier::new(2));
            let outcomes = each(&mut world(ranks, 3), |r, rank| {
                if r == 2 {
                    return Ok(());
                }
                begun.wait();
                all_reduce(rank, Say { limit, ..floats(count) })
            });
            for outcome in &outcomes[..2] {
                let Err(Error::Timeout { after, missing, progress, .. }) = outcome else { panic!("{outcome:?}") };
                assert_eq!((*after, missing.as_slice()), (limit, &[2][..]));
                let progress = progress.as_ref().unwrap();
                assert!(progress.done < progress.total, "{progress:?}");
            }
        }
    }
}

#[test]
fn a_deadline_ends_a_send_that_the_peer_does_not_receive() {
    for ranks in EVERY {
        let mut world = world(ranks, 2);
        let data = vec![0; 64 << 20];
        let say = Say { limit: Duration::from_millis(50), ..Say::new(Kind::Send, DType::U8, data.len()) };
        let outcome = world[0].call(say, |x, cx| x.exchange(cx, &[Outgoing::new(1, cx.fingerprint, &data)], &mut []));
        assert!(matches!(&outcome, Err(Error::Timeout { missing, .. }) if *missing == [1]), "{outcome:?}");
    }
}

#[test]
fn a_failure_elsewhere_ends_a_wait_at_once_with_that_cause() {
    for ranks in EVERY {
        let mut world = world(ranks, 2);
        let health = world[0].health.clone();
        let started = Barrier::new(2);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                started.wait();
                all_reduce(&mut world[0], floats(10))
            });
            started.wait();
            let start = Instant::now();
            let cause = Error::Aborted("enough".to_owned());
            health.fail_from_peer(cause.clone());
            assert_eq!(waiting.join().unwrap(), Err(cause));
            assert!(start.elapsed() < SOON);
        });
    }
}

#[test]
fn a_message_to_oneself_is_refused_and_nothing_is_lost() {
    let mut world = world(local, 2);
    let refused = world[0].call(Say::new(Kind::Send, DType::U8, 1), |x, cx| {
        x.exchange(cx, &[Outgoing::new(0, cx.fingerprint, &[1])], &mut [])
    });
    assert!(refused.unwrap_err().is_argument());
    world[0].seq = 0;
    assert!(each(&mut world, |_, rank| all_reduce(rank, floats(9))).iter().all(Result::is_ok));
}

#[test]
fn bytes_on_a_wire_are_counted_and_bytes_in_memory_are_not() {
    for (ranks, is_wire) in [(local as Ranks, 0), (tcp as Ranks, 1)] {
        let mut world = world(ranks, 2);
        each(&mut world, |_, rank| all_reduce(rank, floats(1000))).into_iter().for_each(Result::unwrap);
        for rank in &world {
            let stats = rank.stats.of(Kind::AllReduce);
            let moved = (stats.wire_bytes_sent.load(Relaxed), stats.wire_bytes_received.load(Relaxed));
            assert_eq!(moved, (is_wire * 4104, is_wire * 4104));
            assert!(stats.snapshot().reduce_s > 0.0);
        }
    }
}
