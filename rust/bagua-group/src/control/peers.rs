//! The connected peers of a rank: opening and replacing connections, and heartbeats.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::super::wire::Encoding;
use super::assembly::{Assembly, Step};
use super::message::Message;
use super::overlay::{Action, Overlay, Presence};
use super::plane::{Loss, Plane, no_heartbeat};
use super::session;
use super::silence::{Silence, is_stopped};
use crate::error::Source;
use crate::wait::lock;

/// The most processes on this host that a rank watches, the next ones by rank: the end of one closes its connections, which every rank
/// notices, but whether one is stopped each rank would have to look up for each other.
const WATCHED: usize = 8;

/// Many ranks leave when more than one in so many is gone since the heartbeat before.
const MANY: usize = 32;

/// In a small world, when more than so many are.
const LEAST: usize = 4;

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
    /// The process was stopped when this rank last looked.
    stopped: AtomicBool,
    by_unix: bool,
    /// It has acknowledged that this rank leaves, or its connection has ended.
    pub(super) settled: AtomicBool,
}

impl Peer {
    /// Notes that a message has arrived from it.
    pub(super) fn note_arrival(&self, now: Instant) {
        *lock(&self.silence) = Silence::from(now);
    }

    /// Whether the connection is inside this host.
    pub(super) fn is_here(&self) -> bool {
        self.by_unix
    }

    /// Queues a message for it.
    pub(super) fn send(&self, message: &Message) {
        self.queue(message.frame());
    }

    fn queue(&self, frame: Vec<u8>) {
        self.unwritten.fetch_add(1, Ordering::Relaxed);
        let _ = self.outbox.send(frame);
    }

    /// Whether frames are queued that its writer will write.
    pub(super) fn is_writing(&self) -> bool {
        self.unwritten.load(Ordering::Relaxed) > 0 && !self.outbox.is_closed()
    }

    /// Notes that the writer has written so many frames.
    pub(super) fn note_written(&self, frames: usize) {
        self.unwritten.fetch_sub(frames, Ordering::Relaxed);
    }
}

/// The control connections of this rank, and what it knows of the others.
pub(super) struct Connections {
    pub(super) overlay: Overlay,
    pub(super) assembly: Assembly,
    /// By rank.
    pub(super) peers: BTreeMap<usize, Arc<Peer>>,
    /// The neighbours were connected once, so that those that become neighbours later replace others.
    pub(super) were_connected: bool,
    /// Since when neighbours that replace others are not connected.
    pub(super) missing: BTreeMap<usize, Instant>,
    /// The ranks to which a connection is being opened.
    pub(super) dialling: BTreeSet<usize>,
    /// How many ranks were gone when connections were last to be replaced.
    pub(super) were_gone: usize,
    /// The group is used as soon as the ring and the tree of the assembly are connected, and only these are: see [`Connections::awaited`].
    /// Until [`Plane::connect_skips`].
    pub(super) skips_later: bool,
}

impl Connections {
    /// The neighbours that have to be connected now, and are not. Where the skips come later, messages pass along the tree.
    pub(super) fn awaited(&self) -> BTreeSet<usize> {
        let missing = self.overlay.not_connected();
        if !self.skips_later {
            return missing;
        }
        &missing & &self.overlay.beside().chain(self.assembly.relatives()).collect()
    }

    /// Queues what is to be sent, while this is locked: so messages leave in the order in which they were decided on. The other actions.
    pub(super) fn send(&self, actions: Vec<Action>) -> Vec<Action> {
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
}

impl Plane {
    /// Notes that a peer is connected; the frames for it. `None` if it was before, or is gone.
    pub(super) fn connected(self: &Arc<Plane>, rank: usize, by_unix: bool) -> Option<(Arc<Peer>, Frames)> {
        let (outbox, frames) = mpsc::unbounded_channel();
        // Both ends agree on it: they have the same addresses and the same connection.
        let process = self.process(rank).filter(|_| by_unix);
        let silence = Mutex::new(Silence::from(Instant::now()));
        let (unwritten, stopped, settled) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        let peer = Arc::new(Peer { outbox, unwritten, silence, process, stopped, by_unix, settled });
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
        let are_connected = self.look(|connections| !connections.were_connected && connections.awaited().is_empty());
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
        let is_complete = self.change(&Source::default(), |connections, out| {
            out.extend(event(&mut connections.assembly).map(|step| {
                let (to, message) = step.message();
                Action::Send(to, message)
            }));
            connections.assembly.complete().is_some()
        });
        if is_complete {
            self.wake_connecting();
        }
    }

    /// Whether the connection to a peer is a Unix socket; `None` without one.
    pub(super) fn by_unix(&self, rank: usize) -> Option<bool> {
        self.peer(rank).map(|peer| peer.is_here())
    }

    /// Replaces the connections to ranks that are gone, once this rank was connected.
    pub(super) fn repair(self: &Arc<Plane>) {
        if self.has_left() || self.is_over() {
            return;
        }
        let (limit, period) = (self.config.heartbeat_timeout * 2, session::period(self));
        let late: Vec<usize> = self.change(&Source::default(), |connections, out| {
            let wanted = connections.awaited();
            let Connections { overlay, were_connected, missing, were_gone, .. } = connections;
            let mut late = Vec::new();
            if !*were_connected {
                return late;
            }
            let now = Instant::now();
            // Where many leave, their successors are about to leave too. Half of the connections keep this rank reachable meanwhile.
            let gone = overlay.gone().count();
            let many_leave = gone > std::mem::replace(were_gone, gone) + (self.config.world_size / MANY).max(LEAST);
            if many_leave && 2 * overlay.not_connected().len() <= overlay.neighbours().len() {
                return late;
            }
            missing.retain(|rank, _| wanted.contains(rank));
            for rank in wanted.iter().copied() {
                let since = now - *missing.entry(rank).or_insert(now);
                if since > limit {
                    overlay.lost(rank, false, &format!("no connection to it for {:.1} s", limit.as_secs_f64()), out);
                } else if since > period {
                    late.push(rank);
                }
            }
            overlay.connect(wanted, out);
            late
        });
        // Those that are lower are asked when they are connected to.
        late.into_iter().filter(|rank| *rank > self.config.rank).for_each(|rank| self.dial_neighbour(rank));
    }

    /// The skips do not come later any more: [`Plane::repair`] opens them.
    pub(super) fn connect_skips(self: &Arc<Plane>) {
        self.change(&Source::default(), |connections, _| connections.skips_later = false);
    }

    /// Opens a connection that replaces another, or asks a higher rank whether it runs, unless that is in progress.
    pub(super) fn dial_neighbour(self: &Arc<Plane>, rank: usize) {
        if !self.change(&Source::default(), |connections, _| connections.dialling.insert(rank)) {
            return;
        }
        let plane = Arc::clone(self);
        tokio::spawn(async move {
            plane.connect_to_neighbour(rank).await;
            plane.change(&Source::default(), |connections, _| _ = connections.dialling.remove(&rank));
        });
    }

    /// Sends heartbeats to the peers on other hosts, and detects the peers that are silent. `late`: for how long this thread should have run
    /// before and did not; no peer was silent then.
    pub(super) fn beat(self: &Arc<Plane>, now: Instant, late: Duration, heartbeat: &[u8]) {
        let timeout = self.config.heartbeat_timeout;
        let (has_failed, is_over, has_left) = (self.has_world_failed(), self.is_over(), self.has_left());
        // In a large world each rank has enough others that watch it, also while a view is agreed on.
        let all_are_watched = has_failed && self.config.world_size <= self.config.full_mesh;
        let own = self.config.rank;
        // The next ranks first.
        let (lower, higher): (Vec<_>, Vec<_>) = self.all_peers().into_iter().partition(|(rank, _)| *rank < own);
        let (mut on_host, mut elsewhere, mut sending, mut silent) = (0, 0, 0, Vec::new());
        for (rank, peer) in higher.into_iter().chain(lower) {
            if self.presence(rank) != Presence::Present {
                continue;
            }
            match peer.process {
                None => {
                    elsewhere += 1;
                    peer.queue(heartbeat.to_vec());
                }
                Some(process) => {
                    on_host += 1;
                    // Of a group that is over only the loss of those is still found that had stopped before.
                    let is_watched = if is_over {
                        peer.stopped.load(Ordering::Relaxed)
                    } else {
                        all_are_watched || on_host <= WATCHED
                    };
                    let stopped = is_watched && !has_left && is_stopped(process);
                    peer.stopped.store(stopped, Ordering::Relaxed);
                    if !stopped {
                        peer.note_arrival(now);
                    }
                }
            }
            let mut silence = lock(&peer.silence);
            if silence.exceeds(timeout, now, late) {
                silent.push(rank);
            }
            sending += usize::from(peer.process.is_none() && !silence.has_lasted(timeout / 2, now));
        }
        let mut reason = no_heartbeat(timeout);
        if elsewhere > 1 && sending == 0 {
            reason += ", nor from any other rank of another host: this host may be cut off itself";
        }
        for rank in silent {
            self.peer_lost(rank, &reason, &Source::default(), Loss::Silent);
        }
    }
}
