//! What a visitor and a door say to each other, in frames.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::super::address::LIMIT;
use super::super::wire::{AtMost, Encoding, Malformed, Ranks, Texts, check_view, rank, socket, text};

/// The most models that an answer names, and the most ranks of a membership.
pub(in super::super) const COUNT_LIMIT: usize = 4096;

/// How a door answers a visitor that asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Its rank.
    #[serde(with = "rank")]
    pub rank: usize,
    /// Distinguishes its process from others of the same rank.
    pub incarnation: u64,
    /// The job is formed, and this rank in it.
    pub in_job: bool,
    /// Names of the models whose averaging lets visitors in.
    #[serde(with = "Texts::<COUNT_LIMIT>")]
    pub models: Vec<String>,
}

/// What a visitor wants of a model's averaging.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Name of the model.
    #[serde(with = "text")]
    pub model: String,
    /// Digest of what must be equal on all ranks.
    pub digest: [u8; 32],
    /// The visitor's own door.
    #[serde(with = "socket")]
    pub door: SocketAddr,
    /// It was in the averaging before, and its weights count as they are.
    pub returns: bool,
}

/// A message of either side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DoorMessage {
    /// Visitor: how do things stand?
    Ask,
    Answer(Answer),
    /// Visitor: let me in.
    Join(Asked),
    /// Door: no, for this reason. `for_ever`: also at another door, and later.
    Refused {
        for_ever: bool,
        #[serde(with = "text")]
        text: String,
    },
    /// Door: bind for a group of these ranks, as this one of them.
    Bind {
        view: u64,
        #[serde(with = "rank")]
        place: usize,
        #[serde(with = "Ranks::<COUNT_LIMIT>")]
        ranks: Vec<usize>,
    },
    /// Visitor: my address in that group; empty where it could not bind.
    Address(Vec<u8>),
    /// Door: the addresses of all its ranks.
    Addresses(#[serde(with = "AtMost::<COUNT_LIMIT>")] Vec<Vec<u8>>),
    /// Door: every rank has opened the group.
    Welcome,
}

impl Encoding for DoorMessage {
    fn check(&self) -> Result<(), Malformed> {
        let is_long = |address: &Vec<u8>| address.len() > LIMIT;
        match self {
            DoorMessage::Bind { view, place, ranks } => {
                check_view(*view)?;
                let is_one = *place < ranks.len() && ranks.is_sorted_by(|a, b| a < b);
                if is_one { Ok(()) } else { Err(Malformed("a membership that is none")) }
            }
            DoorMessage::Address(address) if is_long(address) => Err(Malformed("an address beyond its limit")),
            DoorMessage::Addresses(all) if all.iter().any(is_long) => Err(Malformed("an address beyond its limit")),
            DoorMessage::Address(_)
            | DoorMessage::Addresses(_)
            | DoorMessage::Ask
            | DoorMessage::Answer(_)
            | DoorMessage::Join(_)
            | DoorMessage::Refused { .. }
            | DoorMessage::Welcome => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_membership_without_the_visitor_or_out_of_order_is_refused() {
        for (place, ranks) in [(2, vec![0, 1]), (0, vec![1, 0]), (0, vec![0, 0]), (0, vec![])] {
            assert!(DoorMessage::parse(&DoorMessage::Bind { view: 1, place, ranks }.encode()).is_err());
        }
    }
}
