//! Arithmetic on tensors in memory: element-wise reductions and codecs. Also the types that every crate of Bagua uses.
//! No I/O, no threads, no clock.
//!
//! | file | what it is |
//! |---|---|
//! | `codec` | codecs: compression of tensors |
//! | `reduce` | element-wise reductions |
//! | `prefetch` | hints to the processor about the memory that is read next |
//! | `types` | element types, reduce operations, and the fingerprint of an operation |
//! | `error` | the errors |

#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod codec;
pub mod error;
pub mod prefetch;
pub mod reduce;
pub mod types;
