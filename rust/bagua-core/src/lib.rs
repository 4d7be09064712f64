//! The engine of Bagua. Pure Rust: it uses no Python and no CUDA, reads no environment variables and prints nothing.
//!
//! This crate re-exports the modules of the crates below it. A crate depends only on those below it:
//!
//! | crate | modules |
//! |---|---|
//! | `bagua-core` | [`engine`]: communication threads, the queue of buckets, handles |
//! | | [`average`]: asynchronous averaging of models |
//! | | [`op`]: the operations on a bucket |
//! | | [`bucket`], [`schedule`]: tensors that are communicated together, and which bucket is next |
//! | `bagua-group` | [`group`]: store, bootstrap, control, membership, TLS; lanes, sub-groups |
//! | `bagua-collectives` | [`collective`]: how ranks combine tensors: solo, shm, net, hier; compressed, gossip |
//! | `bagua-net` | [`transport`]: byte streams between two ranks, the mesh |
//! | | [`request`]: one operation as a value |
//! | | [`memory`], [`stats`], [`recorder`], [`health`], [`wait`] |
//! | `bagua-kernels` | [`reduce`], [`codec`]: element-wise kernels; compression |
//! | | [`types`], [`error`]: element types, reduce operations, fingerprints; what can fail |

#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod average;
pub mod bucket;
pub mod engine;
pub mod op;
pub mod schedule;

pub use bagua_collectives::{self as collective, same_ranks_as};
pub use bagua_group as group;
pub use bagua_kernels::{codec, coded, error, reduce, types};
pub use bagua_net::{health, memory, platform, recorder, request, stats, transport, wait};

use bagua_net::sync;
