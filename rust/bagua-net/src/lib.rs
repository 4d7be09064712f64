//! What moves bytes between ranks: memory, waits, a group's failure state, records, transports and the mesh.
//!
//! | module | what it is |
//! |---|---|
//! | [`transport`] | byte streams between two ranks (local, tcp, tls, shm), and the mesh of them |
//! | [`request`] | one operation as a value: verb, buffers, deadline, counters |
//! | [`memory`], [`stats`], [`recorder`], [`health`] | tensor memory; counters; the last operations; a group's failure state |
//! | [`wait`] | deadlines, futexes, doorbells |
//! | [`platform`] | what is specific to an operating system: all of Linux's system calls beyond POSIX |
//! | [`sync`] | atomics, locks and futexes, which a model checker may replace |

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

use bagua_kernels::codec;
use bagua_types::{error, types};
