//! The state that the control thread shares with the other threads of a rank: peers, groups, and the handling of failures.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc};

use super::super::address::Address;
use super::super::admission::Admission;
use super::super::config::Config;
use super::super::connection::{PendingConns, Socket};
use super::super::fork::OwnerProcess;
use super::super::handshake::{Key, digest};
use super::super::tls::Ends;
use super::super::views::{Inbox, ViewMessage};
use super::super::wire::Encoding;
use super::message::Message;
use super::silence::{Silence, is_stopped};
use crate::error::{Error, Result, Source};
use crate::health::{GroupHealth, Subscription};
use crate::stats::Stats;
use crate::transport::{Transport, unsent};
use crate::wait::lock;

/// How long a leaving rank waits for acknowledgements.
pub(super) const LINGER: Duration = Duration::from_millis(200);

/// How long a leaving rank waits for its last bytes to be acknowledged while none is.
const STALLED: Duration = Duration::from_secs(1);

/// The most messages that are kept for groups that this rank has not built yet.
const MAX_EARLY: usize = 4096;

/// The addresses of all ranks, and the key and the ids derived from them.
pub(in super::super) struct World {
    /// By world rank.
    pub(in super::super) addresses: Vec<Address>,
    /// Authenticates the ranks of the job.
    pub(in super::super) key: Key,
    /// Public name of this incarnation of the job.
    pub(in super::super) job: [u8; 8],
    /// Id of the world group.
    pub(in super::super) id: u64,
}

impl World {
    pub(in super::super) fn new(addresses: Vec<Address>, blobs: &[Vec<u8>], secret: &[u8]) -> World {
        let parts: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
        let all = digest(&parts);
        let key = Key::new(secret, &all);
        let id = key.number(b"world");
        let job = *all.first_chunk().expect("32 bytes have a first 8");
        World { addresses, key, job, id }
    }

    /// Distinguishes this incarnation of the group from others in message headers.
    pub(in super::super) fn epoch(&self) -> u32 {
        u32::try_from(self.key.number(b"epoch") >> 32).unwrap_or(0)
    }
}

/// The most processes on this host that a rank watches, the next ones by rank: the end of one closes its connections, which every rank
/// notices, but whether one is stopped each rank would have to look up for each other.
const WATCHED: usize = 8;

/// The reason of `PeerLost` for a peer that is silent.
pub(super) fn no_heartbeat(timeout: Duration) -> String {
    format!("no heartbeat for {:.1} s", timeout.as_secs_f64())
}

/// The peer is connected, or will be.
pub(super) const ALIVE: u8 = 0;
/// The peer has left the world group.
const DEPARTED: u8 = 1;
/// The peer is lost, and its process is known to have ended.
const ENDED: u8 = 2;
/// The peer is lost, but its process may live on.
const SILENT: u8 = 3;

/// What the loss of a peer says about its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Loss {
    /// It has ended, or has left the group.
    Ended,
    /// It may live on: it is frozen, cut off, or sends what cannot be understood.
    Silent,
}

/// A peer.
pub(super) struct Peer {
    /// Frames for its writer task.
    pub(super) outbox: mpsc::UnboundedSender<Vec<u8>>,
    /// The other end of `outbox`, until the peer is connected.
    frames: Mutex<Option<mpsc::UnboundedReceiver<Vec<u8>>>>,
    /// How long it has sent nothing. `None` before it is connected.
    silence: Mutex<Option<Silence>>,
    /// Its process, when it is on this host and visible here: that runs or not, instead of heartbeats. Set when it is connected.
    process: OnceLock<Option<u32>>,
    /// [`ALIVE`], [`DEPARTED`], [`ENDED`] or [`SILENT`].
    pub(super) state: AtomicU8,
    /// It has acknowledged that this rank leaves, or its connection has ended.
    pub(super) settled: AtomicBool,
}

impl Peer {
    fn new() -> Peer {
        let (outbox, frames) = mpsc::unbounded_channel();
        Peer {
            outbox,
            frames: Mutex::new(Some(frames)),
            silence: Mutex::default(),
            process: OnceLock::new(),
            state: AtomicU8::new(ALIVE),
            settled: AtomicBool::new(false),
        }
    }

    /// Notes that a message has arrived from it.
    pub(super) fn note_arrival(&self, now: Instant) {
        *lock(&self.silence) = Some(Silence::from(now));
    }

    fn is_connected(&self) -> bool {
        lock(&self.silence).is_some()
    }

    /// True when the connection broke or its heartbeats stopped, without a goodbye.
    fn is_lost(&self) -> bool {
        matches!(self.state.load(Ordering::Acquire), ENDED | SILENT)
    }
}

/// A group of which this rank is a member.
struct Entry {
    health: Weak<GroupHealth>,
    /// World ranks of the members, by group rank.
    ranks: Vec<usize>,
    /// Broadcasts a failure that this rank finds to the members, until the group is removed.
    _subscription: Subscription,
}

/// Group rank of a world rank.
fn group_rank(ranks: &[usize], world_rank: usize) -> Option<usize> {
    ranks.iter().position(|rank| *rank == world_rank)
}

/// Groups by id, and messages for groups that this rank has not built yet.
#[derive(Default)]
struct Groups {
    known: HashMap<u64, Entry>,
    early_failures: HashMap<u64, Error>,
    early_departures: HashMap<u64, HashSet<usize>>,
}

/// The progress of [`super::super::Bootstrap::connect`].
#[derive(Default)]
pub(in super::super) struct ConnectState {
    /// By world rank of each connected rank: whether by a Unix socket; taken when all are there.
    pub(in super::super) by_unix: HashMap<usize, bool>,
    /// By world rank: whether it is connected by Unix sockets to all ranks with its host id.
    pub(in super::super) host_connected: HashMap<usize, bool>,
    /// By world rank: why the last attempt to connect to it failed.
    pub(in super::super) last_failures: HashMap<usize, String>,
    /// Why the last connection was refused, if that may explain why a rank is missing: another secret, or TLS.
    pub(in super::super) last_refusal: Option<String>,
}

/// The state that the control thread shares with the other threads of a rank.
pub(in super::super) struct Plane {
    pub(in super::super) config: Config,
    pub(in super::super) owner: OwnerProcess,
    /// Counters of the world group.
    pub(in super::super) stats: Arc<Stats>,
    pub(in super::super) pending: PendingConns,
    pub(in super::super) connecting: Mutex<ConnectState>,
    /// Notified when `connecting` or the health of a group changes.
    pub(in super::super) connect_changed: Condvar,
    /// The ends of its TLS connections; `None` without TLS.
    pub(super) tls: Option<Ends>,
    world: OnceLock<World>,
    /// Turns true when `world` is set: handshakes wait for it.
    pub(super) world_known: tokio::sync::watch::Sender<bool>,
    /// By world rank; `None` for this rank. Set with `world`.
    pub(super) peers: OnceLock<Vec<Option<Peer>>>,
    groups: Mutex<Groups>,
    /// The connections in the handshake.
    pub(super) admission: Arc<Admission>,
    /// Notified when a peer is settled.
    pub(super) settled: Notify,
    /// Messages for the agreement on the next view.
    pub(in super::super) views: Inbox,
    /// This rank leaves: later events of peers are ignored.
    leaving: AtomicBool,
    /// The connections of lanes and messages.
    streams: Mutex<Vec<Weak<TcpStream>>>,
}

impl Plane {
    pub(in super::super) fn new(config: Config, owner: OwnerProcess, tls: Option<Ends>) -> Plane {
        let pending = PendingConns::new(config.world_size);
        let admission = Admission::new(256 + 4 * config.world_size);
        Plane {
            config,
            owner,
            stats: Arc::default(),
            pending,
            connecting: Mutex::default(),
            connect_changed: Condvar::new(),
            tls,
            world: OnceLock::new(),
            world_known: tokio::sync::watch::Sender::new(false),
            peers: OnceLock::new(),
            groups: Mutex::default(),
            admission,
            settled: Notify::new(),
            views: Inbox::default(),
            leaving: AtomicBool::new(false),
            streams: Mutex::default(),
        }
    }

    /// Sets the world; handshakes are answered from here on.
    pub(in super::super) fn set_world(&self, world: World) -> &World {
        let world = self.world.get_or_init(|| world);
        let (own, size) = (self.config.rank, self.config.world_size);
        self.peers.get_or_init(|| (0..size).map(|rank| (rank != own).then(Peer::new)).collect());
        self.world_known.send_replace(true);
        world
    }

    /// The world; an error before [`Plane::set_world`].
    pub(in super::super) fn world(&self) -> Result<&World> {
        self.world.get().ok_or_else(|| Error::other("the group is not built yet"))
    }

    pub(super) fn peer(&self, rank: usize) -> Option<&Peer> {
        self.peers.get()?.get(rank)?.as_ref()
    }

    pub(super) fn all_peers(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let peers = self.peers.get().into_iter().flatten().enumerate();
        peers.filter_map(|(rank, peer)| peer.as_ref().map(|peer| (rank, peer)))
    }

    /// Number of connected ranks, this one included.
    pub(in super::super) fn peers_seen(&self) -> usize {
        let is_seen = |peer: &Peer| peer.state.load(Ordering::Relaxed) == ALIVE && peer.is_connected();
        1 + self.all_peers().filter(|(_, peer)| is_seen(peer)).count()
    }

    /// The process of a rank, when it is on this host and its number means the same here.
    fn process(&self, rank: usize) -> Option<u32> {
        let addresses = &self.world.get()?.addresses;
        let (own, theirs) = (&addresses[self.config.rank], &addresses[rank]);
        let here = own.host_id == theirs.host_id && own.pid_namespace == theirs.pid_namespace;
        (here && own.pid_namespace != 0).then_some(theirs.pid)
    }

    /// Notes that a peer is connected; the frames for it, unless it was before.
    pub(super) fn connected(&self, rank: usize, by_unix: bool) -> Option<mpsc::UnboundedReceiver<Vec<u8>>> {
        let peer = self.peer(rank)?;
        let frames = lock(&peer.frames).take()?;
        // Both ends agree on it: they have the same addresses and the same connection.
        let _ = peer.process.set(self.process(rank).filter(|_| by_unix));
        peer.note_arrival(Instant::now());
        lock(&self.connecting).by_unix.insert(rank, by_unix);
        self.connect_changed.notify_all();
        Some(frames)
    }

    /// The ranks that are not connected, ascending.
    pub(super) fn not_connected(&self) -> Vec<usize> {
        let is_missing = |peer: &Peer| peer.state.load(Ordering::Acquire) == ALIVE && !peer.is_connected();
        self.all_peers().filter(|(_, peer)| is_missing(peer)).map(|(rank, _)| rank).collect()
    }

    /// True when the process of a rank is known to run on this host.
    pub(super) fn runs_here(&self, rank: usize) -> bool {
        self.process(rank).is_some_and(|process| !is_stopped(process))
    }

    /// Sends heartbeats to the peers on other hosts, and detects the peers that are silent. `late`: for how long this thread should have run
    /// before and did not; no peer was silent then.
    pub(super) fn beat(&self, now: Instant, late: Duration, heartbeat: &[u8]) {
        let timeout = self.config.heartbeat_timeout;
        let has_failed = self.world.get().is_some_and(|world| self.has_failed(world.id));
        let connected = |(_, peer): &(usize, &Peer)| peer.state.load(Ordering::Acquire) == ALIVE && peer.is_connected();
        let own = self.config.rank;
        // The next ranks first.
        let (lower, higher): (Vec<_>, Vec<_>) = self.all_peers().filter(connected).partition(|(rank, _)| *rank < own);
        let mut on_host = 0;
        for (rank, peer) in higher.into_iter().chain(lower) {
            match peer.process.get().copied().flatten() {
                None => _ = peer.outbox.send(heartbeat.to_vec()),
                Some(process) => {
                    on_host += 1;
                    let is_watched = has_failed || on_host <= WATCHED;
                    if !is_watched || !is_stopped(process) {
                        peer.note_arrival(now);
                    }
                }
            }
            let silent = lock(&peer.silence).as_mut().is_some_and(|silence| silence.exceeds(timeout, now, late));
            if silent {
                self.peer_lost(rank, &no_heartbeat(timeout), &Source::default(), Loss::Silent);
            }
        }
    }

    fn has_failed(&self, id: u64) -> bool {
        let health = lock(&self.groups).known.get(&id).and_then(|entry| entry.health.upgrade());
        health.is_some_and(|health| health.cause().is_some())
    }

    /// Number of accepted connections that no lane has taken yet.
    pub(in super::super) fn arrived(&self) -> usize {
        self.admission.count() + self.pending.count()
    }

    /// Registers a group: failures that this rank finds in it are broadcast to its members, and messages about it are handled.
    pub(in super::super) fn register(self: &Arc<Plane>, id: u64, health: &Arc<GroupHealth>) {
        let plane = Arc::downgrade(self);
        let own = health.rank();
        let (rank, host) = (health.world_rank(own), health.host(own).to_owned());
        let subscription = health.subscribe_local(move |cause| {
            if let Some(plane) = plane.upgrade()
                && plane.owner.is_current()
            {
                let raised = |kind: &str, message: &str| {
                    let (kind, message) = (kind.to_owned(), message.to_owned());
                    Error::PeerRaised { rank, host: host.clone(), kind, message }
                };
                // A call of a driver or a library fails, or a library is missing, on this rank alone: peers name the rank.
                let for_peers = match cause {
                    Error::Device(failure) => raised("DeviceError", &failure.message),
                    Error::Unavailable(text) => raised("BaguaError", text),
                    _ => cause.clone(),
                };
                plane.broadcast_failure(id, &for_peers);
                plane.fail_subgroups(id, cause);
            }
        });
        let mut groups = lock(&self.groups);
        let ranks = health.world_ranks().to_vec();
        let failure = groups.early_failures.remove(&id);
        let departures = groups.early_departures.remove(&id).unwrap_or_default();
        for (member, rank) in ranks.iter().enumerate() {
            let departed = self.peer(*rank).is_some_and(|peer| peer.state.load(Ordering::Acquire) == DEPARTED);
            if departed || departures.contains(rank) {
                health.depart(member);
            }
        }
        groups.known.insert(id, Entry { health: Arc::downgrade(health), ranks, _subscription: subscription });
        drop(groups);
        if let Some(cause) = failure {
            health.fail_from_peer(cause);
        }
        for (member, rank) in health.world_ranks().iter().enumerate() {
            if self.peer(*rank).is_some_and(Peer::is_lost) {
                let _ = health.fail(health.peer_lost(member, "it was lost before the group was built"));
            }
        }
    }

    /// Leaves a sub-group, and announces that to its members.
    pub(in super::super) fn leave_subgroup(&self, id: u64) {
        let entry = lock(&self.groups).known.remove(&id);
        let Some(Entry { ranks, .. }) = entry else { return };
        self.send(&ranks, &Message::Leave { group: id });
        self.pending.clear(Some(id));
    }

    /// Queues a message for these world ranks, also for those that are lost: one may only be frozen.
    pub(in super::super) fn send(&self, ranks: &[usize], message: &Message) {
        let frame = message.frame();
        for peer in ranks.iter().filter_map(|rank| self.peer(*rank)) {
            // The channel is closed when the connection has ended.
            let _ = peer.outbox.send(frame.clone());
        }
    }

    /// The transport over a connection to a rank. While it is open, [`Plane::flush`] waits for its bytes.
    pub(in super::super) fn transport(&self, socket: Socket) -> io::Result<Box<dyn Transport>> {
        socket.into_transport(self.config.transport, |stream| {
            let mut streams = lock(&self.streams);
            streams.retain(|stream| stream.strong_count() > 0);
            streams.push(Arc::downgrade(stream));
        })
    }

    /// Waits until the peers' kernels have acknowledged what was sent to them, as long as bytes arrive and `goes_on`. Otherwise the message that this
    /// rank leaves, on a connection of its own, comes before them on a slow line.
    pub(in super::super) fn flush(&self, goes_on: impl Fn() -> bool) {
        let streams = std::mem::take(&mut *lock(&self.streams));
        let (mut least, mut moved) = (usize::MAX, Instant::now());
        while goes_on() && moved.elapsed() < STALLED {
            let left = streams.iter().filter_map(Weak::upgrade).map(|stream| unsent(&stream)).sum();
            if left == 0 {
                return;
            }
            if left < least {
                (least, moved) = (left, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Queues a message for all peers.
    pub(in super::super) fn send_all(&self, message: &Message) {
        let ranks: Vec<usize> = (0..self.config.world_size).collect();
        self.send(&ranks, message);
    }

    /// Sends a group's first cause to its members, also to a lost one: it may only be frozen.
    fn broadcast_failure(&self, id: u64, cause: &Error) {
        let ranks = lock(&self.groups).known.get(&id).map(|entry| entry.ranks.clone()).unwrap_or_default();
        self.send(&ranks, &Message::Fail { group: id, cause: cause.clone() });
    }

    /// Fails the sub-groups that a failure of the world group concerns. Every rank does so for its own sub-groups.
    fn fail_subgroups(&self, id: u64, cause: &Error) {
        if self.world.get().is_none_or(|world| world.id != id) {
            return;
        }
        for health in self.healths_except(Some(id)) {
            let concerned = match cause {
                Error::PeerLost { rank, .. } | Error::PeerRaised { rank, .. } => {
                    group_rank(health.world_ranks(), *rank).is_some()
                }
                Error::Aborted(_) => true,
                Error::Timeout { .. }
                | Error::Mismatch(_)
                | Error::InvalidArgument(_)
                | Error::UnsupportedType(_)
                | Error::NotImplemented(_)
                | Error::Unavailable(_)
                | Error::Device(_)
                | Error::System { .. } => false,
            };
            if concerned {
                health.fail_from_peer(cause.clone());
            }
        }
    }

    /// The healths of all existing groups except one.
    fn healths_except(&self, excluded: Option<u64>) -> Vec<Arc<GroupHealth>> {
        let groups = lock(&self.groups);
        let others = groups.known.iter().filter(|(id, _)| Some(**id) != excluded);
        others.filter_map(|(_, entry)| entry.health.upgrade()).collect()
    }

    /// Ends all waits of this rank before it leaves, without a message to the peers.
    pub(in super::super) fn abort_waits(&self, reason: &str) {
        self.leaving.store(true, Ordering::Release);
        for health in self.healths_except(None) {
            health.fail_from_peer(Error::Aborted(reason.to_owned()));
        }
    }

    /// Handles the end of a peer that has not left.
    pub(super) fn peer_lost(&self, rank: usize, reason: &str, source: &Source, loss: Loss) {
        let Some(peer) = self.peer(rank) else { return };
        let state = match loss {
            Loss::Ended => ENDED,
            Loss::Silent => SILENT,
        };
        let was = peer.state.compare_exchange(ALIVE, state, Ordering::AcqRel, Ordering::Relaxed);
        if was == Err(SILENT) {
            // What was frozen has ended now.
            peer.state.store(state, Ordering::Release);
        }
        self.views.notify();
        if was.is_err() || self.leaving.load(Ordering::Acquire) {
            return;
        }
        // The world group first: its failure is broadcast to all ranks and fails the sub-groups.
        let world = self.world.get().map(|world| world.id);
        let first = world.and_then(|id| lock(&self.groups).known.get(&id).and_then(|entry| entry.health.upgrade()));
        for health in first.into_iter().chain(self.healths_except(world)) {
            if let Some(member) = group_rank(health.world_ranks(), rank) {
                let _ = health.fail(health.peer_lost(member, reason).caused_by(source));
            }
        }
        self.connect_changed.notify_all();
    }

    /// The peers that are lost or have left. A message about views that arrived before is in the inbox already.
    pub(in super::super) fn losses(&self) -> Vec<(usize, Loss)> {
        let loss = |peer: &Peer| match peer.state.load(Ordering::Acquire) {
            DEPARTED | ENDED => Some(Loss::Ended),
            SILENT => Some(Loss::Silent),
            _ => None,
        };
        self.all_peers().filter_map(|(rank, peer)| Some((rank, loss(peer)?))).collect()
    }

    /// True when this rank leaves or has left the world group.
    pub(in super::super) fn has_left(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// True when a peer is lost because its heartbeats stopped.
    pub(super) fn is_silent(&self, rank: usize) -> bool {
        self.peer(rank).is_some_and(|peer| peer.state.load(Ordering::Acquire) == SILENT)
    }

    /// Handles a peer's message about views.
    pub(super) fn view_message(&self, from: usize, message: ViewMessage) {
        self.views.put(from, message);
    }

    /// Handles a peer's report that a group failed.
    pub(super) fn peer_reported(&self, from: usize, id: u64, cause: Error) {
        let mut groups = lock(&self.groups);
        let Some(entry) = groups.known.get(&id) else {
            if groups.early_failures.len() < MAX_EARLY {
                groups.early_failures.entry(id).or_insert(cause);
            }
            return;
        };
        let Some(health) = entry.health.upgrade() else { return };
        drop(groups);
        // Every rank forwards to every rank: only the first report is forwarded.
        if health.cause().is_none() {
            let others: Vec<usize> = health.world_ranks().iter().copied().filter(|rank| *rank != from).collect();
            // Invariant 1: before the waits of this rank end, after which the rank may leave.
            self.send(&others, &Message::Fail { group: id, cause: cause.clone() });
        }
        health.fail_from_peer(cause.clone());
        self.fail_subgroups(id, &cause);
        self.connect_changed.notify_all();
    }

    /// Handles a peer's message that it leaves a group.
    pub(super) fn peer_left(&self, from: usize, id: u64) {
        let is_world = self.world.get().is_some_and(|world| world.id == id);
        if is_world && let Some(peer) = self.peer(from) {
            let _ = peer.state.compare_exchange(ALIVE, DEPARTED, Ordering::AcqRel, Ordering::Relaxed);
            let _ = peer.outbox.send(Message::LeaveAck.frame());
        }
        let mut groups = lock(&self.groups);
        for (known, entry) in &groups.known {
            if (is_world || *known == id)
                && let Some(member) = group_rank(&entry.ranks, from)
                && let Some(health) = entry.health.upgrade()
            {
                health.depart(member);
            }
        }
        if !is_world && !groups.known.contains_key(&id) && groups.early_departures.len() < MAX_EARLY {
            groups.early_departures.entry(id).or_default().insert(from);
        }
        drop(groups);
        self.connect_changed.notify_all();
        self.views.notify();
    }

    /// Announces to all peers that this rank leaves, and waits up to [`LINGER`] for their acknowledgements.
    pub(super) async fn announce_leave(&self) {
        let Some(world) = self.world.get() else { return };
        self.send_all(&Message::Leave { group: world.id });
        let all_settled = async {
            for (_, peer) in self.all_peers() {
                loop {
                    let changed = self.settled.notified();
                    if peer.settled.load(Ordering::Acquire) || peer.is_lost() {
                        break;
                    }
                    changed.await;
                }
            }
        };
        // A peer that does not answer in time still has the message in its socket.
        let _ = tokio::time::timeout(LINGER, all_settled).await;
    }
}
