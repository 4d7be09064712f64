//! The messages by which ranks agree on a view.

use serde::{Deserialize, Serialize};

use super::super::wire::{AtMost, BytesOf, Encoding, FRAME_LIMIT, Malformed, Ranks, bytes, check_view, rank, text};

/// The longest address in a message.
const ADDRESS_LIMIT: usize = 16 * 1024;

/// Bytes of a frame with a list of addresses beside these and its receivers.
const OVERHEAD: usize = 64;

/// The most bytes of a rank, or of the length of an address, in a frame.
const EACH: usize = 3;

/// The most ranks in a message, and of a group that can be shrunk: the messages fit into a frame of the control plane.
pub(in super::super) const RANKS_LIMIT: usize = 12 * 1024;

/// A rank that another knows to be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct GoneRank {
    /// Rank of the group.
    #[serde(with = "rank")]
    pub(in super::super) rank: usize,
    /// Its process is known to have ended, or it has left; otherwise it may live on.
    pub(in super::super) ended: bool,
}

/// The last `Ready` of another rank.
#[derive(Clone, Debug)]
pub(super) struct Ready {
    pub(super) view: u64,
    pub(super) any: bool,
    pub(super) gone: Vec<GoneRank>,
}

/// A message about a view. Ranks are those of the group on whose control plane it travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum ViewMessage {
    /// The sender takes part and waits for a proposal of this view.
    Ready {
        /// Number of the view.
        view: u64,
        /// The sender would go on without a majority.
        any: bool,
        /// Ranks that are gone as far as the sender knows, ascending.
        #[serde(with = "AtMost::<RANKS_LIMIT>")]
        gone: Vec<GoneRank>,
    },
    /// The sender takes part no longer: its call raised.
    Withdrawn {
        /// If its deadline has passed: whom it waited for.
        #[serde(with = "Ranks::<RANKS_LIMIT>")]
        missing: Vec<usize>,
    },
    /// The sender, the lowest rank that is not gone, proposes a view of these ranks, ascending.
    Propose {
        /// Number of the view.
        view: u64,
        /// The members.
        #[serde(with = "Ranks::<RANKS_LIMIT>")]
        members: Vec<usize>,
    },
    /// To the leader: the address at which the sender listens for the members of a view.
    Address {
        /// Number of the view.
        view: u64,
        /// From [`Bootstrap::address`](super::super::Bootstrap::address).
        #[serde(with = "bytes")]
        address: Vec<u8>,
    },
    /// Of the leader: addresses of members of a view, one after the other.
    Addresses {
        /// Number of the view.
        view: u64,
        /// Whose the first one is, by its rank in the view.
        #[serde(with = "rank")]
        first: usize,
        /// The addresses.
        #[serde(with = "BytesOf::<RANKS_LIMIT>")]
        addresses: Vec<Vec<u8>>,
    },
    /// The sender refuses a view, for all.
    Refused {
        /// Number of the view.
        view: u64,
        /// Why, for the exception of every rank.
        #[serde(with = "text")]
        text: String,
    },
    /// All members of a view have passed its barrier, and use it from now on.
    Opened {
        /// Number of the view.
        view: u64,
        /// Its members, ascending.
        #[serde(with = "Ranks::<RANKS_LIMIT>")]
        members: Vec<usize>,
    },
}

impl Encoding for ViewMessage {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            ViewMessage::Ready { view, any: _, gone } => {
                check_view(*view)?;
                ascending(gone.iter().map(|gone| gone.rank))
            }
            ViewMessage::Propose { view, members } | ViewMessage::Opened { view, members } => {
                check_view(*view)?;
                ascending(members.iter().copied())
            }
            ViewMessage::Address { view: _, address } if address.len() > ADDRESS_LIMIT => {
                Err(Malformed("an address is too long"))
            }
            ViewMessage::Addresses { view: _, first: _, addresses }
                if addresses.iter().any(|address| address.len() > ADDRESS_LIMIT) =>
            {
                Err(Malformed("an address is too long"))
            }
            ViewMessage::Address { view, .. }
            | ViewMessage::Addresses { view, .. }
            | ViewMessage::Refused { view, .. } => check_view(*view),
            ViewMessage::Withdrawn { .. } => Ok(()),
        }
    }
}

/// Divides the addresses of a view into lists that fit into a frame together with their receivers, with the number of the first of each.
pub(super) fn batches(addresses: &[Vec<u8>]) -> impl Iterator<Item = (usize, Vec<Vec<u8>>)> {
    let mut first = 0;
    // The last one of a list may be the longest.
    let longest = (FRAME_LIMIT - OVERHEAD - ADDRESS_LIMIT).saturating_sub(EACH * (1 + addresses.len()));
    std::iter::from_fn(move || {
        let (begin, mut bytes) = (first, 0);
        while first < addresses.len() && (first == begin || bytes < longest) {
            bytes += addresses[first].len() + EACH;
            first += 1;
        }
        (begin < first).then(|| (begin, addresses[begin..first].to_vec()))
    })
}

/// "rank 1" or "ranks 1, 2".
pub(super) fn named(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}") }
}

fn ascending(ranks: impl Iterator<Item = usize>) -> Result<(), Malformed> {
    if ranks.is_sorted_by(|a, b| a < b) { Ok(()) } else { Err(Malformed("ranks are not ascending")) }
}

#[cfg(test)]
mod tests {
    use super::super::super::wire::VIEWS_LIMIT;
    use super::*;

    #[test]
    fn a_number_of_a_view_that_the_next_ones_would_overflow_is_malformed() {
        let members = vec![0, 1];
        let parse = |view| ViewMessage::parse(&ViewMessage::Propose { view, members: members.clone() }.encode());
        assert!(parse(VIEWS_LIMIT).is_ok());
        for view in [VIEWS_LIMIT + 1, u64::MAX] {
            assert_eq!(parse(view), Err(Malformed("the number of a view is out of range")));
        }
    }

    #[test]
    fn unordered_ranks_are_malformed() {
        for members in [vec![1, 0], vec![1, 1]] {
            let unordered = ViewMessage::Opened { view: 1, members }.encode();
            assert_eq!(ViewMessage::parse(&unordered), Err(Malformed("ranks are not ascending")));
        }
    }
}
