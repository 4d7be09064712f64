//! Processes that join the averaging of an elastic job, and the server that they join by.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::group_world::{config, until, world};
use bagua_core::average::{Averager, Elastic, Model, Settings};
use bagua_core::error::Error;
use bagua_core::group::JoinServer;
use bagua_core::memory::{WeightLock, Weights};
use bagua_core::types::DType;
use bagua_core::wait::{Deadline, Waited};

const INTERVAL: Duration = Duration::from_millis(2);
const LONG: Duration = Duration::from_secs(30);

const DIGEST: [u8; 32] = [3; 32];

/// The join servers of a job, each of which knows the others.
fn servers(size: usize) -> Vec<Arc<JoinServer>> {
    let servers: Vec<Arc<JoinServer>> =
        (0..size).map(|rank| Arc::new(JoinServer::open(config(rank, size), b"token").unwrap())).collect();
    introduce(&servers);
    servers
}

fn introduce(servers: &[Arc<JoinServer>]) {
    for server in servers {
        servers.iter().for_each(|other| server.note_server(other.rank(), other.address()));
        server.enter_job();
    }
}

/// Weights and a buffer of three numbers, leaked.
fn model(rank: usize, lock: &Arc<WeightLock>, first: f32) -> (Model, *mut f32, *mut f32) {
    let weights = vec![first; 100].leak().as_mut_ptr();
    let buffer = vec![rank as f32; 3].leak().as_mut_ptr();
    // SAFETY: leaked, and used under the lock only.
    let at =
        |memory: *mut f32, count| unsafe { Weights::new(memory.cast(), count, DType::F32, Arc::clone(lock)).unwrap() };
    (Model { weights: vec![at(weights, 100)], buffers: vec![at(buffer, 3)] }, weights, buffer)
}

fn settings(server: &Arc<JoinServer>, digest: [u8; 32]) -> Settings {
    let elastic = Some(Elastic { server: Arc::clone(server), digest });
    Settings { name: "model".to_owned(), interval: INTERVAL, codec: None, elastic, takes_part: true }
}

fn value(lock: &Arc<WeightLock>, memory: *const f32) -> f32 {
    let _guard = lock.lock(1);
    // SAFETY: leaked, and used under the lock only.
    unsafe { memory.read() }
}

#[test]
fn a_process_joins_through_any_server_with_the_average_of_the_others() {
    let (size, servers) = (3, servers(3));
    let barrier = Barrier::new(size);
    std::thread::scope(|scope| {
        let (servers, barrier) = (&servers, &barrier);
        for (rank, group) in world(size).into_iter().enumerate() {
            scope.spawn(move || {
                let mut lane = group.lane().unwrap();
                let lock = WeightLock::new();
                let (all, weights, _) = model(rank, &lock, 3.0 * rank as f32);
                let averager = Averager::start(&group, &mut lane, all, settings(&servers[rank], DIGEST)).unwrap();
                averager.set_forwards(100 + rank as u64);
                until("a round of three", || averager.stats().rounds > 2);
                barrier.wait();
                if rank != 1 {
                    until("the rank has joined", || {
                        let stats = averager.stats();
                        assert!(averager.check().is_ok());
                        stats.view > 2 && stats.ranks == [0, 1, 2]
                    });
                    barrier.wait();
                    averager.stop(LONG);
                    return;
                }
                averager.stop(LONG);
                drop(averager);
                until("the others go on", || {
                    servers[1].status(0, servers[0].address(), LONG).is_ok_and(|status| status.in_job)
                });
                // A different model is refused, and the rounds continue.
                let (other, ..) = model(1, &lock, 500.0);
                let refused = Averager::join(other, settings(&servers[1], [4; 32]), &Deadline::after(LONG));
                assert!(matches!(refused, Err(Error::Mismatch(text)) if text.contains("differs")));
                let (other, joined, buffer) = model(1, &lock, 500.0);
                let averager = Averager::join(other, settings(&servers[1], DIGEST), &Deadline::after(LONG)).unwrap();
                assert_eq!(averager.wait_joined(LONG), Waited::Done(Ok(())));
                // The joining rank has the average of all three ranks from before. Its own 500 did not count.
                assert_eq!(value(&lock, joined), 3.0);
                assert_eq!(value(&lock, weights), 3.0);
                assert_eq!((value(&lock, buffer), averager.forwards()), (0.0, 100));
                assert_eq!(averager.stats().joined, 1);
                until("a round of three", || averager.stats().ranks == [0, 1, 2] && averager.stats().rounds > 2);
                barrier.wait();
                averager.stop(LONG);
            });
        }
    });
}

#[test]
fn a_rank_that_takes_part_is_not_let_in_twice() {
    let (size, servers) = (2, servers(2));
    let barrier = Barrier::new(size);
    std::thread::scope(|scope| {
        let (servers, barrier) = (&servers, &barrier);
        for (rank, group) in world(size).into_iter().enumerate() {
            scope.spawn(move || {
                let mut lane = group.lane().unwrap();
                let lock = WeightLock::new();
                let (all, ..) = model(rank, &lock, 1.0);
                let averager = Averager::start(&group, &mut lane, all, settings(&servers[rank], DIGEST)).unwrap();
                if rank == 1 {
                    let second = Arc::new(JoinServer::open(config(1, size), b"token").unwrap());
                    second.note_server(0, servers[0].address());
                    let (all, ..) = model(1, &lock, 1.0);
                    let refused = Averager::join(all, settings(&second, DIGEST), &Deadline::after(LONG));
                    assert!(matches!(refused, Err(Error::Mismatch(text)) if text.contains("already takes part")));
                }
                barrier.wait();
                averager.check().unwrap();
                barrier.wait();
                averager.stop(LONG);
            });
        }
    });
}

#[test]
fn a_join_server_accepts_the_secret_the_token_and_the_right_rank_only() {
    let servers = servers(2);
    let at = servers[0].address();
    assert!(servers[1].status(0, at, LONG).unwrap().in_job);
    let stranger = |adjust: fn(&mut bagua_core::group::Config), token: &[u8]| {
        let mut config = config(1, 2);
        adjust(&mut config);
        JoinServer::open(config, token).unwrap().status(0, at, LONG)
    };
    assert!(stranger(|config| config.secret = b"other".to_vec(), b"token").is_err());
    assert!(stranger(|_| (), b"another token").is_err());
    assert!(stranger(|config| config.world_size = 3, b"token").is_err());
    assert!(servers[1].status(1, at, LONG).is_err(), "it is rank 0's server");
    until("four are counted", || servers[0].refused() == 4);
    // Garbage, and a connection that says nothing and closes.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4000], b""] {
        use std::io::Write;
        let mut stream = std::net::TcpStream::connect(at).unwrap();
        stream.write_all(bytes).unwrap();
        drop(stream);
    }
    until("all are counted", || servers[0].refused() == 7);
    assert!(servers[1].status(0, at, LONG).is_ok());
}
