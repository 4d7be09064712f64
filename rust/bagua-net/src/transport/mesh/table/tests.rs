//! The invariants of closing the streams between two ranks.

use std::net::{TcpListener, TcpStream};

use super::*;
use crate::transport::{Tcp, Transport};

/// Index of the other rank, at ranks 0 and 1.
const PEER: [usize; 2] = [1, 0];

/// The tables of two ranks with a stream between them.
fn pair() -> [StreamTable; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let left = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let right = listener.accept().unwrap().0;
    let mut streams = [left, right].map(|stream| vec![Box::new(Tcp::new(stream).unwrap()) as Box<dyn Transport>]);
    [0, 1].map(|rank| {
        let mut bundles = [Vec::new(), Vec::new()];
        bundles[PEER[rank]] = std::mem::take(&mut streams[rank]);
        let endpoints = bundles.into_iter().enumerate().map(|(peer, bundle)| Endpoint::new(peer, bundle)).collect();
        StreamTable::new(Links { endpoints, messages: vec![PeerMessages::default(), PeerMessages::default()] })
    })
}

/// A run of a rank in which it sends and receives so many messages.
fn run(table: &StreamTable, rank: usize, sent: usize, received: usize) {
    let mut links = table.take();
    let messages = &mut links.messages[PEER[rank]];
    messages.begin((sent, received));
    messages.end();
    table.put(links, true);
}

#[test]
fn streams_close_at_both_ends_when_all_messages_have_come_by_invariant_1() {
    let [left, right] = pair();
    run(&left, 0, 2, 1);
    let request = left.ask(1).unwrap();
    assert_eq!(request, CloseRequest { number: 1, sent: 2, received: 1 });
    assert_eq!((left.open(), left.unanswered()), (0, vec![(1, request, 1)]));
    assert_eq!(right.requested(0, request), Some(false), "two messages are in flight, and one was not sent");
    left.answered(1, 1, false);
    assert_eq!((left.open(), right.open(), left.unanswered()), (1, 1, vec![]));

    run(&right, 1, 1, 2);
    let request = left.ask(1).unwrap();
    assert_eq!(right.requested(0, request), Some(true));
    assert_eq!((right.open(), right.idle()), (0, vec![]));
    left.answered(1, request.number, true);
    assert_eq!((left.open(), left.idle(), left.ask(1)), (0, vec![], None));
}

#[test]
fn streams_do_not_close_in_a_run_nor_after_one_that_failed() {
    let [left, right] = pair();
    let links = right.take();
    assert_eq!((right.ask(0), right.idle()), (None, vec![]));
    assert_eq!(right.requested(0, left.ask(1).unwrap()), Some(false));
    assert_eq!(right.open(), 1, "they may be idle later");
    left.answered(1, 1, false);
    right.put(links, false);
    assert_eq!((right.ask(0), right.idle(), right.open()), (None, vec![], 0));
    assert_eq!(right.requested(0, left.ask(1).unwrap()), Some(false));
}

#[test]
fn a_repeated_request_gets_the_same_answer_by_invariant_2() {
    let [left, right] = pair();
    let refused = left.ask(1).unwrap();
    let links = right.take();
    assert_eq!(right.requested(0, refused), Some(false));
    right.put(links, true);
    assert_eq!((right.requested(0, refused), right.open()), (Some(false), 1), "although it could close them now");
    left.answered(1, refused.number, false);

    let closed = left.ask(1).unwrap();
    assert_eq!(right.requested(0, closed), Some(true));
    let links = right.take();
    assert_eq!(right.requested(0, closed), Some(true), "also while it opens them again");
    assert_eq!(right.requested(0, refused), None);
    right.put(links, true);
}

#[test]
fn an_answer_to_an_earlier_request_has_no_effect() {
    let [left, _right] = pair();
    let first = left.ask(1).unwrap();
    left.answered(1, first.number, false);
    let second = left.ask(1).unwrap();
    left.answered(1, first.number, true);
    assert_eq!(left.unanswered(), [(1, second, 1)]);
    left.answered(1, second.number, false);
    left.answered(1, second.number, true);
    assert_eq!(left.open(), 1);
}

#[test]
fn two_ranks_that_ask_each_other_both_close() {
    let [left, right] = pair();
    let (one, other) = (left.ask(1).unwrap(), right.ask(0).unwrap());
    assert_eq!((right.requested(0, one), left.requested(1, other)), (Some(true), Some(true)));
    assert_eq!((left.unanswered(), right.unanswered()), (vec![], vec![]));
    left.answered(1, one.number, true);
    right.answered(0, other.number, true);
    assert_eq!((left.open(), right.open()), (0, 0));
}

#[test]
fn a_run_uses_streams_on_hold_after_the_answer_only_by_invariant_3() {
    for closed in [false, true] {
        let [left, _right] = pair();
        let request = left.ask(1).unwrap();
        let mut links = left.take();
        let endpoint = &mut links.endpoints[1];
        assert!(endpoint.is_held() && !endpoint.is_open());
        assert_eq!(left.settle(1, endpoint), None);
        left.answered(1, request.number, closed);
        assert!(!endpoint.is_open(), "the run settles it");
        assert_eq!(left.settle(1, endpoint), Some(closed));
        assert_eq!((endpoint.is_held(), endpoint.is_open(), left.settle(1, endpoint)), (false, !closed, None));
        left.put(links, true);
        assert_eq!(left.open(), usize::from(!closed));
    }
}

#[test]
fn an_answer_that_comes_in_a_run_without_the_peer_is_settled_at_its_end() {
    let [left, _right] = pair();
    let request = left.ask(1).unwrap();
    let links = left.take();
    left.answered(1, request.number, true);
    left.put(links, true);
    assert_eq!((left.open(), left.idle()), (0, vec![]));
    assert!(left.look(|endpoints| !endpoints[1].is_held()));
}

#[test]
fn all_streams_of_a_group_that_has_failed_are_closed_except_in_a_run() {
    let [left, _right] = pair();
    left.ask(1).unwrap();
    let links = left.take();
    assert_eq!(left.abandon(), 0);
    left.put(links, true);
    assert_eq!((left.abandon(), left.abandon(), left.unanswered(), left.open()), (1, 0, vec![], 0));
}

#[test]
fn a_peer_that_refused_is_not_asked_again_at_once() {
    let [left, _right] = pair();
    assert_eq!(left.idle(), [IdleStreams { peer: 1, last_run: 0, streams: 1 }]);
    let request = left.ask(1).unwrap();
    left.answered(1, request.number, false);
    assert_eq!(left.idle(), []);
}
