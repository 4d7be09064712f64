//! Idle connections of a stranger without the secret, reopened as they are closed, keep no member out.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::group_world::{config, connect_all, port, until};
use bagua_group::{
    Access, Bootstrap, Config, JoinServer, RendezvousServer, Store, StoreServer, TcpStore, TransportChoice,
    rendezvous_at,
};
use rustix::process::{Resource, getrlimit, setrlimit};

/// Connections of the stranger: more than any listener has places for those that are not authenticated.
const COUNT: usize = 500;

/// The deadline of a member: shorter than the time that an idle connection has while there is no other.
const LIMIT: Duration = Duration::from_secs(4);

/// A stranger that holds connections; ends when it is dropped.
struct Stranger {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Stranger {
    /// Returns when all its connections are open.
    fn at(port: u16) -> Stranger {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum.map(|most| most.min(1 << 16));
        setrlimit(Resource::Nofile, limit).unwrap();
        let (stop, open) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, opened) = (Arc::clone(&stop), Arc::clone(&open));
        let thread = std::thread::spawn(move || hold(port, &stopped, &opened));
        until("the stranger is connected", || open.load(Ordering::Acquire) >= COUNT);
        Stranger { stop, thread: Some(thread) }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Opens the connections, and each again that was closed, until `stop`; counts those that it has opened.
fn hold(port: u16, stop: &AtomicBool, opened: &AtomicUsize) {
    let mut streams: Vec<Option<TcpStream>> = (0..COUNT).map(|_| None).collect();
    while !stop.load(Ordering::Acquire) {
        for slot in &mut streams {
            let is_open = slot
                .as_mut()
                .is_some_and(|stream| matches!(stream.read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock));
            if is_open {
                continue;
            }
            let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            *slot = TcpStream::connect_timeout(&at, Duration::from_millis(100)).ok();
            if let Some(stream) = slot {
                stream.set_nonblocking(true).unwrap();
                opened.fetch_add(1, Ordering::Release);
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn access() -> Access<'static> {
    Access { secret: b"secret", tls: None }
}

#[test]
fn the_ranks_of_a_group_connect_and_open_lanes() {
    let adjusted = |rank| Config { transport: TransportChoice::Tcp, connect_timeout: LIMIT, ..config(rank, 3) };
    let bootstraps: Vec<Bootstrap> = (0..3).map(|rank| Bootstrap::bind(adjusted(rank)).unwrap()).collect();
    let addresses: Vec<Vec<u8>> = bootstraps.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
    let _strangers = [0, 1].map(|rank| Stranger::at(port(&addresses[rank])));
    let groups: Vec<_> = connect_all(bootstraps, &addresses).into_iter().map(|group| group.unwrap()).collect();
    std::thread::scope(|scope| {
        let lanes: Vec<_> = groups.iter().map(|group| scope.spawn(|| group.lane().unwrap())).collect();
        lanes.into_iter().for_each(|lane| assert_eq!(lane.join().unwrap().size(), 3));
    });
}

#[test]
fn the_ranks_of_a_rendezvous_exchange_their_addresses() {
    let server = RendezvousServer::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let at = server.address().unwrap();
    let _stranger = Stranger::at(at.port());
    let expected: Vec<Vec<u8>> = [b"0", b"1", b"2"].map(|address| address.to_vec()).into();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || server.serve(3, b"0", access(), LIMIT));
        let others: Vec<_> = [(1, b"1"), (2, b"2")]
            .map(|(rank, address)| scope.spawn(move || rendezvous_at(at, rank, 3, address, access(), LIMIT)))
            .into();
        others.into_iter().chain([first]).for_each(|rank| assert_eq!(rank.join().unwrap(), Ok(expected.clone())));
    });
}

#[test]
fn a_store_is_read_and_written() {
    let server = StoreServer::start("127.0.0.1", 0, &access(), None).unwrap();
    let _stranger = Stranger::at(server.address().port());
    let store = TcpStore::connect("127.0.0.1", server.address().port(), &access(), LIMIT).unwrap();
    store.set("rank-0", b"here").unwrap();
    assert_eq!(store.get("rank-0").unwrap(), Some(b"here".to_vec()));
}

#[test]
fn a_rank_of_an_elastic_job_answers() {
    let servers = [0, 1].map(|rank| JoinServer::open(config(rank, 2), b"token").unwrap());
    let _stranger = Stranger::at(servers[0].address().port());
    assert_eq!(servers[1].status(0, servers[0].address(), LIMIT).unwrap().incarnation, servers[0].incarnation());
}
