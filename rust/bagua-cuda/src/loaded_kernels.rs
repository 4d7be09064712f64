//! The kernels that a context has loaded, and the compiler of their machine code.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys::CUfunction;

use crate::error::Result;
use crate::kernels::Program;

/// Returns the machine code of a program for an architecture. Takes seconds if it is not in the cache.
pub type Compiler = Box<dyn Fn(&'static Program, i32) -> Result<Vec<u8>> + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernel(pub(crate) CUfunction);

// SAFETY: any thread may launch a function of a loaded module.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

#[derive(Default)]
pub(crate) struct Kernels {
    /// Compiler of the kernels, set when the device is first used.
    pub(crate) compiler: OnceLock<Compiler>,
    pub(crate) processors: OnceLock<u32>,
    /// Kernels of loaded programs, by name. Locked while a program is compiled, so that it is compiled once.
    pub(crate) loaded: Mutex<BTreeMap<&'static str, Kernel>>,
}
