//! Recorded openings of connections are replayed to the join server of a running elastic job. None of them joins, all
//! are counted, and the rounds of averaging continue.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::group_world::{PATIENCE, config, port, until, world};
use bagua_core::average::{Averager, Elastic, Model, Settings};
use bagua_core::group::{Bootstrap, Config, Group, JoinServer, Lane, TransportChoice};
use bagua_core::memory::{WeightLock, Weights};
use bagua_core::types::DType;
use bagua_core::wait::{Deadline, Waited};

const LONG: Duration = Duration::from_secs(30);

/// Bytes of the first and of the second message of an opening.
const HELLO: usize = 79;
const PROOF: usize = 32;

/// Passes connections on to another address, and keeps what their clients send.
struct Tap {
    address: SocketAddr,
    /// Recorded bytes of each connection.
    recorded: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Tap {
    fn on(upstream: SocketAddr) -> Tap {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let recorded: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let kept = Arc::clone(&recorded);
        // The threads end with their connections, and with the process.
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(upstream) else { continue };
                let number = {
                    let mut kept = kept.lock().unwrap();
                    kept.push(Vec::new());
                    kept.len() - 1
                };
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let kept = Arc::clone(&kept);
                std::thread::spawn(move || pass(from, to, |bytes| kept.lock().unwrap()[number].extend(bytes)));
                std::thread::spawn(move || pass(server, client, |_| ()));
            }
        });
        Tap { address, recorded }
    }

    fn recorded(&self) -> Vec<Vec<u8>> {
        self.recorded.lock().unwrap().clone()
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, keep: impl Fn(&[u8])) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        keep(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// One rank of the job.
struct Rank {
    averager: Averager,
    server: Arc<JoinServer>,
    _lane: Option<Lane>,
    _group: Option<Group>,
}

fn model() -> Model {
    let memory = vec![1.0f32; 100].leak().as_mut_ptr();
    // SAFETY: leaked, and only this model uses it.
    let weights = unsafe { Weights::new(memory.cast(), 100, DType::F32, WeightLock::new()) }.unwrap();
    Model { weights: vec![weights], buffers: vec![] }
}

fn settings(server: &Arc<JoinServer>) -> Settings {
    let elastic = Some(Elastic { server: Arc::clone(server), digest: [3; 32] });
    Settings { name: "model".to_owned(), interval: Duration::from_millis(2), codec: None, elastic, takes_part: true }
}

/// Three ranks.
fn job() -> Vec<Rank> {
    let servers: Vec<Arc<JoinServer>> =
        (0..3).map(|rank| Arc::new(JoinServer::open(config(rank, 3), b"token").unwrap())).collect();
    for server in &servers {
        servers.iter().for_each(|other| server.note_server(other.rank(), other.address()));
        server.enter_job();
    }
    let start = |(group, server): (Group, Arc<JoinServer>)| {
        let mut lane = group.lane().unwrap();
        let averager = Averager::start(&group, &mut lane, model(), settings(&server)).unwrap();
        Rank { averager, server, _lane: Some(lane), _group: Some(group) }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = world(3).into_iter().zip(servers).map(|one| scope.spawn(move || start(one))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The hello with which rank 2 of a group with the job's secret opened its control connection to rank 0.
fn hello_of_another_group() -> Vec<u8> {
    let bind = |rank| {
        let connect_timeout = Duration::from_secs(2);
        Bootstrap::bind(Config { connect_timeout, transport: TransportChoice::Tcp, ..config(rank, 3) }).unwrap()
    };
    let mut bootstraps: Vec<Bootstrap> = (0..3).map(bind).collect();
    let addresses: Vec<Vec<u8>> = bootstraps.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
    let last = bootstraps.pop().unwrap();
    drop(bootstraps);
    let listener = TcpListener::bind(("127.0.0.1", port(&addresses[0]))).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(last.connect(&addresses).is_err()));
        let mut hello = vec![0; HELLO];
        listener.accept().unwrap().0.read_exact(&mut hello).unwrap();
        drop(listener);
        hello
    })
}

/// Waits for two whole rounds of these ranks. The server of the first rank must then have refused `refused`
/// connections.
#[track_caller]
fn rounds_go_on(ranks: &[&Rank], numbers: &[usize], refused: u64) {
    for rank in ranks {
        until("a round of the ranks", || rank.averager.check().is_ok() && rank.averager.stats().ranks == numbers);
        let view = rank.averager.stats().view;
        let rounds = rank.averager.stats().rounds;
        until("two rounds", || rank.averager.stats().rounds >= rounds + 2);
        let stats = rank.averager.stats();
        assert_eq!((stats.ranks.as_slice(), stats.view), (numbers, view), "no rank came or went");
    }
    until("all are counted", || ranks[0].server.refused() >= refused);
    assert_eq!(ranks[0].server.refused(), refused);
}

/// Plays bytes to a server, and returns its answer.
fn play(at: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // The server may have closed the connection before the last byte.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn openings_that_are_played_back_to_a_join_server_are_refused_and_counted_and_rounds_go_on() {
    let former = hello_of_another_group();
    assert!(former.starts_with(b"BGhello\n"));
    let mut ranks = job();
    let at = ranks[0].server.address();
    rounds_go_on(&ranks.iter().collect::<Vec<_>>(), &[0, 1, 2], 0);

    // Rank 2 leaves, and a rank joins through a tap on rank 0's server.
    let old = ranks.pop().unwrap();
    old.averager.stop(LONG);
    drop(old);
    rounds_go_on(&[&ranks[0], &ranks[1]], &[0, 1], 0);
    let tap = Tap::on(at);
    let server = Arc::new(JoinServer::open(config(2, 3), b"token").unwrap());
    server.note_server(0, tap.address);
    server.enter_job();
    let averager = Averager::join(model(), settings(&server), &Deadline::after(LONG)).unwrap();
    assert_eq!(averager.wait_joined(LONG), Waited::Done(Ok(())));
    let joiner = Rank { averager, server, _lane: None, _group: None };
    rounds_go_on(&[&ranks[0], &ranks[1], &joiner], &[0, 1, 2], 0);
    let openings: Vec<Vec<u8>> = tap.recorded().into_iter().filter(|bytes| !bytes.is_empty()).collect();
    let opening = openings.last().unwrap();
    // The opening is a hello, a proof and the request to join.
    assert!(opening.starts_with(b"BGhello\n") && opening.len() > HELLO + PROOF + 32, "{}", opening.len());

    // The rank's opening must not let a replay join, neither while the rank is a member nor after it has left.
    let mut refused = 0;
    let mixed = [&former, &opening[HELLO..]].concat();
    let parts: [&[u8]; 7] = [
        &opening[..HELLO],
        &opening[..HELLO + PROOF],
        &opening[HELLO..],
        &opening[HELLO + PROOF..],
        opening,
        &former,
        &mixed,
    ];
    let mut joiner = Some(joiner);
    for numbers in [&[0, 1, 2][..], &[0, 1]] {
        if numbers.len() == 2 {
            joiner.take().unwrap().averager.stop(LONG);
            let [first, second, ..] = &ranks[..] else { unreachable!() };
            rounds_go_on(&[first, second], numbers, refused);
        }
        for bytes in parts {
            let answer = play(at, bytes);
            // The answer is empty, a refusal, or an answer to the hello with a refusal of the old proof. It is never an
            // acceptance.
            assert!(!answer.ends_with(&[0]) && answer.len() <= 1 + 32 + 32 + 2, "{answer:?}");
            refused += 1;
        }
        // These connections are more than the server serves at the same time.
        std::thread::scope(|scope| (0..100).for_each(|_| _ = scope.spawn(|| play(at, opening))));
        refused += 100;
        let all: Vec<&Rank> = ranks.iter().chain(&joiner).collect();
        rounds_go_on(&all, numbers, refused);
        assert_eq!(all.iter().skip(1).map(|rank| rank.server.refused()).sum::<u64>(), 0);
    }
}
