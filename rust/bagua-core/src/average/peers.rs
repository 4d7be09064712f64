//! The ranks with which a model is averaged: their group, and the lanes of those that take part.

use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::group::{Group, Lane, Lanes, Options, Quorum, carry_data};
use crate::request::{Io, Verb};
use crate::stats::Stats;
use crate::types::DType;

/// How many sets of ranks keep their lanes. The same on all ranks, which therefore drop the same ones.
const SETS: usize = 4;

/// Numbers in a [`Status`] on the wire.
const FIELDS: usize = 9;

/// What a rank sends to all others at the beginning of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    /// It takes part in this round.
    pub(super) takes_part: bool,
    /// It waits in `synchronize`.
    pub(super) synchronizes: bool,
    /// Its exchange before this one said so too: every status in this one is newer than its call.
    pub(super) announced: bool,
    /// Its interval has passed.
    pub(super) is_due: bool,
    /// It has no weights of the job yet.
    pub(super) is_new: bool,
    /// Rank in the job of the first joining rank whose connection it holds.
    pub(super) joiner: Option<usize>,
    /// Number of the last membership that it knows.
    pub(super) view: u64,
    /// Exchanges before this one, as far as it knows.
    pub(super) exchanges: u64,
    /// Number of the last round whose update it has written or is about to write: all had the average. 0 for none.
    pub(super) agreed: u64,
}

impl Status {
    fn encode(self) -> [u8; FIELDS * 8] {
        let Status { takes_part, synchronizes, announced, is_due, is_new, joiner, view, exchanges, agreed } = self;
        let [takes_part, synchronizes, announced, is_due, is_new] =
            [takes_part, synchronizes, announced, is_due, is_new].map(u64::from);
        let joiner = joiner.map_or(0, |rank| rank as u64 + 1);
        let fields = [takes_part, synchronizes, is_new, joiner, view, exchanges, agreed, is_due, announced];
        let mut bytes = [0; FIELDS * 8];
        for (slot, field) in bytes.chunks_exact_mut(8).zip(fields) {
            slot.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Status {
        let field = |at: usize| bytes[at * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Status {
            takes_part: field(0) == 1,
            synchronizes: field(1) == 1,
            is_new: field(2) == 1,
            joiner: field(3).checked_sub(1).map(|rank| rank as usize),
            view: field(4),
            exchanges: field(5),
            agreed: field(6),
            is_due: field(7) == 1,
            announced: field(8) == 1,
        }
    }
}

/// Bytes on sockets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WireBytes {
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl WireBytes {
    fn add(&mut self, stats: &Stats) {
        for (_, op) in stats.snapshot() {
            self.sent += op.wire_bytes_sent;
            self.received += op.wire_bytes_received;
        }
    }

    fn add_sets<'a>(&mut self, sets: impl IntoIterator<Item = &'a Set>) {
        sets.into_iter().filter_map(|set| set.lanes.as_ref()).for_each(|lanes| self.add(lanes.global.stats()));
    }
}

/// A set of ranks that took part in a round.
struct Set {
    ranks: Vec<usize>,
    /// Where this rank is in the set, and the set is neither this rank alone nor the whole group.
    lanes: Option<Lanes>,
}

/// See the module. Ranks are those of the group.
pub(super) struct Peers {
    /// First fields, so that lanes go before their group does.
    all: Lanes,
    /// The last one last.
    sets: VecDeque<Set>,
    /// A group of its own, so that leaving it concerns nothing else.
    pub(super) group: Group,
    /// Rank in the job of each rank.
    pub(super) world_ranks: Vec<usize>,
    /// Of former groups and sets.
    bytes: WireBytes,
}

/// Lanes in a new group, whose members have got data from each other. Collective.
pub(super) fn lanes_that_carry(group: &Group) -> Result<Lanes> {
    let mut lanes = Lanes::of(group)?;
    carry_data(&mut lanes.global)?;
    Ok(lanes)
}

impl Peers {
    /// Over a group whose lane is open. `world_ranks`: rank in the job of each of its ranks.
    pub(super) fn over(group: Group, all: Lanes, world_ranks: Vec<usize>) -> Peers {
        Peers { all, sets: VecDeque::new(), group, world_ranks, bytes: WireBytes::default() }
    }

    /// The lane of all ranks.
    pub(super) fn lane(&mut self) -> &mut Lane {
        &mut self.all.global
    }

    /// Counts the bytes of another group too, which this one takes the place of.
    pub(super) fn take_bytes(&mut self, former: &Peers) {
        let WireBytes { sent, received } = former.wire_bytes();
        self.bytes.sent += sent;
        self.bytes.received += received;
    }

    /// Opens the lane of all ranks. Collective.
    pub(super) fn new(group: Group, world_ranks: Vec<usize>) -> Result<Peers> {
        let all = Lanes::of(&group)?;
        Ok(Peers::over(group, all, world_ranks))
    }

    /// Goes on without ranks that have left or are lost; also returns the ranks in the job of those that are lost. Collective among
    /// those that are left. After an error this rank has left the group: the others do not wait for it.
    ///
    /// # Errors
    /// As [`Group::shrink`].
    pub(super) fn shrink(self) -> Result<(Peers, Vec<usize>)> {
        let bytes = self.wire_bytes();
        let Peers { all, sets, group, world_ranks, .. } = self;
        // Lanes go before their group does.
        drop((all, sets));
        let barrier = |lanes: &mut Lanes| lanes.global.barrier(&Options { label: "view", ..Options::DEFAULT });
        // Other clones of the group may outlive this value.
        let view = group.shrink(None, Quorum::Any, lanes_that_carry, barrier).inspect_err(|_| group.leave())?;
        let lost = view.lost.iter().filter(|rank| !group.health().has_departed(**rank));
        let lost = lost.map(|rank| world_ranks[*rank]).collect();
        let world_ranks = view.ranks.iter().map(|former| world_ranks[*former]).collect();
        Ok((Peers { all: view.opened, sets: VecDeque::new(), group: view.group, world_ranks, bytes }, lost))
    }

    /// Bytes written to and read from sockets so far.
    pub(super) fn wire_bytes(&self) -> WireBytes {
        let mut bytes = self.bytes;
        bytes.add(self.group.stats());
        bytes.add_sets(&self.sets);
        bytes
    }

    /// Every rank's status, by rank.
    pub(super) fn exchange(&mut self, own: Status) -> Result<Vec<Status>> {
        let mut all = vec![0; FIELDS * 8 * self.group.size()];
        let options = Options { label: "status", ..Options::DEFAULT };
        self.all.global.run(&options, DType::U8, Verb::AllGather, Io::split(&own.encode(), &mut all))?;
        Ok(all.chunks(FIELDS * 8).map(Status::decode).collect())
    }

    /// The lanes of a set of ranks that has this rank. All ranks of the group call it with the same sets in the same order, also those
    /// that are not in them, which get `None`.
    pub(super) fn lanes(&mut self, set: &[usize], name: &str) -> Result<Option<&mut Lanes>> {
        if set.len() == self.group.size() {
            return Ok(Some(&mut self.all));
        }
        let known = self.sets.iter().position(|known| known.ranks == set);
        let entry = match known.and_then(|at| self.sets.remove(at)) {
            Some(entry) => entry,
            None => {
                while self.sets.len() >= SETS {
                    if let Some(oldest) = self.sets.pop_front() {
                        self.bytes.add_sets([&oldest]);
                    }
                }
                let subgroup = if set.len() > 1 { self.group.subgroup(set, name)? } else { None };
                Set { ranks: set.to_vec(), lanes: subgroup.map(|group| Lanes::of(&group)).transpose()? }
            }
        };
        self.sets.push_back(entry);
        Ok(self.sets.back_mut().and_then(|set| set.lanes.as_mut()))
    }

    /// Ranks in the job.
    pub(super) fn in_job(&self, ranks: &[usize]) -> Vec<usize> {
        ranks.iter().map(|rank| self.world_ranks[*rank]).collect()
    }

    /// An error of the group with ranks in the job.
    pub(super) fn named(&self, error: Error) -> Error {
        let of = |rank: usize| self.world_ranks.get(rank).copied().unwrap_or(rank);
        match error {
            Error::PeerLost { rank, host, reason, noticed_by, progress, source } => {
                Error::PeerLost { rank: of(rank), host, reason, noticed_by: of(noticed_by), progress, source }
            }
            Error::Timeout { after, missing, noticed_by, progress } => {
                let missing = missing.into_iter().map(of).collect();
                Error::Timeout { after, missing, noticed_by: of(noticed_by), progress }
            }
            Error::PeerRaised { rank, host, kind, message } => {
                Error::PeerRaised { rank: of(rank), host, kind, message }
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_survives_the_wire() {
        let other = Status {
            takes_part: true,
            synchronizes: false,
            announced: true,
            is_due: true,
            is_new: true,
            joiner: Some(0),
            view: 7,
            exchanges: 3,
            agreed: u64::MAX,
        };
        for status in [Status::default(), other, Status { synchronizes: true, joiner: None, ..other }] {
            assert_eq!(Status::decode(&status.encode()), status);
        }
    }
}
