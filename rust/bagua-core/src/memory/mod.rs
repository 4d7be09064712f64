//! Memory: tensors on loan, and memory that peers on this host map.
//!
//! One of the few rooms where `unsafe` is allowed: everything above works on slices that come from here.

#![allow(unsafe_code)]

mod arena;
mod region;

pub use arena::Arena;
pub use region::Region;
