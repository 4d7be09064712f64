//! The engine of Bagua: pure Rust, no Python, no CUDA, no environment, no printing.
//!
//! The rooms, top to bottom; a room imports only from rows below its own:
//!
//! | row | room | what it is |
//! |---|---|---|
//! | 5 | [`engine`] | the communication thread, the queue of buckets, handles: threads live here and in the control plane |
//! | 4 | [`schedule`], [`op`] | which bucket goes next; what is done to it |
//! | 3 | [`bucket`], [`collective`], [`group`] | tensors that travel together; how ranks combine them; who the ranks are |
//! | 2 | [`reduce`], [`transport`] | element-wise kernels; streams of bytes between two ranks |
//! | 1 | [`memory`] | tensor memory on loan, memory shared with peers |
//! | 0 | [`types`], [`error`], [`watch`], [`sync`], [`stats`] | words, failures, waiting, counting |

#![deny(unsafe_code)]

pub mod bucket;
pub mod collective;
pub mod engine;
pub mod error;
pub mod group;
pub mod memory;
pub mod op;
pub mod reduce;
pub mod schedule;
pub mod stats;
pub mod sync;
pub mod transport;
pub mod types;
pub mod watch;
