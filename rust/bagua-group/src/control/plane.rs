//! The state that the control thread shares with the other threads of a rank: peers, groups, and the handling of failures.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
use super::super::views::Inbox;
use super::super::wire::Encoding;
use super::assembly::{Assembly, Step};
use super::message::{Body, Message, Notice, Routed};
use super::overlay::{Action, Overlay, Presence};
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

/// What the loss of a peer says about its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Loss {
    /// It has ended, or has left the group.
    Ended,
    /// It may live on: it is frozen, cut off, or sends what cannot be understood.
    Silent,
    /// It is in another view.
    Moved,
}

/// The frames that a peer's writer task takes.
pub(super) type Frames = mpsc::UnboundedReceiver<Vec<u8>>;

/// A peer with a control connection.
pub(super) struct Peer {
    /// Frames for its writer task. Closed when the connection has ended.
    outbox: mpsc::UnboundedSender<Vec<u8>>,
    /// How many of them are not written.
    unwritten: AtomicUsize,
    /// How long it has sent nothing.
    silence: Mutex<Silence>,
    /// Its process, when it is on this host and visible here: that runs or not, instead of heartbeats.
    process: Option<u32>,
    by_unix: bool,
    /// It has acknowledged that this rank leaves, or its connection has ended.
    settled: AtomicBool,
}

impl Peer {
    /// Notes that a message has arrived from it.
    pub(super) fn note_arrival(&self, now: Instant) {
        *lock(&self.silence) = Silence::from(now);
    }

    /// Queues a message for it.
    fn send(&self, message: &Message) {
        self.queue(message.frame());
    }

    fn queue(&self, frame: Vec<u8>) {
        self.unwritten.fetch_add(1, Ordering::Relaxed);
        let _ = self.outbox.send(frame);
    }

    /// Notes that the writer has written a frame.
    pub(super) fn note_written(&self) {
        self.unwritten.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The control connections of this rank, and what it knows of the others.
struct Connections {
    overlay: Overlay,
    assembly: Assembly,
    /// By rank.
    peers: BTreeMap<usize, Arc<Peer>>,
    /// The neighbours were connected once, so that those that become neighbours later replace others.
    were_connected: bool,
    /// Since when neighbours that replace others are not connected.
    missing: BTreeMap<usize, Instant>,
    /// The ranks to which a connection is being opened.
    dialling: BTreeSet<usize>,
}

impl Connections {
    /// Queues what is to be sent, while this is locked: so messages leave in the order in which they were decided on. The other actions.
    fn send(&self, actions: Vec<Action>) -> Vec<Action> {
        let mut others = Vec::new();
        for action in actions {
            match action {
                Action::Send(to, message) => {
                    let frame = message.frame();
                    for peer in to.iter().filter_map(|rank| self.peers.get(rank)) {
                        peer.queue(frame.clone());
                    }
                }
                other => others.push(other),
            }
        }
        others
    }

    /// Performs a step of the assembly.
    fn step(&self, own: usize, step: Option<Step>) {
        let (to, message) = match step {
            None => return,
            Some(Step::Report(parent, apart)) => (vec![parent], Message::Connected { apart }),
            Some(Step::Complete(children, apart)) => (children, Message::Complete { apart }),
        };
        debug_assert!(!to.contains(&own));
        let frame = message.frame();
        for peer in to.iter().filter_map(|rank| self.peers.get(rank)) {
            peer.queue(frame.clone());
        }
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
    /// Set with `world`.
    connections: OnceLock<Mutex<Connections>>,
    groups: Mutex<Groups>,
    /// The connections in the handshake.
    pub(super) admission: Arc<Admission>,
    /// Notified when a peer is settled.
    pub(super) settled: Notify,
    /// Messages for the agreement on the next view.
    pub(in super::super) views: Inbox,
    /// This rank leaves: later events of peers are ignored.
    leaving: AtomicBool,
    /// This rank does not use the group, and may live on in another view.
    moved: AtomicBool,
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
            connections: OnceLock::new(),
            groups: Mutex::default(),
            admission,
            settled: Notify::new(),
            views: Inbox::default(),
            leaving: AtomicBool::new(false),
            moved: AtomicBool::new(false),
            streams: Mutex::default(),
        }
    }

    /// Sets the world; handshakes are answered from here on.
    pub(in super::super) fn set_world(&self, world: World) -> &World {
        let world = self.world.get_or_init(|| world);
        let Config { rank, world_size, full_mesh, .. } = self.config;
        self.connections.get_or_init(|| {
            let (overlay, assembly) = (Overlay::new(rank, world_size, full_mesh), Assembly::new(rank, world_size));
            let (missing, dialling) = (BTreeMap::new(), BTreeSet::new());
            let peers = BTreeMap::new();
            Mutex::new(Connections { overlay, assembly, peers, were_connected: false, missing, dialling })
        });
        self.world_known.send_replace(true);
        world
    }

    /// The world; an error before [`Plane::set_world`].
    pub(in super::super) fn world(&self) -> Result<&World> {
        self.world.get().ok_or_else(|| Error::other("the group is not built yet"))
    }

    /// Looks at the connections; the default before the world is known.
    fn look<T: Default>(&self, what: impl FnOnce(&Connections) -> T) -> T {
        self.connections.get().map(|connections| what(&lock(connections))).unwrap_or_default()
    }

    /// Changes the connections, and performs what follows.
    fn change<T: Default>(
        self: &Arc<Plane>,
        source: &Source,
        change: impl FnOnce(&mut Connections, &mut Vec<Action>) -> T,
    ) -> T {
        let Some(connections) = self.connections.get() else { return T::default() };
        let mut actions = Vec::new();
        let mut guard = lock(connections);
        let result = change(&mut guard, &mut actions);
        let actions = guard.send(actions);
        drop(guard);
        actions.into_iter().for_each(|action| self.perform(action, source));
        result
    }

    fn perform(self: &Arc<Plane>, action: Action, source: &Source) {
        match action {
            // Already done.
            Action::Send(..) => {}
            Action::Dial(rank) => self.dial_neighbour(rank),
            Action::Notice(notice) => self.noticed(notice, source),
            Action::Deliver(from, Body::LeftGroup { group }) => self.left_group(from, group),
            Action::Deliver(from, Body::View(message)) => self.views.put(from, message),
            Action::Deliver(_, Body::Connect) => {}
        }
    }

    /// A connected peer.
    pub(super) fn peer(&self, rank: usize) -> Option<Arc<Peer>> {
        self.look(|connections| connections.peers.get(&rank).cloned())
    }

    fn all_peers(&self) -> Vec<(usize, Arc<Peer>)> {
        self.look(|connections| connections.peers.iter().map(|(rank, peer)| (*rank, Arc::clone(peer))).collect())
    }

    /// Number of ranks that take part, this one included; before all are connected, of those that this rank is connected to.
    pub(in super::super) fn peers_seen(&self) -> usize {
        let Some(connections) = self.connections.get() else { return 1 };
        let Connections { overlay, assembly, .. } = &*lock(connections);
        let present = |rank: &usize| overlay.presence(*rank) == Presence::Present;
        match assembly.complete() {
            Some(_) => (0..self.config.world_size).filter(present).count(),
            None => 1 + overlay.links().iter().copied().filter(present).count(),
        }
    }

    /// The ranks with a control connection, also those that are gone.
    pub(in super::super) fn control_connections(&self) -> usize {
        self.look(|connections| connections.peers.len())
    }

    fn presence(&self, rank: usize) -> Presence {
        let connections = self.connections.get();
        connections.map_or(Presence::Present, |connections| lock(connections).overlay.presence(rank))
    }

    /// The process of a rank, when it is on this host and its number means the same here.
    fn process(&self, rank: usize) -> Option<u32> {
        let addresses = &self.world.get()?.addresses;
        let (own, theirs) = (&addresses[self.config.rank], &addresses[rank]);
        let here = own.host_id == theirs.host_id && own.pid_namespace == theirs.pid_namespace;
        (here && own.pid_namespace != 0).then_some(theirs.pid)
    }

    /// Notes that a peer is connected; the frames for it. `None` if it was before, or is gone.
    pub(super) fn connected(self: &Arc<Plane>, rank: usize, by_unix: bool) -> Option<(Arc<Peer>, Frames)> {
        let (outbox, frames) = mpsc::unbounded_channel();
        // Both ends agree on it: they have the same addresses and the same connection.
        let process = self.process(rank).filter(|_| by_unix);
        let (silence, settled) = (Mutex::new(Silence::from(Instant::now())), AtomicBool::new(false));
        let unwritten = AtomicUsize::new(0);
        let peer = Arc::new(Peer { outbox, unwritten, silence, process, by_unix, settled });
        let is_new = self.change(&Source::default(), |connections, out| {
            let is_new = connections.overlay.link_up(rank, out);
            if is_new {
                connections.peers.insert(rank, Arc::clone(&peer));
            }
            is_new
        });
        is_new.then(|| {
            self.check_neighbours();
            (peer, frames)
        })
    }

    /// When the last neighbour is connected for the first time, continues the assembly.
    fn check_neighbours(self: &Arc<Plane>) {
        let are_connected = self.look(|connections| {
            !connections.were_connected && connections.overlay.not_connected().is_empty()
        });
        self.connect_changed.notify_all();
        if are_connected {
            self.change(&Source::default(), |connections, _| connections.were_connected = true);
            let plane = Arc::clone(self);
            tokio::spawn(async move {
                let apart = !plane.reaches_its_host().await;
                plane.assemble(|assembly| assembly.connected(apart));
            });
        }
    }

    /// Continues the assembly.
    pub(super) fn assemble(self: &Arc<Plane>, event: impl FnOnce(&mut Assembly) -> Option<Step>) {
        let own = self.config.rank;
        self.change(&Source::default(), |connections, _| {
            let step = event(&mut connections.assembly);
            connections.step(own, step);
        });
        self.connect_changed.notify_all();
    }

    /// The ranks that do not reach the others of their host, when all ranks are connected.
    pub(in super::super) fn complete(&self) -> Option<Vec<usize>> {
        self.look(|connections| connections.assembly.complete().map(<[usize]>::to_vec))
    }

    /// Whether the connection to a peer is a Unix socket; `None` without one.
    pub(super) fn by_unix(&self, rank: usize) -> Option<bool> {
        self.peer(rank).map(|peer| peer.by_unix)
    }

    /// The neighbours that are not connected, ascending.
    pub(in super::super) fn not_connected(&self) -> Vec<usize> {
        self.look(|connections| connections.overlay.not_connected().into_iter().collect())
    }

    /// A rank that was present and has left.
    pub(in super::super) fn departed(&self) -> Option<usize> {
        self.look(|connections| {
            let mut gone = connections.overlay.gone();
            gone.find(|(_, presence)| !presence.is_lost()).map(|(rank, _)| rank)
        })
    }

    /// The ranks that some rank could not connect to.
    pub(in super::super) fn unreached(&self) -> BTreeSet<usize> {
        self.look(|connections| connections.overlay.unreached().clone())
    }

    /// Whom the assembly waits for at this rank.
    pub(in super::super) fn not_assembled(&self) -> Vec<usize> {
        self.look(|connections| connections.assembly.waits_for())
    }

    /// Publishes a notice of this rank.
    pub(in super::super) fn publish(self: &Arc<Plane>, notice: Notice) {
        self.change(&Source::default(), |connections, out| connections.overlay.publish(notice, out));
    }

    /// Queues a message for these world ranks.
    pub(in super::super) fn send(self: &Arc<Plane>, ranks: &[usize], body: Body) {
        self.change(&Source::default(), |connections, out| connections.overlay.send(ranks, body, out));
    }

    /// Handles a notice from a peer.
    pub(super) fn received_notice(self: &Arc<Plane>, via: usize, notice: Notice) {
        self.change(&Source::default(), |connections, out| connections.overlay.received_notice(via, notice, out));
    }

    /// Handles or passes on a message.
    pub(super) fn received_routed(self: &Arc<Plane>, routed: Routed) {
        self.change(&Source::default(), |connections, out| connections.overlay.received_routed(routed, out));
    }

    /// Replaces the connections to ranks that are gone, once this rank was connected.
    pub(super) fn repair(self: &Arc<Plane>) {
        if self.has_left() {
            return;
        }
        let limit = self.config.heartbeat_timeout * 2;
        self.change(&Source::default(), |connections, out| {
            let Connections { overlay, were_connected, missing, .. } = connections;
            if !*were_connected {
                return;
            }
            let (now, wanted) = (Instant::now(), overlay.not_connected());
            missing.retain(|rank, _| wanted.contains(rank));
            for rank in wanted {
                if now - *missing.entry(rank).or_insert(now) > limit {
                    overlay.lost(rank, false, &format!("no connection to it for {:.1} s", limit.as_secs_f64()), out);
                }
            }
            overlay.connect(out);
        });
    }

    /// Opens a connection that replaces another, unless that is in progress.
    fn dial_neighbour(self: &Arc<Plane>, rank: usize) {
        if !self.change(&Source::default(), |connections, _| connections.dialling.insert(rank)) {
            return;
        }
        let plane = Arc::clone(self);
        tokio::spawn(async move {
            plane.connect_to_neighbour(rank).await;
            plane.change(&Source::default(), |connections, _| _ = connections.dialling.remove(&rank));
        });
    }

    /// True when the process of a rank is known to run on this host.
    pub(super) fn runs_here(&self, rank: usize) -> bool {
        self.process(rank).is_some_and(|process| !is_stopped(process))
    }

    /// Sends heartbeats to the peers on other hosts, and detects the peers that are silent. `late`: for how long this thread should have run
    /// before and did not; no peer was silent then.
    pub(super) fn beat(self: &Arc<Plane>, now: Instant, late: Duration, heartbeat: &[u8]) {
        let timeout = self.config.heartbeat_timeout;
        let has_failed = self.world.get().is_some_and(|world| self.has_failed(world.id));
        let own = self.config.rank;
        // The next ranks first.
        let (lower, higher): (Vec<_>, Vec<_>) = self.all_peers().into_iter().partition(|(rank, _)| *rank < own);
        let mut on_host = 0;
        for (rank, peer) in higher.into_iter().chain(lower) {
            if self.presence(rank) != Presence::Present {
                continue;
            }
            match peer.process {
                None => peer.queue(heartbeat.to_vec()),
                Some(process) => {
                    on_host += 1;
                    let is_watched = has_failed || on_host <= WATCHED;
                    if !is_watched || !is_stopped(process) {
                        peer.note_arrival(now);
                    }
                }
            }
            let silent = lock(&peer.silence).exceeds(timeout, now, late);
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
                plane.publish(Notice::Failed { group: id, cause: for_peers });
                plane.fail_subgroups(id, cause);
            }
        });
        let mut groups = lock(&self.groups);
        let ranks = health.world_ranks().to_vec();
        let failure = groups.early_failures.remove(&id);
        let departures = groups.early_departures.remove(&id).unwrap_or_default();
        for (member, rank) in ranks.iter().enumerate() {
            let departed = matches!(self.presence(*rank), Presence::Left | Presence::Moved);
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
            if self.presence(*rank).is_lost() {
                let _ = health.fail(health.peer_lost(member, "it was lost before the group was built"));
            }
        }
    }

    /// Leaves a sub-group, and announces that to its members.
    pub(in super::super) fn leave_subgroup(self: &Arc<Plane>, id: u64) {
        let entry = lock(&self.groups).known.remove(&id);
        let Some(Entry { ranks, .. }) = entry else { return };
        let others: Vec<usize> = ranks.into_iter().filter(|rank| *rank != self.config.rank).collect();
        self.send(&others, Body::LeftGroup { group: id });
        self.pending.clear(Some(id));
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

    /// The connection to a peer has ended.
    pub(super) fn disconnected(self: &Arc<Plane>, rank: usize, reason: &str, source: &Source, loss: Loss) {
        self.change(source, |connections, out| {
            connections.overlay.link_down(rank, loss == Loss::Ended, reason, out);
            if let Some(peer) = connections.peers.remove(&rank) {
                peer.settled.store(true, Ordering::Release);
            }
        });
        self.settled.notify_one();
        self.views.notify();
    }

    /// This rank finds that a peer that has not left is lost.
    pub(super) fn peer_lost(self: &Arc<Plane>, rank: usize, reason: &str, source: &Source, loss: Loss) {
        self.change(source, |connections, out| connections.overlay.lost(rank, loss == Loss::Ended, reason, out));
        self.views.notify();
    }

    /// Handles a notice that holds for this rank. `source`: of a loss that this rank found.
    fn noticed(self: &Arc<Plane>, notice: Notice, source: &Source) {
        match notice {
            Notice::Lost { rank, by, reason, .. } => self.lost(rank, by, &reason, source),
            Notice::Left { rank, .. } => self.left(rank),
            Notice::Failed { group, cause } => self.failed(group, cause),
            Notice::View { from, message } => self.views.put(from, message),
            Notice::Unreached { .. } => self.connect_changed.notify_all(),
        }
    }

    fn lost(&self, rank: usize, by: usize, reason: &str, source: &Source) {
        self.views.notify();
        if self.has_left() {
            return;
        }
        // The world group first. Each rank does this for its own groups: the loss itself was passed on.
        let world = self.world.get().map(|world| world.id);
        let first = world.and_then(|id| lock(&self.groups).known.get(&id).and_then(|entry| entry.health.upgrade()));
        for health in first.into_iter().chain(self.healths_except(world)) {
            if let Some(member) = group_rank(health.world_ranks(), rank) {
                let mut error = health.peer_lost(member, reason).caused_by(source);
                if let Error::PeerLost { noticed_by, .. } = &mut error {
                    *noticed_by = by;
                }
                health.fail_from_peer(error);
            }
        }
        self.connect_changed.notify_all();
    }

    /// What is known of the ranks that are lost or have left. A message about views that arrived before is in the inbox already.
    pub(in super::super) fn losses(&self) -> Vec<(usize, Loss)> {
        let loss = |presence| match presence {
            Presence::Present => None,
            Presence::Left | Presence::Ended => Some(Loss::Ended),
            Presence::Silent => Some(Loss::Silent),
            Presence::Moved => Some(Loss::Moved),
        };
        self.look(|connections| {
            connections.overlay.gone().filter_map(|(rank, presence)| Some((rank, loss(presence)?))).collect()
        })
    }

    /// A rank that goes on without this one.
    pub(in super::super) fn excluded_by(&self) -> Option<usize> {
        self.look(|connections| connections.overlay.excluded_by())
    }

    /// True when this rank leaves or has left the world group.
    pub(in super::super) fn has_left(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// This rank does not use the group, and may live on in another view: it says so when it leaves.
    pub(in super::super) fn abandon(&self) {
        self.moved.store(true, Ordering::Release);
    }

    /// True when a peer is lost because its heartbeats stopped.
    pub(super) fn is_silent(&self, rank: usize) -> bool {
        self.presence(rank) == Presence::Silent
    }

    /// Handles the report that a group failed.
    fn failed(&self, id: u64, cause: Error) {
        let mut groups = lock(&self.groups);
        let Some(entry) = groups.known.get(&id) else {
            if groups.early_failures.len() < MAX_EARLY {
                groups.early_failures.entry(id).or_insert(cause);
            }
            return;
        };
        let Some(health) = entry.health.upgrade() else { return };
        drop(groups);
        // Invariant 1: it was passed on before the waits of this rank end, after which the rank may leave.
        health.fail_from_peer(cause.clone());
        self.fail_subgroups(id, &cause);
        self.connect_changed.notify_all();
    }

    /// Handles the notice that a rank leaves the world group.
    fn left(&self, rank: usize) {
        if let Some(peer) = self.peer(rank) {
            peer.send(&Message::LeaveAck);
        }
        for (_, entry) in &lock(&self.groups).known {
            depart(entry, rank);
        }
        self.connect_changed.notify_all();
        self.views.notify();
    }

    /// Handles the message that a rank leaves a sub-group.
    fn left_group(&self, from: usize, id: u64) {
        let mut groups = lock(&self.groups);
        if let Some(entry) = groups.known.get(&id) {
            depart(entry, from);
        } else if groups.early_departures.len() < MAX_EARLY {
            groups.early_departures.entry(id).or_default().insert(from);
        }
        drop(groups);
        self.connect_changed.notify_all();
    }

    /// A peer has received that this rank leaves.
    pub(super) fn acknowledged(&self, rank: usize) {
        if let Some(peer) = self.peer(rank) {
            peer.settled.store(true, Ordering::Release);
            self.settled.notify_one();
        }
    }

    /// Announces that this rank leaves, and waits up to [`LINGER`] for the acknowledgements of its peers.
    pub(super) async fn announce_leave(self: &Arc<Plane>) {
        let moved = self.moved.load(Ordering::Acquire);
        self.publish(Notice::Left { rank: self.config.rank, moved });
        let all_settled = async {
            for (rank, peer) in self.all_peers() {
                loop {
                    let changed = self.settled.notified();
                    if peer.settled.load(Ordering::Acquire) || self.presence(rank).is_lost() {
                        break;
                    }
                    changed.await;
                }
                // What this rank has passed on for others must not end with it.
                while peer.unwritten.load(Ordering::Relaxed) > 0 && !self.presence(rank).is_lost() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        };
        // A peer that does not answer in time still has the message in its socket.
        let _ = tokio::time::timeout(LINGER, all_settled).await;
    }
}

/// A world rank has left a group, if it was a member.
fn depart(entry: &Entry, rank: usize) {
    if let Some(member) = group_rank(&entry.ranks, rank)
        && let Some(health) = entry.health.upgrade()
    {
        health.depart(member);
    }
}
