//! Building a lane: its shared memory, and the collective for the group's hosts. A new lane has no streams. The streams
//! between two ranks open in the first operation with a message between them, see [`super::streams`].
//!
//! The ranks of one host share one memory segment per lane, see [`super::segment`].

use std::sync::Arc;

use super::connection::DataConn;
use super::fork::ForkFd;
use super::handshake::Purpose;
use super::lane::ProcessBound;
use super::streams::{LaneConns, StreamOpener};
use crate::collective::shm::{segment_len, spare_links};
use crate::collective::{Collective, Hier, Net, Shm, Solo};
use crate::error::{Error, Progress, Result};
use crate::health::LEFT;
use crate::memory::{Arena, Registry};
use crate::transport::Mesh;
use crate::wait::{Deadline, slice_among};

/// `index` of the streams between all ranks.
const FLAT: u32 = 0;

/// `index` of the streams between the first ranks of hosts.
const LEADERS: u32 = 1;

/// `index` of the streams between the ranks of one machine that do not share memory.
const MACHINE: u32 = 2;

/// Builds one lane: connections and shared memory in which one operation runs at a time. Also opens the connections
/// over which the lane's ranks pass descriptors.
pub(super) struct LaneBuilder<'a> {
    pub(super) conns: &'a LaneConns,
    /// Name of the thing that is opened, for error texts.
    pub(super) what: &'static str,
    /// Group ranks on each host, ascending.
    pub(super) hosts: &'a [Vec<usize>],
    /// Deadline for all connections.
    pub(super) deadline: Deadline,
    /// The arenas of this rank. Tensors may lie in them.
    pub(super) registry: &'a Arc<Registry>,
}

impl LaneBuilder<'_> {
    /// Opens the connections and the shared memory of the lane, and returns the collective that uses them.
    pub(super) fn build(&self) -> Result<Box<dyn Collective>> {
        let (size, mut fork_fds) = (self.conns.health.size(), Vec::new());
        let inner = if self.hosts.len() == 1 || self.hosts.len() == size {
            let all: Vec<usize> = (0..size).collect();
            self.part(&all, FLAT, &mut fork_fds)?
        } else {
            Box::new(self.shm_and_net(&mut fork_fds)?)
        };
        Ok(self.bound(inner, self.hosts, fork_fds))
    }

    /// Returns a hierarchy of the lane's ranks: a collective of the ranks of each machine, and one of the machines'
    /// first ranks.
    pub(super) fn build_by_machine(&self, machines: &[Vec<usize>]) -> Result<Hier> {
        let rank = self.conns.health.rank();
        let machine = machines.iter().find(|machine| machine.contains(&rank));
        let machine = machine.ok_or_else(|| Error::other("this rank is on no machine of its group"))?;
        let mut fork_fds = Vec::new();
        let intra = self.part(machine, MACHINE, &mut fork_fds)?;
        let intra = self.bound(intra, &[(0..machine.len()).collect()], fork_fds);
        let mut fork_fds = Vec::new();
        let alone: Vec<Vec<usize>> = (0..machines.len()).map(|index| vec![index]).collect();
        let inter = self.leaders(machines, &mut fork_fds)?;
        let inter = inter.map(|inter| self.bound(inter, &alone, fork_fds));
        Ok(Hier::new(intra, inter, machines.to_vec(), rank))
    }

    /// Builds a hierarchy: shared memory inside each host, streams between the hosts' first ranks. Verbs that are not
    /// hierarchical use the best link between each two ranks: rings in the segment on one host, streams between hosts.
    fn shm_and_net(&self, fork_fds: &mut Vec<ForkFd>) -> Result<Hier> {
        let (size, rank) = (self.conns.health.size(), self.conns.health.rank());
        let (host, local) = self.host()?;
        let shared = if host.len() > 1 { Some(self.shm(fork_fds)?) } else { None };
        let rings = shared.as_ref().map(|(_, arena)| (arena, local, host));
        let flat = self.mesh((0..size).collect(), FLAT, rings);
        let intra: Box<dyn Collective> = match shared {
            Some((shm, _)) => Box::new(shm),
            None => Box::new(Solo::new()),
        };
        let inter = self.leaders(self.hosts, fork_fds)?;
        Ok(Hier::new(intra, inter, self.hosts.to_vec(), rank).with_flat(flat))
    }

    /// Returns the collective of the hosts' first ranks, or `None` if this rank is not one of them.
    fn leaders(&self, hosts: &[Vec<usize>], fork_fds: &mut Vec<ForkFd>) -> Result<Option<Box<dyn Collective>>> {
        let leaders: Vec<usize> = hosts.iter().map(|host| host[0]).collect();
        let is_one = leaders.contains(&self.conns.health.rank());
        is_one.then(|| self.part(&leaders, LEADERS, fork_fds)).transpose()
    }

    /// Returns a collective of some ranks of the group, including this one, like ncclCommSplit. It uses shared memory
    /// if the ranks are exactly those of this host, and otherwise streams with this `index`.
    fn part(&self, members: &[usize], index: u32, fork_fds: &mut Vec<ForkFd>) -> Result<Box<dyn Collective>> {
        if members.len() == 1 {
            return Ok(Box::new(Solo::new()));
        }
        if members == self.host()?.0 {
            return Ok(Box::new(self.shm(fork_fds)?.0));
        }
        Ok(Box::new(self.mesh(members.to_vec(), index, None)))
    }

    /// Returns the collective of this host's ranks, and its segment.
    fn shm(&self, fork_fds: &mut Vec<ForkFd>) -> Result<(Shm, Arc<Arena>)> {
        let (host, local) = self.host()?;
        let arena = Arc::new(self.segment(host, segment_len(host.len()))?);
        fork_fds.push(ForkFd::new(&arena.fd()));
        let shm = Shm::new(Arc::clone(&arena), local, host.to_vec())?;
        Ok((self.knowing_arenas(shm), arena))
    }

    /// Applies the factories of the configuration to a collective, and binds it to this process.
    fn bound(
        &self,
        collective: Box<dyn Collective>,
        hosts: &[Vec<usize>],
        fork_fds: Vec<ForkFd>,
    ) -> Box<dyn Collective> {
        let factories = self.conns.control.plane.config.factories.iter().cloned();
        let (unused, at_once): (Vec<_>, Vec<_>) = factories.partition(|factory| factory.device() != 0);
        let inner = at_once.iter().fold(collective, |inner, factory| factory.wrap(inner, hosts));
        let owner = self.conns.control.plane.owner;
        Box::new(ProcessBound::new(inner, unused, hosts.to_vec(), fork_fds, owner))
    }

    /// Returns the group ranks on this rank's host, and this rank's index among them.
    pub(super) fn host(&self) -> Result<(&[usize], usize)> {
        let rank = self.conns.health.rank();
        let index = |host: &'_ Vec<usize>| host.iter().position(|member| *member == rank);
        let found = self.hosts.iter().find_map(|host| index(host).map(|at| (host.as_slice(), at)));
        found.ok_or_else(|| Error::other("this rank is on no host of its group"))
    }

    /// Returns a mesh of some members of the group. Ranks of this host are connected by rings in `shared`, if given.
    /// All others get streams with this `index`, which open on demand.
    fn mesh(&self, members: Vec<usize>, index: u32, shared: Option<(&Arc<Arena>, usize, &[usize])>) -> Net {
        let LaneConns { control, health, .. } = self.conns;
        let (mut rings, mut bell) = (Vec::new(), None);
        if let Some((arena, local, host)) = shared {
            let (links, own) = spare_links(arena, local, host.len());
            bell = Some(own);
            rings = host.iter().copied().zip(links).collect();
        }
        let own_index = members.iter().position(|member| *member == health.rank()).unwrap_or(0);
        let ring_to =
            |member: &usize| rings.iter_mut().find(|(other, _)| other == member).and_then(|(_, link)| link.take());
        let bundles = members.iter().map(ring_to).map(|ring| ring.into_iter().collect()).collect();
        let opener = Box::new(StreamOpener::new(self.conns, index, members.clone()));
        let mesh = Mesh::on_demand(own_index, members, bundles, bell, opener);
        Net::new(mesh).with(control.plane.config.algorithm)
    }

    /// Returns a connection with another rank of the group. Either end may have opened it.
    pub(super) fn connected(&self, peer: usize, purpose: Purpose, index: u32) -> Result<DataConn> {
        let slice = slice_among(self.conns.health.size());
        let awaited = self.conns.begin(peer, purpose, index, self.deadline.left());
        loop {
            // The connection comes before the check, because the peer may have connected and then left.
            if let Some(conn) = self.conns.wait(peer, &awaited, slice.min(self.deadline.left()))? {
                return Ok(conn);
            }
            self.check(peer)?;
        }
    }

    /// Returns the error that must end a wait for a peer: the group failed, the peer left, or the deadline passed.
    pub(super) fn check(&self, peer: usize) -> Result<()> {
        let health = &self.conns.health;
        health.check()?;
        if health.has_departed(peer) {
            return Err(health.attribute_disconnect(peer, LEFT));
        }
        if !self.deadline.passed() {
            return Ok(());
        }
        let what = format!("opening {} {} of the group", self.what, self.conns.channel);
        Err(health.timed_out(self.deadline.limit(), &[peer], Progress { what, ..Progress::default() }))
    }
}
