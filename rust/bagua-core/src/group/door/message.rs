//! What a visitor and a door say to each other, in frames.

use std::net::SocketAddr;

use super::super::address::LIMIT;
use super::super::wire::{Malformed, Reader, Writer};

/// The most models that an answer names, and the most ranks of a membership.
const COUNT_LIMIT: usize = 4096;

/// How a door answers a visitor that asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Its rank.
    pub rank: usize,
    /// Distinguishes its process from others of the same rank.
    pub incarnation: u64,
    /// The job is formed, and this rank in it.
    pub in_job: bool,
    /// Names of the models whose averaging lets visitors in.
    pub models: Vec<String>,
}

/// What a visitor wants of a model's averaging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Name of the model.
    pub model: String,
    /// Digest of what must be equal on all ranks.
    pub digest: [u8; 32],
    /// The visitor's own door.
    pub door: SocketAddr,
    /// It was in the averaging before, and its weights count as they are.
    pub returns: bool,
}

/// A message of either side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DoorMessage {
    /// Visitor: how do things stand?
    Ask,
    Answer(Answer),
    /// Visitor: let me in.
    Join(Asked),
    /// Door: no, for this reason. `for_ever`: also at another door, and later.
    Refused {
        for_ever: bool,
        text: String,
    },
    /// Door: bind for a group of these ranks, as this one of them.
    Bind {
        view: u64,
        place: usize,
        ranks: Vec<usize>,
    },
    /// Visitor: my address in that group; empty where it could not bind.
    Address(Vec<u8>),
    /// Door: the addresses of all its ranks.
    Addresses(Vec<Vec<u8>>),
    /// Door: every rank has opened the group.
    Welcome,
}

impl DoorMessage {
    /// The body of a frame.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            DoorMessage::Ask => _ = out.u8(0),
            DoorMessage::Answer(Answer { rank, incarnation, in_job, models }) => {
                out.u8(1).rank(*rank).u64(*incarnation).u8(u8::from(*in_job)).rank(models.len());
                models.iter().for_each(|model| _ = out.text(model));
            }
            DoorMessage::Join(Asked { model, digest, door, returns }) => {
                out.u8(2).text(model).fixed(digest).text(&door.to_string()).u8(u8::from(*returns));
            }
            DoorMessage::Refused { for_ever, text } => _ = out.u8(3).u8(u8::from(*for_ever)).text(text),
            DoorMessage::Bind { view, place, ranks } => {
                out.u8(4).u64(*view).rank(*place).rank(ranks.len());
                ranks.iter().for_each(|rank| _ = out.rank(*rank));
            }
            DoorMessage::Address(address) => _ = out.u8(5).bytes(address),
            DoorMessage::Addresses(addresses) => {
                out.u8(6).rank(addresses.len());
                addresses.iter().for_each(|address| _ = out.bytes(address));
            }
            DoorMessage::Welcome => _ = out.u8(7),
        }
        out.0
    }

    /// The message of a frame's body.
    pub(in super::super) fn parse(body: &[u8]) -> Result<DoorMessage, Malformed> {
        let mut from = Reader(body);
        let message = match from.u8()? {
            0 => DoorMessage::Ask,
            1 => {
                let (rank, incarnation, in_job) = (from.rank()?, from.u64()?, flag(&mut from)?);
                DoorMessage::Answer(Answer { rank, incarnation, in_job, models: list(&mut from, Reader::text)? })
            }
            2 => {
                let (model, digest, door) = (from.text()?, from.array()?, from.text()?);
                let door = door.parse().map_err(|_| Malformed("an address of a door that is none"))?;
                DoorMessage::Join(Asked { model, digest, door, returns: flag(&mut from)? })
            }
            3 => DoorMessage::Refused { for_ever: flag(&mut from)?, text: from.text()? },
            4 => {
                let (view, place, ranks) = (from.view()?, from.rank()?, list(&mut from, Reader::rank)?);
                if place >= ranks.len() || !ranks.is_sorted_by(|a, b| a < b) {
                    return Err(Malformed("a membership that is none"));
                }
                DoorMessage::Bind { view, place, ranks }
            }
            5 => DoorMessage::Address(address(&mut from)?),
            6 => DoorMessage::Addresses(list(&mut from, address)?),
            7 => DoorMessage::Welcome,
            _ => return Err(Malformed("an unknown message of a door")),
        };
        from.end()?;
        Ok(message)
    }
}

fn flag(from: &mut Reader<'_>) -> Result<bool, Malformed> {
    match from.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed("a flag that is neither 0 nor 1")),
    }
}

fn address(from: &mut Reader<'_>) -> Result<Vec<u8>, Malformed> {
    let bytes = from.bytes()?;
    if bytes.len() > LIMIT { Err(Malformed("an address beyond its limit")) } else { Ok(bytes.to_vec()) }
}

fn list<'a, T>(
    from: &mut Reader<'a>,
    one: impl Fn(&mut Reader<'a>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let count = from.rank()?;
    if count > COUNT_LIMIT {
        return Err(Malformed("a list beyond its limit"));
    }
    (0..count).map(|_| one(from)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_message_survives_the_wire() {
        let answer = Answer { rank: 3, incarnation: 9, in_job: true, models: vec!["a".to_owned(), String::new()] };
        let asked = Asked {
            model: "model".to_owned(),
            digest: [7; 32],
            door: SocketAddr::from(([127, 0, 0, 1], 9)),
            returns: true,
        };
        for message in [
            DoorMessage::Ask,
            DoorMessage::Answer(answer),
            DoorMessage::Join(asked),
            DoorMessage::Refused { for_ever: true, text: "no".to_owned() },
            DoorMessage::Bind { view: 4, place: 1, ranks: vec![0, 2] },
            DoorMessage::Address(vec![1, 2]),
            DoorMessage::Addresses(vec![vec![], vec![3]]),
            DoorMessage::Welcome,
        ] {
            let bytes = message.encode();
            assert_eq!(DoorMessage::parse(&bytes), Ok(message.clone()));
            assert!(DoorMessage::parse(&[&bytes[..], &[0]].concat()).is_err(), "trailing bytes of {message:?}");
            for end in 0..bytes.len() {
                assert!(DoorMessage::parse(&bytes[..end]).is_err(), "{end} bytes of {message:?}");
            }
        }
    }

    #[test]
    fn a_membership_without_the_visitor_or_out_of_order_is_refused() {
        for (place, ranks) in [(2, vec![0, 1]), (0, vec![1, 0]), (0, vec![0, 0]), (0, vec![])] {
            assert!(DoorMessage::parse(&DoorMessage::Bind { view: 1, place, ranks }.encode()).is_err());
        }
    }

    proptest! {
        #[test]
        fn random_bytes_are_refused_or_parsed_but_never_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = DoorMessage::parse(&body) {
                prop_assert_eq!(message.encode(), body);
            }
        }
    }
}
