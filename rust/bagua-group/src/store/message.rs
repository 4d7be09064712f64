//! The requests to a store, and its replies.

use serde::{Deserialize, Serialize};

use super::super::wire::{Encoding, bytes, text};

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum Request {
    Get(#[serde(with = "text")] String),
    Set(#[serde(with = "text")] String, #[serde(with = "bytes")] Vec<u8>),
    SetNew(#[serde(with = "text")] String, #[serde(with = "bytes")] Vec<u8>),
    Add(#[serde(with = "text")] String, i64),
}

impl Encoding for Request {}

impl Request {
    pub(super) fn key(&self) -> &str {
        match self {
            Request::Get(key) | Request::Set(key, _) | Request::SetNew(key, _) | Request::Add(key, _) => key,
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
    /// The value is no number, or the sum is out of range.
    NoNumber,
}

impl Encoding for Reply {}
