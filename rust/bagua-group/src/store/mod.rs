//! The key-value store through which the processes of a job find each other: the calls of `torch.distributed.Store`.
//!
//! It helps processes to find each other, and nothing more: who answers at an address in it proves by itself that it belongs to the job.
//! Server and client prove to each other that they know the job's secret, by the handshake of all connections, and by TLS where the job
//! has it.
//!
//! The exchange of addresses through TCP (`rendezvous`) is not a use of it: rank 0 has to notice a rank whose connection ends, has to name
//! the missing ranks, and must not send n lists of n addresses. Neither is `joining`, where a connection stays open until its rank is in.
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

pub use client::TcpStore;
pub use file::FileStore;
#[cfg(test)]
pub(super) use message::{Reply, Request};
pub use server::StoreServer;

use super::handshake::{Hello, Key, Purpose};
use crate::error::{Error, Progress, Result};
use crate::wait::Deadline;

/// The longest request or reply; a value with the incarnations of 10,000 ranks takes a third of it.
const FRAME_LIMIT: usize = 1 << 20;

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

    /// Sets the value of a key that has none, and returns the value that it has then: torch's `compare_set` with an empty expected value.
    /// By `add` and `set`, a process that ends between the two would leave the key without a value for ever.
    fn set_new(&self, key: &str, value: &[u8]) -> Result<Vec<u8>>;

    /// Adds to the number that a key has as its value, in decimal digits, 0 without a value; returns the sum.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Waits until all keys have a value. `check` is called between two looks: its error, such as that of a group that has failed, ends the
    /// wait.
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
                std::thread::sleep(Duration::from_millis(looks.min(LONGEST_PAUSE)).min(deadline.left()));
            }
        }
        Ok(())
    }
}

/// A sum that [`Store::add`] makes; `None` when the value is no number, or the sum is out of range.
fn sum(value: Option<&[u8]>, amount: i64) -> Option<i64> {
    let before: i64 = value.map_or(Some(0), |value| std::str::from_utf8(value).ok()?.parse().ok())?;
    before.checked_add(amount)
}

fn no_number(key: &str) -> Error {
    Error::InvalidArgument(format!("the value of {key:?} is no number to which that can be added"))
}

/// The key of the connections to a store.
fn key(secret: &[u8]) -> Key {
    Key::new(secret, b"store")
}

/// The first message of a client: a store knows neither ranks nor world sizes.
fn hello() -> Hello {
    let purpose = Purpose::Store;
    Hello { world_size: 1, from: 0, to: 0, purpose, group: 0, channel: 0, index: 0, job: [0; 8] }
}
