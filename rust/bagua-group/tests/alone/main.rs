//! Tests that fork, count the descriptors and threads of their process, or set a limit of it. No other test may run in
//! that process meanwhile.
//! nextest gives every test its own process. `cargo test` runs them as threads, which [`alone`] serialises.

mod descriptors;
mod fork;
#[path = "../group_world/mod.rs"]
mod group_world;
mod limits;

use std::sync::{Mutex, MutexGuard};

use bagua_net::wait::lock;

/// Returns when no other test of this program runs.
fn alone() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::new(());
    lock(&RUNNING)
}
