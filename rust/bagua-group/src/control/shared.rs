//! The state that the control thread shares with the other threads of a rank.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::super::admission::Admission;
use super::super::config::Config;
use super::super::connection::{ConnKey, ControlConn, PendingConns, Socket};
use super::super::fork::OwnerProcess;
use super::super::handshake::Purpose;
use super::super::plane::{Body, Event, Handle, Notice, Presence, Status};
use super::super::tls::Ends;
use super::super::views::Inbox;
use super::group_table::Groups;
use super::open_streams::{OpenStreams, end};
use super::world::World;
use crate::error::{Error, Result};
use crate::stats::Stats;
use crate::transport::Transport;
use crate::wait::lock;

/// The sign by which a rank that is gone was found to be so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Loss {
    /// The rank's process has ended, or the rank has left the group.
    Ended,
    /// The rank may live on: it is frozen, cut off, or sends messages that cannot be understood.
    Silent,
    /// The rank is in another view.
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
    /// Returns the part of an error text about the last refused connection.
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
    /// The keys for both ends of TLS connections; `None` without TLS.
    pub(super) tls: Option<Ends>,
    pub(super) world: OnceLock<World>,
    /// True once `world` and `handle` are set: handshakes wait for that.
    pub(super) world_known: tokio::sync::watch::Sender<bool>,
    /// Commands to this rank's task of the control plane. Set with `world`; never set in a world of one.
    pub(super) handle: OnceLock<Handle<ControlConn>>,
    /// The ranks that some rank could not connect to.
    unreached: Mutex<BTreeSet<usize>>,
    pub(super) groups: Mutex<Groups>,
    /// The connections in the handshake.
    pub(super) admission: Arc<Admission>,
    /// Messages for the agreement on the next view.
    pub(in super::super) views: Inbox,
    /// True once this rank leaves: it ignores later events of peers.
    pub(super) leaving: AtomicBool,
    /// True if this rank does not use the group, and may live on in another view.
    pub(super) moved: AtomicBool,
    /// The time from when this rank listened, or a view was agreed on, until all ranks were connected.
    pub(in super::super) joined_in: OnceLock<Duration>,
    /// The connections of lanes and messages.
    pub(super) streams: OpenStreams,
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
            handle: OnceLock::new(),
            unreached: Mutex::default(),
            groups: Mutex::default(),
            admission,
            views: Inbox::default(),
            leaving: AtomicBool::new(false),
            moved: AtomicBool::new(false),
            joined_in: OnceLock::new(),
            streams: OpenStreams::default(),
        }
    }

    /// Returns the world; an error before it is set.
    pub(in super::super) fn world(&self) -> Result<&World> {
        self.world.get().ok_or_else(|| Error::other("the group is not built yet"))
    }

    /// Wakes the thread that waits until all ranks are connected: there may be a reason to end that.
    pub(super) fn wake_connecting(&self) {
        // The thread looks and goes to sleep under this lock. So it sleeps now, or looks after this.
        drop(lock(&self.connecting));
        self.connect_changed.notify_all();
    }

    /// Returns what `look` finds in the state of the control plane; the default before the world is known.
    fn status<T: Default>(&self, look: impl FnOnce(&Status) -> T) -> T {
        self.handle.get().map(|handle| handle.status(look)).unwrap_or_default()
    }

    /// Handles an event of the control plane. The control thread calls this.
    pub(super) fn handle_event(self: &Arc<Plane>, event: Event) {
        match event {
            Event::Complete(_) => self.wake_connecting(),
            Event::Notice(Notice::Lost { rank, by, reason, .. }) => self.lost(rank, by, &reason),
            Event::Notice(Notice::Left { rank, .. }) => self.left(rank),
            Event::Notice(Notice::Failed { group, members, cause }) => self.failed(group, &members, cause),
            Event::Notice(Notice::View { from, message }) => self.views.put(from, message),
            Event::Notice(Notice::Unreached { by, ranks }) => {
                // Another rank's deadline is near, so it needs to know which ranks this one misses.
                let missing = if by == self.config.rank { Vec::new() } else { self.unlinked() };
                if !missing.is_empty() {
                    self.publish(Notice::Unreached { by: self.config.rank, ranks: missing });
                }
                lock(&self.unreached).extend(ranks.into_iter().filter(|rank| *rank < self.config.world_size));
                self.wake_connecting();
            }
            Event::Deliver(from, Body::LeftGroup { group }) => self.left_group(from, group),
            Event::Deliver(from, Body::View(message)) => self.views.put(from, message),
            // The control plane's task handles these messages itself and never delivers them.
            Event::Deliver(_, Body::Ack | Body::Ping(_) | Body::Pong(_) | Body::Lives(_)) => {}
            Event::Unreachable(_, error) => {
                if let Some(health) = self.world_health() {
                    let _ = health.fail(error);
                }
                self.wake_connecting();
            }
        }
    }

    /// Returns the number of ranks that take part, this one included. Before all ranks are connected, those that this
    /// rank is not connected to do not count.
    pub(in super::super) fn peers_seen(&self) -> usize {
        let is_present = |status: &Status, rank: usize| status.presence[rank] == Presence::Present;
        let others = self.status(|status| match status.complete {
            Some(_) => (0..status.presence.len()).filter(|rank| is_present(status, *rank)).count() - 1,
            None => status.links.iter().filter(|rank| is_present(status, **rank)).count(),
        });
        1 + others
    }

    /// Returns the number of open control connections.
    pub(in super::super) fn control_connections(&self) -> usize {
        self.status(|status| status.links.len())
    }

    pub(super) fn presence(&self, rank: usize) -> Presence {
        self.handle.get().map_or(Presence::Present, |handle| handle.status(|status| status.presence[rank]))
    }

    /// Returns the process of a rank, if the rank is on this host and its process number means the same here.
    pub(super) fn process(&self, rank: usize) -> Option<u32> {
        let addresses = &self.world.get()?.addresses;
        let (own, theirs) = (&addresses[self.config.rank], &addresses[rank]);
        let here = own.host_id == theirs.host_id && own.pid_namespace == theirs.pid_namespace;
        (here && own.pid_namespace != 0).then_some(theirs.pid)
    }

    /// Returns the ranks that cannot use the Unix sockets of their host, once all ranks are connected.
    pub(in super::super) fn complete(&self) -> Option<Vec<usize>> {
        self.status(|status| status.complete.clone())
    }

    /// Returns the ranks that this one waits for, ascending: those that it is not connected to, or else those that are
    /// not ready.
    pub(in super::super) fn awaited(&self) -> Vec<usize> {
        let unlinked = self.unlinked();
        if unlinked.is_empty() { self.status(|status| status.awaited.iter().copied().collect()) } else { unlinked }
    }

    /// Returns the ranks that this one must be connected to before the group is used, and is not, ascending.
    pub(in super::super) fn unlinked(&self) -> Vec<usize> {
        self.status(|status| status.awaited.difference(&status.links).copied().collect())
    }

    /// Returns a rank that was present and has left.
    pub(in super::super) fn departed(&self) -> Option<usize> {
        let has_left = |presence: &Presence| matches!(presence, Presence::Left | Presence::Moved);
        self.status(|status| status.presence.iter().position(has_left))
    }

    /// Returns the ranks that some rank could not connect to.
    pub(in super::super) fn unreached(&self) -> BTreeSet<usize> {
        lock(&self.unreached).clone()
    }

    /// Tells all ranks.
    pub(in super::super) fn publish(&self, notice: Notice) {
        if let Some(handle) = self.handle.get() {
            handle.tell(notice);
        }
    }

    /// Sends a message to these world ranks.
    pub(in super::super) fn send(&self, ranks: &[usize], body: Body) {
        if let Some(handle) = self.handle.get() {
            handle.send(ranks.to_vec(), body);
        }
    }

    /// Returns the largest number of these awaited connections that may have been accepted, but not taken yet.
    pub(in super::super) fn arrived(&self, awaited: &[ConnKey]) -> usize {
        self.admission.count() + self.pending.count(awaited)
    }

    /// Returns the transport over a connection to a rank, for a lane or the messages of this group. While it is open,
    /// [`Plane::flush`] waits for its bytes.
    pub(in super::super) fn transport(
        &self,
        socket: Socket,
        group: u64,
        purpose: Purpose,
    ) -> io::Result<Box<dyn Transport>> {
        self.streams.transport(&self.config, socket, group, purpose)
    }

    /// Waits until the peers' kernels have acknowledged what this rank sent them in a group (`None`: in any), because
    /// bytes that a kernel holds for a process that has ended may be lost. Waits as long as bytes arrive and `goes_on`
    /// is true, for a limited time. Does not wait for the bytes of groups that have failed, which no member reads.
    /// Returns the streams of the group's lanes, for [`end_streams`](Plane::end_streams).
    pub(in super::super) fn flush(&self, group: Option<u64>, goes_on: impl Fn() -> bool) -> Vec<Weak<TcpStream>> {
        self.streams.flush(group, || self.failed_groups(), goes_on)
    }

    /// Sends nothing more on these streams. Peers that wait for bytes of a rank that has left get them, and then the
    /// end of the stream, however slow the line is.
    pub(in super::super) fn end_streams(streams: &[Weak<TcpStream>]) {
        end(streams);
    }

    /// Returns the ranks that are lost or have left, with the sign of that. A message about views that arrived before
    /// the sign is in the inbox already.
    pub(in super::super) fn losses(&self) -> Vec<(usize, Loss)> {
        let loss = |presence: &Presence| match presence {
            Presence::Present => None,
            Presence::Left | Presence::Ended => Some(Loss::Ended),
            Presence::Silent => Some(Loss::Silent),
            Presence::Moved => Some(Loss::Moved),
        };
        let own = self.config.rank;
        self.status(|status| {
            let all = status.presence.iter().enumerate().filter(|(rank, _)| *rank != own);
            all.filter_map(|(rank, presence)| Some((rank, loss(presence)?))).collect()
        })
    }

    /// Returns a rank that has excluded this one and continues without it.
    pub(in super::super) fn excluded_by(&self) -> Option<usize> {
        self.status(|status| status.excluded_by)
    }

    /// True if this rank leaves or has left the world group.
    pub(in super::super) fn has_left(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Notes that this rank does not use the group, and may live on in another view. Leaving then tells the other ranks
    /// so.
    pub(in super::super) fn abandon(&self) {
        self.moved.store(true, Ordering::Release);
    }
}
