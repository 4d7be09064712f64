//! Doors: where a running elastic job lets processes in.
//!
//! Each rank of an elastic job listens at a door, from before the job is formed until its process ends. A visitor proves, by the
//! handshake of all connections, that it knows the job's secret and its token; then it asks how things stand, or asks to be let into
//! the averaging of a model. What a door refuses is counted; who has not been authenticated chooses no length and holds no memory.
//!
//! | file | what it is |
//! |---|---|
//! | `message` | what a visitor and a door say to each other |
//! | `server` | [`Door`]: listens, answers questions, and keeps visitors for the averaging of their model |
//! | `visit` | [`Visit`]: a conversation, and the visitor's way to one |

mod message;
mod server;
mod visit;

#[cfg(all(test, not(model)))]
pub(super) use message::COUNT_LIMIT;
pub(crate) use message::DoorMessage;
pub use message::{Answer, Asked};
pub use server::Door;
pub(crate) use visit::Visit;
