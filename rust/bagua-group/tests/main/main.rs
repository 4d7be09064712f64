//! Tests of the public interface of groups, in one program, because each program links the whole crate. Tests that
//! need a process of their own are in `alone`.

mod arenas;
mod attacks;
#[path = "../group_world/mod.rs"]
mod group_world;
mod health;
mod joining;
mod lanes;
mod rendezvous;
mod shrink;
mod strangers;
mod streams;
mod tls;
