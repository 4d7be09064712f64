//! Ranks as threads, and the factories that connect them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bagua_core::collective::shm::{Shm, segment_len};
use bagua_core::collective::{Algorithm, Collective, Hier, Net, OpContext, Solo};
use bagua_core::error::Result;
use bagua_core::group::{self, Access, tls_pair};
use bagua_core::health::GroupHealth;
use bagua_core::memory::Arena;
use bagua_core::stats::Stats;
use bagua_core::transport::shm::{ring_links, rings_len};
use bagua_core::transport::{Batch, Local, Mesh, OpenStreams, Opened, Tcp, Transport, local_mesh};
use bagua_core::types::{DType, Fingerprint, Kind, ReduceOp, Shape};
use bagua_core::wait::{Deadline, Doorbell, lock};

/// One collective per rank of a new world of this size.
pub type Ranks = fn(usize) -> Vec<Box<dyn Collective>>;

/// The two ends of a new stream, with the doorbells of their owners.
pub type Ends = fn() -> [(Box<dyn Transport>, Doorbell); 2];

/// The stream to each rank.
type Links = Vec<Option<Box<dyn Transport>>>;

/// State of a rank in a test: its collective, health, counters and sequence number.
pub struct Rank {
    pub collective: Box<dyn Collective>,
    pub health: Arc<GroupHealth>,
    pub stats: Stats,
    pub seq: u64,
}

/// Description of an operation, without the numbers that [`Rank::call`] adds.
#[derive(Clone, Copy)]
pub struct Say {
    pub kind: Kind,
    pub dtype: DType,
    pub op: Option<ReduceOp>,
    pub root: Option<usize>,
    pub count: usize,
    pub limit: Duration,
}

impl Say {
    pub fn new(kind: Kind, dtype: DType, count: usize) -> Say {
        Say { kind, dtype, op: None, root: None, count, limit: Duration::from_secs(60) }
    }
}

impl Rank {
    /// Runs one operation under the next fingerprint.
    pub fn call<T>(
        &mut self,
        say: Say,
        run: impl FnOnce(&mut dyn Collective, &OpContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let fingerprint = Fingerprint {
            epoch: 1,
            seq: self.seq,
            op: say.op,
            root: say.root.map(|root| root as u32),
            shape: Shape::flat(say.count),
            ..Fingerprint::new(say.kind, say.dtype, say.count)
        };
        self.seq += 1;
        let stats = self.stats.of(say.kind);
        let deadline = Deadline::after(say.limit);
        let extra = &RefCell::default();
        let cx = OpContext { fingerprint, deadline, health: &self.health, stats, label: "", extra };
        run(self.collective.as_mut(), &cx)
    }
}

/// A world of ranks, none of which has done anything yet.
pub fn world(ranks: Ranks, size: usize) -> Vec<Rank> {
    let with_watch = |(rank, collective)| Rank {
        collective,
        health: GroupHealth::local(rank, size),
        stats: Stats::default(),
        seq: 0,
    };
    ranks(size).into_iter().enumerate().map(with_watch).collect()
}

/// Runs `f` on every rank at once, each on a thread of its own, and returns what they return, by rank.
pub fn each<T: Send>(ranks: &mut [Rank], f: impl Fn(usize, &mut Rank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let spawn = |(index, rank)| scope.spawn(move || f(index, rank));
        let threads: Vec<_> = ranks.iter_mut().enumerate().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// Runs `f` as [`each`] does, but drops each rank as soon as it is done, so that the other ranks see its streams end.
pub fn each_leaving<T: Send>(ranks: Vec<Rank>, f: impl Fn(usize, &mut Rank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let spawn = |(index, mut rank): (usize, Rank)| scope.spawn(move || f(index, &mut rank));
        let threads: Vec<_> = ranks.into_iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// `net` over streams between threads.
pub fn local(size: usize) -> Vec<Box<dyn Collective>> {
    local_mesh(size).into_iter().map(|mesh| Box::new(Net::new(mesh)) as Box<dyn Collective>).collect()
}

/// `net` over TCP on the loopback interface.
pub fn tcp(size: usize) -> Vec<Box<dyn Collective>> {
    mixed_mesh(size, |_, _| false)
}

/// `net` over TLS on the loopback interface, two connections per pair.
pub fn tls(size: usize) -> Vec<Box<dyn Collective>> {
    bundles_of(size, Algorithm::Auto, 2, tls_links)
}

/// `net` over TCP between odd and even ranks and over streams between threads otherwise.
pub fn mixed(size: usize) -> Vec<Box<dyn Collective>> {
    mixed_mesh(size, |a, b| a % 2 == b % 2)
}

/// `net` over three TCP connections per pair.
pub fn bundled(size: usize) -> Vec<Box<dyn Collective>> {
    bundles(size, Algorithm::Auto, 3)
}

/// All_reduce along a ring, over two TCP connections per pair.
pub fn ring(size: usize) -> Vec<Box<dyn Collective>> {
    bundles(size, Algorithm::Ring, 2)
}

/// All_reduce by doubling.
pub fn doubling(size: usize) -> Vec<Box<dyn Collective>> {
    bundles(size, Algorithm::Doubling, 1)
}

/// All_reduce by halving.
pub fn halving(size: usize) -> Vec<Box<dyn Collective>> {
    bundles(size, Algorithm::Halving, 1)
}

/// All_reduce between every pair, whatever the size of the world.
pub fn direct(size: usize) -> Vec<Box<dyn Collective>> {
    let net = |mesh| Box::new(Net::new(mesh).with(Algorithm::Direct)) as Box<dyn Collective>;
    local_mesh(size).into_iter().map(net).collect()
}

fn bundles(size: usize, algorithm: Algorithm, streams: usize) -> Vec<Box<dyn Collective>> {
    bundles_of(size, algorithm, streams, || {
        let (left, right) = sockets();
        [left, right].map(|end| Box::new(Tcp::new(end).unwrap()) as Box<dyn Transport>)
    })
}

fn bundles_of(
    size: usize,
    algorithm: Algorithm,
    streams: usize,
    pair: impl Fn() -> [Box<dyn Transport>; 2],
) -> Vec<Box<dyn Collective>> {
    let mut links: Vec<Vec<Vec<Box<dyn Transport>>>> =
        (0..size).map(|_| (0..size).map(|_| Vec::new()).collect()).collect();
    let pairs = (0..size).flat_map(|a| (a + 1..size).map(move |b| (a, b)));
    for (a, b) in pairs.flat_map(|pair| std::iter::repeat_n(pair, streams)) {
        let [left, right] = pair();
        links[a][b].push(left);
        links[b][a].push(right);
    }
    let mesh = |(rank, links)| Mesh::bundled(rank, (0..size).collect(), links, None);
    let net = |rank| Box::new(Net::new(mesh(rank)).with(algorithm)) as Box<dyn Collective>;
    links.into_iter().enumerate().map(net).collect()
}

/// Returns `net` over TCP streams that open on demand between odd and even ranks, and over streams between threads
/// otherwise.
pub fn on_demand(size: usize) -> Vec<Box<dyn Collective>> {
    let asked = Arc::new(Mutex::default());
    let opener = |rank| Box::new(Pairs { rank, awaited: Vec::new(), asked: Arc::clone(&asked) });
    let net = |(rank, (links, bell)): (usize, (Links, Doorbell))| {
        let bundles = links.into_iter().map(|link| link.into_iter().collect()).collect();
        let mesh = Mesh::on_demand(rank, (0..size).collect(), bundles, Some(bell), opener(rank));
        Box::new(Net::new(mesh)) as Box<dyn Collective>
    };
    links(size, |a, b| if a % 2 == b % 2 { Some(true) } else { None }).into_iter().enumerate().map(net).collect()
}

/// Two TCP connections between two ranks, one for each batch. A connection opens when both ranks have requested it.
struct Pairs {
    rank: usize,
    /// Batches that this rank has requested and not fetched, with their peers.
    awaited: Vec<(usize, Batch)>,
    /// State by pair of ranks and batch: the rank that has asked first, then the ends that were not fetched, by rank.
    asked: Arc<Mutex<HashMap<Pair, Asked>>>,
}

/// Two ranks, the lower first, and a batch.
type Pair = (usize, usize, u8);

enum Asked {
    By(usize),
    Ends(HashMap<usize, Box<dyn Transport>>),
}

impl Pairs {
    fn with(&self, (peer, batch): (usize, Batch)) -> Pair {
        (self.rank.min(peer), self.rank.max(peer), batch as u8)
    }
}

impl OpenStreams for Pairs {
    fn begin(&mut self, _: &OpContext<'_>, batches: &[(usize, Batch)]) -> Result<()> {
        self.awaited.extend(batches);
        for batch in batches {
            let mut asked = lock(&self.asked);
            let first = asked.insert(self.with(*batch), Asked::By(self.rank));
            let are_fetched = |first: &Asked| !matches!(first, Asked::Ends(ends) if !ends.is_empty());
            assert!(first.as_ref().is_none_or(are_fetched), "asked twice");
            if let Some(Asked::By(other)) = first {
                assert_eq!(other, batch.0);
                let (left, right) = sockets();
                let end = |socket| Box::new(Tcp::new(socket).unwrap()) as Box<dyn Transport>;
                let ends = HashMap::from([(self.rank, end(left)), (other, end(right))]);
                asked.insert(self.with(*batch), Asked::Ends(ends));
            }
        }
        Ok(())
    }

    fn opened(&mut self, peer: usize) -> Result<Opened> {
        let (own, of_others) = std::mem::take(&mut self.awaited).into_iter().partition(|(other, _)| *other == peer);
        self.awaited = of_others;
        let (own, mut streams): (Vec<_>, _) = (own, Vec::new());
        for batch in own {
            match lock(&self.asked).get_mut(&self.with(batch)) {
                Some(Asked::Ends(ends)) => streams.extend(ends.remove(&self.rank)),
                _ => self.awaited.push(batch),
            }
        }
        Ok(Opened { streams, all: self.awaited.iter().all(|(other, _)| *other != peer) })
    }

    fn name(&self) -> &'static str {
        Tcp::NAME
    }
}

fn mixed_mesh(size: usize, is_local: fn(usize, usize) -> bool) -> Vec<Box<dyn Collective>> {
    let mesh = |(rank, (links, bell))| Mesh::new(rank, (0..size).collect(), links, Some(bell));
    let ranks = links(size, |a, b| Some(is_local(a, b))).into_iter().enumerate();
    ranks.map(|rank| Box::new(Net::new(mesh(rank))) as Box<dyn Collective>).collect()
}

/// Returns, by rank, its stream to each other rank, and its doorbell. A stream is one between threads, a TCP connection
/// or, for `None`, absent.
fn links(size: usize, is_local: impl Fn(usize, usize) -> Option<bool>) -> Vec<(Links, Doorbell)> {
    let bells: Vec<_> = (0..size).map(|_| Doorbell::local()).collect();
    let mut links: Vec<Links> = (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for a in 0..size {
        for b in a + 1..size {
            let Some(is_local) = is_local(a, b) else { continue };
            let (left, right): (Box<dyn Transport>, Box<dyn Transport>) = if is_local {
                let (left, right) = Local::pair((bells[a].clone(), bells[b].clone()), 1000);
                (Box::new(left), Box::new(right))
            } else {
                let (left, right) = sockets();
                (Box::new(Tcp::new(left).unwrap()), Box::new(Tcp::new(right).unwrap()))
            };
            links[a][b] = Some(left);
            links[b][a] = Some(right);
        }
    }
    links.into_iter().zip(bells).collect()
}

/// Two connected sockets.
pub fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let left = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (left, listener.accept().unwrap().0)
}

/// The ends of a stream between threads, with so little room that most calls are partial.
pub fn local_ends() -> [(Box<dyn Transport>, Doorbell); 2] {
    let bells = (Doorbell::local(), Doorbell::local());
    let (left, right) = Local::pair(bells.clone(), 1000);
    [(Box::new(left), bells.0), (Box::new(right), bells.1)]
}

/// The ends of a TCP connection.
pub fn tcp_ends() -> [(Box<dyn Transport>, Doorbell); 2] {
    let (left, right) = sockets();
    [left, right].map(|end| (Box::new(Tcp::new(end).unwrap()) as Box<dyn Transport>, Doorbell::local()))
}

fn tls_links() -> [Box<dyn Transport>; 2] {
    let access = Access { secret: b"secret", tls: Some(&group::Tls::Secret) };
    let (left, right) = tls_pair(&access, sockets()).unwrap();
    [Box::new(left), Box::new(right)]
}

/// The ends of a TLS connection.
pub fn tls_ends() -> [(Box<dyn Transport>, Doorbell); 2] {
    tls_links().map(|end| (end, Doorbell::local()))
}

/// `shm` over one segment, which every rank has mapped for itself.
pub fn shm(size: usize) -> Vec<Box<dyn Collective>> {
    let shm = |(rank, arena)| Box::new(Shm::new(arena, rank, (0..size).collect()).unwrap()) as Box<dyn Collective>;
    mappings(size, segment_len(size)).into_iter().enumerate().map(shm).collect()
}

/// `solo`: a world of one rank.
pub fn solo(size: usize) -> Vec<Box<dyn Collective>> {
    assert_eq!(size, 1);
    vec![Box::new(Solo::new())]
}

/// `hier`: even ranks on one host, odd ranks on another, streams between threads between them.
pub fn hier(size: usize) -> Vec<Box<dyn Collective>> {
    let hosts: Vec<Vec<usize>> = [0, 1]
        .map(|host| (host..size).step_by(2).collect())
        .into_iter()
        .filter(|host: &Vec<usize>| !host.is_empty())
        .collect();
    let mut flat: Vec<_> = local_mesh(size).into_iter().map(|mesh| Some(Net::new(mesh))).collect();
    let mut ranks: Vec<Option<Box<dyn Collective>>> = (0..size).map(|_| None).collect();
    for (members, leaders) in hosts.iter().zip(local_mesh(hosts.len())) {
        let mut leaders = Some(leaders);
        let arenas = mappings(members.len(), segment_len(members.len()));
        for (index, (rank, arena)) in members.iter().zip(arenas).enumerate() {
            let intra = Box::new(Shm::new(arena, index, members.clone()).unwrap());
            let inter = leaders.take().map(|mesh| Box::new(Net::new(mesh)) as Box<dyn Collective>);
            let flat = flat[*rank].take().expect("every rank is on one host");
            ranks[*rank] = Some(Box::new(Hier::new(intra, inter, hosts.clone(), *rank).with_flat(flat)));
        }
    }
    ranks.into_iter().map(|rank| rank.expect("every rank is on one host")).collect()
}

/// The ends of a pair of rings in shared memory.
pub fn shm_ends() -> [(Box<dyn Transport>, Doorbell); 2] {
    let arenas = mappings(2, rings_len(2));
    [0, 1].map(|rank| {
        let (mut links, bell) = ring_links(&arenas[rank], 0, rank, 2);
        (links[1 - rank].take().unwrap(), bell)
    })
}

fn mappings(size: usize, len: usize) -> Vec<Arc<Arena>> {
    let arena = Arena::create("bagua-test", len).unwrap();
    (0..size).map(|_| Arc::new(Arena::from_fd(arena.fd().try_clone_to_owned().unwrap()).unwrap())).collect()
}
