//! NCCL: a loaded library, its version and its functions, and the collective `nccl` that uses them.
//!
//! | file | what it holds |
//! |---|---|
//! | this one | [`Nccl`]: the library |
//! | `communicator` | a rank's communicator: its creation, its calls, its end |
//! | `watchdog` | the thread that watches running operations, and aborts |
//! | `verbs` | the verbs as calls of NCCL |

mod communicator;
mod verbs;
mod watchdog;

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

/// The way in which collectives get NCCL.
pub struct Source {
    /// Loads NCCL, or returns the reason why NCCL cannot be loaded.
    pub load: Box<dyn Fn() -> Result<Arc<Nccl>> + Send + Sync>,
    /// True if several ranks may use one device, provided that the library supports it.
    pub several: bool,
}

/// A loaded `libnccl`. The version is known even if it is too old for the functions that are used.
pub struct Nccl {
    library: Library,
    /// Version number from `ncclGetVersion`.
    version: i32,
    /// The functions, or the first one that is missing.
    functions: std::result::Result<Functions, nccl_sys::Missing>,
}

impl Nccl {
    /// Asks the library for its version and its functions.
    pub fn new(library: Library) -> Result<Nccl> {
        // SAFETY: the signature is NCCL's.
        let get_version: unsafe extern "C" fn(*mut c_int) -> ncclResult_t =
            unsafe { library.function(c"ncclGetVersion") }?;
        let mut version = 0;
        // SAFETY: the function writes one int, and may be the first call.
        let result = unsafe { get_version(&raw mut version) };
        if result != ncclResult_t::SUCCESS {
            return Err(library.failed("ncclGetVersion", "ncclResult_t".to_owned(), result.0));
        }
        // SAFETY: the addresses are in a library that is never unloaded, under NCCL's names.
        let functions = unsafe { Functions::load(|name| library.symbol(name)) };
        Ok(Nccl { library, version, functions })
    }

    /// Returns the library's file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Returns NCCL's version, for example "2.30.7".
    pub fn version(&self) -> String {
        version_text(self.version)
    }

    /// Returns the version number, or the reason why collectives cannot use the library.
    pub(crate) fn served(&self) -> std::result::Result<i32, String> {
        if self.version < OLDEST_VERSION {
            return Err(format!("NCCL {} is too old: {} is needed", self.version(), version_text(OLDEST_VERSION)));
        }
        self.functions().map(|_| self.version).map_err(|error| error.to_string())
    }

    /// Returns the error of a call that failed, with NCCL's own message.
    pub(crate) fn failure(&self, device: i32, api: &str, result: ncclResult_t) -> core::Error {
        let (code, name) = (result.0, result.name().to_owned());
        let mut message = format!("{}: {api} failed on device {device}: {name} ({code})", self.library.text());
        if let Ok(functions) = &self.functions {
            // SAFETY: the function returns a NUL-terminated text that is valid until the library's next error, which no
            // other thread of ours causes meanwhile. The communicator may be null.
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

    /// Returns the functions that collectives need.
    pub fn functions(&self) -> Result<&Functions> {
        self.functions
            .as_ref()
            .map_err(|missing| Error::NoFunction { library: self.library.text(), function: missing.0 })
    }
}

pub(crate) fn version_text(version: i32) -> String {
    // Until 2.8, the major version was counted in thousands.
    let major = if version < 10_000 { 1_000 } else { 10_000 };
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}
