//! NCCL's C types, and a table of its functions that is filled at run time. This crate links no library.
//!
//! | file | what it has |
//! |---|---|
//! | `types` | handles, numbers and structures, as NVIDIA documents them |
//! | `table` | [`Functions`]: the functions of one loaded library |
//!
//! Names, numbers and layouts are those of NCCL's user guide,
//! <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html>. The caller finds and loads the library.

#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod table;
mod types;

pub use table::{Functions, Missing};
pub use types::{
    MAGIC, OLDEST_VERSION, UNDEFINED, UNIQUE_ID_BYTES, cudaStream_t, ncclComm, ncclComm_t, ncclConfig_t,
    ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
