//! Joining a running elastic job.
//!
//! Each rank of an elastic job has a server, from before the job is formed until its process ends. A joining rank
//! proves, by the handshake of all connections, that it knows the job's secret and its token; then it asks for the
//! state of the rank, or to join the averaging of a model. The server counts the connections that it refuses; an
//! unauthenticated client chooses no length and holds no memory.
//!
//! | file | what it is |
//! |---|---|
//! | `message` | the messages |
//! | `server` | [`JoinServer`]: listens, answers, and keeps joining ranks until the averaging of their model takes them |
//! | `connection` | [`JoinConnection`]: either end of a connection |

mod connection;
mod message;
mod server;

pub use connection::JoinConnection;
#[cfg(test)]
pub(super) use message::COUNT_LIMIT;
pub use message::JoinMessage;
pub use message::{JobStatus, JoinRequest};
pub use server::JoinServer;
