//! The benchmarks of `bagua-core`, in `benches/`: `cargo bench` runs them all, `cargo bench --bench shm` one of them, and
//! `cargo bench -- --list` names them.
//!
//! They are a crate of their own because cargo builds all dev-dependencies of a crate for its tests, and those of the benchmarks are 28 crates
//! that no test needs.

/// Prints `name` as criterion and libtest print a benchmark, where the arguments have `--list`; returns whether they have.
///
/// For benchmarks that are a `main` of their own: criterion answers `--list` itself.
#[must_use]
pub fn listed(name: &str) -> bool {
    let asked = std::env::args().any(|argument| argument == "--list");
    if asked {
        println!("{name}: benchmark");
    }
    asked
}
