//! The messages by which ranks agree on a view, and their encoding inside a frame of the control plane.

use super::super::wire::{Malformed, Reader, Writer};

/// The longest address in a message.
const ADDRESS_LIMIT: usize = 16 * 1024;

/// The most ranks in a message; they fit into a frame of the control plane.
pub(super) const RANKS_LIMIT: usize = 12 * 1024;

/// A rank that another knows to be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct GoneRank {
    /// Rank of the group.
    pub(in super::super) rank: usize,
    /// Its process is known to have ended, or it has left; otherwise it may live on.
    pub(in super::super) ended: bool,
}

/// A message about a view. Ranks are those of the group on whose control plane it travels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum ViewMessage {
    /// The sender takes part and waits for a proposal of this view.
    Ready {
        /// Number of the view.
        view: u64,
        /// The sender would go on without a majority.
        any: bool,
        /// Ranks that are gone as far as the sender knows, ascending.
        gone: Vec<GoneRank>,
    },
    /// The sender takes part no longer: its call raised.
    Withdrawn,
    /// The sender, the lowest rank that is not gone, proposes a view of these ranks, ascending.
    Propose {
        /// Number of the view.
        view: u64,
        /// The members.
        members: Vec<usize>,
    },
    /// The address at which the sender listens for the members of a view.
    Address {
        /// Number of the view.
        view: u64,
        /// From [`Bootstrap::address`](super::super::Bootstrap::address).
        address: Vec<u8>,
    },
    /// The sender refuses a view, for all.
    Refused {
        /// Number of the view.
        view: u64,
        /// Why, for the exception of every rank.
        text: String,
    },
    /// The sender has opened a view and uses it from now on; it leaves this group.
    Opened {
        /// Number of the view.
        view: u64,
        /// Its members, ascending.
        members: Vec<usize>,
    },
    /// The sender does not use the group on whose control plane this travels, but may live on in another.
    Abandoned,
}

impl ViewMessage {
    /// The message as bytes.
    pub(in super::super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            ViewMessage::Ready { view, any, gone } => {
                out.u8(1).u64(*view).u8(u8::from(*any)).rank(gone.len());
                gone.iter().for_each(|gone| _ = out.rank(gone.rank).u8(u8::from(gone.ended)));
            }
            ViewMessage::Withdrawn => _ = out.u8(2),
            ViewMessage::Propose { view, members } => put_ranks(out.u8(3).u64(*view), members),
            ViewMessage::Address { view, address } => _ = out.u8(4).u64(*view).bytes(address),
            ViewMessage::Refused { view, text } => _ = out.u8(5).u64(*view).text(text),
            ViewMessage::Opened { view, members } => put_ranks(out.u8(6).u64(*view), members),
            ViewMessage::Abandoned => _ = out.u8(7),
        }
        out.0
    }

    /// The message that these bytes encode.
    pub(in super::super) fn parse(bytes: &[u8]) -> Result<ViewMessage, Malformed> {
        let mut from = Reader(bytes);
        let message = match from.u8()? {
            1 => {
                let (view, any) = (from.view()?, get_flag(&mut from)?);
                let count = get_count(&mut from)?;
                let gone = (0..count).map(|_| Ok(GoneRank { rank: from.rank()?, ended: get_flag(&mut from)? }));
                let gone = gone.collect::<Result<Vec<_>, Malformed>>()?;
                ascending(gone.iter().map(|gone| gone.rank))?;
                ViewMessage::Ready { view, any, gone }
            }
            2 => ViewMessage::Withdrawn,
            3 => ViewMessage::Propose { view: from.view()?, members: get_ranks(&mut from)? },
            4 => {
                let (view, address) = (from.view()?, from.bytes()?);
                if address.len() > ADDRESS_LIMIT {
                    return Err(Malformed("an address is too long"));
                }
                ViewMessage::Address { view, address: address.to_vec() }
            }
            5 => ViewMessage::Refused { view: from.view()?, text: from.text()? },
            6 => ViewMessage::Opened { view: from.view()?, members: get_ranks(&mut from)? },
            7 => ViewMessage::Abandoned,
            _ => return Err(Malformed("a message about views of an unknown kind")),
        };
        from.end()?;
        Ok(message)
    }
}

fn put_ranks(out: &mut Writer, ranks: &[usize]) {
    out.rank(ranks.len());
    ranks.iter().for_each(|rank| _ = out.rank(*rank));
}

fn get_ranks(from: &mut Reader<'_>) -> Result<Vec<usize>, Malformed> {
    let count = get_count(from)?;
    let ranks = (0..count).map(|_| from.rank()).collect::<Result<Vec<_>, _>>()?;
    ascending(ranks.iter().copied())?;
    Ok(ranks)
}

fn get_count(from: &mut Reader<'_>) -> Result<usize, Malformed> {
    let count = from.rank()?;
    if count > RANKS_LIMIT { Err(Malformed("too many ranks")) } else { Ok(count) }
}

fn get_flag(from: &mut Reader<'_>) -> Result<bool, Malformed> {
    match from.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed("a flag is neither 0 nor 1")),
    }
}

fn ascending(ranks: impl Iterator<Item = usize>) -> Result<(), Malformed> {
    if ranks.is_sorted_by(|a, b| a < b) { Ok(()) } else { Err(Malformed("ranks are not ascending")) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::wire::VIEWS_LIMIT;
    use super::*;

    fn ranks() -> impl Strategy<Value = Vec<usize>> {
        proptest::collection::btree_set(0..100_000usize, 0..50).prop_map(|ranks| ranks.into_iter().collect())
    }

    fn message() -> impl Strategy<Value = ViewMessage> {
        prop_oneof![
            (0..=VIEWS_LIMIT, any::<bool>(), ranks(), any::<u64>()).prop_map(|(view, any, ranks, bits)| {
                let ended = |at: usize| bits >> at & 1 == 1;
                let gone = ranks.into_iter().enumerate();
                let gone = gone.map(|(at, rank)| GoneRank { rank, ended: ended(at) }).collect();
                ViewMessage::Ready { view, any, gone }
            }),
            Just(ViewMessage::Withdrawn),
            (0..=VIEWS_LIMIT, ranks()).prop_map(|(view, members)| ViewMessage::Propose { view, members }),
            (0..=VIEWS_LIMIT, any::<Vec<u8>>()).prop_map(|(view, address)| ViewMessage::Address { view, address }),
            (0..=VIEWS_LIMIT, any::<String>()).prop_map(|(view, text)| ViewMessage::Refused { view, text }),
            (0..=VIEWS_LIMIT, ranks()).prop_map(|(view, members)| ViewMessage::Opened { view, members }),
            Just(ViewMessage::Abandoned),
        ]
    }

    proptest! {
        #[test]
        fn an_encoded_message_is_parsed_unchanged_and_a_truncated_one_is_malformed(message in message()) {
            let bytes = message.encode();
            prop_assert_eq!(ViewMessage::parse(&bytes), Ok(message));
            for end in 0..bytes.len() {
                prop_assert!(ViewMessage::parse(&bytes[..end]).is_err());
            }
        }

        #[test]
        fn random_bytes_are_a_message_or_malformed_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = ViewMessage::parse(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }

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
    fn too_many_ranks_and_unordered_ranks_are_malformed() {
        let many = ViewMessage::Propose { view: 1, members: (0..=RANKS_LIMIT).collect() }.encode();
        assert_eq!(ViewMessage::parse(&many), Err(Malformed("too many ranks")));
        for members in [vec![1, 0], vec![1, 1]] {
            let unordered = ViewMessage::Opened { view: 1, members }.encode();
            assert_eq!(ViewMessage::parse(&unordered), Err(Malformed("ranks are not ascending")));
        }
        // The most ranks fit into a frame.
        let gone = (0..RANKS_LIMIT).map(|rank| GoneRank { rank, ended: true }).collect();
        let longest = ViewMessage::Ready { view: 1, any: true, gone }.encode();
        assert!(longest.len() + 64 <= super::super::super::wire::FRAME_LIMIT, "{}", longest.len());
    }
}
