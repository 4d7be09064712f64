//! Spreading addresses through files beside a path that all ranks share.
//!
//! Files of an earlier job may lie there, and ranks start in any order. So rank 0 writes `path.0` with a number that nobody
//! used before; rank r answers with `path.r`, which repeats the number; when rank 0 has an answer to its own number from every
//! rank, it writes `path.all`, and a rank takes that only when it has the number and the rank's own address in it. Every file
//! appears by rename, so that nobody reads half of one. `path.0` and `path.all` stay: rank 0 cannot know who has read them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::handshake::random;
use super::super::wire::{Garbled, Reader, Writer};
use super::exchange::{check_arguments, timed_out};
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// First bytes of every file.
const MAGIC: [u8; 4] = *b"BGrv";

/// A larger file is none of ours.
const LIMIT: u64 = 64 << 20;

/// Spreads addresses through files beside `path` on a file system that all ranks share.
///
/// # Errors
/// `Timeout` naming the missing ranks, `Mismatch` when world sizes differ or two processes claim one rank, `InvalidArgument` for a rank
/// that makes no sense, `System` when the files cannot be written.
pub fn rendezvous_file(
    path: &Path,
    rank: usize,
    world_size: usize,
    address: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    check_arguments(rank, world_size, address)?;
    let board = Board { path, rank, world_size, deadline: Deadline::after(timeout) };
    if rank == 0 { board.lead(address) } else { board.follow(address) }
}

/// What a rank writes.
#[derive(Debug, PartialEq, Eq)]
struct Note {
    number: [u8; 16],
    world_size: usize,
    /// One address, or all.
    addresses: Vec<Vec<u8>>,
}

impl Note {
    fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.fixed(&MAGIC).fixed(&self.number).rank(self.world_size).rank(self.addresses.len());
        self.addresses.iter().for_each(|address| _ = out.bytes(address));
        out.0
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Note, Garbled> {
        let mut from = Reader(bytes);
        if from.array()? != MAGIC {
            return Err(Garbled("it does not begin as one"));
        }
        let (number, world_size, count) = (from.array()?, from.rank()?, from.rank()?);
        let addresses = (0..count).map(|_| Ok(from.bytes()?.to_vec())).collect::<std::result::Result<_, Garbled>>()?;
        from.end()?;
        Ok(Note { number, world_size, addresses })
    }
}

struct Board<'a> {
    path: &'a Path,
    rank: usize,
    world_size: usize,
    deadline: Deadline,
}

impl Board<'_> {
    fn file(&self, end: &str) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(".");
        name.push(end);
        name.into()
    }

    fn write(&self, end: &str, note: &Note) -> Result<()> {
        let file = self.file(end);
        let failed = |e: std::io::Error| Error::system(&format!("writing {}", file.display()), e);
        let draft = self.file(&format!("{end}.{:032x}", u128::from_le_bytes(random()?)));
        std::fs::write(&draft, note.encode()).map_err(failed)?;
        std::fs::rename(&draft, &file).map_err(|e| {
            let _ = std::fs::remove_file(&draft);
            failed(e)
        })
    }

    /// What a file says; `None` while it does not exist, or is not one of ours.
    fn read(&self, end: &str) -> Result<Option<Note>> {
        let file = self.file(end);
        let read = std::fs::metadata(&file)
            .and_then(|about| if about.len() > LIMIT { Ok(Vec::new()) } else { std::fs::read(&file) });
        match read {
            Ok(bytes) => Ok(Note::parse(&bytes).ok()),
            // Network file systems say the second while a file is being replaced.
            Err(e) if e.kind() == ErrorKind::NotFound || e.kind() == ErrorKind::StaleNetworkFileHandle => Ok(None),
            Err(e) => Err(Error::system(&format!("reading {}", file.display()), e)),
        }
    }

    /// A moment between two looks, or the end.
    fn pause(&self, looks: u32) -> bool {
        let pause = Duration::from_millis(u64::from(looks.clamp(1, 50)));
        std::thread::sleep(pause.min(self.deadline.left()));
        !self.deadline.passed()
    }

    fn late(&self, missing: Vec<usize>) -> Error {
        timed_out(self.deadline.limit(), missing, self.rank, format!("the rendezvous at {}", self.path.display()))
    }

    fn lead(&self, address: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (number, world_size) = (random()?, self.world_size);
        self.write("0", &Note { number, world_size, addresses: vec![address.to_vec()] })?;
        let mut found: Vec<Option<Vec<u8>>> = vec![None; world_size];
        found[0] = Some(address.to_vec());
        for looks in 1.. {
            for rank in (1..world_size).filter(|rank| found[*rank].is_none()).collect::<Vec<_>>() {
                let Some(mut note) = self.read(&rank.to_string())?.filter(|note| note.number == number) else {
                    continue;
                };
                if note.world_size != world_size {
                    let theirs = note.world_size;
                    return Err(Error::Mismatch(format!(
                        "rank {rank} was told that there are {theirs} ranks, rank 0 that there are {world_size}"
                    )));
                }
                found[rank] = note.addresses.pop();
            }
            if found.iter().all(Option::is_some) {
                break;
            }
            if !self.pause(looks) {
                return Err(self.late((0..world_size).filter(|rank| found[*rank].is_none()).collect()));
            }
        }
        let addresses: Vec<Vec<u8>> = found.into_iter().flatten().collect();
        self.write("all", &Note { number, world_size, addresses: addresses.clone() })?;
        Ok(addresses)
    }

    fn follow(&self, address: &[u8]) -> Result<Vec<Vec<u8>>> {
        let own = self.rank.to_string();
        let mut answered = None;
        let mut wrong = None;
        for looks in 1.. {
            if let Some(first) = self.read("0")? {
                if answered != Some(first.number) {
                    let note =
                        Note { number: first.number, world_size: self.world_size, addresses: vec![address.to_vec()] };
                    self.write(&own, &note)?;
                    answered = Some(first.number);
                }
                // Both may be of an earlier job whose rank 0 has not been replaced yet, so they only count in the end.
                wrong = (first.world_size != self.world_size).then(|| {
                    let (here, there) = (self.world_size, first.world_size);
                    format!("rank {own} was told that there are {here} ranks, rank 0 that there are {there}")
                });
                if let Some(all) = self.read("all")?.filter(|all| all.number == first.number) {
                    if all.addresses.len() == self.world_size && all.addresses[self.rank] == address {
                        // Left lying it would do no harm.
                        let _ = std::fs::remove_file(self.file(&own));
                        return Ok(all.addresses);
                    }
                    wrong.get_or_insert_with(|| {
                        format!("rank {own} is another process in {}", self.file("all").display())
                    });
                }
            }
            if !self.pause(looks) {
                break;
            }
        }
        Err(wrong.map_or_else(|| self.late(vec![0]), Error::Mismatch))
    }
}
