//! Tests that fork. They are not in `main`, because under `cargo test` a child would inherit the locks and connections
//! of every test that runs in the same process.

mod callbacks;
mod engine;
