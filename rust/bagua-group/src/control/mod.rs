//! The control plane of one rank: the thread that accepts connections and runs this rank's part of
//! [`plane`](super::plane).
//!
//! | file | what it is |
//! |---|---|
//! | `shared` | the state that the control thread shares with the other threads of the rank |
//! | `groups` | the groups of the rank: failures and departures become the errors that each group raises |
//! | `group_table` | the groups by id, and messages for groups that are not built yet |
//! | `open_streams` | the connections of lanes and messages |
//! | `world` | the addresses of all ranks, and the key and the ids that follow from them |
//! | `thread` | starting and ending the thread, joining and leaving |
//! | `accept`, `dial` | accepting and opening connections |
//! | `probe` | asks ranks that are not connected whether they run |
//!
//! The control thread carries no tensor data, waits for no other thread, and runs no application code. So neither a
//! computation nor a lock of the application can delay its heartbeats. Other threads reach it through channels that
//! never block.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Cause before leaving.** A rank that knows of a failure has told its parent before it leaves the group, and a
//!    rank that is told of a failure passes it on before its own waits end. So no consequence overtakes the cause.
//! 2. **Leaving is not a failure** until an operation needs the rank that left.
//! 3. **Unauthenticated connections are only counted**: none of them can end the group, occupy memory without bound, or
//!    stay open.

mod accept;
mod dial;
mod group_table;
mod groups;
mod open_streams;
mod probe;
mod shared;
mod thread;
mod world;

pub(super) use accept::Listeners;
pub(super) use dial::Dial;
pub(super) use probe::ask_missing;
pub(super) use shared::{ConnectState, Loss, Plane};
pub(super) use thread::{Control, Leaving};
pub(super) use world::World;
