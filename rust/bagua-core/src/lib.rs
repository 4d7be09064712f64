//! The engine of Bagua: pure Rust, no Python, no CUDA, no environment, no printing.
//!
//! The rooms, top to bottom; a room imports only from rows below its own (`tools/check_layers.py` checks it):
//!
//! | row | room | what it is |
//! |---|---|---|
//! | 9 | [`engine`], [`average`] | communication threads, the queue of buckets, handles; asynchronous averaging of models |
//! | 8 | [`bucket`] | tensors that are communicated together |
//! | 7 | [`op`] | the operations on a bucket, one file each |
//! | 6 | [`group`] | membership: rendezvous, control connections, lanes, sub-groups |
//! | 5 | [`collective`] | how the ranks of a group combine tensors: solo, shm, net, hier; compressed, gossip |
//! | 4 | [`transport`], [`reduce`] | byte streams between two ranks; element-wise kernels |
//! | 3 | [`request`] | one operation as a value: verb, buffers, deadline, counters |
//! | 2 | [`memory`], [`codec`], [`stats`], [`recorder`], [`health`], [`schedule`] | tensor memory; compression; counters; the last operations; a group's failure state; which bucket is next |
//! | 1 | [`types`], [`wait`] | element types, reduce operations, fingerprints; deadlines, futexes, doorbells |
//! | 0 | [`error`], `sync` | what can fail; atomics, locks and futexes, which a model checker may replace |

#![deny(unsafe_code)]

pub mod average;
pub mod bucket;
pub mod codec;
pub mod collective;
pub mod engine;
pub mod error;
pub mod group;
pub mod health;
pub mod memory;
pub mod op;
pub mod recorder;
pub mod reduce;
pub mod request;
pub mod schedule;
pub mod stats;
mod sync;
pub mod transport;
pub mod types;
pub mod wait;
