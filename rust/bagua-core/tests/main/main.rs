//! Tests of the crate's public interface. They are one program, because each program links the whole core. Tests that
//! fork are in `forks`.

mod average;
mod average_deaths;
mod average_joining;
mod contract;
mod engine;
mod engine_callbacks;
#[path = "../../../bagua-group/tests/group_world/mod.rs"]
mod group_world;
