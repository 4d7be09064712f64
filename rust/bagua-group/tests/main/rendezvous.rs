//! Exchange of addresses by TCP and files: any order of arrival, missing ranks, wrong clients, misconfigured ranks.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::group_world::{PATIENCE, own_host, until};
use bagua_group::{RendezvousServer, VERSION, local_address_towards, rendezvous_at, rendezvous_file, rendezvous_tcp};
use bagua_kernels::error::{Error, Result};

fn free_port() -> u16 {
    TcpListener::bind((own_host().as_str(), 0)).unwrap().local_addr().unwrap().port()
}

fn by_tcp(port: u16, rank: usize, size: usize, secret: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
    rendezvous_tcp((&own_host(), port), rank, size, format!("address {rank}").as_bytes(), secret, timeout)
}

/// A server on a port that the system chooses.
fn listening() -> (RendezvousServer, SocketAddr) {
    let server = RendezvousServer::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let address = server.address().unwrap();
    assert_ne!(address.port(), 0);
    (server, address)
}

fn at(server: SocketAddr, rank: usize, size: usize, secret: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
    rendezvous_at(server, rank, size, format!("address {rank}").as_bytes(), secret, timeout)
}

fn expected(size: usize) -> Vec<Vec<u8>> {
    (0..size).map(|rank| format!("address {rank}").into_bytes()).collect()
}

/// A temporary folder, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("bagua-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self) -> PathBuf {
        self.0.join("rendezvous")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn by_file(path: &Path, rank: usize, size: usize, address: &str, timeout: Duration) -> Result<Vec<Vec<u8>>> {
    rendezvous_file(path, rank, size, address.as_bytes(), timeout)
}

#[test]
fn all_ranks_get_all_addresses_by_tcp_in_any_order_of_arrival() {
    for size in [1, 2, 5] {
        let port = free_port();
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..size).rev().map(|rank| scope.spawn(move || by_tcp(port, rank, size, b"s", PATIENCE))).collect();
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), Ok(expected(size))));
        });
    }
}

#[test]
fn all_ranks_of_large_worlds_get_all_addresses_in_rank_order() {
    // Every rank of the largest world has a few descriptors in this process.
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    for size in [17, 18, 40, 300] {
        let port = free_port();
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..size).rev().map(|rank| scope.spawn(move || by_tcp(port, rank, size, b"s", PATIENCE))).collect();
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), Ok(expected(size))));
        });
    }
}

#[test]
fn all_ranks_get_all_addresses_through_a_port_that_the_system_chose() {
    for size in [1, 2, 20] {
        let (server, address) = listening();
        std::thread::scope(|scope| {
            let others: Vec<_> =
                (1..size).map(|rank| scope.spawn(move || at(address, rank, size, b"s", PATIENCE))).collect();
            assert_eq!(server.serve(size, b"address 0", b"s", PATIENCE), Ok(expected(size)));
            others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), Ok(expected(size))));
        });
    }
}

#[test]
fn a_server_that_has_ended_is_a_lost_rank_0_at_once() {
    let lost = |outcome| {
        let Err(Error::PeerLost { rank: 0, reason, noticed_by: 1, source, .. }) = outcome else {
            panic!("{outcome:?}")
        };
        assert!(reason.contains("the rendezvous at 127.0.0.1:"), "{reason}");
        assert!(source.get().is_some(), "the connection was refused or reset, or it ended");
    };
    let (server, address) = listening();
    std::thread::scope(|scope| {
        // It may have connected before the server ends.
        let early = scope.spawn(move || at(address, 1, 2, b"s", PATIENCE));
        drop(server);
        lost(early.join().unwrap());
    });
    lost(at(address, 1, 2, b"s", PATIENCE));
}

#[test]
fn on_timeout_a_rank_gets_the_missing_ranks_from_rank_0_and_another_process_may_take_its_rank() {
    let (server, address) = listening();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || server.serve(3, b"address 0", b"s", PATIENCE));
        let error = at(address, 1, 3, b"s", Duration::from_secs(1)).unwrap_err();
        assert!(matches!(&error, Error::Timeout { missing, noticed_by: 1, .. } if missing == &[2]), "{error:?}");
        let others: Vec<_> = [1, 2].map(|rank| scope.spawn(move || at(address, rank, 3, b"s", PATIENCE))).into();
        others.into_iter().chain([first]).for_each(|rank| assert_eq!(rank.join().unwrap(), Ok(expected(3))));
    });
}

#[test]
fn ranks_that_timed_out_are_named_only_when_no_other_rank_is_missing() {
    for (size, named) in [(4, vec![3]), (3, vec![1, 2])] {
        let (server, address) = listening();
        std::thread::scope(|scope| {
            let first = scope.spawn(move || server.serve(size, b"address 0", b"s", Duration::from_secs(6)));
            let short = Duration::from_millis(500);
            let time_out = |rank, missing: &[usize]| {
                let error = at(address, rank, size, b"s", short).unwrap_err();
                assert!(matches!(&error, Error::Timeout { missing: named, .. } if named == missing), "{error:?}");
            };
            time_out(1, if size == 4 { &[2, 3] } else { &[2] });
            time_out(2, if size == 4 { &[3] } else { &[1] });
            let error = first.join().unwrap().unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == named), "{error:?}");
            assert_eq!(error.to_string().contains("rank 1 had registered and timed out"), size == 3, "{error}");
        });
    }
}

#[test]
fn addresses_that_cannot_be_listened_on_are_refused() {
    let nowhere = RendezvousServer::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))).map(|_| ());
    assert!(matches!(nowhere, Err(Error::InvalidArgument(_))), "{nowhere:?}");
    let (taken, address) = listening();
    let again = RendezvousServer::bind(address).map(|_| ());
    assert!(
        matches!(&again, Err(Error::System { message, .. }) if message.contains("listening on 127.0.0.1:")),
        "{again:?}"
    );
    assert_eq!(again.unwrap_err().os_error().and_then(std::io::Error::raw_os_error), Some(libc::EADDRINUSE));
    assert!(matches!(at(address, 0, 2, b"s", PATIENCE), Err(Error::InvalidArgument(_))));
    drop(taken);
}

#[test]
fn all_ranks_name_a_rank_that_is_missing_by_tcp() {
    let port = free_port();
    std::thread::scope(|scope| {
        for rank in [0, 2] {
            scope.spawn(move || {
                let error = by_tcp(port, rank, 3, b"s", Duration::from_millis(3000)).unwrap_err();
                assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error:?}");
            });
        }
    });
    let alone = by_tcp(free_port(), 1, 2, b"s", Duration::from_millis(100)).unwrap_err();
    assert!(matches!(alone, Error::Timeout { missing, .. } if missing == [0]));
}

#[test]
fn wrong_clients_of_the_tcp_server_are_refused_with_the_reason_and_the_exchange_succeeds() {
    let port = free_port();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || by_tcp(port, 0, 3, b"s", PATIENCE));
        let second = scope.spawn(move || by_tcp(port, 1, 3, b"s", PATIENCE));
        let secret = by_tcp(port, 2, 3, b"S", PATIENCE).unwrap_err();
        assert!(matches!(&secret, Error::System { message, .. } if message.contains("wrong secret")), "{secret:?}");
        let size = by_tcp(port, 2, 4, b"s", PATIENCE).unwrap_err();
        assert!(matches!(&size, Error::Mismatch(text) if text.contains("world size 4")), "{size:?}");
        let silent = TcpStream::connect((own_host().as_str(), port)).unwrap();
        let third = scope.spawn(move || by_tcp(port, 2, 3, b"s", PATIENCE));
        for joined in [first, second, third] {
            assert_eq!(joined.join().unwrap(), Ok(expected(3)));
        }
        drop(silent);
    });
}

#[test]
fn rank_0_names_the_reason_why_it_refused_a_missing_rank() {
    for (secret, size, why) in [(b"S", 2, "does not have this rank's secret"), (b"s", 3, "another world size")] {
        let port = free_port();
        std::thread::scope(|scope| {
            let first = scope.spawn(move || by_tcp(port, 0, 2, b"s", Duration::from_millis(3000)));
            by_tcp(port, 1, size, secret, PATIENCE).unwrap_err();
            let error = first.join().unwrap().unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("a process with rank 1 was refused") && text.contains(why), "{text}");
            assert!(!text.contains("of 0 bytes"), "{text}");
        });
    }
}

#[test]
fn the_second_process_with_a_rank_is_refused_by_tcp() {
    let port = free_port();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || by_tcp(port, 0, 3, b"s", PATIENCE));
        let twins: Vec<_> = [b"one", b"two"]
            .map(|address| scope.spawn(move || rendezvous_tcp((&own_host(), port), 1, 3, address, b"s", PATIENCE)))
            .into();
        until("one of the twins is refused", || twins.iter().any(|twin| twin.is_finished()));
        by_tcp(port, 2, 3, b"s", PATIENCE).unwrap();
        first.join().unwrap().unwrap();
        let outcomes: Vec<_> = twins.into_iter().map(|twin| twin.join().unwrap()).collect();
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
        assert!(
            outcomes
                .iter()
                .any(|outcome| matches!(outcome, Err(Error::Mismatch(text)) if text.contains("two processes")))
        );
    });
}

#[test]
fn invalid_ports_ranks_and_paths_are_refused() {
    let wrong =
        [by_tcp(0, 1, 2, b"", PATIENCE), by_tcp(1, 2, 2, b"", PATIENCE), by_file(Path::new("x"), 3, 2, "", PATIENCE)];
    assert!(wrong.iter().all(|outcome| matches!(outcome, Err(Error::InvalidArgument(_)))));
    let nowhere = by_file(Path::new("/nonexistent/rendezvous"), 0, 2, "a", PATIENCE);
    assert!(matches!(nowhere, Err(Error::System { .. })));
}

#[test]
fn all_ranks_get_all_addresses_by_file_in_any_order_of_arrival_and_beside_files_of_earlier_jobs() {
    let folder = Folder::new("order");
    let path = folder.path();
    for job in 0..3 {
        let address = |rank: usize| format!("job {job}, rank {rank}");
        let all: Vec<Vec<u8>> = (0..3).map(|rank| address(rank).into_bytes()).collect();
        std::thread::scope(|scope| {
            let join = |rank| {
                let path = &path;
                scope.spawn(move || by_file(path, rank, 3, &address(rank), PATIENCE))
            };
            // The others start first, and find the files of the last job.
            let mut threads = vec![join(2), join(1)];
            if job > 0 {
                until("rank 2 has read the earlier job's number", || folder.0.join("rendezvous.2").exists());
            }
            threads.push(join(0));
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), Ok(all.clone())));
        });
    }
}

#[test]
fn a_rank_that_gives_up_by_file_before_rank_0_does_names_the_missing_rank_and_not_rank_0() {
    let folder = Folder::new("gives-up");
    let path = folder.path();
    std::thread::scope(|scope| {
        let root = scope.spawn(|| by_file(&path, 0, 4, "a", Duration::from_secs(6)));
        until("the others can answer rank 0", || folder.0.join("rendezvous.0").exists());
        let others: Vec<_> = [1, 2]
            .map(|rank| {
                scope.spawn({
                    let path = &path;
                    move || by_file(path, rank, 4, "b", Duration::from_secs(2))
                })
            })
            .into();
        for (rank, error) in [1, 2].into_iter().zip(others.into_iter().map(|other| other.join().unwrap().unwrap_err()))
        {
            assert!(
                matches!(&error, Error::Timeout { missing, noticed_by, .. } if missing == &[3] && *noticed_by == rank),
                "{error:?}"
            );
        }
        assert!(matches!(root.join().unwrap().unwrap_err(), Error::Timeout { missing, .. } if missing == [3]));
    });
}

#[test]
fn a_rank_that_is_missing_by_file_is_named() {
    let folder = Folder::new("missing");
    let error = by_file(&folder.path(), 0, 3, "a", Duration::from_millis(100)).unwrap_err();
    assert!(matches!(error, Error::Timeout { missing, .. } if missing == [1, 2]));
    let other = Folder::new("alone");
    let error = by_file(&other.path(), 1, 3, "a", Duration::from_millis(100)).unwrap_err();
    assert!(matches!(error, Error::Timeout { missing, .. } if missing == [0]));
}

#[test]
fn a_file_of_another_version_is_no_file_of_a_rank_and_the_timeout_names_both_versions() {
    let folder = Folder::new("versions");
    // Version 6 did not say which it was; a later one does.
    let later = [b"BGrf", &(VERSION + 1).to_le_bytes()[..], b"anything"].concat();
    for (content, version) in [(&b"BGrv0123456789abcdef"[..], 6), (&later, VERSION + 1)] {
        for (rank, suffix) in [(0, "1"), (1, "0")] {
            std::fs::write(folder.0.join(format!("rendezvous.{suffix}")), content).unwrap();
            let error = by_file(&folder.path(), rank, 2, "a", Duration::from_millis(100)).unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1 - rank]), "{error}");
            let named =
                format!("rendezvous.{suffix} is of version {version} of the protocol, this rank runs {VERSION}");
            assert!(error.to_string().contains(&named), "{error}");
        }
    }
}

#[test]
fn different_world_sizes_by_file_are_a_mismatch_on_both_sides() {
    let folder = Folder::new("sizes");
    let path = folder.path();
    std::thread::scope(|scope| {
        // By then it has seen rank 0's file.
        let other = scope.spawn(|| by_file(&path, 1, 3, "b", Duration::from_secs(3)));
        assert!(matches!(by_file(&path, 0, 2, "a", PATIENCE), Err(Error::Mismatch(text)) if text.contains("rank 1")));
        assert!(matches!(other.join().unwrap(), Err(Error::Mismatch(_))));
    });
}

#[test]
fn the_route_to_a_loopback_address_is_the_loopback_address() {
    assert!(local_address_towards("127.0.0.1", 80).unwrap().is_loopback());
    assert!(local_address_towards("localhost", 0).unwrap().is_loopback());
    assert!(local_address_towards("no-such-host.invalid", 80).is_err());
}
