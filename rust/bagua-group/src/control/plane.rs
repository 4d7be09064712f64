//! The state that the control thread shares with the other threads of a rank: peers, groups, and the handling of failures.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::super::admission::Admission;
use super::super::collecting::Collecting;
use super::super::config::Config;
use super::super::connection::{ConnKey, PendingConns, Socket};
use super::super::fork::OwnerProcess;
use super::super::handshake::Purpose;
use super::super::tls::Ends;
use super::super::views::Inbox;
use super::assembly::Assembly;
use super::groups::Groups;
use super::message::{Body, Notice, Routed};
use super::open_streams::{OpenStreams, STALLED, end};
use super::overlay::{Action, Overlay, Presence};
use super::peers::{Connections, Peer};
use super::session;
use super::silence::is_stopped;
use super::world::World;
use crate::error::{Error, Result, Source};
use crate::stats::Stats;
use crate::transport::Transport;
use crate::wait::{SLICE, lock, slice_among};

/// How long a leaving rank waits for acknowledgements.
pub(super) const LINGER: Duration = Duration::from_millis(200);

/// How many turns of a millisecond at least a leaving rank gives its writers. Turns, not time: where many ranks share a processor, this thread
/// may not run for long, and its writers have not run either then. Whom no message reaches takes the rank for lost, and reports that to all.
const TURNS: usize = 200;

/// How long a rank collects which others have left before it passes that on: at first, and while ever more leave. So few messages are sent
/// while all ranks of a busy machine leave.
const TOGETHER: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(320)];

/// How many times as long as a wait sleeps between two looks for failures others have to raise one before a rank leaves, where many share a
/// processor.
const RAISING: u32 = 8;

/// What a rank needs of a processor to open a view, divided by two: leaving costs as much, and would delay the views of the others.
const OPENING: Duration = Duration::from_micros(500);

/// The longest that a rank with a view waits for those of the others because its own took long.
const LONGEST_OPENING: Duration = Duration::from_secs(5);

/// The longest that a leaving rank waits for peers on other hosts.
pub(super) const LONGEST_FAREWELL: Duration = Duration::from_secs(5);

/// The reason of `PeerLost` for a peer that is silent.
pub(super) fn no_heartbeat(timeout: Duration) -> String {
    format!("no heartbeat for {:.1} s", timeout.as_secs_f64())
}

/// How long a rank of a host with so many waits before it leaves a group that failed so long ago. Where many share a processor, most have not
/// run since then, and would wait for it behind the ends of those that have.
fn others_raise(ranks: usize, failed: Duration) -> Duration {
    (RAISING * (slice_among(ranks) - SLICE)).saturating_sub(failed)
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

/// The progress of [`super::super::Bootstrap::connect`].
#[derive(Default)]
pub(in super::super) struct ConnectState {
    /// By world rank: why the last attempt to connect to it failed.
    pub(in super::super) last_failures: HashMap<usize, String>,
    /// Why the last connection was refused, if that may explain why a rank is missing: another secret, or TLS.
    pub(in super::super) last_refusal: Option<String>,
}

impl ConnectState {
    /// What an error says of the last refused connection.
    pub(in super::super) fn refusal(&self) -> String {
        self.last_refusal.iter().map(|why| format!("; a connection was refused: {why}")).collect()
    }
}

/// The state that the control thread shares with the other threads of a rank.
pub(in super::super) struct Plane {
    pub(in super::super) config: Config,
    pub(in super::super) owner: OwnerProcess,
    /// Counters of the world group.
    pub(in super::super) stats: Arc<Stats>,
    pub(in super::super) pending: PendingConns,
    pub(in super::super) connecting: Mutex<ConnectState>,
    /// Notified when all ranks are connected, or the group cannot be: see [`Plane::wake_connecting`].
    pub(in super::super) connect_changed: Condvar,
    /// The ends of its TLS connections; `None` without TLS.
    pub(super) tls: Option<Ends>,
    pub(super) world: OnceLock<World>,
    /// Turns true when `world` is set: handshakes wait for it.
    pub(super) world_known: tokio::sync::watch::Sender<bool>,
    /// Set with `world`.
    pub(super) connections: OnceLock<Mutex<Connections>>,
    pub(super) groups: Mutex<Groups>,
    /// The connections in the handshake.
    pub(super) admission: Arc<Admission>,
    /// Notified when a peer is settled.
    pub(super) settled: Notify,
    /// Messages for the agreement on the next view.
    pub(in super::super) views: Inbox,
    /// This rank leaves: later events of peers are ignored.
    pub(super) leaving: AtomicBool,
    /// When the world group failed, before this rank left it.
    pub(super) failed_at: OnceLock<Instant>,
    /// This rank does not use the group, and may live on in another view.
    moved: AtomicBool,
    /// From when this rank listened, or a view was agreed on, until all were connected.
    pub(in super::super) joined_in: OnceLock<Duration>,
    /// How long this rank collects who has left.
    departures: Mutex<Collecting>,
    /// The connections of lanes and messages.
    streams: OpenStreams,
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
            failed_at: OnceLock::new(),
            moved: AtomicBool::new(false),
            joined_in: OnceLock::new(),
            departures: Mutex::new(Collecting::new(TOGETHER[0], TOGETHER[1])),
            streams: OpenStreams::default(),
        }
    }

    /// Sets the world; handshakes are answered from here on. `skips_later`: few connections are awaited before the group is used.
    pub(in super::super) fn set_world(&self, world: World, skips_later: bool) -> &World {
        let world = self.world.get_or_init(|| world);
        let Config { rank, world_size, full_mesh, .. } = self.config;
        self.connections.get_or_init(|| {
            let (overlay, assembly) = (Overlay::new(rank, world_size, full_mesh), Assembly::new(rank, world_size));
            let (peers, missing, dialling) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
            let (were_connected, were_gone) = (false, 0);
            // In a small world each rank has to have a connection to each other.
            let skips_later = skips_later && world_size > full_mesh;
            Mutex::new(Connections {
                overlay,
                assembly,
                peers,
                were_connected,
                missing,
                dialling,
                were_gone,
                skips_later,
            })
        });
        self.world_known.send_replace(true);
        world
    }

    /// The world; an error before [`Plane::set_world`].
    pub(in super::super) fn world(&self) -> Result<&World> {
        self.world.get().ok_or_else(|| Error::other("the group is not built yet"))
    }

    /// Wakes the thread that waits until all ranks are connected: there may be a reason to end that.
    pub(super) fn wake_connecting(&self) {
        // It looks and sleeps under this lock: it has looked before, and sleeps now, or looks after this.
        drop(lock(&self.connecting));
        self.connect_changed.notify_all();
    }

    /// Looks at the connections; the default before the world is known.
    pub(super) fn look<T: Default>(&self, what: impl FnOnce(&Connections) -> T) -> T {
        self.connections.get().map(|connections| what(&lock(connections))).unwrap_or_default()
    }

    /// Changes the connections, and performs what follows.
    pub(super) fn change<T: Default>(
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
            Action::PassLater => {
                let plane = Arc::clone(self);
                tokio::spawn(async move {
                    let together = lock(&plane.departures).wait(Instant::now());
                    tokio::time::sleep(together).await;
                    // Those of a failed group are passed on by invariant 3 of the overlay.
                    let has_failed = plane.has_world_failed();
                    plane.change(&Source::default(), |connections, out| {
                        if !has_failed || connections.overlay.view_is_agreed_on() {
                            connections.overlay.pass_departures(out);
                        }
                    });
                });
            }
        }
    }

    /// Whether the world group has failed, and not only because this rank leaves.
    pub(super) fn has_world_failed(&self) -> bool {
        self.failed_at.get().is_some()
    }

    /// Whether the world group has failed and no rank that this one knows of agrees on the next view: its ranks raise and leave.
    pub(super) fn is_over(&self) -> bool {
        self.has_world_failed() && !self.look(|connections| connections.overlay.view_is_agreed_on())
    }

    /// How long this rank waits before it leaves, see [`others_raise`].
    pub(super) fn others_raise(&self) -> Duration {
        match (self.failed_at.get(), self.is_over()) {
            (Some(failed_at), true) => others_raise(self.ranks_of_host(), failed_at.elapsed()),
            _ => Duration::ZERO,
        }
    }

    /// How long this rank, which has a view, waits before it leaves the group: the others of its host get theirs first. `took`: how long
    /// this rank has built it; where many ranks share a processor the last one has it so long after the first.
    pub(in super::super) fn others_open(&self, took: Duration) -> Duration {
        (OPENING * self.ranks_of_host() as u32).max(took.min(LONGEST_OPENING))
    }

    /// The number of ranks on this rank's host; 0 before the world is known.
    fn ranks_of_host(&self) -> usize {
        let Some(world) = self.world.get() else { return 0 };
        let host = &world.addresses[self.config.rank].host_id;
        world.addresses.iter().filter(|address| address.host_id == *host).count()
    }

    /// A connected peer.
    pub(super) fn peer(&self, rank: usize) -> Option<Arc<Peer>> {
        self.look(|connections| connections.peers.get(&rank).cloned())
    }

    pub(super) fn all_peers(&self) -> Vec<(usize, Arc<Peer>)> {
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

    /// The number of open control connections.
    pub(in super::super) fn control_connections(&self) -> usize {
        self.look(|connections| connections.peers.len())
    }

    /// Whether a rank takes part, and there is no connection to it.
    pub(in super::super) fn is_missing(&self, rank: usize) -> bool {
        self.look(|connections| {
            !connections.peers.contains_key(&rank) && connections.overlay.presence(rank) == Presence::Present
        })
    }

    pub(super) fn presence(&self, rank: usize) -> Presence {
        let connections = self.connections.get();
        connections.map_or(Presence::Present, |connections| lock(connections).overlay.presence(rank))
    }

    /// The process of a rank, when it is on this host and its number means the same here.
    pub(super) fn process(&self, rank: usize) -> Option<u32> {
        let addresses = &self.world.get()?.addresses;
        let (own, theirs) = (&addresses[self.config.rank], &addresses[rank]);
        let here = own.host_id == theirs.host_id && own.pid_namespace == theirs.pid_namespace;
        (here && own.pid_namespace != 0).then_some(theirs.pid)
    }

    /// The ranks that do not reach the others of their host, when all ranks are connected.
    pub(in super::super) fn complete(&self) -> Option<Vec<usize>> {
        self.look(|connections| connections.assembly.complete().map(<[usize]>::to_vec))
    }

    /// The neighbours that must be connected before the group is used, and are not, ascending.
    pub(in super::super) fn awaited(&self) -> Vec<usize> {
        self.look(|connections| connections.awaited().into_iter().collect())
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

    /// True when the process of a rank is known to run on this host.
    pub(super) fn runs_here(&self, rank: usize) -> bool {
        self.process(rank).is_some_and(|process| !is_stopped(process))
    }

    /// The most of these awaited connections that may have been accepted, but not taken yet.
    pub(in super::super) fn arrived(&self, awaited: &[ConnKey]) -> usize {
        self.admission.count() + self.pending.count(awaited)
    }

    /// The transport over a connection to a rank, for a lane or the messages of this group. While it is open, [`Plane::flush`] waits for its
    /// bytes.
    pub(in super::super) fn transport(
        &self,
        socket: Socket,
        group: u64,
        purpose: Purpose,
    ) -> io::Result<Box<dyn Transport>> {
        self.streams.transport(&self.config, socket, group, purpose)
    }

    /// Waits until the peers' kernels have acknowledged what this rank sent them in a group (`None`: in any), as long as bytes arrive and
    /// `goes_on`, for a limited time: what a kernel holds for a process that has ended may be lost. Not for the bytes of groups that have
    /// failed, which no member reads. The streams of the group's lanes, for [`end_streams`](Plane::end_streams).
    pub(in super::super) fn flush(&self, group: Option<u64>, goes_on: impl Fn() -> bool) -> Vec<Weak<TcpStream>> {
        self.streams.flush(group, || self.failed_groups(), goes_on)
    }

    /// Sends nothing more on these streams. Peers that wait for bytes of a rank that has left get them, and then the end of the stream, however
    /// long the line is.
    pub(in super::super) fn end_streams(streams: &[Weak<TcpStream>]) {
        end(streams);
    }

    /// The connection to a peer has ended; how, and what that says, unless it had never been ready.
    pub(super) fn disconnected(self: &Arc<Plane>, rank: usize, loss: Option<(&str, Loss)>, source: &Source) {
        self.change(source, |connections, out| {
            match loss {
                Some((reason, loss)) => connections.overlay.link_down(rank, loss == Loss::Ended, reason, out),
                None => connections.overlay.unlink(rank),
            }
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
            Notice::Left { ranks, .. } => self.left(&ranks),
            Notice::Failed { group, members, cause } => self.failed(group, &members, cause),
            Notice::View { from, message } => self.views.put(from, message),
            Notice::Unreached { .. } => self.wake_connecting(),
        }
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

    /// A peer has received that this rank leaves.
    pub(super) fn acknowledged(&self, rank: usize) {
        if let Some(peer) = self.peer(rank) {
            peer.settled.store(true, Ordering::Release);
            self.settled.notify_one();
        }
    }

    /// Waits until the peers on other hosts have acknowledged that this rank leaves, as long as some do. Where the group has failed, none takes
    /// a rank for lost that leaves.
    async fn elsewhere_settled(&self, peers: &[(usize, Arc<Peer>)]) {
        let is_awaited = |rank: usize, peer: &Peer| {
            !peer.is_here() && !peer.settled.load(Ordering::Acquire) && !self.presence(rank).is_lost()
        };
        let awaited = || peers.iter().filter(|(rank, peer)| is_awaited(*rank, peer)).count();
        loop {
            let before = awaited();
            let some_settle = async {
                while before > 0 && awaited() == before {
                    self.settled.notified().await;
                }
            };
            if before == 0 || tokio::time::timeout(STALLED, some_settle).await.is_err() {
                break;
            }
        }
    }

    /// Announces that this rank leaves, when others have raised what ended the group ([`others_raise`]), and waits up to [`LINGER`] for the
    /// acknowledgements of its peers.
    pub(super) async fn announce_leave(self: &Arc<Plane>) {
        loop {
            let wait = self.others_raise();
            if wait.is_zero() {
                break;
            }
            // Meanwhile ranks may begin to agree on a view, and wait for this one to leave.
            tokio::time::sleep(wait.min(session::period(self))).await;
        }
        let moved = self.moved.load(Ordering::Acquire);
        self.change(&Source::default(), |connections, out| connections.overlay.leave(moved, out));
        let peers = self.all_peers();
        let all_settled = async {
            for (rank, peer) in &peers {
                loop {
                    let changed = self.settled.notified();
                    if peer.settled.load(Ordering::Acquire) || self.presence(*rank).is_lost() {
                        break;
                    }
                    changed.await;
                }
            }
        };
        // A peer on this host that does not answer in time still gets the message.
        let _ = tokio::time::timeout(LINGER, all_settled).await;
        if !self.has_world_failed() {
            let _ = tokio::time::timeout(LONGEST_FAREWELL, self.elsewhere_settled(&peers)).await;
        }
        // What this rank passes on for others must not end with it.
        self.change(&Source::default(), |connections, out| connections.overlay.pass_departures(out));
        let writes = |(rank, peer): &(usize, Arc<Peer>)| peer.is_writing() && !self.presence(*rank).is_lost();
        for _ in 0..TURNS {
            if !peers.iter().any(writes) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_shares_its_processor_with_many_leaves_a_failed_group_after_them_and_another_at_once() {
        assert_eq!(others_raise(1, Duration::ZERO), Duration::ZERO);
        let (crowd, second) = (1 << 20, Duration::from_secs(1));
        let wait = others_raise(crowd, Duration::ZERO);
        assert!(wait > 2 * second && wait < 3 * second, "{wait:?}");
        assert_eq!(others_raise(crowd, second), wait - second);
        assert_eq!(others_raise(crowd, 3 * second), Duration::ZERO);
    }
}
