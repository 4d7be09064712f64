//! The contract of `Transport`: bytes arrive once, in order, unchanged, and neither call blocks.

use std::time::Duration;

use bagua_core::transport::{Readiness, Transport};
use bagua_core::wait::Doorbell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::oracle::noise;
use super::world::{Ends, local_ends, shm_ends, tcp_ends, tls_ends};

macro_rules! contract {
    ($name:ident, $ends:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn bytes_arrive_in_order_in_both_directions_at_once() {
                super::bytes_arrive_in_order_in_both_directions_at_once($ends);
            }

            #[test]
            fn neither_call_blocks() {
                super::neither_call_blocks($ends);
            }

            #[test]
            fn what_was_sent_before_the_peer_went_can_be_received_and_then_it_is_broken() {
                super::what_was_sent_before_the_peer_went_can_be_received_and_then_it_is_broken($ends);
            }

            #[test]
            fn sending_to_a_peer_that_went_breaks() {
                super::sending_to_a_peer_that_went_breaks($ends);
            }
        }
    };
}

contract!(local, local_ends);
contract!(shm, shm_ends);
contract!(tcp, tcp_ends);
contract!(tls, tls_ends);

/// Sleeps for at most 20 ms, in the way that the transport's readiness asks for.
fn sleep(end: &dyn Transport, bell: &Doorbell, rings: u32, wanted: PollFlags) {
    match end.readiness() {
        Readiness::Doorbell => bell.wait(rings, Duration::from_millis(20)),
        Readiness::Poll => bell.wait(bell.rings(), Duration::from_millis(1)),
        Readiness::Descriptor(fd) => {
            let timeout = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let _ = poll(&mut [PollFd::from_borrowed_fd(fd, wanted)], Some(&timeout));
        }
    }
}

fn bytes_arrive_in_order_in_both_directions_at_once(ends: Ends) {
    const TOTAL: usize = 300_000;
    let stream = |end: usize| (0..TOTAL).map(move |i| noise(end, i) as u8).collect::<Vec<u8>>();
    let run = |me: usize, mut end: Box<dyn Transport>, bell: Doorbell| {
        let (out, expected) = (stream(me), stream(1 - me));
        let (mut sent, mut got, mut turn) = (0, Vec::<u8>::new(), 0);
        while sent < TOTAL || got.len() < TOTAL {
            turn += 1;
            let rings = bell.rings();
            // Heads, bodies and reads have uneven lengths. Some heads and bodies are empty.
            let head = &out[sent..(sent + noise(me, turn) as usize % 100).min(TOTAL)];
            let body = &out[sent + head.len()..(sent + head.len() + noise(me + 2, turn) as usize % 5000).min(TOTAL)];
            let moved_out = end.send(head, body).unwrap();
            assert!(moved_out <= head.len() + body.len());
            sent += moved_out;
            let mut into = vec![0; 1 + noise(me + 4, turn) as usize % 3000];
            let moved_in = if got.len() < TOTAL { end.recv(&mut into).unwrap() } else { 0 };
            got.extend(&into[..moved_in]);
            if moved_out + moved_in == 0 {
                let mut wanted = PollFlags::IN;
                wanted.set(PollFlags::OUT, sent < TOTAL);
                sleep(end.as_ref(), &bell, rings, wanted);
            }
        }
        assert!(got == expected, "the stream changed in transit");
        // Dropped only after the other end has everything too: the sockets' own buffers see to that.
        end
    };
    let [(left, left_bell), (right, right_bell)] = ends();
    std::thread::scope(|scope| {
        let left = scope.spawn(|| run(0, left, left_bell));
        let right = scope.spawn(|| run(1, right, right_bell));
        drop((left.join().unwrap(), right.join().unwrap()));
    });
}

fn neither_call_blocks(ends: Ends) {
    let [(mut left, _), (mut right, _)] = ends();
    assert_eq!(left.recv(&mut [0; 8]), Ok(0));
    let block = vec![7; 1 << 20];
    let mut sent = 0u64;
    // The stream is full at some point, because no socket buffer holds a thousand megabytes.
    let full = (0..1000).any(|_| {
        let count = left.send(&[], &block).unwrap();
        sent += count as u64;
        count == 0
    });
    assert!(full, "{sent} bytes were taken that the peer did not receive");
    assert_eq!(right.send(&[1], &[]), Ok(1), "the other direction is full too");
}

fn what_was_sent_before_the_peer_went_can_be_received_and_then_it_is_broken(ends: Ends) {
    let [(mut left, _), (mut right, bell)] = ends();
    assert_eq!(left.send(&[1, 2], &[3, 4]), Ok(4));
    drop(left);
    let mut got: Vec<u8> = Vec::new();
    let broken = loop {
        let rings = bell.rings();
        let mut into = [0; 3];
        match right.recv(&mut into) {
            Ok(0) => sleep(right.as_ref(), &bell, rings, PollFlags::IN),
            Ok(count) => got.extend(&into[..count]),
            Err(broken) => break broken,
        }
    };
    assert_eq!(got, [1, 2, 3, 4]);
    assert!(!broken.how.is_empty());
}

fn sending_to_a_peer_that_went_breaks(ends: Ends) {
    let [(mut left, bell), (right, _)] = ends();
    drop(right);
    let mut broken = false;
    for _ in 0..100 {
        let rings = bell.rings();
        match left.send(&[1], &[2]) {
            Ok(_) => sleep(left.as_ref(), &bell, rings, PollFlags::IN),
            Err(_) => {
                broken = true;
                break;
            }
        }
    }
    assert!(broken);
}
