//! All groups that this rank belongs to. Turns failures and departures, seen here or reported by a peer, into the error
//! that each group raises.

use std::collections::HashSet;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::super::fork::PerProcess;
use super::super::plane::{Answer, Body, LEAVING, Notice, Presence};
use super::super::wire::RANKS_LIMIT;
use super::group_table::{Entry, depart, group_rank};
use super::shared::Plane;
use crate::error::Error;
use crate::health::GroupHealth;
use crate::wait::lock;

/// The most messages that are kept for groups that this rank has not built yet.
const MAX_EARLY: usize = 4096;

/// This process's rank, and a lost rank with its host and process.
type LostProcess = (usize, usize, String, u32);

/// The losses that this process has printed.
static REPORTED: PerProcess<Mutex<HashSet<LostProcess>>> = PerProcess::new();

impl Plane {
    /// Registers a group: failures that this rank finds in it are broadcast to its members, and messages about it are
    /// handled.
    pub(in super::super) fn register(self: &Arc<Plane>, id: u64, health: &Arc<GroupHealth>) {
        let plane = Arc::downgrade(self);
        let own = health.rank();
        let (rank, host) = (health.world_rank(own), health.host(own).to_owned());
        let is_large = health.size() > RANKS_LIMIT || health.size() == self.config.world_size;
        let members = if is_large { Vec::new() } else { health.world_ranks().to_vec() };
        let subscription = health.subscribe_local(move |cause| {
            if let Some(plane) = plane.upgrade()
                && plane.owner.is_current()
            {
                let raised = |kind: &str, message: &str| {
                    let (kind, message) = (kind.to_owned(), message.to_owned());
                    Error::PeerRaised { rank, host: host.clone(), kind, message }
                };
                // The user's code or a call of a driver or a library fails, or a library is missing, on this rank
                // alone: peers name the rank.
                let for_peers = match (cause, cause.exception()) {
                    (_, Some(exception)) => raised(&exception.kind, &exception.message),
                    (Error::Device(failure), None) => raised("DeviceError", &failure.message),
                    (Error::Unavailable(text), None) => raised("BaguaError", text),
                    (_, None) => cause.clone(),
                };
                plane.publish(Notice::Failed { group: id, members: members.clone(), cause: for_peers });
                plane.fail_subgroups(id, cause);
            }
        });
        let plane = Arc::downgrade(self);
        let weak = Arc::downgrade(health);
        let noted = health.subscribe(move |cause| {
            if let Some(plane) = plane.upgrade()
                && plane.owner.is_current()
                && !plane.has_left()
                && let Some(health) = weak.upgrade()
            {
                plane.report(cause, &health);
            }
        });
        let plane = Arc::downgrade(self);
        let limit = self.config.heartbeat_timeout * LEAVING;
        health.ask_about_peers(limit, move |rank, answered| match plane.upgrade() {
            Some(plane) => plane.ask(rank, answered),
            None => answered(false),
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
        groups.known.insert(id, Entry { health: Arc::downgrade(health), ranks, _subscriptions: [noted, subscription] });
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

    /// Asks the coordinator why the connection to a rank broke. `answered` gets true if the rank lives.
    fn ask(&self, rank: usize, answered: Box<dyn FnOnce(bool) + Send>) {
        match self.handle.get() {
            Some(handle) if !self.has_left() => handle.ask(rank, move |answer| answered(answer == Answer::Lives)),
            _ => answered(false),
        }
    }

    /// Prints that a rank is lost, unless it has left in order or this process has printed it for another group. A
    /// launcher may end this process before Python raises the error.
    fn report(&self, cause: &Error, health: &GroupHealth) {
        let Error::PeerLost { rank, host, reason, noticed_by, .. } = cause else { return };
        let own = self.config.rank;
        let has_left = group_rank(health.world_ranks(), *rank).is_none_or(|member| health.has_departed(member));
        let process = self.world.get().and_then(|world| Some(world.addresses.get(*rank)?.pid)).unwrap_or_default();
        if *rank == own || has_left || !lock(REPORTED.get()).insert((own, *rank, host.clone(), process)) {
            return;
        }
        let by = if *noticed_by == own { String::new() } else { format!(" (noticed by rank {noticed_by})") };
        let line = format!("bagua: rank {own} lost rank {rank} (host {host}): {reason}{by}\n");
        // One write, so that the lines of several ranks do not mix. Without a standard error there is nobody to tell.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    /// Leaves a sub-group, and announces that to its members.
    pub(in super::super) fn leave_subgroup(self: &Arc<Plane>, id: u64) {
        let entry = lock(&self.groups).known.remove(&id);
        let Some(Entry { ranks, .. }) = entry else { return };
        let others: Vec<usize> = ranks.into_iter().filter(|rank| *rank != self.config.rank).collect();
        self.send(&others, Body::LeftGroup { group: id });
        self.pending.clear(Some(id));
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

    /// The health of the world group, while the group exists.
    pub(super) fn world_health(&self) -> Option<Arc<GroupHealth>> {
        let id = self.world.get()?.id;
        lock(&self.groups).known.get(&id)?.health.upgrade()
    }

    /// Returns the failure states of all existing groups except one.
    fn healths_except(&self, excluded: Option<u64>) -> Vec<Arc<GroupHealth>> {
        let groups = lock(&self.groups);
        let others = groups.known.iter().filter(|(id, _)| Some(**id) != excluded);
        others.filter_map(|(_, entry)| entry.health.upgrade()).collect()
    }

    /// Returns the ids of the groups that have failed.
    pub(super) fn failed_groups(&self) -> HashSet<u64> {
        let groups = lock(&self.groups);
        let known = groups.known.iter().filter_map(|(id, entry)| Some((*id, entry.health.upgrade()?)));
        let known: Vec<_> = known.collect();
        drop(groups);
        known.into_iter().filter(|(_, health)| health.check().is_err()).map(|(id, _)| id).collect()
    }

    /// Ends all waits of this rank before it leaves, without a message to the peers.
    pub(in super::super) fn abort_waits(&self, reason: &str) {
        self.leaving.store(true, Ordering::Release);
        for health in self.healths_except(None) {
            health.fail_from_peer(Error::Aborted(reason.to_owned()));
        }
        self.views.notify();
    }

    /// Fails the groups of a rank that is lost.
    pub(super) fn lost(&self, rank: usize, by: usize, reason: &str) {
        self.views.notify();
        if self.has_left() {
            return;
        }
        // The world group first. Each rank does this for its own groups: the loss itself was passed on.
        let world = self.world.get().map(|world| world.id);
        for health in self.world_health().into_iter().chain(self.healths_except(world)) {
            if let Some(member) = group_rank(health.world_ranks(), rank) {
                let mut error = health.peer_lost(member, reason);
                if let Error::PeerLost { noticed_by, .. } = &mut error {
                    *noticed_by = by;
                }
                health.fail_from_peer(error);
            }
        }
        self.wake_connecting();
    }

    /// Handles the report that a group failed.
    pub(super) fn failed(&self, id: u64, members: &[usize], cause: Error) {
        if !members.is_empty() && !members.contains(&self.config.rank) {
            return;
        }
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
        self.wake_connecting();
    }

    /// Handles the notice that a rank leaves the world group.
    pub(super) fn left(&self, rank: usize) {
        for entry in lock(&self.groups).known.values() {
            depart(entry, rank);
        }
        self.wake_connecting();
        self.views.notify();
    }

    /// Handles the message that a rank leaves a sub-group.
    pub(super) fn left_group(&self, from: usize, id: u64) {
        let mut groups = lock(&self.groups);
        if let Some(entry) = groups.known.get(&id) {
            depart(entry, from);
        } else if groups.early_departures.len() < MAX_EARLY {
            groups.early_departures.entry(id).or_default().insert(from);
        }
        drop(groups);
        self.wake_connecting();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::{TcpListener, TcpStream};

    use super::super::super::TransportChoice;
    use super::super::super::config::Config;
    use super::super::super::connection::Socket;
    use super::super::super::fork::OwnerProcess;
    use super::super::super::handshake::Purpose;
    use super::*;

    /// A connection whose peer reads nothing, with bytes that its kernel has not taken.
    fn stalled(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[0; 1 << 16]).is_ok() {}
        ours.set_nonblocking(false).unwrap();
        (ours, theirs)
    }

    #[test]
    fn a_rank_that_leaves_waits_for_the_bytes_of_groups_that_have_not_failed() {
        let config = Config { transport: TransportChoice::Tcp, ..Config::new(0, 2) };
        let plane = Arc::new(Plane::new(config, OwnerProcess::current(), None));
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (healthy, failed) = (7, 8);
        let opened = [healthy, failed].map(|id| {
            let health = GroupHealth::new(0, vec![0, 1], vec!["a".to_owned(), "b".to_owned()]);
            plane.register(id, &health);
            let (ours, theirs) = stalled(&listener);
            let transport = plane.transport(Socket::Tcp(ours), id, Purpose::Stream).unwrap();
            (health, transport, theirs)
        });
        opened[1].0.fail_from_peer(Error::Aborted("the step was cut off".to_owned()));
        // How often it looks for bytes, up to three times.
        let looks = |group| {
            let looks = Cell::new(0);
            let streams = plane.flush(group, || looks.replace(looks.get() + 1) < 2);
            assert_eq!(streams.len(), 1, "the streams of both groups are ended");
            looks.get()
        };
        assert_eq!(looks(Some(healthy)), 3, "it waits for these");
        assert_eq!(looks(None), 1, "that of the failed group is left, and nothing to wait for");
    }
}
