//! One contract for many implementations. To add an implementation, write a factory in `world` and a line in
//! `implementations`, `transports` or both.

mod buckets;
#[macro_use]
mod collectives;
mod failures;
mod implementations;
mod oracle;
mod streams;
mod toy;
mod transports;
mod world;
