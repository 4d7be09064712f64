//! The key-value store through which the processes of a job find each other: the calls of `torch.distributed.Store`.
//!
//! The store helps processes to find each other, and nothing more: who answers at an address in it proves by itself
//! that it belongs to the job. Server and client prove to each other that they know the job's secret, by the handshake
//! of all connections, and by TLS where the job has it.
//!
//! Ranks exchange their addresses through a store, too (`rendezvous`). Two of its calls exist for that: a value that is
//! claimed goes away when the connection of its client ends, so the store shows which ranks live; and the server
//! answers a wait when the value comes, so that n ranks that wait for one value send n requests.
//!
//! | file | what it is |
//! |---|---|
//! | `message` | requests and replies |
//! | `server` | [`StoreServer`]: one thread, in a process of its own |
//! | `client` | [`TcpStore`]: a connection to it |
//! | `file` | [`FileStore`]: files on a file system that all ranks share |

mod client;
mod file;
mod message;
mod server;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub(super) use client::Server;
pub use client::TcpStore;
pub use file::FileStore;
#[cfg(test)]
pub(super) use message::{KEYS_LIMIT, Reply, Request};
pub use server::StoreServer;

use super::handshake::{Hello, Key, Purpose};
use crate::error::{Error, Progress, Result};
use crate::wait::Deadline;

/// The longest request or reply; a value with the incarnations of 10,000 ranks takes a third of it.
const FRAME_LIMIT: usize = 1 << 20;

/// Before the key of a claimed value whose client's connection ended.
pub(super) const ENDED: &str = "ended/";

/// Before the rank of a client that did not prove that it has the secret.
pub(super) const REFUSED: &str = "refused/";

/// The key of the reason why a client was refused that did not get as far as to say its rank.
pub(super) const STRANGER: &str = "stranger";

/// The longest reply of a server that the client trusts: a value of it may be the addresses of a whole world.
const REPLY_LIMIT: usize = 64 << 20;

/// The longest pause between two looks whether a key has a value, in milliseconds.
const LONGEST_PAUSE: u64 = 50;

/// A store of keys and values.
///
/// # Errors
/// Every call: `System` when the store does not answer or cannot keep a value.
pub trait Store: Send + Sync {
    /// Sets the value of a key.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of a key; `None` without one. Does not wait.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// Sets the value of a key that has none, and returns the value that it has then: torch's `compare_set` with an
    /// empty expected value. By `add` and `set`, a process that ends between the two would leave the key without a
    /// value for ever.
    fn set_new(&self, key: &str, value: &[u8]) -> Result<Vec<u8>>;

    /// Sets the value of a key that has none, or has this one, and returns the value that it has then. A server removes
    /// a claimed value when the connection of its client ends, and keeps it under "ended/", before the key.
    fn claim(&self, key: &str, value: &[u8]) -> Result<Vec<u8>>;

    /// Removes the value of a key, if it has one.
    fn remove(&self, key: &str) -> Result<()>;

    /// The keys that begin with a text, ascending.
    fn keys(&self, prefix: &str) -> Result<Vec<String>>;

    /// The value of a key as soon as it has one; `None` after `limit`.
    fn find(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        let deadline = Deadline::after(limit);
        for looks in 1.. {
            let found = self.get(key)?;
            if found.is_some() || deadline.passed() {
                return Ok(found);
            }
            pause(looks, &deadline);
        }
        Ok(None)
    }

    /// Adds to the number that a key has as its value, in decimal digits, 0 without a value; returns the sum.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Waits until all keys have a value. `check` is called between two looks: its error, such as that of a group that
    /// has failed, ends the wait.
    ///
    /// # Errors
    /// `Timeout` that names the first key without a value, and what `check` returns.
    fn wait(&self, keys: &[&str], limit: Duration, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let deadline = Deadline::after(limit);
        for key in keys {
            for looks in 1.. {
                check()?;
                if self.get(key)?.is_some() {
                    break;
                }
                if deadline.passed() {
                    let progress =
                        Some(Box::new(Progress { what: format!("waiting for {key:?}"), ..Progress::default() }));
                    return Err(Error::Timeout { after: limit, missing: Vec::new(), noticed_by: 0, progress });
                }
                pause(looks, &deadline);
            }
        }
        Ok(())
    }
}

/// Pauses between two looks, longer after more of them, until the deadline at most.
pub(super) fn pause(looks: u64, deadline: &Deadline) {
    std::thread::sleep(Duration::from_millis(looks.min(LONGEST_PAUSE)).min(deadline.left()));
}

/// A sum that [`Store::add`] makes; `None` when the value is not a number, or the sum is out of range.
fn sum(value: Option<&[u8]>, amount: i64) -> Option<i64> {
    let before: i64 = value.map_or(Some(0), |value| std::str::from_utf8(value).ok()?.parse().ok())?;
    before.checked_add(amount)
}

fn no_number(key: &str) -> Error {
    Error::InvalidArgument(format!("the value of {key:?} is not a number, or the sum is too large"))
}

/// The key of the connections to a store.
fn key(secret: &[u8]) -> Key {
    Key::new(secret, b"store")
}

/// The first message of a client. A store knows no ranks; one of a rendezvous notes which `rank` it refused.
fn hello(rank: usize) -> Hello {
    let purpose = Purpose::Store;
    Hello { world_size: 1, from: rank, to: 0, purpose, group: 0, channel: 0, index: 0, job: [0; 8] }
}
