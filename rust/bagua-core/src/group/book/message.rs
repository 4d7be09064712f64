//! What a client asks of a book, and its answer.

use super::super::wire::{Malformed, Reader, Writer};

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Request {
    /// The entry of a name.
    Read(String),
    /// Replaces the entry of a name.
    Write(String, Vec<u8>),
    /// Writes an entry if the name has none, and asks for the one that it has then.
    Claim(String, Vec<u8>),
}

impl Request {
    pub(in super::super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Request::Read(name) => out.u8(0).text(name),
            Request::Write(name, entry) => out.u8(1).text(name).bytes(entry),
            Request::Claim(name, entry) => out.u8(2).text(name).bytes(entry),
        };
        out.0
    }

    pub(in super::super) fn parse(body: &[u8]) -> Result<Request, Malformed> {
        let mut from = Reader(body);
        let (kind, name) = (from.u8()?, from.text()?);
        let request = match kind {
            0 => Request::Read(name),
            1 => Request::Write(name, from.bytes()?.to_vec()),
            2 => Request::Claim(name, from.bytes()?.to_vec()),
            _ => return Err(Malformed("a request of an unknown kind")),
        };
        from.end()?;
        Ok(request)
    }
}

/// A book's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Reply {
    /// The name has no entry.
    Nothing,
    /// The entry that the name has now.
    Entry(Vec<u8>),
    /// The book is full.
    Full,
}

impl Reply {
    pub(in super::super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Reply::Nothing => out.u8(0),
            Reply::Entry(entry) => out.u8(1).bytes(entry),
            Reply::Full => out.u8(2),
        };
        out.0
    }

    pub(in super::super) fn parse(body: &[u8]) -> Result<Reply, Malformed> {
        let mut from = Reader(body);
        let reply = match from.u8()? {
            0 => Reply::Nothing,
            1 => Reply::Entry(from.bytes()?.to_vec()),
            2 => Reply::Full,
            _ => return Err(Malformed("a reply of an unknown kind")),
        };
        from.end()?;
        Ok(reply)
    }
}
