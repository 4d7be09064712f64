//! CUDA, found at run time and never linked.
//!
//! Which libraries there are, which devices, kernels, codecs on a device, and the collectives `staged`, `nccl` and `hier`.
//!
//! | file | what it has |
//! |---|---|
//! | [`libraries`] | [`Libraries`]: the driver, NVRTC and NCCL of this process, each looked for at its first use |
//! | [`driver`] | the driver (`libcuda`): its functions, its version, its devices |
//! | `calls` | calls of the driver and of NVRTC, with the types of cudarc |
//! | `error_names` | the names of the driver's errors |
//! | [`driver_functions`] | the functions of the driver that operations use |
//! | [`context`] | the primary context of a device, current around calls only |
//! | [`stream`], [`event`], [`memory`] | streams, events, pinned memory |
//! | [`lane_state`] | what a lane has on a device: streams, pinned memory, the arrays that are still used |
//! | [`device`] | [`OperationDevice`]: the core's device, one per operation |
//! | [`factory`] | [`Factory`]: a lane's collective, which hands arrays on devices to the one that was chosen |
//! | [`collective_choice`] | which one the ranks choose, and why |
//! | `shards` | where the shards of an operation are |
//! | [`staged`] | the collective over pinned memory and the host's |
//! | `reduction` | reductions by our kernels |
//! | [`nvrtc`] | the compiler of kernels (`libnvrtc`): its version and architectures, and compiling |
//! | [`kernels`] | which kernels there are, in `kernels/*.cu`, and the grids that they are launched with |
//! | [`compile`] | programs, their options, and the machine code for an architecture, compiled or from the cache |
//! | [`loaded_kernels`] | which kernels a context has loaded |
//! | [`launch`] | loading machine code for a device, and launching kernels |
//! | [`codec`] | codecs on arrays of a device |
//! | `compressed` | the same for compressed all_reduce and the compressed ring: records between a device and the host |
//! | [`cache`] | a folder of machine code |
//! | [`nccl`] | NCCL (`libnccl`): its version, its functions, and the collective over them |
//! | [`shared_library`] | finding and loading one shared library |
//! | [`error`] | why there is no CUDA |
//!
//! What is absent is an error value, never a panic: a library, a function, a device.

#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod cache;
mod calls;
pub mod codec;
pub mod collective_choice;
pub mod compile;
mod compressed;
pub mod context;
pub mod device;
pub mod driver;
pub mod driver_functions;
pub mod error;
mod error_names;
pub mod event;
pub mod factory;
pub mod kernels;
pub mod lane_state;
pub mod launch;
pub mod libraries;
pub mod loaded_kernels;
pub mod memory;
pub mod nccl;
pub mod nvrtc;
mod reduction;
mod shards;
pub mod shared_library;
pub mod staged;
pub mod stream;
pub mod weights;

pub use cache::Cache;
pub use context::{Context, Memory};
pub use device::{OperationDevice, Requested};
pub use error::{Error, Result};
pub use factory::Factory;
pub use lane_state::{Choice, Counts, LaneDevice};
pub use libraries::{Libraries, LibraryPaths};
pub use weights::{Averaged, Averaging, WeightOrder};
