//! Bootstrap of a group: a rank listens, the caller exchanges the addresses, and the rank connects to all others.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::address::{self, Address};
use super::config::{Config, MAX_STREAMS};
use super::control::{ConnectState, Control, Listeners, Plane, World, ask_missing};
use super::descriptors;
use super::fork::OwnerProcess;
use super::group::Group;
use super::handshake;
use super::plane::Notice;
use super::rendezvous::Awaited;
use super::tls::{Ends, Tls};
use super::views::Endpoint;
use crate::error::{Error, Progress, Result};
use crate::health::GroupHealth;
use crate::wait::{Deadline, lock, slice_among, wait_on_for};

/// Time before the deadline of joining at which a rank tells the other ranks whom it could not connect to.
const GRACE: Duration = Duration::from_millis(500);

/// A rank that listens and has an address, but is not connected to any peer.
pub struct Bootstrap {
    control: Control,
    /// The address blob.
    address: Vec<u8>,
    /// Time at which the rank began to listen.
    begun: Instant,
}

impl Bootstrap {
    /// First step: listens. The caller must then exchange the [`Bootstrap::address`] of all ranks. Raises the process's
    /// soft limit of file descriptors to its hard limit.
    ///
    /// # Errors
    /// `InvalidArgument` for an invalid configuration. `System` if the hard limit of file descriptors is too low, or if
    /// a socket or the thread cannot be created.
    pub fn bind(config: Config) -> Result<Bootstrap> {
        let Config { rank, world_size, .. } = config;
        if rank >= world_size || u32::try_from(world_size).is_err() {
            return Err(Error::InvalidArgument(format!("rank {rank} is not in a world of {world_size} ranks")));
        }
        if config.heartbeat_timeout.is_zero() {
            return Err(Error::InvalidArgument("a heartbeat timeout of 0 s".to_owned()));
        }
        if !(1..=MAX_STREAMS).contains(&config.streams_per_peer) {
            let asked = config.streams_per_peer;
            return Err(Error::InvalidArgument(format!(
                "{asked} streams per peer: it must be between 1 and {MAX_STREAMS}"
            )));
        }
        if world_size > 1 && config.listen.ip().is_unspecified() {
            let at = config.listen.ip();
            return Err(Error::InvalidArgument(format!("listening on {at} gives peers no address to connect to")));
        }
        if world_size > 1 {
            provide_descriptors(&config)?;
        }
        let tls = Ends::of(&config.access())?;
        let mut config = config;
        if config.host_id.is_empty() {
            config.host_id = address::host_id()?;
        }
        if config.host_name.is_empty() {
            config.host_name = address::host_name();
        }
        let owner = OwnerProcess::install()?;
        let listeners = if world_size > 1 { Some(Listeners::open(&config)?) } else { None };
        let address = Address {
            rank,
            world_size,
            pid: std::process::id(),
            pid_namespace: address::pid_namespace(),
            tcp: listeners.as_ref().map(Listeners::tcp_address).transpose()?,
            unix: listeners.as_ref().map(|listeners| listeners.name.clone()).unwrap_or_default(),
            host_id: config.host_id.as_str().into(),
            host_name: config.host_name.as_str().into(),
            streams: config.streams_per_peer as u8,
            algorithm: config.algorithm as u8,
            tls: Tls::code(config.tls.as_ref()),
            nonce: handshake::random()?,
        };
        let plane = Plane::new(config, owner, tls);
        let control = match listeners {
            Some(listeners) => Control::start(plane, listeners)?,
            None => Control::without_thread(plane),
        };
        Ok(Bootstrap { control, address: address.encode(), begun: Instant::now() })
    }

    /// Returns this rank's address for its peers, a few hundred opaque bytes.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Returns the ranks that [`Bootstrap::connect`] waits for. Can be read by another thread.
    pub fn awaited(&self) -> Awaited {
        let awaited = Awaited::default();
        let plane = Arc::downgrade(&self.control.plane);
        awaited.found_by(move || plane.upgrade().map(|plane| plane.awaited()).unwrap_or_default());
        awaited
    }

    /// Second step: connects to the peers. `addresses[r]` is the address of rank r. Returns when every rank has its
    /// control connections.
    ///
    /// # Errors
    /// `InvalidArgument` or `Mismatch` if the addresses contradict each other. `Timeout` names the ranks that cannot be
    /// reached. `System` or `Mismatch` if a rank refuses the connection. `PeerLost` if a rank ends or leaves meanwhile.
    pub fn connect(self, addresses: &[Vec<u8>]) -> Result<Group> {
        let Bootstrap { control, address, begun } = self;
        let plane = Arc::clone(&control.plane);
        plane.owner.check()?;
        let parsed = Address::parse_all(addresses, &plane.config, &address)?;
        let world = World::new(parsed, addresses, &plane.config.secret);
        connect(control, world, begun, &AtomicBool::new(false))
    }
}

/// Begins to listen for the members of view `view` of a group. This rank may become a member. Fails with `System` if a
/// socket cannot be opened, or the hard limit of file descriptors is too low.
pub(super) fn listen_for_view(former: &Plane, view: u64) -> Result<(Listeners, Endpoint)> {
    provide_descriptors(&former.config)?;
    // The group itself uses the port of the configuration.
    let at = SocketAddr::new(former.config.listen.ip(), 0);
    let (names, own) = (former.world()?.listener_names(view), former.config.rank);
    let listeners = Listeners::open_at(at, former.config.transport, |port| names(own, port))?;
    let endpoint = Endpoint { port: listeners.tcp_address()?.port(), unix: !listeners.name.is_empty() };
    Ok((listeners, endpoint))
}

/// A view of a group that its members agreed on.
pub(super) struct NextView {
    /// Number of the view.
    pub(super) view: u64,
    /// Members by their ranks in the group, ascending.
    pub(super) members: Vec<usize>,
    /// Listening endpoint of each member.
    pub(super) endpoints: Vec<Endpoint>,
    /// Listeners of this rank.
    pub(super) listeners: Listeners,
}

/// Connects to the other members of a view, like [`Bootstrap::connect`]. Ends with `Aborted` soon after `cancelled` was
/// set.
pub(super) fn connect_view(former: &Plane, next: NextView, cancelled: &AtomicBool) -> Result<Group> {
    let (begun, NextView { view, members, endpoints, listeners }) = (Instant::now(), next);
    let own = former.config.rank;
    let rank = members.iter().position(|member| *member == own);
    let rank = rank.ok_or_else(|| Error::other("this rank is not a member of the view that it accepted"))?;
    let world_size = members.len();
    let world = former.world()?.next(view, &members, &endpoints, &former.config.secret);
    let listen = SocketAddr::new(former.config.listen.ip(), 0);
    let config = Config { rank, world_size, listen, view, ..former.config.clone() };
    let tls = Ends::of(&config.access())?;
    let plane = Plane::new(config, former.owner, tls);
    let control = match world_size {
        1 => Control::without_thread(plane),
        _ => Control::start(plane, listeners)?,
    };
    connect(control, world, begun, cancelled)
}

/// Connects a rank that listens.
fn connect(control: Control, world: World, begun: Instant, cancelled: &AtomicBool) -> Result<Group> {
    let plane = Arc::clone(&control.plane);
    let config = &plane.config;
    let deadline = Deadline::after(config.connect_timeout);
    let hosts = world.addresses.iter().map(|address| address.host_name.to_string()).collect();
    let health = GroupHealth::new(config.rank, (0..config.world_size).collect(), hosts);
    plane.register(world.id, &health);
    control.enter(world);
    control.spawn(ask_missing(Arc::clone(&plane)));
    let world = plane.world()?;
    if config.world_size == 1 {
        return Group::world(control, health, vec![vec![0]]);
    }
    let apart = Connecting { plane: &plane, health: &health, world, deadline, cancelled }.wait()?;
    let ids: Vec<&str> = world.addresses.iter().map(|address| &*address.host_id).collect();
    let shares = |rank: usize| !world.addresses[rank].unix.is_empty() && !apart.contains(&rank);
    plane.joined_in.get_or_init(|| begun.elapsed());
    Group::world(control, health, partition(&ids, shares))
}

/// Raises the limit of file descriptors, and checks that it suffices for a rank of a world.
fn provide_descriptors(config: &Config) -> Result<()> {
    descriptors::provide(|| descriptors::of_world(config), describe(config))
}

fn describe(config: &Config) -> String {
    let Config { rank, world_size, .. } = config;
    format!("rank {rank} of {world_size}")
}

/// A rank that is connecting to its peers.
struct Connecting<'a> {
    plane: &'a Arc<Plane>,
    health: &'a GroupHealth,
    world: &'a World,
    deadline: Deadline,
    /// True once the caller does not want the group any more.
    cancelled: &'a AtomicBool,
}

impl Connecting<'_> {
    /// Waits until all ranks are connected. Returns the ranks that cannot reach the other ranks of their host.
    fn wait(&self) -> Result<Vec<usize>> {
        let mut state = lock(&self.plane.connecting);
        let (mut last_check, mut missed): (Option<Instant>, Option<Vec<usize>>) = (None, None);
        let slice = slice_among(self.plane.config.world_size);
        let grace = GRACE.min(self.deadline.limit() / 4);
        loop {
            if let Some(apart) = self.plane.complete() {
                return Ok(apart);
            }
            self.health.check()?;
            if self.cancelled.load(Ordering::Acquire) {
                return Err(Error::Aborted("the view was given up".to_owned()));
            }
            let passed = self.deadline.passed();
            if passed || last_check.is_none_or(|last| last.elapsed() >= slice) {
                last_check = Some(Instant::now());
                if let Some(departed) = self.plane.departed() {
                    // If this rank still misses ranks, the departed rank left because its own deadline passed.
                    let left = || self.health.peer_lost(departed, "it left while the group was being built");
                    return Err(if self.plane.unreached().is_empty() {
                        left()
                    } else {
                        self.timed_out(&state, missed)
                    });
                }
                if self.deadline.left() < grace && missed.is_none() {
                    // Also tell the ranks that miss nobody, so that their errors name the same ranks. A rank that
                    // misses nobody asks with an empty list, see `Plane::handle_event`.
                    let ranks = self.plane.awaited();
                    missed = Some(ranks.clone());
                    if !ranks.is_empty() || self.plane.unreached().is_empty() {
                        self.plane.publish(Notice::Unreached { by: self.plane.config.rank, ranks });
                    }
                }
                if passed {
                    return Err(self.timed_out(&state, missed));
                }
            }
            state = wait_on_for(&self.plane.connect_changed, state, slice.min(self.deadline.left()));
        }
    }

    /// The error for the ranks that are not connected; `missed`: to this rank, shortly before the deadline.
    fn timed_out(&self, state: &ConnectState, missed: Option<Vec<usize>>) -> Error {
        let mut missing = self.plane.unreached();
        missing.extend(missed.unwrap_or_default());
        missing.remove(&self.plane.config.rank);
        let missing: Vec<usize> = missing.into_iter().collect();
        let each = missing.iter().map(|rank| {
            let failure = state.last_failures.get(rank).map(|how| format!(": {how}")).unwrap_or_default();
            format!("{}{failure}", self.world.addresses[*rank].describe())
        });
        let what = format!("connecting to {}{}", each.collect::<Vec<_>>().join("; "), state.refusal());
        let progress = Progress { what, label: String::new(), done: 0, total: 0 };
        let (after, noticed_by) = (self.deadline.limit(), self.plane.config.rank);
        Error::Timeout { after, missing, noticed_by, progress: Some(Box::new(progress)) }
    }
}

/// Partitions the ranks into hosts. Ranks with equal host ids form a host if they reach each other by Unix sockets.
/// Otherwise each of them forms a host of its own. `is_connected(r)` is true if rank r has a Unix socket and reaches
/// another rank of its host. Hosts are in the order of their first ranks.
fn partition(host_ids: &[&str], is_connected: impl Fn(usize) -> bool) -> Vec<Vec<usize>> {
    let mut classes: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (rank, id) in host_ids.iter().enumerate() {
        classes.entry(id).or_default().push(rank);
    }
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for class in classes.into_values() {
        if class.iter().all(|rank| is_connected(*rank)) {
            hosts.push(class);
        } else {
            hosts.extend(class.into_iter().map(|rank| vec![rank]));
        }
    }
    hosts.sort_unstable();
    hosts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_host_id_are_a_host_if_all_are_connected_by_unix_sockets() {
        let ids = ["a", "b", "a", "b"];
        assert_eq!(partition(&ids, |_| true), [[0, 2], [1, 3]]);
        // Rank 3 does not reach rank 1.
        assert_eq!(partition(&ids, |rank| rank != 3), [vec![0, 2], vec![1], vec![3]]);
        assert_eq!(partition(&ids, |_| false), [[0], [1], [2], [3]]);
    }
}
