//! The exchange of addresses through files next to a path on a shared file system.
//!
//! Files of an earlier job may exist, and ranks start in any order. Rank 0 therefore writes a random number to `path.0`; rank r writes
//! `path.r` with the same number; when rank 0 has read its own number from every rank, it writes `path.all`, which a rank accepts only
//! with that number and the rank's own address in it. The files are a store's ([`FileStore`]), in which no key is new for long: so each rank
//! looks for its number again and again. `path.0` and `path.all` remain, because rank 0 does not know which ranks have read them.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::handshake::random;
use super::super::store::{FileStore, Store};
use super::super::wire::{BytesOf, Encoding, Malformed, VERSION, WORLD_LIMIT, rank};
use super::common::{Awaited, Limits, check_arguments, timed_out};
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// First bytes of every file, before the version of the protocol.
const MAGIC: [u8; 4] = *b"BGrf";

/// First bytes of a file that does not say its version: [`LAST_UNNAMED`] or an older one.
const UNNAMED: [u8; 4] = *b"BGrv";
const LAST_UNNAMED: u16 = 6;

/// Exchanges addresses through files next to `path`, on a file system that all ranks share.
///
/// # Errors
/// `Timeout` naming the missing ranks, `Mismatch` when world sizes differ or two processes have the same rank, `InvalidArgument` for an
/// invalid rank or address, `System` when the files cannot be read or written.
pub fn rendezvous_file(
    path: &Path,
    rank: usize,
    world_size: usize,
    address: &[u8],
    limits: impl Into<Limits>,
) -> Result<Vec<Vec<u8>>> {
    check_arguments(rank, world_size, address)?;
    let Limits { timeout, awaited, .. } = limits.into();
    let (store, deadline) = (FileStore::next_to(path), Deadline::after(timeout));
    let exchange = FileExchange { path, store, rank, world_size, deadline, awaited, other: Cell::default() };
    if rank == 0 { exchange.run_as_root(address) } else { exchange.run_as_peer(address) }
}

/// The content of a file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Content {
    /// Random number of this exchange.
    pub(in super::super) number: [u8; 16],
    #[serde(with = "rank")]
    pub(in super::super) world_size: usize,
    /// The writer's address, or all addresses.
    #[serde(with = "BytesOf::<WORLD_LIMIT>")]
    pub(in super::super) addresses: Vec<Vec<u8>>,
}

impl Encoding for Content {}

impl Content {
    pub(in super::super) fn encode(&self) -> Vec<u8> {
        [&MAGIC[..], &VERSION.to_le_bytes(), &Encoding::encode(self)].concat()
    }

    pub(in super::super) fn parse(bytes: &[u8]) -> std::result::Result<Content, Malformed> {
        match Content::version(bytes) {
            Some(VERSION) => Encoding::parse(&bytes[MAGIC.len() + size_of::<u16>()..]),
            _ => Err(Malformed("it does not start with the magic bytes and the version of a rendezvous file")),
        }
    }

    /// The version of the protocol that a file is for; `None` if it is no file of a rendezvous.
    fn version(bytes: &[u8]) -> Option<u16> {
        if bytes.starts_with(&UNNAMED) {
            return Some(LAST_UNNAMED);
        }
        let version = bytes.strip_prefix(&MAGIC)?.first_chunk()?;
        Some(u16::from_le_bytes(*version))
    }
}

/// One rank's part of an exchange.
struct FileExchange<'a> {
    path: &'a Path,
    /// The files next to it; a key is what follows `path.`.
    store: FileStore,
    rank: usize,
    world_size: usize,
    deadline: Deadline,
    awaited: Awaited,
    /// A file of another version, for the error. It may be from an earlier job, which does no harm.
    other: Cell<Option<(PathBuf, u16)>>,
}

impl FileExchange<'_> {
    fn write(&self, key: &str, content: &Content) -> Result<()> {
        self.store.set(key, &content.encode())
    }

    /// The content of a file; `None` while it does not exist, or when it is malformed.
    fn read(&self, key: &str) -> Result<Option<Content>> {
        let Some(bytes) = self.store.get(key)? else { return Ok(None) };
        if let Some(version) = Content::version(&bytes).filter(|version| *version != VERSION) {
            self.other.set(Some((self.store.file(key), version)));
        }
        Ok(Content::parse(&bytes).ok())
    }

    /// Pauses between two polls, longer after more of them; false once the deadline has passed.
    fn pause(&self, polls: u32) -> bool {
        let pause = Duration::from_millis(u64::from(polls.clamp(1, 50)));
        std::thread::sleep(pause.min(self.deadline.left()));
        !self.deadline.passed()
    }

    fn timed_out(&self, missing: Vec<usize>) -> Error {
        let mut what = format!("the rendezvous at {}", self.path.display());
        if let Some((file, theirs)) = self.other.take() {
            what += &format!("; {} is of version {theirs} of the protocol, this rank runs {VERSION}", file.display());
        }
        timed_out(self.deadline.limit(), missing, self.rank, what)
    }

    fn run_as_root(&self, address: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (number, world_size) = (random()?, self.world_size);
        self.write("0", &Content { number, world_size, addresses: vec![address.to_vec()] })?;
        let mut found: Vec<Option<Vec<u8>>> = vec![None; world_size];
        found[0] = Some(address.to_vec());
        for polls in 1.. {
            for rank in (1..world_size).filter(|rank| found[*rank].is_none()).collect::<Vec<_>>() {
                let Some(mut content) = self.read(&rank.to_string())?.filter(|content| content.number == number) else {
                    continue;
                };
                if content.world_size != world_size {
                    let theirs = content.world_size;
                    return Err(Error::Mismatch(format!(
                        "rank {rank} has world size {theirs}, rank 0 has {world_size}"
                    )));
                }
                found[rank] = content.addresses.pop();
            }
            let missing: Vec<usize> = (0..world_size).filter(|rank| found[*rank].is_none()).collect();
            if missing.is_empty() {
                break;
            }
            let awaited = missing.clone();
            self.awaited.found_by(move || awaited.clone());
            if !self.pause(polls) {
                return Err(self.timed_out(missing));
            }
        }
        let addresses: Vec<Vec<u8>> = found.into_iter().flatten().collect();
        self.write("all", &Content { number, world_size, addresses: addresses.clone() })?;
        Ok(addresses)
    }

    fn run_as_peer(&self, address: &[u8]) -> Result<Vec<Vec<u8>>> {
        let own = self.rank.to_string();
        let mut answered = None;
        self.awaited.found_by(|| vec![0]);
        let mut mismatch = None;
        for polls in 1.. {
            if let Some(first) = self.read("0")? {
                if answered != Some(first.number) {
                    let content = Content {
                        number: first.number,
                        world_size: self.world_size,
                        addresses: vec![address.to_vec()],
                    };
                    self.write(&own, &content)?;
                    // Rank 0 knows who is missing.
                    self.awaited.found_by(Vec::new);
                    answered = Some(first.number);
                }
                // Both mismatches may come from the files of an earlier job, and are errors only at the deadline.
                mismatch = (first.world_size != self.world_size).then(|| {
                    let (here, there) = (self.world_size, first.world_size);
                    format!("rank {own} has world size {here}, rank 0 has {there}")
                });
                if let Some(all) = self.read("all")?.filter(|all| all.number == first.number) {
                    if all.addresses.len() == self.world_size && all.addresses[self.rank] == address {
                        // A file that remains does no harm.
                        self.store.remove(&own);
                        return Ok(all.addresses);
                    }
                    mismatch.get_or_insert_with(|| {
                        format!(
                            "{} has the address of another process for rank {own}",
                            self.store.file("all").display()
                        )
                    });
                }
            }
            if !self.pause(polls) {
                break;
            }
        }
        match mismatch {
            Some(mismatch) => Err(Error::Mismatch(mismatch)),
            None => Err(self.timed_out(self.missing(answered)?)),
        }
    }

    /// The ranks that have not come to the exchange of this number: rank 0 when no other is missing, or without a number.
    fn missing(&self, number: Option<[u8; 16]>) -> Result<Vec<usize>> {
        let mut missing = Vec::new();
        for rank in (1..self.world_size).filter(|rank| *rank != self.rank && number.is_some()) {
            if self.read(&rank.to_string())?.is_none_or(|content| Some(content.number) != number) {
                missing.push(rank);
            }
        }
        Ok(if missing.is_empty() { vec![0] } else { missing })
    }
}
