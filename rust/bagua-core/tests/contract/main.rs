//! One contract, many implementations: an implementation joins with a factory in `world` and a line in `collectives`,
//! `transports` or both.

mod collectives;
mod failures;
mod oracle;
mod streams;
mod toy;
mod transports;
mod world;
