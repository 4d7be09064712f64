//! The control plane of one rank: one thread that accepts connections, sends heartbeats, and spreads failures and goodbyes.
//!
//! It carries no data, waits for no other thread, and calls nobody's code, so that no computation and no lock of the
//! application can make a healthy rank look dead. Other threads talk to it through channels that never block.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Cause before goodbye.** A rank that knows of a failure passes it on before it says goodbye and before it closes a
//!    connection; each rank passes on a failure that is news to it before its own waits end. So consequences never overtake the cause.
//! 2. **A goodbye is not a failure** until somebody needs the rank that left.
//! 3. **Strangers cost nothing but a count**: no unproven connection can end the group, hold memory without bound, or stay.

mod accept;
mod dial;
mod plane;
mod session;
mod thread;

pub(super) use accept::Listeners;
pub(super) use dial::Dial;
pub(super) use plane::{Book, Building, Plane};
pub(super) use thread::Control;
