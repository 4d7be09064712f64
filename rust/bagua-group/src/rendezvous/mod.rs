//! The exchange of addresses between the ranks that start a group. It takes place in a store: one that rank 0 serves,
//! or files.
//!
//! 1. Rank 0 writes a random number and its address under "0". In files, entries of earlier exchanges may be left. The
//!    number tells which entries belong to this one.
//! 2. Every other rank waits for "0", and claims the key that is its own rank with its address and the number. A server
//!    returns what the key has then. If it is the address of another process, two processes have this rank.
//! 3. Rank 0 waits for the keys of all ranks, and writes all addresses under "all".
//! 4. Every other rank waits for "all". The server answers each rank once, when the value is there. Then the rank
//!    closes its connection, and the server ends when all ranks have.
//!
//! A rank that is missing is one without a key. If the connection of a rank ends, the server removes its key, and rank
//! 0 waits for another process with this rank until `lost_after`. Then it writes the loss under "all" instead of the
//! addresses. A rank whose deadline passes removes its own key and leaves a note, so that another process may take its
//! rank. Ranks that the server refuses leave notes as well: they are part of the text of a timeout.
//!
//! Rank 0 sends the list of n addresses, each about 140 bytes, n times: 150 MB for 1,024 ranks.
//!
//! | file | what it is |
//! |---|---|
//! | `exchange` | the steps above, through any store |
//! | `by_tcp`, `by_file` | through a server on rank 0; through files on a shared file system |
//! | `entry` | the values |
//! | `route` | the local address that peers can connect to |

mod by_file;
mod by_tcp;
mod entry;
mod exchange;
mod route;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use by_file::rendezvous_file;
pub use by_tcp::{RendezvousServer, rendezvous_at, rendezvous_tcp};
#[cfg(test)]
pub(super) use entry::{Entry, MissingRanks, Said};
pub use route::local_address_towards;

use super::wire::{FRAME_LIMIT, WORLD_LIMIT};
use crate::error::{Error, Result};
use crate::wait::lock;

/// The ranks that a joining rank waits for at this moment. Another thread may ask meanwhile.
#[derive(Clone, Default)]
pub struct Awaited(Arc<Mutex<Option<FindRanks>>>);

type FindRanks = Box<dyn Fn() -> Vec<usize> + Send>;

impl Awaited {
    /// Returns the missing ranks, ascending. Empty if this rank does not know them, because rank 0 counts.
    pub fn ranks(&self) -> Vec<usize> {
        lock(&self.0).as_ref().map_or_else(Vec::new, |find| find())
    }

    /// Sets the function that finds the missing ranks from now on.
    pub(super) fn found_by(&self, find: impl Fn() -> Vec<usize> + Send + 'static) {
        *lock(&self.0) = Some(Box::new(find));
    }
}

impl std::fmt::Debug for Awaited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Awaited").field(&self.ranks()).finish()
    }
}

/// How long an exchange of addresses waits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// For all ranks to come.
    pub timeout: Duration,
    /// For another process to take the rank of one that had registered and whose connection ended.
    pub lost_after: Duration,
    /// The exchange reports there whom it waits for.
    pub awaited: Awaited,
}

impl From<Duration> for Limits {
    /// With the default heartbeat timeout.
    fn from(timeout: Duration) -> Limits {
        Limits { timeout, lost_after: Duration::from_secs(5), awaited: Awaited::default() }
    }
}

/// Checks the arguments of every exchange.
fn check_arguments(rank: usize, world_size: usize, address: &[u8]) -> Result<()> {
    if rank >= world_size {
        return Err(Error::InvalidArgument(format!("rank {rank} is not in a world of {world_size} ranks")));
    }
    if world_size > WORLD_LIMIT {
        return Err(Error::InvalidArgument(format!("a world of {world_size} ranks: the limit is {WORLD_LIMIT}")));
    }
    if address.len() > FRAME_LIMIT {
        let len = address.len();
        return Err(Error::InvalidArgument(format!("an address of {len} bytes: the limit is {FRAME_LIMIT}")));
    }
    Ok(())
}
