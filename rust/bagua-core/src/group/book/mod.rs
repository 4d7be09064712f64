//! The address book of elastic jobs: named entries that processes of a job write and read, served over TCP.
//!
//! It helps processes to find each other, and nothing more: who answers at an address in it proves by itself that it belongs to the job.
//! Server and client prove to each other that they know the job's secret, by the handshake of all connections, and by TLS where the job
//! has it.
//!
//! | file | what it is |
//! |---|---|
//! | `message` | requests and replies |
//! | `server` | [`BookServer`]: one thread, in a process of its own |
//! | `client` | [`Book`]: a connection to it |

mod client;
mod message;
mod server;

pub use client::Book;
#[cfg(all(test, not(model)))]
pub(super) use message::{Reply, Request};
pub use server::BookServer;

use super::handshake::{Hello, Key, Purpose};

/// The longest request or reply; an entry with the incarnations of 10,000 ranks takes a third of it.
const FRAME_LIMIT: usize = 1 << 20;

/// The key of the connections to a book.
fn key(secret: &[u8]) -> Key {
    Key::new(secret, b"address book")
}

/// The first message of a client: a book knows neither ranks nor world sizes.
fn hello() -> Hello {
    let purpose = Purpose::Book;
    Hello { world_size: 1, from: 0, to: 0, purpose, group: 0, channel: 0, index: 0, job: [0; 8] }
}
