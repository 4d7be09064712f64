//! NCCL: a loaded library, its version and its functions, and the collective `nccl` over them.
//!
//! | file | what it has |
//! |---|---|
//! | this one | [`Nccl`]: the library |
//! | `communicator` | a rank's communicator from its creation to its end, calls that are polled to their end |
//! | `watch` | the thread that looks after operations that run, and aborts |
//! | `verbs` | the verbs as calls of NCCL |
//! | `gathered` | reductions that NCCL lacks, by our kernels |

mod communicator;
mod gathered;
mod verbs;
mod watch;

use std::ffi::{CStr, c_int};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use bagua_core::error as core;
use nccl_sys::{Functions, OLDEST_VERSION, ncclResult_t};

pub(crate) use self::communicator::{Communicator, unique_id};
pub(crate) use self::verbs::serves;

use crate::error::{Error, Result};
use crate::shared_library::Library;

/// Where collectives get NCCL from.
pub struct Source {
    /// Loads it, or says why not.
    pub load: Box<dyn Fn() -> Result<Arc<Nccl>> + Send + Sync>,
    /// Several ranks may use one device, where the library can do that.
    pub several: bool,
}

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
        version_text(self.version)
    }

    /// Its version as it counts; the reason, where collectives cannot use it.
    pub(crate) fn served(&self) -> std::result::Result<i32, String> {
        if self.version < OLDEST_VERSION {
            return Err(format!("NCCL {} is too old: {} is needed", self.version(), version_text(OLDEST_VERSION)));
        }
        self.functions().map(|_| self.version).map_err(|error| error.to_string())
    }

    /// The error of a call that returned something else than success, with NCCL's own words on it.
    pub(crate) fn failure(&self, device: i32, api: &str, result: ncclResult_t) -> core::Error {
        let (code, name) = (result.0, result.name().to_owned());
        let mut message = format!("{}: {api} failed on device {device}: {name} ({code})", self.library.text());
        if let Ok(functions) = &self.functions {
            // SAFETY: it returns a NUL-terminated text that stays valid until the library's next error, which no other thread of ours
            // causes meanwhile; the communicator may be null.
            let said = unsafe { (functions.get_last_error)(ptr::null_mut()) };
            if !said.is_null() {
                // SAFETY: as above.
                let said = crate::shared_library::line(unsafe { CStr::from_ptr(said) }.to_bytes());
                if !said.trim().is_empty() {
                    message = format!("{message}: {}", said.trim());
                }
            }
        }
        let failure = core::DeviceFailure { message, api: api.to_owned(), code, name, device, harmless: false };
        core::Error::Device(Box::new(failure))
    }

    /// The functions that collectives need.
    pub fn functions(&self) -> Result<&Functions> {
        self.functions
            .as_ref()
            .map_err(|missing| Error::NoFunction { library: self.library.text(), function: missing.0 })
    }
}

/// A version as people write it.
pub(crate) fn version_text(version: i32) -> String {
    // Until 2.8 the minor version was counted in hundreds and the major in thousands.
    let major = if version < 10_000 { 1_000 } else { 10_000 };
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}
