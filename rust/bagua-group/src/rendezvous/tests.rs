//! Tests of what the keys of an exchange say about ranks that misbehave.

use std::net::TcpListener;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use super::super::store::{Server, Store, TcpStore};
use super::super::tests::own_host;
use super::super::wire::RANKS_LIMIT;
use super::by_tcp::rendezvous_tcp;
use super::*;
use crate::wait::Deadline;

/// The longest that a test waits for one event.
const PATIENCE: Duration = Duration::from_secs(30);

const SIZE: usize = 4;

type Outcome = Result<Vec<Vec<u8>>>;

/// An address that says which process has it.
fn address(rank: usize) -> Vec<u8> {
    let mut own = super::super::tests::examples::address(1);
    own.rank = rank;
    own.encode()
}

fn free_port() -> u16 {
    TcpListener::bind((own_host().as_str(), 0)).unwrap().local_addr().unwrap().port()
}

fn join<'s>(scope: &'s Scope<'s, '_>, port: u16, rank: usize, limits: Limits) -> ScopedJoinHandle<'s, Outcome> {
    scope.spawn(move || rendezvous_tcp((&own_host(), port), rank, SIZE, &address(rank), b"s", limits))
}

/// The connection of a rank that does nothing by itself, and what it has to claim.
fn connect(port: u16, rank: usize) -> (TcpStore, Vec<u8>) {
    let server = Server::new((&own_host(), port), &b"s".into(), rank, PATIENCE).unwrap();
    let store = TcpStore::until(Deadline::after(PATIENCE), &server, |_| true).unwrap().unwrap();
    let first = Entry::parse(&store.find("0", PATIENCE).unwrap().unwrap()).unwrap();
    let said = Said::Address(address(rank));
    (store, Entry { said, ..first }.encode())
}

#[test]
fn of_very_many_missing_ranks_some_are_named_and_the_others_counted() {
    let missing = MissingRanks::new((0..RANKS_LIMIT + 500).collect(), String::new());
    let entry = Entry { number: [0; 16], world_size: 2, said: Said::Missing(missing.clone()) };
    assert!(entry.encode().len() <= 4 * RANKS_LIMIT + 64);
    assert_eq!(Entry::parse(&entry.encode()), Ok(entry));
    let error = missing.timed_out(PATIENCE, 0, "the rendezvous".to_owned());
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing.len() == RANKS_LIMIT));
    assert!(error.to_string().contains("500 more ranks"), "{error}");
}

#[test]
fn a_rank_that_ends_after_it_has_registered_is_lost_on_every_rank_that_waits_for_others() {
    let port = free_port();
    let limits = || Limits { lost_after: Duration::from_millis(300), ..PATIENCE.into() };
    std::thread::scope(|scope| {
        let others = [0, 1].map(|rank| join(scope, port, rank, limits()));
        let (dead, entry) = connect(port, 2);
        assert_eq!(dead.claim("2", &entry).unwrap(), entry);
        dead.find("1", PATIENCE).unwrap().unwrap();
        drop(dead);
        for other in others {
            let error = other.join().unwrap().unwrap_err();
            let is_named = matches!(&error, Error::PeerLost { rank: 2, host, noticed_by: 0, .. } if host == "node-é");
            assert!(is_named, "{error:?}");
        }
    });
}

#[test]
fn another_process_takes_the_rank_of_one_that_ended() {
    let port = free_port();
    std::thread::scope(|scope| {
        let others = [0, 1, 3].map(|rank| join(scope, port, rank, PATIENCE.into()));
        let (dead, entry) = connect(port, 2);
        dead.claim("2", &entry[..entry.len() - 1]).unwrap();
        let (observer, entry) = connect(port, 2);
        drop(dead);
        observer.find("ended/2", PATIENCE).unwrap().unwrap();
        assert_eq!(observer.claim("2", &entry).unwrap(), entry);
        assert_eq!(observer.get("ended/2"), Ok(None));
        let all: Vec<_> = (0..SIZE).map(address).collect();
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap().as_ref(), Ok(&all)));
    });
}

#[test]
fn a_rank_that_does_not_take_the_addresses_does_not_block_the_others() {
    let port = free_port();
    std::thread::scope(|scope| {
        let others = [0, 1, 2].map(|rank| join(scope, port, rank, PATIENCE.into()));
        let (slow, entry) = connect(port, 3);
        slow.claim("3", &entry).unwrap();
        let all: Vec<_> = (0..SIZE).map(address).collect();
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap().as_ref(), Ok(&all)));
        let entry = Entry::parse(&slow.get("all").unwrap().unwrap()).unwrap();
        assert_eq!(entry.said, Said::All(all), "rank 0 still serves it");
    });
}

#[test]
fn a_rank_that_times_out_reads_which_rank_two_processes_have() {
    let port = free_port();
    std::thread::scope(|scope| {
        let root = join(scope, port, 0, PATIENCE.into());
        let (first, entry) = connect(port, 1);
        assert_eq!(first.claim("1", &entry).unwrap(), entry);
        let other = rendezvous_tcp((&own_host(), port), 1, SIZE, b"other", b"s", PATIENCE).unwrap_err();
        assert!(matches!(&other, Error::Mismatch(text) if text.contains("two processes have rank 1")), "{other:?}");
        let late = join(scope, port, 2, Duration::from_millis(300).into()).join().unwrap().unwrap_err();
        let pid = super::super::tests::examples::address(1).pid;
        let said = format!(
            "; a process from {} was refused because another one (process {pid} on node-é) had joined as rank 1",
            first.local_address().unwrap()
        );
        assert!(late.to_string().contains(&said), "{late}");
        assert!(matches!(&late, Error::Timeout { missing, .. } if missing == &[3]), "{late:?}");
        // The world completes although one process of rank 3 timed out.
        let others = [2, 3].map(|rank| join(scope, port, rank, PATIENCE.into()));
        let all: Vec<_> = (0..SIZE).map(address).collect();
        others.into_iter().chain([root]).for_each(|rank| assert_eq!(rank.join().unwrap().as_ref(), Ok(&all)));
    });
}
