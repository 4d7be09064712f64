//! A connected group: its lanes, arenas and sub-groups. Also how a group fails and how a rank leaves it.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::builder::LaneBuilder;
use super::config::Config;
use super::control::{Control, Leaving, Plane};
use super::fork::PerProcess;
use super::handshake::digest;
use super::lane::Lane;
use super::message_streams::MessageStreams;
use super::streams::LaneConns;
use crate::collective::Hier;
use crate::error::{Error, Result};
use crate::health::{GroupHealth, LEAVING};
use crate::memory::{Registry, SharedArena};
use crate::recorder::FlightRecorder;
use crate::stats::Stats;
use crate::wait::{Deadline, lock};

static RECORDER: PerProcess<FlightRecorder> = PerProcess::new();

/// Returns the flight recorder of this process. A forked child starts with an empty one.
pub fn flight_recorder() -> &'static FlightRecorder {
    RECORDER.get()
}

/// A group of ranks. Clones are cheap. Dropping the last clone leaves the group.
#[derive(Clone)]
pub struct Group {
    membership: Arc<Membership>,
}

/// The state that the clones of a group share.
struct Membership {
    health: Arc<GroupHealth>,
    stats: Arc<Stats>,
    name: String,
    /// Equal on all members, and different for every group.
    id: u64,
    /// Random number in message headers that distinguishes this world group from earlier and later ones.
    epoch: u32,
    /// Group ranks on each host, ascending. Hosts are in the order of their first ranks.
    hosts: Vec<Vec<usize>>,
    /// Number of lanes opened.
    channels: AtomicU32,
    /// This rank's arenas, of the world group and all its sub-groups.
    registry: Arc<Registry>,
    /// For each list of world ranks, in the order of the sub-group, the number of sub-groups built with it.
    subgroups: Mutex<HashMap<Vec<usize>, u64>>,
    /// True once `leave` was called.
    left: AtomicBool,
    /// The parent group, which must not leave before this one. `None` for the world group.
    parent: Option<Arc<Membership>>,
    /// The control connections, shared by the world group and all its sub-groups.
    control: Arc<Control>,
    /// The former group of which this one is the next view, while this rank still leaves it. Awaited when this group is
    /// left.
    former: Mutex<Option<Leaving>>,
}

impl Group {
    /// Creates the group of all ranks. `hosts` are the world ranks on each host.
    pub(super) fn world(control: Control, health: Arc<GroupHealth>, hosts: Vec<Vec<usize>>) -> Result<Group> {
        let plane = &control.plane;
        let world = plane.world()?;
        let membership = Membership {
            health,
            stats: Arc::clone(&plane.stats),
            name: plane.config.name.clone(),
            id: world.id,
            epoch: world.epoch(),
            hosts,
            channels: AtomicU32::new(0),
            registry: Arc::default(),
            subgroups: Mutex::default(),
            left: AtomicBool::new(false),
            parent: None,
            control: Arc::new(control),
            former: Mutex::default(),
        };
        Ok(Group { membership: Arc::new(membership) })
    }

    /// Returns this process's rank in the group.
    pub fn rank(&self) -> usize {
        self.membership.health.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.membership.health.size()
    }

    /// Returns the id of the group. It is equal on all members, and different for every group.
    pub fn id(&self) -> u64 {
        self.membership.id
    }

    /// Returns the name of the group.
    pub fn name(&self) -> &str {
        &self.membership.name
    }

    /// Returns the world ranks of the members, by group rank.
    pub fn ranks(&self) -> &[usize] {
        self.membership.health.world_ranks()
    }

    /// Returns the group ranks on each host, in the order of the hosts' first ranks.
    pub fn hosts(&self) -> Vec<Vec<usize>> {
        self.membership.hosts.clone()
    }

    /// Returns the group ranks on each machine, in the order of the machines' first ranks. Unlike [`Group::hosts`],
    /// counts ranks of one machine that may not share memory as one machine.
    pub fn machines(&self) -> Vec<Vec<usize>> {
        let Ok(world) = self.membership.control.plane.world() else { return self.hosts() };
        let mut machines: HashMap<&str, Vec<usize>> = HashMap::new();
        for (rank, world_rank) in self.ranks().iter().enumerate() {
            machines.entry(&*world.addresses[*world_rank].host_id).or_default().push(rank);
        }
        let mut machines: Vec<Vec<usize>> = machines.into_values().collect();
        machines.sort_unstable();
        machines
    }

    /// Returns the default time limit of an operation.
    pub fn timeout(&self) -> Duration {
        self.membership.control.plane.config.timeout
    }

    /// Returns the parameters with which the world group was built. Rank and size in them are those of the world.
    pub(super) fn config(&self) -> &Config {
        &self.membership.control.plane.config
    }

    /// Returns the failure state of the group.
    pub fn health(&self) -> &Arc<GroupHealth> {
        &self.membership.health
    }

    /// Returns the counters of the group.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.membership.stats
    }

    /// Returns the address on which this rank listens.
    pub fn listen_host(&self) -> IpAddr {
        self.membership.control.plane.config.listen.ip()
    }

    /// Returns the number of the world group's view. It grows with each [`Group::shrink`].
    pub fn view(&self) -> u64 {
        self.membership.control.plane.config.view
    }

    /// Returns the control plane of a world group, or `None` for a sub-group.
    pub(super) fn plane(&self) -> Option<&Arc<Plane>> {
        self.membership.parent.is_none().then_some(&self.membership.control.plane)
    }

    /// Returns the number of connected world ranks, including this one.
    pub fn peers_seen(&self) -> usize {
        self.membership.control.plane.peers_seen()
    }

    /// Returns the number of open control connections. All groups of this rank share them.
    pub fn control_connections(&self) -> usize {
        self.membership.control.plane.control_connections()
    }

    /// Returns the time from the start of listening, or from the agreement on the view, until all ranks of the world
    /// were connected.
    pub fn joined_in(&self) -> Duration {
        self.membership.control.plane.joined_in.get().copied().unwrap_or_default()
    }

    /// Opens a lane. A lane has its own streams and shared memory, so its operations run concurrently with those of
    /// other lanes. Collective: all members open lanes in the same order. The streams between two ranks open in the
    /// lane's first operation that has a message between them.
    ///
    /// # Errors
    /// The group's first failure. An error of this call becomes the first failure.
    pub fn lane(&self) -> Result<Lane> {
        let Membership { health, stats, epoch, .. } = &*self.membership;
        let conns = self.conns()?;
        let channel = conns.channel;
        let collective = self.builder(&conns).build().map_err(|error| health.fail(error))?;
        let lane = Lane::new(collective, Arc::clone(health), Arc::clone(stats), *epoch, channel, self.timeout());
        Ok(lane.recorded_by(flight_recorder().lane(self.name(), channel)))
    }

    /// Returns the streams of the group's messages.
    pub fn message_streams(&self) -> MessageStreams {
        let Membership { health, stats, id, control, .. } = &*self.membership;
        let limit = control.plane.config.connect_timeout;
        MessageStreams::new(control, health, stats, *id, limit)
    }

    /// Builds a hierarchy of the ranks by machine, without a collective of all ranks. Collective, like [`Group::lane`].
    /// Returns the errors of [`Group::lane`].
    pub(super) fn by_machine(&self) -> Result<Hier> {
        let connected = self.builder(&self.conns()?).build_by_machine(&self.machines());
        connected.map_err(|error| self.health().fail(error))
    }

    /// Allocates an arena: `bytes` of memory for tensors, populated and zeroed. Not collective.
    ///
    /// If the tensors of all ranks of a host lie in arenas, operations of this group and its sub-groups access the
    /// peers' tensors directly. The peers map the arena in the first operation on a tensor in it. An arena may outlive
    /// its group. If no other rank of this group is on this host, the memory is private. `label` appears in
    /// `/proc/<pid>/maps`.
    ///
    /// # Errors
    /// `InvalidArgument` for a size beyond the address space. `System` if memory or descriptors are short, or in a
    /// forked child. Otherwise the group's first failure.
    pub fn arena(&self, bytes: usize, label: &str) -> Result<SharedArena> {
        let Membership { health, hosts, control, registry, .. } = &*self.membership;
        control.plane.owner.check()?;
        health.check()?;
        if hosts.iter().any(|host| host.len() == 1 && host.contains(&self.rank())) {
            return SharedArena::private(bytes, registry);
        }
        // The kernel accepts 249 bytes without NUL.
        let label: String = label.chars().filter(|c| *c != '\0').take(50).collect();
        SharedArena::new(&label, bytes, registry)
    }

    /// Returns the connections of the next lane.
    fn conns(&self) -> Result<LaneConns> {
        let Membership { health, stats, id, control, channels, .. } = &*self.membership;
        control.plane.owner.check()?;
        health.check()?;
        let (control, health, stats) = (Arc::clone(control), Arc::clone(health), Arc::clone(stats));
        Ok(LaneConns { control, health, stats, group: *id, channel: channels.fetch_add(1, Ordering::Relaxed) })
    }

    /// Returns the builder of a lane.
    fn builder<'a>(&'a self, conns: &'a LaneConns) -> LaneBuilder<'a> {
        let Membership { hosts, control, registry, .. } = &*self.membership;
        let deadline = Deadline::after(control.plane.config.connect_timeout);
        LaneBuilder { conns, what: "channel", hosts, deadline, registry }
    }

    /// Builds the sub-group of some members, given as ranks of this group: its rank r is `ranks[r]`. Returns `None` if
    /// this rank is not a member. Only members need to call it, in the same order for the same ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty list, a duplicate rank or a rank outside this group. Otherwise the first cause of
    /// this group.
    pub fn subgroup(&self, ranks: &[usize], name: &str) -> Result<Option<Group>> {
        let parent = &self.membership;
        parent.control.plane.owner.check()?;
        if ranks.is_empty() {
            return Err(Error::InvalidArgument(format!("the group {name:?} would have no ranks")));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = ranks.iter().find(|rank| !seen.insert(**rank)) {
            return Err(Error::InvalidArgument(format!("rank {twice} appears twice in the group {name:?}")));
        }
        if let Some(outside) = ranks.iter().find(|rank| **rank >= self.size()) {
            let size = self.size();
            return Err(Error::InvalidArgument(format!(
                "rank {outside} of the group {name:?} is not among the {size} of {:?}",
                self.name()
            )));
        }
        parent.health.check()?;
        let Some(rank) = ranks.iter().position(|member| *member == self.rank()) else { return Ok(None) };
        let world_ranks: Vec<usize> = ranks.iter().map(|member| parent.health.world_rank(*member)).collect();
        let names = ranks.iter().map(|member| parent.health.host(*member).to_owned()).collect();
        let nth = {
            let mut subgroups = lock(&parent.subgroups);
            let count = subgroups.entry(world_ranks.clone()).or_insert(0);
            *count += 1;
            *count
        };
        let places: HashMap<usize, usize> = ranks.iter().enumerate().map(|(place, member)| (*member, place)).collect();
        let local = |host: &Vec<usize>| -> Vec<usize> {
            let mut here: Vec<usize> = host.iter().filter_map(|old| places.get(old).copied()).collect();
            here.sort_unstable();
            here
        };
        let mut hosts: Vec<Vec<usize>> = parent.hosts.iter().map(local).filter(|host| !host.is_empty()).collect();
        hosts.sort_unstable();
        let health = GroupHealth::new(rank, world_ranks.clone(), names);
        let id = subgroup_id(parent.id, &world_ranks, nth);
        parent.control.plane.register(id, &health);
        // The parent may have failed between the first check and the registration.
        parent.health.check()?;
        let membership = Membership {
            health,
            stats: Arc::default(),
            name: name.to_owned(),
            id,
            epoch: parent.epoch,
            hosts,
            channels: AtomicU32::new(0),
            registry: Arc::clone(&parent.registry),
            subgroups: Mutex::default(),
            left: AtomicBool::new(false),
            parent: Some(Arc::clone(parent)),
            control: Arc::clone(&parent.control),
            former: Mutex::default(),
        };
        Ok(Some(Group { membership: Arc::new(membership) }))
    }

    /// Poisons the group on every rank: the other ranks get `PeerRaised` with this class name and text.
    pub fn raise(&self, kind: &str, message: &str) {
        let health = &self.membership.health;
        if self.membership.control.plane.owner.is_current() {
            let own = health.rank();
            let (rank, host) = (health.world_rank(own), health.host(own).to_owned());
            // If the group has failed already, its first cause stays.
            let _ = health.fail(Error::PeerRaised { rank, host, kind: kind.to_owned(), message: message.to_owned() });
        }
    }

    /// Poisons the group on every rank with `Aborted`.
    pub fn abort(&self, reason: &str) {
        if self.membership.control.plane.owner.is_current() {
            // If the group has failed already, its first cause stays.
            let _ = self.membership.health.fail(Error::Aborted(reason.to_owned()));
        }
    }

    /// Leaves the group and closes every connection of this rank. Waits of this rank end with `Aborted`. Further calls
    /// do nothing. Leaving the world group leaves its sub-groups.
    pub fn leave(&self) {
        self.membership.leave();
    }

    /// Leaves this group for its next view. The control thread announces the departure and ends while the caller
    /// continues, at the latest when `next` is left.
    pub(super) fn leave_for(&self, next: &Group) {
        *lock(&next.membership.former) = self.membership.begin_leave();
    }
}

impl Membership {
    fn leave(&self) {
        if !self.control.plane.owner.is_current() {
            return;
        }
        drop(self.begin_leave());
        let former = lock(&self.former).take();
        drop(former);
    }

    /// Begins to leave; the control thread does the rest.
    fn begin_leave(&self) -> Option<Leaving> {
        if self.left.swap(true, Ordering::AcqRel) {
            return None;
        }
        let Membership { control, health, .. } = self;
        let subgroup = self.parent.is_some().then_some(self.id);
        let streams = control.plane.flush(subgroup, || health.check().is_ok());
        let leaving = if let Some(id) = subgroup {
            // The members get no error from this, because leaving is not a failure.
            health.fail_from_peer(Error::Aborted(LEAVING.to_owned()));
            control.plane.leave_subgroup(id);
            None
        } else {
            control.begin_leave(LEAVING)
        };
        Plane::end_streams(&streams);
        leaving
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Returns the id of a sub-group. All members compute it without communication.
fn subgroup_id(parent: u64, world_ranks: &[usize], nth: u64) -> u64 {
    let ranks: Vec<u8> = world_ranks.iter().flat_map(|rank| (*rank as u64).to_le_bytes()).collect();
    let hash = digest(&[b"bagua sub-group", &parent.to_le_bytes(), &nth.to_le_bytes(), &ranks]);
    u64::from_le_bytes(*hash.first_chunk().expect("32 bytes have a first 8"))
}
