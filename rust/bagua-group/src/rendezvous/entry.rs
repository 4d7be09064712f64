//! The values of an exchange.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::wire::{
    BytesOf, Encoding, Malformed, RANKS_LIMIT, Ranks, VERSION, WORLD_LIMIT, bytes, cause, rank, text,
};
use crate::error::{Error, Progress};

/// First bytes of every value, before the version of the protocol.
const MAGIC: [u8; 4] = *b"BGrf";

/// First bytes of a file that does not say its version: [`LAST_UNNAMED`] or an older one.
const UNNAMED: [u8; 4] = *b"BGrv";
const LAST_UNNAMED: u16 = 6;

/// The value that a rank writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct Entry {
    /// Random number of this exchange.
    pub(in super::super) number: [u8; 16],
    #[serde(with = "rank")]
    pub(in super::super) world_size: usize,
    pub(in super::super) said: Said,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) enum Said {
    /// The writer's address.
    Address(#[serde(with = "bytes")] Vec<u8>),
    /// From rank 0: all addresses, by rank.
    All(#[serde(with = "BytesOf::<WORLD_LIMIT>")] Vec<Vec<u8>>),
    /// From rank 0: the deadline of rank 0 passed before these ranks came.
    Missing(MissingRanks),
    /// From rank 0: the exchange has ended with this error on every rank.
    Failed(#[serde(with = "cause")] Error),
}

impl Encoding for Entry {}

impl Entry {
    pub(in super::super) fn encode(&self) -> Vec<u8> {
        [&MAGIC[..], &VERSION.to_le_bytes(), &Encoding::encode(self)].concat()
    }

    pub(in super::super) fn parse(bytes: &[u8]) -> std::result::Result<Entry, Malformed> {
        match Entry::version(bytes) {
            Some(VERSION) => Encoding::parse(&bytes[MAGIC.len() + size_of::<u16>()..]),
            _ => Err(Malformed("it does not start with the magic bytes and the version of a rendezvous")),
        }
    }

    /// The version of the protocol that a value is for; `None` if it is not one of a rendezvous.
    pub(super) fn version(bytes: &[u8]) -> Option<u16> {
        if bytes.starts_with(&UNNAMED) {
            return Some(LAST_UNNAMED);
        }
        let version = bytes.strip_prefix(&MAGIC)?.first_chunk()?;
        Some(u16::from_le_bytes(*version))
    }
}

/// Ranks that have not come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct MissingRanks {
    /// The first of them.
    #[serde(with = "Ranks::<RANKS_LIMIT>")]
    named: Vec<usize>,
    /// How many more there are.
    #[serde(with = "rank")]
    others: usize,
    /// A possible explanation, for the error text: processes that were refused, for instance.
    #[serde(with = "text")]
    details: String,
}

impl MissingRanks {
    pub(in super::super) fn new(mut all: Vec<usize>, details: String) -> MissingRanks {
        let others = all.len().saturating_sub(RANKS_LIMIT);
        all.truncate(RANKS_LIMIT);
        MissingRanks { named: all, others, details }
    }

    /// The error that names the missing ranks.
    pub(super) fn timed_out(self, after: Duration, noticed_by: usize, mut what: String) -> Error {
        what.push_str(&self.details);
        if self.others > 0 {
            what = format!("{what}; {} more ranks are missing", self.others);
        }
        let progress = Some(Box::new(Progress { what, ..Progress::default() }));
        Error::Timeout { after, missing: self.named, noticed_by, progress }
    }
}
