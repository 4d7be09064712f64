//! The messages between a joining rank and the server of a rank of the job, in frames.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::super::address::LIMIT;
use super::super::wire::{BytesOf, Encoding, Malformed, Ranks, Texts, bytes, check_view, rank, socket, text};

/// The most models that an answer names, and the most ranks of a membership.
pub(in super::super) const COUNT_LIMIT: usize = 4096;

/// The state of a rank of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Rank of the member.
    #[serde(with = "rank")]
    pub rank: usize,
    /// Random number that distinguishes this process from other processes with the same rank.
    pub incarnation: u64,
    /// True if the job has formed its group and this rank is a member.
    pub in_job: bool,
    /// Names of the models whose averaging a rank can join.
    #[serde(with = "Texts::<COUNT_LIMIT>")]
    pub models: Vec<String>,
}

/// The request to join a model's averaging.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinRequest {
    /// Name of the model.
    #[serde(with = "text")]
    pub model: String,
    /// Digest of what must be equal on all ranks.
    pub digest: [u8; 32],
    /// The address at which the joining rank's own server listens.
    #[serde(with = "socket")]
    pub server: SocketAddr,
    /// True if the rank was in the averaging before, so that its weights count as they are.
    pub returns: bool,
}

/// A message of either side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinMessage {
    /// To the server: requests [`JoinMessage::Status`].
    GetStatus,
    /// From the server.
    Status(JobStatus),
    /// To the server.
    Join(JoinRequest),
    /// From the server.
    Refused {
        /// True if every other server would refuse, too, now and later.
        for_ever: bool,
        /// The reason.
        #[serde(with = "text")]
        text: String,
    },
    /// From the server: the receiver must bind an address for a new group of the ranks `ranks`.
    Bind {
        /// Number of the membership.
        view: u64,
        /// Rank of the receiver in the group.
        #[serde(with = "rank")]
        place: usize,
        /// Ranks within the job, by rank within the new group.
        #[serde(with = "Ranks::<COUNT_LIMIT>")]
        ranks: Vec<usize>,
    },
    /// To the server: the address that the sender bound for the new group; empty if binding failed.
    Address(#[serde(with = "bytes")] Vec<u8>),
    /// From the server: the addresses of all its ranks.
    Addresses(#[serde(with = "BytesOf::<COUNT_LIMIT>")] Vec<Vec<u8>>),
    /// From the server: every rank has opened the group.
    Joined,
}

impl Encoding for JoinMessage {
    fn check(&self) -> Result<(), Malformed> {
        let is_long = |address: &Vec<u8>| address.len() > LIMIT;
        match self {
            JoinMessage::Bind { view, place, ranks } => {
                check_view(*view)?;
                let is_one = *place < ranks.len() && ranks.is_sorted_by(|a, b| a < b);
                if is_one { Ok(()) } else { Err(Malformed("a membership that is none")) }
            }
            JoinMessage::Address(address) if is_long(address) => Err(Malformed("an address beyond its limit")),
            JoinMessage::Addresses(all) if all.iter().any(is_long) => Err(Malformed("an address beyond its limit")),
            JoinMessage::Address(_)
            | JoinMessage::Addresses(_)
            | JoinMessage::GetStatus
            | JoinMessage::Status(_)
            | JoinMessage::Join(_)
            | JoinMessage::Refused { .. }
            | JoinMessage::Joined => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_membership_without_the_joining_rank_or_out_of_order_is_refused() {
        for (place, ranks) in [(2, vec![0, 1]), (0, vec![1, 0]), (0, vec![0, 0]), (0, vec![])] {
            assert!(JoinMessage::parse(&JoinMessage::Bind { view: 1, place, ranks }.encode()).is_err());
        }
    }
}
