//! The control plane of one rank: one thread that accepts connections, sends heartbeats, and spreads failures and goodbyes.
//!
//! It carries no data, waits for no other thread, and calls nobody's code, so that no computation and no lock of the
//! application can make a healthy rank look dead. Other threads talk to it through channels that never block.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Cause before goodbye.** A rank that knows of a failure passes it on before it says goodbye and before it closes a
//!    connection; each rank passes on a failure that is news to it before its own waits end. So consequences never overtake the cause.
//! 2. **A goodbye is not a failure** until somebody needs the rank that left.
//! 3. **Strangers cost nothing but a count**: no unproven connection can end the group, hold memory without bound, or stay.

mod accept;
mod dial;
mod session;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc};

pub(super) use accept::Listeners;
pub(super) use dial::Dial;

use super::Config;
use super::address::Address;
use super::connection::{ControlConn, PendingConns};
use super::fork::OwnerProcess;
use super::handshake::{Key, digest};
use super::wire::Message;
use crate::error::{Error, Result, Source};
use crate::health::{GroupHealth, Subscription};
use crate::stats::Stats;
use crate::wait::lock;

/// How long a leaving rank waits for its last words to be heard.
const LINGER: Duration = Duration::from_millis(200);

/// Messages for groups that this rank has not built yet, at most.
const EARLY: usize = 4096;

/// What is known once the addresses are.
pub(super) struct Book {
    /// By world rank.
    pub(super) addresses: Vec<Address>,
    /// Proves membership.
    pub(super) key: Key,
    /// Public name of this incarnation.
    pub(super) job: [u8; 8],
    /// Id of the world group.
    pub(super) world: u64,
}

impl Book {
    pub(super) fn new(addresses: Vec<Address>, blobs: &[Vec<u8>], secret: &[u8]) -> Book {
        let parts: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
        let all = digest(&parts);
        let key = Key::new(secret, &all);
        let world = key.number(b"world");
        let job = *all.first_chunk().expect("32 bytes have a first 8");
        Book { addresses, key, job, world }
    }

    /// What tells this incarnation of the group from others in message headers.
    pub(super) fn epoch(&self) -> u32 {
        u32::try_from(self.key.number(b"epoch") >> 32).unwrap_or(0)
    }
}

/// A peer is there.
const ALIVE: u8 = 0;
/// It said goodbye.
const DEPARTED: u8 = 1;
/// It was lost.
const LOST: u8 = 2;

/// A connected peer.
pub(super) struct Peer {
    /// Frames for its writer.
    outbox: mpsc::UnboundedSender<Vec<u8>>,
    /// When it was last heard. `None` until its first message came: it may still be waiting for others.
    heard: Mutex<Option<Instant>>,
    /// ALIVE, DEPARTED or LOST.
    state: AtomicU8,
    /// It heard our goodbye, or its connection ended: nothing more to wait for.
    settled: AtomicBool,
}

/// A group that this rank is in.
struct Entry {
    health: Weak<GroupHealth>,
    /// World ranks of the members, by group rank: ascending.
    ranks: Vec<usize>,
    /// Reports to the members what this rank finds, as long as it is in the group.
    _subscription: Subscription,
}

/// Group rank of a world rank.
fn place(ranks: &[usize], rank: usize) -> Option<usize> {
    ranks.binary_search(&rank).ok()
}

/// Groups by id, and messages for those that do not exist here yet.
#[derive(Default)]
struct Groups {
    known: HashMap<u64, Entry>,
    early_failures: HashMap<u64, Error>,
    early_goodbyes: HashMap<u64, HashSet<usize>>,
}

/// What `connect` waits for.
#[derive(Default)]
pub(super) struct Building {
    /// Connections by world rank; taken when all are there.
    pub(super) conns: HashMap<usize, ControlConn>,
    /// Which ranks reach all ranks with their host id by a Unix socket.
    pub(super) near: HashMap<usize, bool>,
    /// Why the last attempt to reach a rank failed.
    pub(super) troubles: HashMap<usize, String>,
}

/// What the control thread and everybody else share.
pub(super) struct Plane {
    pub(super) config: Config,
    pub(super) owner: OwnerProcess,
    /// Of the world group.
    pub(super) stats: Arc<Stats>,
    pub(super) room: PendingConns,
    pub(super) building: Mutex<Building>,
    /// Something in `building` changed.
    pub(super) built: Condvar,
    book: OnceLock<Book>,
    /// Turns true when `book` is set: handshakes wait for it.
    opened: tokio::sync::watch::Sender<bool>,
    /// By world rank; `None` for this one. Set when all connections are there.
    peers: OnceLock<Vec<Option<Peer>>>,
    groups: Mutex<Groups>,
    /// Connections that have not proven themselves yet.
    strangers: AtomicUsize,
    /// A peer has settled.
    settled: Notify,
    /// This rank says goodbye: what peers do no longer matters.
    leaving: AtomicBool,
}

impl Plane {
    pub(super) fn new(config: Config, owner: OwnerProcess) -> Plane {
        let room = PendingConns::new(config.world_size);
        Plane {
            config,
            owner,
            stats: Arc::default(),
            room,
            building: Mutex::default(),
            built: Condvar::new(),
            book: OnceLock::new(),
            opened: tokio::sync::watch::Sender::new(false),
            peers: OnceLock::new(),
            groups: Mutex::default(),
            strangers: AtomicUsize::new(0),
            settled: Notify::new(),
            leaving: AtomicBool::new(false),
        }
    }

    /// From here on handshakes are answered.
    pub(super) fn open(&self, book: Book) -> &Book {
        let book = self.book.get_or_init(|| book);
        self.opened.send_replace(true);
        book
    }

    /// Known since `open`.
    pub(super) fn book(&self) -> Result<&Book> {
        self.book.get().ok_or_else(|| Error::other("the group is not built yet"))
    }

    fn peer(&self, rank: usize) -> Option<&Peer> {
        self.peers.get()?.get(rank)?.as_ref()
    }

    fn all_peers(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let peers = self.peers.get().into_iter().flatten().enumerate();
        peers.filter_map(|(rank, peer)| peer.as_ref().map(|peer| (rank, peer)))
    }

    /// Ranks that are connected, this one included.
    pub(super) fn peers_seen(&self) -> usize {
        1 + self.all_peers().filter(|(_, peer)| peer.state.load(Ordering::Relaxed) == ALIVE).count()
    }

    /// Makes a group known: its failures are told to its members from here on. `ranks` are world ranks.
    pub(super) fn register(self: &Arc<Plane>, id: u64, health: &Arc<GroupHealth>) {
        let plane = Arc::downgrade(self);
        let subscription = health.subscribe_local(move |cause| {
            if let Some(plane) = plane.upgrade()
                && plane.owner.is_current()
            {
                plane.tell(id, cause);
                plane.cascade(id, cause);
            }
        });
        let mut groups = lock(&self.groups);
        let ranks = health.world_ranks().to_vec();
        let failure = groups.early_failures.remove(&id);
        let goodbyes = groups.early_goodbyes.remove(&id).unwrap_or_default();
        for (place, rank) in ranks.iter().enumerate() {
            let departed = self.peer(*rank).is_some_and(|peer| peer.state.load(Ordering::Acquire) == DEPARTED);
            if departed || goodbyes.contains(rank) {
                health.depart(place);
            }
        }
        groups.known.insert(id, Entry { health: Arc::downgrade(health), ranks, _subscription: subscription });
        drop(groups);
        if let Some(cause) = failure {
            health.fail_from_peer(cause);
        }
        for (place, rank) in health.world_ranks().iter().enumerate() {
            if self.peer(*rank).is_some_and(|peer| peer.state.load(Ordering::Acquire) == LOST) {
                let _ = health.fail(health.peer_lost(place, "it was lost before the group was built"));
            }
        }
    }

    /// A sub-group ends on this rank: the members hear a goodbye.
    pub(super) fn depart(&self, id: u64) {
        let entry = lock(&self.groups).known.remove(&id);
        let Some(Entry { ranks, .. }) = entry else { return };
        self.send(&ranks, &Message::Bye { group: id });
        self.room.clear(Some(id));
    }

    /// Queues a message for these world ranks.
    fn send(&self, ranks: &[usize], message: &Message) {
        let frame = message.frame();
        for peer in ranks.iter().filter_map(|rank| self.peer(*rank)) {
            // A writer that ended has no reader at the other end.
            let _ = peer.outbox.send(frame.clone());
        }
    }

    /// Queues a message for everybody.
    pub(super) fn send_all(&self, message: &Message) {
        let ranks: Vec<usize> = (0..self.config.world_size).collect();
        self.send(&ranks, message);
    }

    /// Tells a group's members its first cause. A rank that is lost is told too: it may only be frozen.
    fn tell(&self, id: u64, cause: &Error) {
        let ranks = lock(&self.groups).known.get(&id).map(|entry| entry.ranks.clone()).unwrap_or_default();
        self.send(&ranks, &Message::Fail { group: id, cause: cause.clone() });
    }

    /// What fails the world also fails the sub-groups that it concerns. Every rank does that for itself.
    fn cascade(&self, id: u64, cause: &Error) {
        if self.book.get().is_none_or(|book| book.world != id) {
            return;
        }
        for health in self.watches(Some(id)) {
            let concerned = match cause {
                Error::PeerLost { rank, .. } | Error::PeerRaised { rank, .. } => {
                    place(health.world_ranks(), *rank).is_some()
                }
                Error::Aborted(_) => true,
                Error::Timeout { .. }
                | Error::Mismatch(_)
                | Error::InvalidArgument(_)
                | Error::UnsupportedType(_)
                | Error::NotImplemented(_)
                | Error::System { .. } => false,
            };
            if concerned {
                health.fail_from_peer(cause.clone());
            }
        }
    }

    /// Living groups, but for one.
    fn watches(&self, but: Option<u64>) -> Vec<Arc<GroupHealth>> {
        let groups = lock(&self.groups);
        let others = groups.known.iter().filter(|(id, _)| Some(**id) != but);
        others.filter_map(|(_, entry)| entry.health.upgrade()).collect()
    }

    /// This rank is about to leave: its waits end, without a word to the peers.
    pub(super) fn give_up(&self, reason: &str) {
        self.leaving.store(true, Ordering::Release);
        for health in self.watches(None) {
            health.fail_from_peer(Error::Aborted(reason.to_owned()));
        }
    }

    /// A peer is gone without a goodbye.
    fn lost(&self, rank: usize, reason: &str, source: &Source) {
        let Some(peer) = self.peer(rank) else { return };
        let was = peer.state.compare_exchange(ALIVE, LOST, Ordering::AcqRel, Ordering::Relaxed);
        if was.is_err() || self.leaving.load(Ordering::Acquire) {
            return;
        }
        // The world first: it tells everybody, and the sub-groups follow it.
        let world = self.book.get().map(|book| book.world);
        let first = world.and_then(|id| lock(&self.groups).known.get(&id).and_then(|entry| entry.health.upgrade()));
        for health in first.into_iter().chain(self.watches(world)) {
            if let Some(place) = place(health.world_ranks(), rank) {
                let _ = health.fail(health.peer_lost(place, reason).caused_by(source));
            }
        }
        self.built.notify_all();
    }

    /// A peer says that a group failed.
    fn peer_reported(&self, by: usize, id: u64, cause: Error) {
        let mut groups = lock(&self.groups);
        let Some(entry) = groups.known.get(&id) else {
            if groups.early_failures.len() < EARLY {
                groups.early_failures.entry(id).or_insert(cause);
            }
            return;
        };
        let Some(health) = entry.health.upgrade() else { return };
        drop(groups);
        // Everybody tells everybody: only the first is passed on.
        if health.cause().is_none() {
            let others: Vec<usize> = health.world_ranks().iter().copied().filter(|rank| *rank != by).collect();
            // Invariant 1: before this rank's own waits end, and with them perhaps this rank.
            self.send(&others, &Message::Fail { group: id, cause: cause.clone() });
        }
        health.fail_from_peer(cause.clone());
        self.cascade(id, &cause);
        self.built.notify_all();
    }

    /// A peer says goodbye to a group.
    fn peer_left(&self, by: usize, id: u64) {
        let everything = self.book.get().is_some_and(|book| book.world == id);
        if everything && let Some(peer) = self.peer(by) {
            let _ = peer.state.compare_exchange(ALIVE, DEPARTED, Ordering::AcqRel, Ordering::Relaxed);
            let _ = peer.outbox.send(Message::Heard.frame());
        }
        let mut groups = lock(&self.groups);
        for (known, entry) in &groups.known {
            if (everything || *known == id)
                && let Some(place) = place(&entry.ranks, by)
                && let Some(health) = entry.health.upgrade()
            {
                health.depart(place);
            }
        }
        if !everything && !groups.known.contains_key(&id) && groups.early_goodbyes.len() < EARLY {
            groups.early_goodbyes.entry(id).or_default().insert(by);
        }
        drop(groups);
        self.built.notify_all();
    }

    /// The last words: a goodbye to all, and a moment to see that it was heard.
    async fn goodbye(&self) {
        let Some(book) = self.book.get() else { return };
        self.send_all(&Message::Bye { group: book.world });
        let heard = async {
            for (_, peer) in self.all_peers() {
                loop {
                    let changed = self.settled.notified();
                    if peer.settled.load(Ordering::Acquire) || peer.state.load(Ordering::Acquire) == LOST {
                        break;
                    }
                    changed.await;
                }
            }
        };
        // A peer that does not answer in time has the goodbye in its socket all the same.
        let _ = tokio::time::timeout(LINGER, heard).await;
    }
}

/// The control thread, and the end of it.
pub(super) struct Control {
    pub(super) plane: Arc<Plane>,
    /// Starts tasks on the thread; `None` in a world of one.
    thread: Option<Thread>,
    /// Set by the first who ends it.
    ended: AtomicBool,
}

struct Thread {
    handle: tokio::runtime::Handle,
    stop: mpsc::UnboundedSender<()>,
    /// Disconnected when the thread is done.
    done: Mutex<std::sync::mpsc::Receiver<()>>,
    join: Mutex<Option<std::thread::JoinHandle<()>>>,
    id: std::thread::ThreadId,
}

impl Control {
    /// A plane without a thread, for a world of one.
    pub(super) fn alone(plane: Plane) -> Control {
        Control { plane: Arc::new(plane), thread: None, ended: AtomicBool::new(false) }
    }

    /// Starts the thread.
    pub(super) fn start(plane: Plane, listeners: Listeners) -> Result<Control> {
        let plane = Arc::new(plane);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::system("starting the control thread", e))?;
        let handle = runtime.handle().clone();
        let (stop, mut stopped) = mpsc::unbounded_channel();
        let (alive, done) = std::sync::mpsc::channel::<()>();
        let shared = Arc::clone(&plane);
        let body = move || {
            runtime.block_on(async {
                tokio::spawn(accept::accept(Arc::clone(&shared), listeners));
                stopped.recv().await;
                shared.goodbye().await;
            });
            // Closes every connection of the plane; a task never blocks, so this ends.
            drop(runtime);
            shared.room.clear(None);
            lock(&shared.building).conns.clear();
            drop(alive);
        };
        let join = std::thread::Builder::new()
            .name("bagua-control".to_owned())
            .spawn(body)
            .map_err(|e| Error::system("starting the control thread", e))?;
        let id = join.thread().id();
        let thread = Thread { handle, stop, done: Mutex::new(done), join: Mutex::new(Some(join)), id };
        Ok(Control { plane, thread: Some(thread), ended: AtomicBool::new(false) })
    }

    /// Runs a task on the thread.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(thread) = &self.thread {
            drop(thread.handle.spawn(task));
        }
    }

    /// All connections are there: from here on peers are heard and watched.
    pub(super) fn read_loop(&self, mut conns: HashMap<usize, ControlConn>) {
        let (plane, size) = (&self.plane, self.plane.config.world_size);
        let mut tasks = Vec::new();
        let peers = (0..size).map(|rank| {
            let conn = conns.remove(&rank)?;
            let (outbox, frames) = mpsc::unbounded_channel();
            tasks.push(session::read_loop(Arc::clone(plane), rank, conn, frames));
            let (heard, state, settled) = (Mutex::new(None), AtomicU8::new(ALIVE), AtomicBool::new(false));
            Some(Peer { outbox, heard, state, settled })
        });
        let peers: Vec<Option<Peer>> = peers.collect();
        let _ = plane.peers.set(peers);
        tasks.into_iter().for_each(|task| self.spawn(task));
        self.spawn(session::heartbeat(Arc::clone(plane)));
    }

    /// Says goodbye, closes everything and ends the thread. Idempotent; nothing in a forked child.
    pub(super) fn leave(&self, reason: &str) {
        if !self.plane.owner.is_current() || self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        self.plane.give_up(reason);
        let Some(thread) = &self.thread else { return };
        let _ = thread.stop.send(());
        if std::thread::current().id() == thread.id {
            // The thread cannot wait for itself; it ends when it gets back to its loop.
            return;
        }
        // The thread's own end is bounded by LINGER. Ten times that, and it is not worth hanging for.
        let waited = lock(&thread.done).recv_timeout(LINGER * 10);
        if waited == Err(std::sync::mpsc::RecvTimeoutError::Disconnected)
            && let Some(join) = lock(&thread.join).take()
        {
            let _ = join.join();
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.leave("this rank left the group");
        if !self.plane.owner.is_current() {
            // The thread is not in this process, and its descriptors are closed: dropping their owners would close others.
            std::mem::forget(self.thread.take());
            std::mem::forget(Arc::clone(&self.plane));
        }
    }
}
