//! A group that stands.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::builder::LaneBuilder;
use super::control::Control;
use super::handshake::digest;
use super::lane::Lane;
use super::lanes::HostLanes;
use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::memory::{Registry, SharedArena, part_stride};
use crate::stats::Stats;
use crate::wait::{Deadline, lock};

/// What a rank's waits end with after it left.
const LEFT: &str = "this rank left the group";

/// A group of ranks, cheap to clone. The last clone to be dropped leaves the group.
#[derive(Clone)]
pub struct Group {
    membership: Arc<Membership>,
}

/// What the clones of a group share.
struct Membership {
    health: Arc<GroupHealth>,
    stats: Arc<Stats>,
    name: String,
    /// Equal on all members, different for every group.
    id: u64,
    /// What tells this incarnation of the world from others in message headers.
    epoch: u32,
    /// Group ranks on each host.
    hosts: Vec<Vec<usize>>,
    /// Lanes opened so far.
    channels: AtomicU32,
    /// Arenas made so far.
    arenas: AtomicU32,
    /// Those that still live, of the world and all its sub-groups.
    registry: Arc<Registry>,
    /// How often a sub-group of these world ranks was built.
    children: Mutex<HashMap<Vec<usize>, u64>>,
    /// Set by the first who leaves.
    left: AtomicBool,
    /// The group that this one is a part of: keeps it from leaving first. `None` for the world.
    parent: Option<Arc<Membership>>,
    /// Shared by the world and all its sub-groups.
    control: Arc<Control>,
}

impl Group {
    /// The group of all ranks. `hosts` are world ranks.
    pub(super) fn world(control: Control, health: Arc<GroupHealth>, hosts: Vec<Vec<usize>>) -> Result<Group> {
        let plane = &control.plane;
        let book = plane.book()?;
        let membership = Membership {
            health,
            stats: Arc::clone(&plane.stats),
            name: plane.config.name.clone(),
            id: book.world,
            epoch: book.epoch(),
            hosts,
            channels: AtomicU32::new(0),
            arenas: AtomicU32::new(0),
            registry: Arc::default(),
            children: Mutex::default(),
            left: AtomicBool::new(false),
            parent: None,
            control: Arc::new(control),
        };
        Ok(Group { membership: Arc::new(membership) })
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.membership.health.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.membership.health.size()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.membership.name
    }

    /// World ranks of the members, by group rank.
    pub fn ranks(&self) -> &[usize] {
        self.membership.health.world_ranks()
    }

    /// Group ranks of the members on each host, hosts in the order of their first rank.
    pub fn hosts(&self) -> Vec<Vec<usize>> {
        self.membership.hosts.clone()
    }

    /// Group ranks on each machine, machines in the order of their first rank: [`Group::hosts`], except that ranks of one machine
    /// stay together where they may not share memory.
    pub fn machines(&self) -> Vec<Vec<usize>> {
        let Ok(book) = self.membership.control.plane.book() else { return self.hosts() };
        let mut machines: Vec<(&str, Vec<usize>)> = Vec::new();
        for (rank, world_rank) in self.ranks().iter().enumerate() {
            let host = book.addresses[*world_rank].host_id.as_str();
            match machines.iter_mut().find(|(known, _)| *known == host) {
                Some((_, ranks)) => ranks.push(rank),
                None => machines.push((host, vec![rank])),
            }
        }
        machines.into_iter().map(|(_, ranks)| ranks).collect()
    }

    /// Default deadline of an operation.
    pub fn timeout(&self) -> Duration {
        self.membership.control.plane.config.timeout
    }

    /// Its state of failure.
    pub fn health(&self) -> &Arc<GroupHealth> {
        &self.membership.health
    }

    /// Its counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.membership.stats
    }

    /// World ranks that are connected, this one included.
    pub fn peers_seen(&self) -> usize {
        self.membership.control.plane.peers_seen()
    }

    /// A new lane: streams and shared memory of its own, so that operations on it run beside those of other lanes.
    /// Collective: all members open lanes in the same order.
    ///
    /// # Errors
    /// The group's first cause; what goes wrong here becomes it.
    pub fn lane(&self) -> Result<Lane> {
        let Membership { health, stats, epoch, channels, .. } = &*self.membership;
        let builder = self.builder("lane", channels)?;
        let channel = builder.channel;
        let collective = builder.build().map_err(|error| health.fail(error))?;
        Ok(Lane::new(collective, Arc::clone(health), Arc::clone(stats), *epoch, channel, self.timeout()))
    }

    /// The lanes by machine, see [`HostLanes`]. Collective, as [`Group::lane`].
    ///
    /// # Errors
    /// As [`Group::lane`].
    pub(super) fn host_lanes(&self) -> Result<HostLanes> {
        let Membership { health, stats, epoch, channels, .. } = &*self.membership;
        let builder = self.builder("lane", channels)?;
        let number = builder.channel;
        let lane =
            |collective| Lane::new(collective, Arc::clone(health), Arc::clone(stats), *epoch, number, self.timeout());
        let (intra, inter) = builder.build_by_machine(&self.machines()).map_err(|error| health.fail(error))?;
        Ok(HostLanes { intra: lane(intra), inter: inter.map(lane) })
    }

    /// Memory for tensors, `bytes` on every rank, populated and zeroed. Operations of this group and its sub-groups on tensors
    /// that lie in one arena on all ranks of a host work on the peers' memory in place. `label` shows in `/proc/<pid>/maps`.
    /// It stays valid after the group is gone, until the last clone is dropped. Collective: all members make their arenas in the
    /// same order.
    ///
    /// # Errors
    /// `InvalidArgument` for a size that does not fit the address space, otherwise the group's first cause; what goes wrong here, like too
    /// little memory or sizes that differ, becomes it.
    pub fn arena(&self, bytes: usize, label: &str) -> Result<SharedArena> {
        // Alike on all members, as they ask for the same size.
        part_stride(bytes, self.size())?;
        let Membership { health, arenas, .. } = &*self.membership;
        // The kernel takes 249 bytes, and no NUL.
        let label: String = label.chars().filter(|c| *c != '\0').take(50).collect();
        let builder = self.builder("arena", arenas)?;
        builder.arena(bytes, &label).map_err(|error| health.fail(error))
    }

    /// What builds the next thing of a kind.
    fn builder<'a>(&'a self, what: &'static str, counter: &AtomicU32) -> Result<LaneBuilder<'a>> {
        let Membership { health, id, hosts, control, registry, .. } = &*self.membership;
        control.plane.owner.check()?;
        health.check()?;
        let channel = counter.fetch_add(1, Ordering::Relaxed);
        let deadline = Deadline::after(control.plane.config.connect_timeout);
        Ok(LaneBuilder { control, health, group: *id, what, channel, hosts, deadline, registry })
    }

    /// The group of some members, given as ranks of this group (any order; the new group sorts them; duplicates are refused).
    /// `None` when this rank is not among them. Only the members need to call it, in the same order for the same ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for ranks that make no group, otherwise the first cause of this group.
    pub fn subgroup(&self, ranks: &[usize], name: &str) -> Result<Option<Group>> {
        let parent = &self.membership;
        parent.control.plane.owner.check()?;
        let mut members = ranks.to_vec();
        members.sort_unstable();
        if members.is_empty() {
            return Err(Error::InvalidArgument(format!("the group {name:?} would have no ranks")));
        }
        if let Some(twice) = members.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::InvalidArgument(format!("rank {} stands twice in the group {name:?}", twice[0])));
        }
        if let Some(outside) = members.iter().find(|rank| **rank >= self.size()) {
            let size = self.size();
            return Err(Error::InvalidArgument(format!(
                "rank {outside} of the group {name:?} is not among the {size} of {:?}",
                self.name()
            )));
        }
        parent.health.check()?;
        let Some(rank) = members.iter().position(|member| *member == self.rank()) else { return Ok(None) };
        let world_ranks: Vec<usize> = members.iter().map(|member| parent.health.world_rank(*member)).collect();
        let names = members.iter().map(|member| parent.health.host(*member).to_owned()).collect();
        let nth = {
            let mut children = lock(&parent.children);
            let count = children.entry(world_ranks.clone()).or_insert(0);
            *count += 1;
            *count
        };
        let local = |host: &Vec<usize>| -> Vec<usize> {
            host.iter().filter_map(|old| members.binary_search(old).ok()).collect()
        };
        let hosts = parent.hosts.iter().map(local).filter(|host| !host.is_empty()).collect();
        let health = GroupHealth::new(rank, world_ranks.clone(), names);
        let id = subgroup_id(parent.id, &world_ranks, nth);
        parent.control.plane.register(id, &health);
        // A failure of the parent between the check and the registration concerns nobody else than the check would have.
        parent.health.check()?;
        let membership = Membership {
            health,
            stats: Arc::default(),
            name: name.to_owned(),
            id,
            epoch: parent.epoch,
            hosts,
            channels: AtomicU32::new(0),
            arenas: AtomicU32::new(0),
            registry: Arc::clone(&parent.registry),
            children: Mutex::default(),
            left: AtomicBool::new(false),
            parent: Some(Arc::clone(parent)),
            control: Arc::clone(&parent.control),
        };
        Ok(Some(Group { membership: Arc::new(membership) }))
    }

    /// Poisons the group on every rank: the others get `PeerRaised` with this class name and text.
    pub fn raise(&self, kind: &str, message: &str) {
        let health = &self.membership.health;
        if self.membership.control.plane.owner.is_current() {
            let own = health.rank();
            let (rank, host) = (health.world_rank(own), health.host(own).to_owned());
            // The first cause stays the cause, whoever comes later.
            let _ = health.fail(Error::PeerRaised { rank, host, kind: kind.to_owned(), message: message.to_owned() });
        }
    }

    /// Poisons the group on every rank with `Aborted`.
    pub fn abort(&self, reason: &str) {
        if self.membership.control.plane.owner.is_current() {
            // As in `raise`.
            let _ = self.membership.health.fail(Error::Aborted(reason.to_owned()));
        }
    }

    /// Says goodbye and closes every connection of this rank. Waits of this rank end with `Aborted`. Idempotent; leaving the
    /// world group leaves its sub-groups.
    pub fn leave(&self) {
        self.membership.leave();
    }
}

impl Membership {
    fn leave(&self) {
        if !self.control.plane.owner.is_current() || self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.parent.is_none() {
            self.control.leave(LEFT);
            return;
        }
        // Recorded, not told: a goodbye is not a failure.
        self.health.fail_from_peer(Error::Aborted(LEFT.to_owned()));
        self.control.plane.depart(self.id);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Computed alike by all members, without a word.
fn subgroup_id(parent: u64, world_ranks: &[usize], nth: u64) -> u64 {
    let ranks: Vec<u8> = world_ranks.iter().flat_map(|rank| (*rank as u64).to_le_bytes()).collect();
    let hash = digest(&[b"bagua sub-group", &parent.to_le_bytes(), &nth.to_le_bytes(), &ranks]);
    u64::from_le_bytes(*hash.first_chunk().expect("32 bytes have a first 8"))
}
