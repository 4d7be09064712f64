//! The requests to a store, and its replies.

use serde::{Deserialize, Serialize};

use super::super::wire::{Encoding, Texts, bytes, text};

/// The most keys that one reply names.
pub(in super::super) const KEYS_LIMIT: usize = 1 << 20;

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum Request {
    Get(#[serde(with = "text")] String),
    Set(#[serde(with = "text")] String, #[serde(with = "bytes")] Vec<u8>),
    SetNew(#[serde(with = "text")] String, #[serde(with = "bytes")] Vec<u8>),
    Add(#[serde(with = "text")] String, i64),
    /// Sets the value of a key that has none, for as long as the connection lives.
    Claim(#[serde(with = "text")] String, #[serde(with = "bytes")] Vec<u8>),
    Remove(#[serde(with = "text")] String),
    /// Waits until the key has a value, for at most this number of milliseconds.
    Wait(#[serde(with = "text")] String, u64),
    /// The keys that begin with this text.
    Keys(#[serde(with = "text")] String),
}

impl Encoding for Request {}

impl Request {
    pub(super) fn key(&self) -> &str {
        match self {
            Request::Get(key)
            | Request::Set(key, _)
            | Request::SetNew(key, _)
            | Request::Add(key, _)
            | Request::Claim(key, _)
            | Request::Remove(key)
            | Request::Wait(key, _)
            | Request::Keys(key) => key,
        }
    }
}

/// The answer of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum Reply {
    /// The key has no value.
    Nothing,
    /// The value that the key has now.
    Value(#[serde(with = "bytes")] Vec<u8>),
    /// The store is full.
    Full,
    /// The value is not a number, or the sum is out of range.
    NoNumber,
    /// The keys that have a value, ascending.
    Keys(#[serde(with = "Texts::<KEYS_LIMIT>")] Vec<String>),
}

impl Encoding for Reply {}
