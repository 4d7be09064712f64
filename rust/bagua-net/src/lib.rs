//! The layer that moves bytes between ranks.
//!
//! | module | what it is |
//! |---|---|
//! | [`transport`] | byte streams between two ranks (local, tcp, tls, shm), and the mesh of them |
//! | [`request`] | one operation as a value: verb, buffers, deadline, counters |
//! | [`memory`] | buffers that tensors live in, on the host, on devices and in shared memory |
//! | [`stats`], [`recorder`] | counters per kind of operation; the record of the last operations |
//! | [`health`] | the failure state of a group |
//! | [`wait`] | deadlines, futexes, doorbells |
//! | [`platform`] | code for one operating system, with every Linux system call beyond POSIX |
//! | [`sync`] | atomics, locks and futexes, which a model checker can replace |

#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod health;
pub mod memory;
pub mod platform;
pub mod recorder;
pub mod request;
pub mod stats;
pub mod sync;
pub mod transport;
pub mod wait;

use bagua_kernels::{codec, error, types};
