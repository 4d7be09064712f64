//! CUDA, found at run time and never linked.
//!
//! So far: which libraries there are, which devices, and kernels, compiled but not launched. Streams and collectives on devices are not
//! there yet.
//!
//! | file | what it has |
//! |---|---|
//! | [`libraries`] | [`Libraries`]: the driver, NVRTC and NCCL of this process, each looked for at its first use |
//! | [`driver`] | the driver (`libcuda`): its functions, its version, its devices |
//! | [`nvrtc`] | the compiler of kernels (`libnvrtc`): its version and architectures, and compiling |
//! | [`kernels`] | which kernels there are, in `kernels/*.cu`, and the grids that they are launched with |
//! | [`compile`] | programs, their options, and the machine code for an architecture, compiled or from the cache |
//! | [`cache`] | a folder of machine code |
//! | [`nccl`] | NCCL (`libnccl`): its version, its functions |
//! | [`library`] | finding and loading one shared library |
//! | [`error`] | why there is no CUDA |
//!
//! What is absent is an error value, never a panic: a library, a function, a device.

pub mod cache;
pub mod compile;
pub mod driver;
pub mod error;
pub mod kernels;
pub mod libraries;
pub mod library;
pub mod nccl;
pub mod nvrtc;

pub use cache::Cache;
pub use error::{Error, Result};
pub use libraries::{Libraries, Places};
