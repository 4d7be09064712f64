//! CUDA, found at run time and never linked.
//!
//! So far: which libraries there are, and which devices. Streams, kernels and collectives on devices are not there yet.
//!
//! | file | what it has |
//! |---|---|
//! | [`libraries`] | [`Libraries`]: the driver, NVRTC and NCCL of this process, each looked for at its first use |
//! | [`driver`] | the driver (`libcuda`): its functions, its version, its devices |
//! | [`nvrtc`] | the compiler of kernels (`libnvrtc`): its version and architectures |
//! | [`nccl`] | NCCL (`libnccl`): its version, its functions |
//! | [`library`] | finding and loading one shared library |
//! | [`error`] | why there is no CUDA |
//!
//! What is absent is an error value, never a panic: a library, a function, a device.

pub mod driver;
pub mod error;
pub mod libraries;
pub mod library;
pub mod nccl;
pub mod nvrtc;

pub use error::{Error, Result};
pub use libraries::{Libraries, Places};
