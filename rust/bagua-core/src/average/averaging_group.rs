//! The ranks that average a model: their group, and the lanes of those that take part.

use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::group::{Group, Lane, Lanes, Options, Quorum, carry_data};
use crate::request::{Io, Verb};
use crate::stats::Stats;
use crate::types::DType;

/// Number of sets of ranks that keep their lanes. Equal on all ranks, which therefore drop the same ones.
const SETS: usize = 4;

const FIELDS: usize = 9;

/// The record that a rank sends to all others at the start of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) takes_part: bool,
    /// True if the rank waits in `synchronize`.
    pub(super) synchronizes: bool,
    /// True if the rank's previous status already said that it synchronizes. All statuses of this exchange are then
    /// newer than its call.
    pub(super) announced: bool,
    /// True if the rank's interval has passed.
    pub(super) is_due: bool,
    /// True if the rank does not have the weights of the job yet.
    pub(super) is_new: bool,
    /// Job rank of the first joining rank whose connection the rank holds.
    pub(super) joiner: Option<usize>,
    /// Number of the last membership that the rank knows.
    pub(super) view: u64,
    /// Number of earlier exchanges that the rank knows of.
    pub(super) exchanges: u64,
    /// Number of the last round that all ranks agreed on, so that the rank writes its update. 0 for none.
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
    /// `None` if this rank is not in the set, or if the set is only this rank or the whole group.
    lanes: Option<Lanes>,
}

/// The ranks that average a model. Ranks are those of the group.
pub(super) struct Peers {
    /// First fields, so that lanes are dropped before their group.
    all: Lanes,
    /// The lanes of recent sets. The most recently used set is the last one.
    sets: VecDeque<Set>,
    /// The group of the averaging. No other code uses it, so leaving it affects nothing else.
    pub(super) group: Group,
    pub(super) world_ranks: Vec<usize>,
    /// Number of bytes sent and received in former groups and sets, which no longer exist.
    bytes: WireBytes,
}

/// Opens lanes in a new group whose members have received data from each other. Collective.
pub(super) fn lanes_that_carry(group: &Group) -> Result<Lanes> {
    let mut lanes = Lanes::of(group)?;
    carry_data(&mut lanes.global)?;
    Ok(lanes)
}

impl Peers {
    /// Creates the peers of a group whose lane is open. `world_ranks` are the job ranks of its ranks.
    pub(super) fn over(group: Group, all: Lanes, world_ranks: Vec<usize>) -> Peers {
        Peers { all, sets: VecDeque::new(), group, world_ranks, bytes: WireBytes::default() }
    }

    pub(super) fn lane(&mut self) -> &mut Lane {
        &mut self.all.global
    }

    /// Adds the bytes of a former group that this one replaces.
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

    /// Continues without ranks that have left or are lost, and returns the job ranks of the lost ones. Collective among
    /// the remaining ranks. After an error, this rank has left the group, so the others do not wait for it.
    pub(super) fn shrink(self) -> Result<(Peers, Vec<usize>)> {
        let bytes = self.wire_bytes();
        let Peers { all, sets, group, world_ranks, .. } = self;
        // Lanes are dropped before their group.
        drop((all, sets));
        let barrier = |lanes: &mut Lanes| lanes.global.barrier(&Options { label: "view", ..Options::DEFAULT });
        // Leaves explicitly, because other clones of the group may outlive this value.
        let view = group.shrink(None, Quorum::Any, lanes_that_carry, barrier).inspect_err(|_| group.leave())?;
        let lost = view.lost.iter().filter(|rank| !group.health().has_departed(**rank));
        let lost = lost.map(|rank| world_ranks[*rank]).collect();
        let world_ranks = view.ranks.iter().map(|former| world_ranks[*former]).collect();
        Ok((Peers { all: view.opened, sets: VecDeque::new(), group: view.group, world_ranks, bytes }, lost))
    }

    pub(super) fn wire_bytes(&self) -> WireBytes {
        let mut bytes = self.bytes;
        bytes.add(self.group.stats());
        bytes.add_sets(&self.sets);
        bytes
    }

    /// Exchanges the statuses of all ranks, and returns them by rank.
    pub(super) fn exchange(&mut self, own: Status) -> Result<Vec<Status>> {
        let mut all = vec![0; FIELDS * 8 * self.group.size()];
        let options = Options { label: "status", ..Options::DEFAULT };
        self.all.global.run(&options, DType::U8, Verb::AllGather, Io::split(&own.encode(), &mut all))?;
        Ok(all.chunks(FIELDS * 8).map(Status::decode).collect())
    }

    /// Returns the lanes of a set of ranks, or `None` if this rank is not in it or is alone. All ranks of the group
    /// must call it with the same sets in the same order.
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

    pub(super) fn in_job(&self, ranks: &[usize]) -> Vec<usize> {
        ranks.iter().map(|rank| self.world_ranks[*rank]).collect()
    }

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
