//! The control plane of one rank: one thread that accepts connections, sends heartbeats, and passes on failures and departures.
//!
//! | file | what it is |
//! |---|---|
//! | `overlay` | which ranks are connected, how messages reach the others, who is gone; a state machine |
//! | `assembly` | how joining ranks learn that all are connected; a state machine |
//! | `plane` | the state of the rank: runs the state machines, and notes in the groups what they find |
//! | `open_streams` | the connections of lanes and messages |
//! | `world` | the addresses of all ranks, and the key and the ids that follow from them |
//! | `message` | the messages, and their encoding |
//! | `thread`, `accept`, `dial`, `session` | the thread; opening connections, reading and writing them, heartbeats |
//! | `probe`, `silence` | whether a rank runs, while it is not connected, and while it is |
//!
//! It carries no tensor data, waits for no other thread, and runs no application code, so that neither a computation nor a lock of the
//! application can delay its heartbeats. Other threads reach it through channels that never block.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Cause before leaving.** A rank that knows of a failure forwards it before it leaves the group and before it closes a connection;
//!    a rank that receives an unknown failure forwards it before its own waits end. So no consequence overtakes the cause.
//! 2. **Leaving is not a failure** until an operation needs the rank that left.
//! 3. **Unauthenticated connections are only counted**: none of them can end the group, occupy memory without bound, or stay open.

mod accept;
mod assembly;
mod dial;
mod groups;
mod message;
mod open_streams;
mod overlay;
mod peers;
mod plane;
mod probe;
mod session;
mod silence;
mod thread;
mod world;

pub(super) use accept::Listeners;
#[cfg(test)]
pub(super) use assembly::{Assembly, Step};
pub(super) use dial::Dial;
pub(super) use message::{Body, Notice};
#[cfg(test)]
pub(super) use message::{Message, Routed};
#[cfg(test)]
pub(super) use overlay::{Action, Presence};
pub(super) use overlay::{FULL, Overlay};
pub(super) use plane::{ConnectState, Loss, Plane};
pub(super) use thread::{Control, Leaving};
pub(super) use world::World;
