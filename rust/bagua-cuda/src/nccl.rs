//! NCCL: a loaded library, its version, and its functions.

use std::ffi::c_int;
use std::path::Path;

use nccl_sys::{Functions, ncclResult_t};

use crate::error::{Error, Result};
use crate::library::Library;

/// A loaded `libnccl`. Its version is known also where it is too old for the functions that are used.
pub struct Nccl {
    library: Library,
    /// As `ncclGetVersion` counts.
    version: i32,
    /// The functions, or the first that is absent.
    functions: std::result::Result<Functions, nccl_sys::Missing>,
}

impl Nccl {
    /// Asks the library for its version and its functions.
    pub fn new(library: Library) -> Result<Nccl> {
        // SAFETY: the signature is NCCL's.
        let get_version: unsafe extern "C" fn(*mut c_int) -> ncclResult_t =
            unsafe { library.function(c"ncclGetVersion") }?;
        let mut version = 0;
        // SAFETY: it writes one int, and needs nothing to have been called before.
        let result = unsafe { get_version(&raw mut version) };
        if result != ncclResult_t::SUCCESS {
            return Err(library.failed("ncclGetVersion", "ncclResult_t".to_owned(), result.0));
        }
        // SAFETY: the addresses are those of a library that is never unloaded, under NCCL's names.
        let functions = unsafe { Functions::load(|name| library.symbol(name)) };
        Ok(Nccl { library, version, functions })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Its version, "2.30.7" for instance.
    pub fn version(&self) -> String {
        // Until 2.8 the minor version was counted in hundreds and the major in thousands.
        let major = if self.version < 10_000 { 1_000 } else { 10_000 };
        format!("{}.{}.{}", self.version / major, self.version % major / 100, self.version % 100)
    }

    /// The functions that collectives need.
    pub fn functions(&self) -> Result<&Functions> {
        self.functions
            .as_ref()
            .map_err(|missing| Error::NoFunction { library: self.library.text(), function: missing.0 })
    }
}
