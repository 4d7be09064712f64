//! Benchmarks of `bagua-core`, in `benches/`: `cargo bench` runs them all, `cargo bench --bench shm` one of them, and
//! `cargo bench -- --list` names them.
//!
//! The benchmarks are a crate of their own because cargo builds all dev-dependencies of a crate for its tests. The
//! benchmarks have 28 dependencies that no test needs.

/// Prints `name` as criterion and libtest print a benchmark if the arguments contain `--list`. Returns true if they do.
///
/// For benchmarks that have their own `main`: criterion handles `--list` itself.
#[must_use]
pub fn listed(name: &str) -> bool {
    let asked = std::env::args().any(|argument| argument == "--list");
    if asked {
        println!("{name}: benchmark");
    }
    asked
}
