//! The groups that a rank has registered, and messages for groups that it has not built yet.

use std::collections::{HashMap, HashSet};
use std::sync::Weak;

use crate::error::Error;
use crate::health::{GroupHealth, Subscription};

/// A group of which this rank is a member.
pub(super) struct Entry {
    pub(super) health: Weak<GroupHealth>,
    /// World ranks of the members, by group rank.
    pub(super) ranks: Vec<usize>,
    /// One sends failures that this rank finds to the members. The other records failures of the world group.
    pub(super) _subscriptions: [Subscription; 2],
}

/// Group rank of a world rank.
pub(super) fn group_rank(ranks: &[usize], world_rank: usize) -> Option<usize> {
    // In the world group it is the same, and a large one is not searched for each rank that leaves.
    let is_same = ranks.get(world_rank) == Some(&world_rank);
    if is_same { Some(world_rank) } else { ranks.iter().position(|rank| *rank == world_rank) }
}

/// Groups by id, and messages for groups that this rank has not built yet.
#[derive(Default)]
pub(super) struct Groups {
    pub(super) known: HashMap<u64, Entry>,
    pub(super) early_failures: HashMap<u64, Error>,
    pub(super) early_departures: HashMap<u64, HashSet<usize>>,
}

/// Notes that a world rank has left a group, if it was a member.
pub(super) fn depart(entry: &Entry, rank: usize) {
    if let Some(member) = group_rank(&entry.ranks, rank)
        && let Some(health) = entry.health.upgrade()
    {
        health.depart(member);
    }
}
