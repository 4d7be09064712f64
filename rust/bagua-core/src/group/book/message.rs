//! What a client asks of a book, and its answer.

use serde::{Deserialize, Serialize};

use super::super::wire::{Encoding, text};

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum Request {
    /// The entry of a name.
    Read(#[serde(with = "text")] String),
    /// Replaces the entry of a name.
    Write(#[serde(with = "text")] String, Vec<u8>),
    /// Writes an entry if the name has none, and asks for the one that it has then.
    Claim(#[serde(with = "text")] String, Vec<u8>),
}

impl Encoding for Request {}

/// A book's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum Reply {
    /// The name has no entry.
    Nothing,
    /// The entry that the name has now.
    Entry(Vec<u8>),
    /// The book is full.
    Full,
}

impl Encoding for Reply {}
