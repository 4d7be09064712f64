//! The benchmarks of `bagua-core`, in `benches/`: `cargo bench` runs them all, `cargo bench --bench shm` one of them.
//!
//! They are a crate of their own because cargo builds all dev-dependencies of a crate for its tests, and those of the benchmarks are 28 crates
//! that no test needs.
