//! The distribution tree of a rendezvous, with clients and ranks that misbehave.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use super::super::handshake::{self, Failed, Hello, Purpose, Refusal};
use super::super::tests::own_host;
use super::super::wire::{Encoding, RANKS_LIMIT};
use super::client::{register, rendezvous_tcp};
use super::common::Limits;
use super::server::Registration;
use super::tree::{Answer, FANOUT, MissingRanks, Proofs, children, connect, fetch, parent};
use crate::error::{Error, Result};

/// The longest that a test waits for one event.
const PATIENCE: Duration = Duration::from_secs(30);

/// Two levels below rank 0; ranks 1 and 2 have children.
const SIZE: usize = 40;

type Outcome = Result<Vec<Vec<u8>>>;

fn address(rank: usize) -> Vec<u8> {
    format!("address {rank}").into_bytes()
}

/// An address that says which process has it.
fn address_of(rank: usize) -> Vec<u8> {
    let mut own = super::super::tests::examples::address(1);
    own.rank = rank;
    own.encode()
}

fn expected() -> Vec<Vec<u8>> {
    (0..SIZE).map(address).collect()
}

fn free_port() -> u16 {
    TcpListener::bind((own_host().as_str(), 0)).unwrap().local_addr().unwrap().port()
}

fn join<'s>(scope: &'s Scope<'s, '_>, port: u16, rank: usize, limit: Duration) -> ScopedJoinHandle<'s, Outcome> {
    scope.spawn(move || rendezvous_tcp((&own_host(), port), rank, SIZE, &address(rank), b"s", limit))
}

fn key(secret: &[u8]) -> Proofs {
    Proofs::of(&secret.into()).unwrap()
}

fn hello(from: usize, to: usize) -> Hello {
    let purpose = Purpose::Rendezvous;
    Hello { world_size: SIZE, from, to, purpose, group: 0, channel: 0, index: 0, job: [0; 8] }
}

fn run<T>(task: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(task)
}

/// Registers as a rank and returns the answer. Its relay is closed when this returns.
async fn register_as(port: u16, rank: usize) -> Answer {
    register_until(port, rank, &address(rank), Instant::now() + PATIENCE).await
}

/// The same with this address, as a rank that asks at the deadline which ranks are missing.
async fn register_until(port: u16, rank: usize, address: &[u8], deadline: Instant) -> Answer {
    loop {
        match register((&own_host(), port), &hello(rank, 0), &key(b"s"), address, deadline, &AtomicBool::default())
            .await
        {
            Ok((answer, _relay)) => return answer,
            // Rank 0 does not listen yet: retry.
            Err(Failed::Broken { .. }) => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(why) => panic!("rank {rank}: {why}"),
        }
    }
}

fn parent_address(answer: Answer) -> SocketAddr {
    match answer {
        Answer::Fetch(from) => from,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_rank_but_rank_0_is_a_child_of_its_parent_and_no_rank_has_more_children_than_the_fanout() {
    for size in [1, 2, FANOUT + 1, FANOUT + 2, SIZE, 300, 5000] {
        for rank in 1..size {
            assert!(parent(rank) < rank && children(parent(rank), size).contains(&rank));
        }
        assert!((0..size).all(|rank| children(rank, size).len() <= FANOUT));
        assert_eq!((0..size).map(|rank| children(rank, size).len()).sum::<usize>(), size - 1);
    }
    assert!((1..=FANOUT).all(|rank| children(rank, FANOUT + 1).is_empty()), "only rank 0 listens in a small world");
}

#[test]
fn of_very_many_missing_ranks_some_are_named_and_the_others_counted() {
    let missing = MissingRanks::new((0..RANKS_LIMIT + 500).collect(), String::new());
    let answer = Answer::Missing(missing.clone());
    assert!(answer.encode().len() <= 4 * RANKS_LIMIT + 32);
    assert_eq!(Answer::parse(&answer.encode()), Ok(answer));
    let error = missing.timed_out(PATIENCE, 0, "the rendezvous".to_owned());
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing.len() == RANKS_LIMIT));
    assert!(error.to_string().contains("500 more ranks"), "{error}");
}

#[test]
fn a_parent_refuses_wrong_clients_with_the_reason_and_serves_its_children() {
    let port = free_port();
    let last = SIZE - 1;
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..last).map(|rank| join(scope, port, rank, PATIENCE)).collect();
        run(async {
            let from = parent_address(register_as(port, last).await);
            let silent: Vec<TcpStream> = (0..FANOUT + 1).map(|_| TcpStream::connect(from).unwrap()).collect();
            for bytes in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0xff; 4096]] {
                let mut stream = TcpStream::connect(from).unwrap();
                // The parent may close the connection at any byte of these.
                let _ = std::io::Write::write_all(&mut stream, bytes);
                let _ = stream.shutdown(Shutdown::Write);
            }
            let to = parent(last);
            let attempts = [
                (hello(last, to), key(b"S"), Refusal::Secret),
                (hello(last, to + 1), key(b"s"), Refusal::Rank),
                (hello(to, to), key(b"s"), Refusal::Rank),
                (Hello { world_size: SIZE + 1, ..hello(last, to) }, key(b"s"), Refusal::WorldSize),
                (Hello { purpose: Purpose::Stream, ..hello(last, to) }, key(b"s"), Refusal::Purpose),
            ];
            for (hello, key, why) in attempts {
                assert_eq!(fetch(from, &hello, &key).await, Err(Failed::Refused(why)));
            }
            assert_eq!(fetch(from, &hello(last, to), &key(b"s")).await, Ok(Ok(expected())));
            drop(silent);
        });
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), Ok(expected())));
    });
}

#[test]
fn the_children_of_a_rank_that_dies_before_it_sends_the_list_name_it() {
    let port = free_port();
    let orphans = children(1, SIZE);
    std::thread::scope(|scope| {
        let others = (0..SIZE).filter(|rank| *rank != 1 && !orphans.contains(rank));
        let others: Vec<_> = others.map(|rank| join(scope, port, rank, PATIENCE)).collect();
        let dead = scope.spawn(move || run(register_as(port, 1)));
        let orphans: Vec<_> = orphans.clone().map(|rank| (rank, join(scope, port, rank, PATIENCE))).collect();
        assert_eq!(dead.join().unwrap(), Answer::Complete(expected()));
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), Ok(expected())));
        for (rank, orphan) in orphans {
            let error = orphan.join().unwrap().unwrap_err();
            assert!(matches!(&error, Error::PeerLost { rank: 1, noticed_by, .. } if *noticed_by == rank), "{error:?}");
        }
    });
}

#[test]
fn a_rank_that_ends_after_it_has_registered_is_lost_on_every_rank_that_waits_for_others() {
    let port = free_port();
    let limits = || Limits { lost_after: Duration::from_millis(300), ..PATIENCE.into() };
    std::thread::scope(|scope| {
        let join = |rank| {
            scope.spawn(move || rendezvous_tcp((&own_host(), port), rank, SIZE, &address_of(rank), b"s", limits()))
        };
        let others: Vec<_> = (0..SIZE / 2).filter(|rank| *rank != 2).map(join).collect();
        let all_others_have_registered = async {
            let last = SIZE - 1;
            loop {
                let answer = register_until(port, last, &address(last), Instant::now()).await;
                let Answer::Missing(missing) = answer else { panic!("{answer:?}") };
                let error = missing.timed_out(PATIENCE, last, String::new());
                let Error::Timeout { missing, .. } = error else { panic!("{error:?}") };
                if missing == (SIZE / 2..last).collect::<Vec<_>>() {
                    break;
                }
            }
        };
        run(async {
            let address = address_of(2);
            tokio::select! {
                answer = register_until(port, 2, &address, Instant::now() + PATIENCE) => panic!("{answer:?}"),
                () = all_others_have_registered => {}
            }
        });
        for other in others {
            let error = other.join().unwrap().unwrap_err();
            let is_named = matches!(&error, Error::PeerLost { rank: 2, host, noticed_by: 0, .. } if host == "node-é");
            assert!(is_named, "{error:?}");
        }
    });
}

#[test]
fn a_rank_that_times_out_reads_which_rank_two_processes_have() {
    let (port, size) = (free_port(), 4);
    let all: Vec<_> = (0..size).map(address_of).collect();
    let attempt = async |rank| {
        let hello = Hello { world_size: size, ..hello(rank, 0) };
        register((&own_host(), port), &hello, &key(b"s"), &address_of(rank), Instant::now(), &AtomicBool::default())
            .await
    };
    std::thread::scope(|scope| {
        let join = |rank| {
            scope.spawn(move || rendezvous_tcp((&own_host(), port), rank, size, &address_of(rank), b"s", PATIENCE))
        };
        let root = join(0);
        let ranks = async {
            let hello = Hello { world_size: size, ..hello(1, 0) };
            let mut first = loop {
                match connect((own_host().as_str(), port), &hello, &key(b"s")).await {
                    Ok(first) => break first,
                    // Rank 0 does not listen yet.
                    Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            };
            // The second process comes before the first one has said where it is.
            let second = attempt(1).await;
            assert!(matches!(second, Err(Failed::Refused(Refusal::Duplicate))), "the second process is refused");
            let text = async || {
                // Rank 2 does not wait for rank 3.
                let Ok((Answer::Missing(missing), None)) = attempt(2).await else { panic!("ranks are missing") };
                missing.timed_out(PATIENCE, 2, "the rendezvous".to_owned()).to_string()
            };
            let said = "; a process from 127.0.0.1 was refused because another one had joined as rank 1";
            let before = text().await;
            assert!(before.contains(said), "{before}");
            let registration = Registration { address: address_of(1), relay: None };
            first.write_all(&registration.frame()).await.unwrap();
            let address = super::super::tests::examples::address(1);
            let holder = format!("another one (process {} on {}) had", address.pid, address.host_name);
            let said = said.replace("another one had", &holder);
            // Until rank 0 has read it.
            while !text().await.contains(&said) {}
            // The world completes in spite of it.
            let others = [2, 3].map(join);
            assert_eq!(Answer::read(&mut first).await, Ok(Answer::Complete(all.clone())));
            others
        };
        let named = run(async { tokio::time::timeout(PATIENCE, ranks).await });
        let others = named.expect("every timeout names the rank and the process that has it");
        others.into_iter().chain([root]).for_each(|rank| assert_eq!(rank.join().unwrap().as_ref(), Ok(&all)));
    });
}

#[test]
fn a_rank_that_does_not_fetch_the_list_does_not_block_the_others() {
    let port = free_port();
    let last = SIZE - 1;
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..last).map(|rank| join(scope, port, rank, PATIENCE)).collect();
        let from = parent_address(run(register_as(port, last)));
        // It connects, but sends nothing.
        let silent = TcpStream::connect(from).unwrap();
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), Ok(expected())));
        drop(silent);
    });
}

#[test]
fn the_children_of_a_rank_that_cannot_listen_get_the_list_from_rank_0() {
    let port = free_port();
    std::thread::scope(|scope| {
        let others = (0..SIZE).filter(|rank| *rank != 1);
        let others: Vec<_> = others.map(|rank| join(scope, port, rank, PATIENCE)).collect();
        let without_relay = scope.spawn(move || {
            run(async {
                let mut stream = loop {
                    match tokio::net::TcpStream::connect((own_host(), port)).await {
                        Ok(stream) => break stream,
                        Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                    }
                };
                handshake::connect(&mut stream, &hello(1, 0), &key(b"s").key).await.unwrap();
                let frame = Registration { address: address(1), relay: None }.frame();
                tokio::io::AsyncWriteExt::write_all(&mut stream, &frame).await.unwrap();
                Answer::read(&mut stream).await.unwrap()
            })
        });
        assert_eq!(without_relay.join().unwrap(), Answer::Complete(expected()));
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), Ok(expected())));
    });
}

#[test]
fn a_rank_that_disconnected_before_all_had_registered_can_register_again() {
    let port = free_port();
    let last = SIZE - 1;
    std::thread::scope(|scope| {
        let first = join(scope, port, 0, PATIENCE);
        // No other rank has registered, so there is no answer.
        run(async { tokio::time::timeout(Duration::from_millis(200), register_as(port, last)).await }).unwrap_err();
        let others: Vec<_> = (1..last).map(|rank| join(scope, port, rank, PATIENCE)).collect();
        let again = loop {
            match join(scope, port, last, PATIENCE).join().unwrap() {
                // Rank 0 has not detected yet that the first connection is closed.
                Err(Error::Mismatch(_)) => {}
                outcome => break outcome,
            }
        };
        assert_eq!(again, Ok(expected()));
        others.into_iter().chain([first]).for_each(|other| assert_eq!(other.join().unwrap(), Ok(expected())));
    });
}
