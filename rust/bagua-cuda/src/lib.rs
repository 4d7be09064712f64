//! CUDA libraries, devices, kernels and codecs, and the collectives `staged` and `nccl`. The libraries are found at run
//! time and never linked.
//!
//! | file | what it holds |
//! |---|---|
//! | [`libraries`] | [`Libraries`]: the driver, NVRTC and NCCL of this process, each searched for at its first use |
//! | [`driver`] | the driver (`libcuda`): its functions, its version, its devices |
//! | `calls` | calls of the driver and of NVRTC, with the types of cudarc |
//! | `error_names` | the names of the driver's errors |
//! | [`driver_functions`] | the functions of the driver that operations use |
//! | [`context`] | the primary context of a device, current only around calls |
//! | [`stream`], [`event`], [`memory`] | streams, events, pinned memory |
//! | [`device_lane`] | a lane's streams and pinned memory on a device, and the arrays in use |
//! | [`device`] | [`OperationDevice`]: the core's device, one per operation |
//! | [`collective_factory`] | [`Factory`]: a lane's collective, which passes device arrays to the chosen collective |
//! | [`collective_choice`] | which collective the ranks choose, and why |
//! | `shard_addresses` | where the shards of an operation are |
//! | [`staged`] | the collective that copies through pinned memory and uses the host's collective |
//! | `average_on_device` | averages by our kernels |
//! | [`nvrtc`] | the compiler of kernels (`libnvrtc`): its version and architectures, and compiling |
//! | [`kernels`] | the list of kernels, in `kernels/*.cu`, and their grids |
//! | [`compile`] | programs, their options, and the machine code for an architecture, compiled or from the cache |
//! | [`loaded_kernels`] | the kernels that a context has loaded |
//! | [`kernel_launch`] | loading machine code for a device, and launching kernels |
//! | [`codec`] | codecs on arrays of a device |
//! | `compressed` | codecs for compressed all_reduce and the compressed ring |
//! | [`kernel_cache`] | a folder of machine code |
//! | [`nccl`] | NCCL (`libnccl`): its version, its functions, and the collective that uses them |
//! | [`shared_library`] | finding and loading one shared library |
//! | [`error`] | the reasons why CUDA cannot be used |
//!
//! If a library, a function or a device is missing, the result is an error, never a panic.

#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod average_on_device;
pub mod averaged_weights;
mod calls;
pub mod codec;
pub mod collective_choice;
pub mod collective_factory;
pub mod compile;
mod compressed;
pub mod context;
pub mod device;
pub mod device_lane;
pub mod driver;
pub mod driver_functions;
pub mod error;
mod error_names;
pub mod event;
pub mod kernel_cache;
pub mod kernel_launch;
pub mod kernels;
pub mod libraries;
pub mod loaded_kernels;
pub mod memory;
pub mod nccl;
pub mod nvrtc;
mod shard_addresses;
pub mod shared_library;
pub mod staged;
pub mod stream;

pub use averaged_weights::{Averaged, Averaging, WeightOrder};
pub use collective_factory::Factory;
pub use context::{Context, Memory};
pub use device::{OperationDevice, Requested};
pub use device_lane::{Choice, Counts, LaneDevice};
pub use error::{Error, Result};
pub use kernel_cache::Cache;
pub use libraries::{Libraries, LibraryPaths};
