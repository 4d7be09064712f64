//! Arithmetic on tensors in memory: element-wise reductions and codecs. No I/O, no threads, no clock.

#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod codec;
pub mod prefetch;
pub mod reduce;

use bagua_types::{error, types};
