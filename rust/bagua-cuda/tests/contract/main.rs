//! The core's contract of collectives, with `staged` on CUDA devices of the simulated driver, if `make cuda-sim` has
//! built it or can.

#[macro_use]
#[path = "../../../bagua-core/tests/main/contract/collectives.rs"]
mod collectives;
mod cuda;
mod implementations;
#[path = "../../../bagua-core/tests/main/contract/oracle.rs"]
mod oracle;
#[allow(dead_code, reason = "it has streams and collectives of the core's own tests too")]
#[path = "../../../bagua-core/tests/main/contract/world.rs"]
mod world;
