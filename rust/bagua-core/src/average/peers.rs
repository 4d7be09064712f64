//! The ranks with which a model is averaged: their group, and the lanes of those that take part.

use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::group::{Group, Lanes, Options, Quorum};
use crate::request::{Io, Verb};
use crate::stats::Stats;
use crate::types::DType;

/// How many sets of ranks keep their lanes. The same on all ranks, which therefore drop the same ones.
const SETS: usize = 4;

/// Numbers in a [`Status`] on the wire.
const FIELDS: usize = 8;

/// What a rank tells all others at the beginning of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    /// It takes part in this round.
    pub(super) takes_part: bool,
    /// It waits in `synchronize`.
    pub(super) synchronizes: bool,
    /// Number of the last membership that it knows.
    pub(super) view: u64,
    /// Exchanges before this one, as far as it knows.
    pub(super) exchanges: u64,
    /// Number of the last round whose update it has written or is about to write: all had the average. 0 for none.
    pub(super) agreed: u64,
}

impl Status {
    fn encode(self) -> [u8; FIELDS * 8] {
        let fields =
            [u64::from(self.takes_part), u64::from(self.synchronizes), self.view, self.exchanges, self.agreed, 0, 0, 0];
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
            view: field(2),
            exchanges: field(3),
            agreed: field(4),
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

impl Peers {
    /// Opens the lane of all ranks. Collective.
    pub(super) fn new(group: Group, world_ranks: Vec<usize>) -> Result<Peers> {
        Ok(Peers { all: Lanes::of(&group)?, sets: VecDeque::new(), group, world_ranks, bytes: WireBytes::default() })
    }

    /// Goes on without ranks that have left. Collective among those that are left.
    ///
    /// # Errors
    /// As [`Group::shrink`].
    pub(super) fn shrink(self) -> Result<Peers> {
        let Peers { all, sets, group, world_ranks, mut bytes } = self;
        bytes.add(group.stats());
        bytes.add_sets(&sets);
        // Lanes go before their group does.
        drop((all, sets));
        let barrier = |lanes: &mut Lanes| lanes.global.barrier(&Options { label: "view", ..Options::DEFAULT });
        let view = group.shrink(None, Quorum::Any, Lanes::of, barrier)?;
        let world_ranks = view.ranks.iter().map(|former| world_ranks[*former]).collect();
        Ok(Peers { all: view.opened, sets: VecDeque::new(), group: view.group, world_ranks, bytes })
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
        for status in [
            Status::default(),
            Status { takes_part: true, synchronizes: false, view: 7, exchanges: 3, agreed: 2 },
            Status { takes_part: false, synchronizes: true, view: u64::MAX, exchanges: 0, agreed: 9 },
        ] {
            assert_eq!(Status::decode(&status.encode()), status);
        }
    }
}
