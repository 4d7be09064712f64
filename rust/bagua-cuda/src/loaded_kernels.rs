//! Which kernels a context has loaded, and what makes their machine code.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys::CUfunction;

use crate::error::Result;
use crate::kernels::Program;

/// Makes the machine code of a program for an architecture, in seconds, or finds it.
pub type Compiler = Box<dyn Fn(&'static Program, i32) -> Result<Vec<u8>> + Send + Sync>;

/// A kernel of a loaded program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernel(pub(crate) CUfunction);

// SAFETY: a function of a loaded module may be launched by any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// What a context has of kernels.
#[derive(Default)]
pub(crate) struct Kernels {
    /// Set with the first use of the device.
    pub(crate) compiler: OnceLock<Compiler>,
    /// Multiprocessors of the device.
    pub(crate) processors: OnceLock<u32>,
    /// Kernels of the programs that were loaded. Locked while one is compiled, so that no other thread compiles it too.
    pub(crate) loaded: Mutex<BTreeMap<&'static str, Kernel>>,
}
