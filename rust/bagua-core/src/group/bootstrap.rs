//! From a rank that listens to a group that stands.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::{self, Address};
use super::control::{Book, Building, Control, Listeners, Plane};
use super::fork::OwnerProcess;
use super::membership::Group;
use super::wire::Message;
use super::{Config, MOST_STREAMS, handshake};
use crate::error::{Error, Progress, Result};
use crate::health::GroupHealth;
use crate::wait::{Deadline, SLICE, lock, wait_on_for};

/// A rank that listens and has an address to spread, but knows no peer yet.
pub struct Bootstrap {
    /// Ends the thread if the group is never built.
    control: Control,
    /// The blob.
    address: Vec<u8>,
}

impl Bootstrap {
    /// First step: listens. The caller spreads [`Bootstrap::address`] by whatever it has.
    ///
    /// # Errors
    /// `InvalidArgument` when the configuration contradicts itself, `System` when there is no socket or thread to be had.
    pub fn bind(config: Config) -> Result<Bootstrap> {
        let Config { rank, world_size, .. } = config;
        if rank >= world_size || u32::try_from(world_size).is_err() {
            return Err(Error::InvalidArgument(format!("rank {rank} in a world of {world_size} ranks")));
        }
        if config.heartbeat_timeout.is_zero() {
            return Err(Error::InvalidArgument("a heartbeat timeout of 0 s".to_owned()));
        }
        if !(1..=MOST_STREAMS).contains(&config.streams_per_peer) {
            let asked = config.streams_per_peer;
            return Err(Error::InvalidArgument(format!(
                "{asked} streams per peer: it must be between 1 and {MOST_STREAMS}"
            )));
        }
        if world_size > 1 && config.listen.ip().is_unspecified() {
            let at = config.listen.ip();
            return Err(Error::InvalidArgument(format!("listening on {at} gives peers no address to connect to")));
        }
        let mut config = config;
        if config.host_id.is_empty() {
            config.host_id = address::host_id()?;
        }
        if config.host_name.is_empty() {
            config.host_name = address::host_name();
        }
        let owner = OwnerProcess::arm()?;
        let listeners = if world_size > 1 { Some(Listeners::open(&config)?) } else { None };
        let address = Address {
            rank,
            world_size,
            pid: std::process::id(),
            tcp: listeners.as_ref().map(Listeners::tcp_address).transpose()?,
            unix: listeners.as_ref().map(|listeners| listeners.name.clone()).unwrap_or_default(),
            host_id: config.host_id.clone(),
            host_name: config.host_name.clone(),
            streams: config.streams_per_peer as u8,
            algorithm: config.algorithm as u8,
            nonce: handshake::random()?,
        };
        let plane = Plane::new(config, owner);
        let control = match listeners {
            Some(listeners) => Control::start(plane, listeners)?,
            None => Control::alone(plane),
        };
        Ok(Bootstrap { control, address: address.encode() })
    }

    /// Opaque bytes that the peers need; a few hundred.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Second step: connects to all peers. `addresses[r]` is rank r's. Returns when every pair has a control connection.
    ///
    /// # Errors
    /// `InvalidArgument` or `Mismatch` when the addresses do not fit together, `Timeout` naming the ranks that cannot be reached,
    /// `System` or `Mismatch` when one refuses, `PeerLost` when one goes away meanwhile.
    pub fn connect(self, addresses: &[Vec<u8>]) -> Result<Group> {
        let Bootstrap { control, address } = self;
        let plane = Arc::clone(&control.plane);
        plane.owner.check()?;
        let config = &plane.config;
        let deadline = Deadline::after(config.connect_timeout);
        let until = Instant::now() + config.connect_timeout;
        let parsed = Address::parse_all(addresses, config, &address)?;
        let hosts = parsed.iter().map(|address| address.host_name.clone()).collect();
        let health = GroupHealth::new(config.rank, (0..config.world_size).collect(), hosts);
        let book = Book::new(parsed, addresses, &config.secret);
        plane.register(book.world, &health);
        let book = plane.open(book);
        if config.world_size == 1 {
            return Group::world(control, health, vec![vec![0]]);
        }
        for lower in 0..config.rank {
            control.dial_control(lower, until, &health)?;
        }
        let site = Site { plane: &plane, health: &health, book, deadline };
        let conns = site.wait(|building| &mut building.conns)?;
        let ids: Vec<&str> = book.addresses.iter().map(|address| address.host_id.as_str()).collect();
        let own = conns.iter().all(|(rank, conn)| conn.is_unix() || ids[*rank] != ids[config.rank]);
        control.read_loop(conns);
        plane.send_all(&Message::Near(own));
        let mut near = site.wait(|building| &mut building.near)?;
        near.insert(config.rank, own);
        let hosts = partition(&ids, |rank| near.get(&rank) == Some(&true));
        Group::world(control, health, hosts)
    }
}

/// A group under construction.
struct Site<'a> {
    plane: &'a Plane,
    health: &'a GroupHealth,
    book: &'a Book,
    deadline: Deadline,
}

impl Site<'_> {
    /// Waits until every other rank has an entry, and takes them all.
    fn wait<T>(&self, of: impl Fn(&mut Building) -> &mut HashMap<usize, T>) -> Result<HashMap<usize, T>> {
        let Config { rank: own, world_size, .. } = self.plane.config;
        let mut building = lock(&self.plane.building);
        let mut looked: Option<Instant> = None;
        loop {
            let found = of(&mut building);
            if found.len() == world_size - 1 {
                return Ok(std::mem::take(found));
            }
            self.health.check()?;
            // Every arrival ends the wait below, so who is missing is not asked each time.
            let passed = self.deadline.passed();
            if passed || looked.is_none_or(|looked| looked.elapsed() >= SLICE) {
                looked = Some(Instant::now());
                let missing: Vec<usize> =
                    (0..world_size).filter(|rank| *rank != own && !found.contains_key(rank)).collect();
                if let Some(gone) = missing.iter().find(|rank| self.health.has_departed(**rank)) {
                    return Err(self.health.peer_lost(*gone, "it left while the group was being built"));
                }
                if passed {
                    return Err(self.timed_out(&building, missing));
                }
            }
            let slice: Duration = SLICE.min(self.deadline.left());
            building = wait_on_for(&self.plane.built, building, slice);
        }
    }

    fn timed_out(&self, building: &Building, missing: Vec<usize>) -> Error {
        let each = missing.iter().map(|rank| {
            let trouble = building.troubles.get(rank).map(|how| format!(": {how}")).unwrap_or_default();
            format!("{}{trouble}", self.book.addresses[*rank].place())
        });
        let what = format!("connecting to {}", each.collect::<Vec<_>>().join("; "));
        let progress = Progress { what, label: String::new(), done: 0, total: 0 };
        let (after, noticed_by) = (self.deadline.limit(), self.plane.config.rank);
        Error::Timeout { after, missing, noticed_by, progress: Some(Box::new(progress)) }
    }
}

/// Ranks with one host id are a host if every pair of them is connected by a Unix socket, else each is one of its own.
/// `is_near(a)`: rank a says that its connections with all ranks of its host id are such. Hosts come in the order of their first
/// rank.
fn partition(host_ids: &[&str], is_near: impl Fn(usize) -> bool) -> Vec<Vec<usize>> {
    let mut classes: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (rank, id) in host_ids.iter().enumerate() {
        classes.entry(id).or_default().push(rank);
    }
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for class in classes.into_values() {
        if class.iter().all(|rank| is_near(*rank)) {
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
    fn ranks_that_reach_each_other_are_a_host_and_others_are_not() {
        let ids = ["a", "b", "a", "b"];
        assert_eq!(partition(&ids, |_| true), [[0, 2], [1, 3]]);
        // Rank 3 does not reach rank 1, or says so.
        assert_eq!(partition(&ids, |rank| rank != 3), [vec![0, 2], vec![1], vec![3]]);
        assert_eq!(partition(&ids, |_| false), [[0], [1], [2], [3]]);
    }
}
