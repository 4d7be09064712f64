//! The messages by which ranks agree on a view.

use std::num::TryFromIntError;

use serde::{Deserialize, Serialize};

use super::super::wire::{AtMost, Encoding, Malformed, Ranks, check_view, rank, text};

/// Maximum number of ranks in a message, and of a group that can be shrunk. Such messages fit into a control frame.
pub(in super::super) const RANKS_LIMIT: usize = 12 * 1024;

/// A rank that the sender of a message knows to be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct GoneRank {
    /// Rank of the group.
    #[serde(with = "rank")]
    pub(in super::super) rank: usize,
    /// True if the rank's process is known to have ended, or if the rank has left. If false, the process may still run.
    pub(in super::super) ended: bool,
}

/// The listener of a rank for the members of a view, in three bytes of a message. The rest of the address is that of
/// the rank's address in the group, or follows from it: see [`World::next`](super::super::control::World::next).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub(in super::super) struct Endpoint {
    /// Port of its TCP listener.
    pub(in super::super) port: u16,
    /// True if the rank has a Unix listener too.
    pub(in super::super) unix: bool,
}

impl TryFrom<u32> for Endpoint {
    type Error = TryFromIntError;

    fn try_from(encoded: u32) -> Result<Endpoint, TryFromIntError> {
        Ok(Endpoint { port: (encoded >> 1).try_into()?, unix: encoded & 1 == 1 })
    }
}

impl From<Endpoint> for u32 {
    fn from(endpoint: Endpoint) -> u32 {
        u32::from(endpoint.port) << 1 | u32::from(endpoint.unix)
    }
}

/// The last `Ready` of another rank.
#[derive(Clone, Debug)]
pub(super) struct Ready {
    pub(super) view: u64,
    pub(super) any: bool,
    pub(super) gone: Vec<GoneRank>,
    pub(super) endpoint: Endpoint,
}

/// A message about a view. Ranks are those of the group on whose control plane the message travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum ViewMessage {
    /// The sender takes part and waits for a proposal of this view.
    Ready {
        /// Number of the view.
        view: u64,
        /// True if the sender would continue without a majority.
        any: bool,
        /// Ranks that are gone as far as the sender knows, ascending.
        #[serde(with = "AtMost::<RANKS_LIMIT>")]
        gone: Vec<GoneRank>,
        /// The sender's listener for the members.
        endpoint: Endpoint,
    },
    /// The sender no longer takes part, because its call raised.
    Withdrawn {
        /// The ranks that the sender waited for, if its deadline has passed.
        #[serde(with = "Ranks::<RANKS_LIMIT>")]
        missing: Vec<usize>,
    },
    /// The sender, the lowest rank that is not gone, proposes a view of all ranks that are not gone.
    Propose {
        /// Number of the view.
        view: u64,
        /// The ranks that are gone, ascending.
        #[serde(with = "Ranks::<RANKS_LIMIT>")]
        gone: Vec<usize>,
        /// Listening endpoints of the members, in the order of their ranks.
        #[serde(with = "AtMost::<RANKS_LIMIT>")]
        endpoints: Vec<Endpoint>,
    },
    /// The sender refuses a view for all ranks.
    Refused {
        /// Number of the view.
        view: u64,
        /// The reason, for the exception of every rank.
        #[serde(with = "text")]
        text: String,
    },
    /// All members of a view have passed its barrier, and use it from now on.
    Opened {
        /// Number of the view.
        view: u64,
        /// The ranks that are not members, ascending.
        #[serde(with = "Ranks::<RANKS_LIMIT>")]
        gone: Vec<usize>,
    },
}

impl Encoding for ViewMessage {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            ViewMessage::Ready { view, gone, .. } => {
                check_view(*view)?;
                ascending(gone.iter().map(|gone| gone.rank))
            }
            ViewMessage::Propose { view, gone, .. } | ViewMessage::Opened { view, gone } => {
                check_view(*view)?;
                ascending(gone.iter().copied())
            }
            ViewMessage::Refused { view, .. } => check_view(*view),
            ViewMessage::Withdrawn { .. } => Ok(()),
        }
    }
}

/// Returns "rank 1" or "ranks 1, 2".
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
        let propose = |view| ViewMessage::Propose { view, gone: vec![0, 1], endpoints: Vec::new() };
        let parse = |view| ViewMessage::parse(&propose(view).encode());
        assert!(parse(VIEWS_LIMIT).is_ok());
        for view in [VIEWS_LIMIT + 1, u64::MAX] {
            assert_eq!(parse(view), Err(Malformed("the number of a view is out of range")));
        }
    }

    #[test]
    fn unordered_ranks_are_malformed() {
        for gone in [vec![1, 0], vec![1, 1]] {
            let unordered = ViewMessage::Opened { view: 1, gone }.encode();
            assert_eq!(ViewMessage::parse(&unordered), Err(Malformed("ranks are not ascending")));
        }
    }
    #[test]
    fn an_endpoint_is_encoded_in_three_bytes_at_most_and_a_number_beyond_those_of_ports_is_malformed() {
        for (port, length) in [(0, 1), (80, 2), (29_500, 3), (u16::MAX, 3)] {
            for unix in [false, true] {
                let endpoint = Endpoint { port, unix };
                let bytes = postcard::to_allocvec(&endpoint).unwrap();
                assert_eq!((bytes.len(), postcard::from_bytes(&bytes)), (length, Ok(endpoint)));
            }
        }
        let beyond = postcard::to_allocvec(&(1u32 << 17)).unwrap();
        assert!(postcard::from_bytes::<Endpoint>(&beyond).is_err());
    }
}
