//! The words that every crate of Bagua uses: element types, reduce operations, what a message says of itself, and what can fail.

#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod error;
pub mod types;
