//! Closing streams that neither end uses, where the process is short of file descriptors.
//!
//! The streams of a lane stay open for its next operation. When the process may open no further descriptor, for a stream, a stream of
//! messages or an accepted connection, the rank asks the peers of its least recently used streams to close these, over the control
//! connections. A peer closes between two operations of the lane, if no byte is in flight between the two ranks, or refuses; the rules
//! are in [`StreamTable`](crate::transport::StreamTable). Nothing is asked of a peer while descriptors suffice, so that operations pay
//! nothing for it. The next operation that needs the streams opens them again.
//!
//! The streams of a group's messages ([`MessageStreams`](super::MessageStreams)) stay open. Both ends of a lane's streams know by the order
//! of operations what is in flight between the two; of messages only the sender knows, because a message may come before its receive is
//! posted, and its order on the one stream from its sender decides which receive gets it. A stream that is closed and opened again would be
//! two: the receiver would have to read the first to its end before the second, and the sender to keep back what is posted between its
//! last frame and the receiver's end of the stream. That is a second order of arrival beside the queue of unexpected messages, for the two
//! descriptors of a direction that carries nothing; a rank that is short of them has those of its lanes closed instead.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::control::{Body, Closing, MeshId, Plane};
use super::descriptors::{self, Need, Shortage};
use super::fork::PerProcess;
use crate::health::GroupHealth;
use crate::transport::{CloseRequest, IdleStreams, StreamTable};
use crate::wait::lock;

/// How many descriptors the peers are asked to free where a system call failed for the lack of one.
const BATCH: usize = 4;

/// The longest wait for streams in use to become idle.
const PATIENCE: Duration = Duration::from_secs(30);

/// The wait where there are none: connections in the handshake have descriptors too, and those that are refused give them back.
const GRACE: Duration = Duration::from_secs(1);

/// Shortest and longest pause before the descriptors are counted again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// The meshes of all groups in this process: its limit of descriptors is one.
static MESHES: PerProcess<Mutex<Vec<Arc<Registered>>>> = PerProcess::new();

/// A mesh whose streams open on demand.
struct Registered {
    id: MeshId,
    /// Group ranks by index of the mesh.
    members: Vec<usize>,
    health: Weak<GroupHealth>,
    plane: Weak<Plane>,
    table: Weak<StreamTable>,
}

/// A mesh that was not dropped.
struct Existing {
    entry: Arc<Registered>,
    health: Arc<GroupHealth>,
    plane: Arc<Plane>,
    table: Arc<StreamTable>,
}

impl Existing {
    fn send(&self, peer: usize, closing: Closing) {
        let rank = self.health.world_rank(self.entry.members[peer]);
        self.plane.send(&[rank], Body::Streams { mesh: self.entry.id, closing });
    }

    fn is(&self, plane: &Arc<Plane>, id: MeshId) -> bool {
        Arc::ptr_eq(&self.plane, plane) && self.entry.id == id
    }

    /// The streams that a peer may be asked to close.
    fn idle(&self) -> impl Iterator<Item = IdleStreams> {
        self.table.idle().into_iter().filter(|idle| self.may_answer(idle.peer))
    }

    /// Whether a peer may still answer: the group has not failed, and the peer has not left it.
    fn may_answer(&self, peer: usize) -> bool {
        self.health.check().is_ok() && !self.health.has_departed(self.entry.members[peer])
    }
}

/// Streams of a mesh may be closed from now on. `members` are group ranks, by index of the mesh.
pub(super) fn register(
    plane: &Arc<Plane>,
    id: MeshId,
    members: Vec<usize>,
    health: &Arc<GroupHealth>,
    table: &Arc<StreamTable>,
) {
    let (health, plane, table) = (Arc::downgrade(health), Arc::downgrade(plane), Arc::downgrade(table));
    let mut all = lock(MESHES.get());
    all.retain(|entry| entry.table.strong_count() > 0);
    all.push(Arc::new(Registered { id, members, health, plane, table }));
}

/// All meshes that were not dropped.
fn meshes() -> Vec<Existing> {
    let entries: Vec<Arc<Registered>> = lock(MESHES.get()).clone();
    let exists = |entry: Arc<Registered>| {
        let (health, plane, table) = (entry.health.upgrade()?, entry.plane.upgrade()?, entry.table.upgrade()?);
        Some(Existing { entry, health, plane, table })
    };
    entries.into_iter().filter_map(exists).collect()
}

/// Closes the streams of groups that have failed, and asks peers to close as many idle ones as are wanted beside those and the ones that are
/// being closed, those that were used least recently first. False where that gives nothing: no stream was closed, no peer was asked, and no
/// stream of another mesh than `except` can become idle.
fn close(wanted: usize, except: Option<(&Arc<Plane>, MeshId)>) -> bool {
    let (meshes, failed): (Vec<_>, Vec<_>) = meshes().into_iter().partition(|mesh| mesh.health.check().is_ok());
    // The ranks know of the failure, or will before they notice that the streams have ended, as when a rank leaves.
    let freed: usize = failed.iter().map(|mesh| mesh.table.abandon()).sum();
    let unanswered = |mesh: &Existing| -> usize {
        let all = mesh.table.unanswered().into_iter();
        all.filter(|(peer, ..)| mesh.may_answer(*peer)).map(|(.., streams)| streams).sum()
    };
    let mut closing = freed + meshes.iter().map(unanswered).sum::<usize>();
    let idle_of = |mesh| Existing::idle(mesh).map(move |idle| (idle, mesh));
    let mut idle: Vec<_> = meshes.iter().flat_map(idle_of).collect();
    idle.sort_unstable_by_key(|(idle, _)| idle.last_run);
    for (idle, mesh) in idle {
        if closing >= wanted {
            break;
        }
        if let Some(request) = mesh.table.ask(idle.peer) {
            closing += idle.streams;
            mesh.send(idle.peer, request.into());
        }
    }
    let is_other = |mesh: &&Existing| except.is_none_or(|(plane, id)| !mesh.is(plane, id));
    closing > 0 || meshes.iter().filter(is_other).any(|mesh| mesh.table.open() > 0)
}

/// As [`close`], where a system call failed because there is no free descriptor.
pub(super) fn close_some() {
    close(BATCH, None);
}

/// Waits until this process may open as many descriptors as `need` says, and has idle streams closed for that; at most for half of `limit`.
/// `mesh` is the one that needs them.
///
/// # Errors
/// What is missing, where the streams are in use.
pub(super) async fn make_room(
    plane: &Arc<Plane>,
    mesh: Option<MeshId>,
    need: impl Fn() -> Need,
    limit: Duration,
) -> Result<(), Shortage> {
    let (begin, mut pause) = (Instant::now(), PAUSES.0);
    loop {
        let open = descriptors::open();
        let Err(shortage) = descriptors::provide(open, need()) else { return Ok(()) };
        let may_help = close(shortage.missing(), mesh.map(|mesh| (plane, mesh)));
        if begin.elapsed() >= (if may_help { PATIENCE } else { GRACE }).min(limit / 2) {
            return Err(shortage);
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(PAUSES.1);
    }
}

/// Handles what a world rank says about the streams of a mesh.
pub(super) fn received(plane: &Arc<Plane>, from: usize, id: MeshId, closing: Closing) {
    let mesh = meshes().into_iter().find(|mesh| mesh.is(plane, id));
    let known = mesh.and_then(|mesh| {
        let peer = mesh.entry.members.iter().position(|member| mesh.health.world_rank(*member) == from)?;
        Some((mesh, peer))
    });
    match (known, closing) {
        (Some((mesh, peer)), Closing::Asked { number, sent, received }) => {
            if let Some(closed) = mesh.table.requested(peer, CloseRequest { number, sent, received }) {
                mesh.send(peer, Closing::Answered { number, closed });
            }
        }
        (Some((mesh, peer)), Closing::Answered { number, closed }) => mesh.table.answered(peer, number, closed),
        // This rank has not opened the lane yet, or not any more: the peer may have sent what an operation will read.
        (None, Closing::Asked { number, .. }) => {
            let closing = Closing::Answered { number, closed: false };
            plane.send(&[from], Body::Streams { mesh: id, closing });
        }
        (None, Closing::Answered { .. }) => {}
    }
}

/// Repeats the requests of a rank that are not answered: a message that others pass on is lost when one of them is.
pub(super) fn ask_again(plane: &Arc<Plane>) {
    for mesh in meshes().into_iter().filter(|mesh| Arc::ptr_eq(&mesh.plane, plane)) {
        for (peer, request, _) in mesh.table.unanswered() {
            if mesh.may_answer(peer) {
                mesh.send(peer, request.into());
            }
        }
    }
}
