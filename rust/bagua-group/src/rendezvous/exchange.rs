//! One rank's part of an exchange of addresses through a store.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::address::Address;
use super::super::handshake::random;
use super::super::store::{ENDED, REFUSED, STRANGER, Store, pause};
use super::super::wire::VERSION;
use super::Limits;
use super::entry::{Entry, MissingRanks, Said};
use crate::error::{Error, Result, Source};
use crate::wait::{Deadline, lock};

/// The key of the outcome.
const ALL: &str = "all";

/// Prefix of the key under which the second process with a rank says on which host it runs.
const SECOND: &str = "second/";

/// Prefix of the key that a rank sets when its deadline has passed.
const TIMED_OUT: &str = "timed-out/";

/// Maximum number of duplicate ranks that an error text describes. Further ones are only counted.
const NAMED_DUPLICATES: usize = 8;

/// How long rank 0 waits for missing ranks before it looks for lost ones, and a rank for the outcome if all ranks have
/// come at its deadline.
const SLICE: Duration = Duration::from_millis(50);

/// One rank's part.
pub(super) struct Exchange<'a> {
    pub(super) store: &'a dyn Store,
    /// True if processes of earlier exchanges may have left values, and the store does not notice a process that ends.
    pub(super) is_kept: bool,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) address: &'a [u8],
    pub(super) deadline: Deadline,
    pub(super) limits: &'a Limits,
    /// Host and port of the server, or the path of the files, for error texts.
    pub(super) place: String,
    /// Name of this process's host, for the error text of other ranks.
    pub(super) from: String,
    /// The key of a file of another version, for the error. The file may be from an earlier job, which does no harm.
    pub(super) other: Cell<Option<(String, u16)>>,
    /// Ranks whose connection ended, and when they are lost.
    pub(super) ended: RefCell<BTreeMap<String, Deadline>>,
}

impl Exchange<'_> {
    pub(super) fn run(&self) -> Result<Vec<Vec<u8>>> {
        if self.rank == 0 { self.run_as_root() } else { self.run_as_peer() }
    }

    fn run_as_root(&self) -> Result<Vec<Vec<u8>>> {
        let number = random()?;
        let write = |key, said| {
            let entry = Entry { number, world_size: self.world_size, said };
            self.store.set(key, &entry.encode())
        };
        write("0", Said::Address(self.address.to_vec()))?;
        let outcome = self.collect(number);
        let said = match &outcome {
            Ok(all) => Said::All(all.clone()),
            // A rank 0 that is started again may use the same files.
            Err(_) if self.is_kept => return outcome,
            Err(Error::Timeout { .. }) => Said::Missing(self.missing(number)?),
            Err(why) => Said::Failed(why.clone()),
        };
        write(ALL, said)?;
        outcome
    }

    /// The addresses of all ranks.
    fn collect(&self, number: [u8; 16]) -> Result<Vec<Vec<u8>>> {
        let mut found: Vec<Option<Vec<u8>>> = vec![None; self.world_size];
        let awaited = Arc::new(Mutex::new(Vec::new()));
        let shown = Arc::clone(&awaited);
        self.limits.awaited.found_by(move || lock(&shown).clone());
        for looks in 1.. {
            if !self.is_kept {
                // The claim of a rank ends with its connection.
                found.fill(None);
            }
            for (rank, address) in found.iter_mut().enumerate() {
                if address.is_none() {
                    *address = self.address_of(rank, number)?;
                }
            }
            let missing: Vec<usize> = (0..self.world_size).filter(|rank| found[*rank].is_none()).collect();
            if missing.is_empty() {
                break;
            }
            lock(&awaited).clone_from(&missing);
            self.check_ended()?;
            if self.deadline.passed() {
                return Err(self.timed_out(self.missing(number)?));
            }
            if self.is_kept {
                pause(looks, &self.deadline);
                continue;
            }
            let slice = Deadline::after(SLICE.min(self.deadline.left()));
            for rank in missing {
                if self.store.find(&rank.to_string(), slice.left())?.is_none() {
                    break;
                }
            }
        }
        Ok(found.into_iter().flatten().collect())
    }

    /// The address of a rank that has come to this exchange.
    fn address_of(&self, rank: usize, number: [u8; 16]) -> Result<Option<Vec<u8>>> {
        let Some(entry) = self.read(&rank.to_string())?.filter(|entry| entry.number == number) else { return Ok(None) };
        let (theirs, ours) = (entry.world_size, self.world_size);
        if theirs != ours {
            return Err(Error::Mismatch(format!("rank {rank} has world size {theirs}, rank 0 has {ours}")));
        }
        Ok(if let Said::Address(address) = entry.said { Some(address) } else { None })
    }

    /// The error for a rank whose connection ended too long ago.
    fn check_ended(&self) -> Result<()> {
        let keys = if self.is_kept { Vec::new() } else { self.store.keys(ENDED)? };
        let mut ended = self.ended.borrow_mut();
        ended.retain(|key, _| keys.contains(key));
        let after = self.limits.lost_after;
        for key in keys {
            let rank = key[ENDED.len()..].parse();
            let Some((rank, value)) = rank.ok().zip(self.store.get(&key)?) else { continue };
            if !ended.entry(key).or_insert_with(|| Deadline::after(after)).passed() {
                continue;
            }
            let host = process(&value).map_or_else(String::new, |address| address.host_name.to_string());
            let (what, after) = (self.what(), after.as_secs_f64());
            let reason = format!(
                "its process died or its connection to {what} broke, and no other process registered with its rank within \
                 {after:.1} s"
            );
            return Err(Error::PeerLost {
                rank,
                host,
                reason,
                noticed_by: 0,
                progress: None,
                source: Source::default(),
            });
        }
        Ok(())
    }

    fn run_as_peer(&self) -> Result<Vec<Vec<u8>>> {
        let (mut written, mut mismatch) = (None, None);
        self.limits.awaited.found_by(|| vec![0]);
        for looks in 1.. {
            if let Some(first) = self.look("0", self.deadline.left())? {
                if written != Some(first.number) {
                    self.register(&first)?;
                    // Rank 0 knows who is missing.
                    self.limits.awaited.found_by(Vec::new);
                    written = Some(first.number);
                }
                // In files, both mismatches may come from an earlier job, and are errors only at the deadline.
                mismatch = (first.world_size != self.world_size).then(|| {
                    let (rank, here, there) = (self.rank, self.world_size, first.world_size);
                    format!("rank {rank} has world size {here}, rank 0 has {there}")
                });
                let all = self.look(ALL, self.deadline.left())?;
                if let Some(all) = all.filter(|all| all.number == first.number) {
                    if let Some(all) = self.outcome(all.said)? {
                        return Ok(all);
                    }
                    let (what, rank) = (self.what(), self.rank);
                    mismatch
                        .get_or_insert_with(|| format!("{what} has the address of another process for rank {rank}"));
                }
            }
            pause(looks, &self.deadline);
            if self.deadline.passed() {
                break;
            }
        }
        if let Some(mismatch) = mismatch {
            return Err(Error::Mismatch(mismatch));
        }
        let Some(number) = written else { return Err(self.timed_out(MissingRanks::new(vec![0], String::new()))) };
        let missing = self.missing(number)?;
        if !self.is_kept {
            // All ranks may have come just now, and rank 0 may have written the addresses.
            if let Some(all) = self.look(ALL, SLICE)?
                && let Some(all) = self.outcome(all.said)?
            {
                return Ok(all);
            }
            self.store.set(&format!("{TIMED_OUT}{}", self.rank), b"")?;
            self.store.remove(&self.rank.to_string())?;
        }
        Err(self.timed_out(missing))
    }

    /// Writes this rank's address.
    fn register(&self, first: &Entry) -> Result<()> {
        let (rank, here, what) = (self.rank, self.world_size, self.what());
        if !self.is_kept && first.world_size != here {
            self.store.set(&format!("{REFUSED}{rank}"), b"it has another world size")?;
            return Err(Error::Mismatch(format!("rank {rank} has world size {here}, rank 0 has another ({what})")));
        }
        let entry = Entry { number: first.number, world_size: here, said: Said::Address(self.address.to_vec()) };
        let entry = entry.encode();
        if self.store.claim(&rank.to_string(), &entry)? != entry {
            self.store.set(&format!("{SECOND}{rank}"), self.from.as_bytes())?;
            return Err(Error::Mismatch(format!("two processes have rank {rank} ({what})")));
        }
        Ok(())
    }

    /// Returns the addresses in rank 0's answer, or `None` if they do not contain this rank's address.
    fn outcome(&self, said: Said) -> Result<Option<Vec<Vec<u8>>>> {
        match said {
            Said::All(all) if all.len() == self.world_size && all[self.rank] == self.address => {
                // A server drops the value when the connection ends. A file that remains does no harm.
                let _ = if self.is_kept { self.store.remove(&self.rank.to_string()) } else { Ok(()) };
                Ok(Some(all))
            }
            Said::Missing(missing) => Err(self.timed_out(missing)),
            Said::Failed(why) => Err(why),
            Said::All(_) | Said::Address(_) => Ok(None),
        }
    }

    /// Returns the value of a key, or `None` if the key has no value or a malformed one.
    fn read(&self, key: &str) -> Result<Option<Entry>> {
        Ok(self.store.get(key)?.and_then(|value| self.parse(key, &value)))
    }

    /// Returns the value of a key like [`Exchange::read`]. A server waits up to `limit` until there is a value.
    fn look(&self, key: &str, limit: Duration) -> Result<Option<Entry>> {
        if self.is_kept {
            return self.read(key);
        }
        Ok(self.store.find(key, limit)?.and_then(|value| self.parse(key, &value)))
    }

    fn parse(&self, key: &str, value: &[u8]) -> Option<Entry> {
        if let Some(version) = Entry::version(value).filter(|version| *version != VERSION) {
            self.other.set(Some((key.to_owned(), version)));
        }
        Entry::parse(value).ok()
    }

    /// The ranks that have not come to the exchange of this number, and what explains it. Ranks that timed out had
    /// come: they are missing only when no other rank is. Rank 0 is when nobody else is.
    fn missing(&self, number: [u8; 16]) -> Result<MissingRanks> {
        let keys: BTreeSet<String> =
            if self.is_kept { BTreeSet::new() } else { self.store.keys("")?.into_iter().collect() };
        let mut absent = Vec::new();
        for rank in (1..self.world_size).filter(|rank| *rank != self.rank) {
            let key = rank.to_string();
            let is_here = match self.is_kept {
                true => self.read(&key)?.is_some_and(|entry| entry.number == number),
                false => keys.contains(&key),
            };
            if !is_here {
                absent.push(rank);
            }
        }
        let timed_out = |rank: &usize| keys.contains(&format!("{TIMED_OUT}{rank}"));
        if absent.iter().any(|rank| !timed_out(rank)) {
            absent.retain(|rank| !timed_out(rank));
        }
        let details = self.details(&keys, &absent)?;
        Ok(MissingRanks::new(if absent.is_empty() { vec![0] } else { absent }, details))
    }

    /// Details on missing ranks, for the error text.
    fn details(&self, keys: &BTreeSet<String>, missing: &[usize]) -> Result<String> {
        let said = |key: &str| Ok(String::from_utf8_lossy(&self.store.get(key)?.unwrap_or_default()).into_owned());
        let seconds: Vec<&str> = keys.iter().filter_map(|key| key.strip_prefix(SECOND)).collect();
        let mut details = String::new();
        for rank in seconds.iter().take(NAMED_DUPLICATES) {
            let (host, holder) = (said(&format!("{SECOND}{rank}"))?, self.store.get(rank)?);
            let holder = holder.and_then(|value| process(&value));
            let holder = holder.map_or_else(String::new, |it| format!(" (process {} on {})", it.pid, it.host_name));
            details += &format!("; a process{host} was refused because another one{holder} had joined as rank {rank}");
        }
        if let others @ 1.. = seconds.len().saturating_sub(NAMED_DUPLICATES) {
            details += &format!("; and {others} more ranks had a second process");
        }
        for rank in missing {
            let refused = format!("{REFUSED}{rank}");
            if keys.contains(&format!("{TIMED_OUT}{rank}")) {
                details += &format!("; rank {rank} had registered and timed out");
            } else if keys.contains(&refused) {
                details += &format!("; a process with rank {rank} was refused: {}", said(&refused)?);
            }
        }
        if keys.contains(STRANGER) {
            details += &format!("; a process was refused: {}", said(STRANGER)?);
        }
        Ok(details)
    }

    /// The exchange, for error texts.
    fn what(&self) -> String {
        format!("the rendezvous at {}", self.place)
    }

    fn timed_out(&self, missing: MissingRanks) -> Error {
        let mut what = self.what();
        if let Some((key, theirs)) = self.other.take() {
            what += &format!("; {}.{key} is of version {theirs} of the protocol, this rank runs {VERSION}", self.place);
        }
        missing.timed_out(self.deadline.limit(), self.rank, what)
    }
}

/// The process that has written its address. The address is checked where it is used.
fn process(value: &[u8]) -> Option<Address> {
    let Ok(Entry { said: Said::Address(address), .. }) = Entry::parse(value) else { return None };
    Address::parse(&address).ok()
}
