//! NVRTC, which compiles kernels: <https://docs.nvidia.com/cuda/nvrtc/>. It needs no driver.

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;

use crate::error::Result;
use crate::library::{Library, line};

/// What a call of NVRTC returns: 0, or the number of an error.
type NvrtcResult = c_int;

/// A loaded `libnvrtc`.
pub struct Nvrtc {
    library: Library,
    /// Major, minor.
    version: (i32, i32),
    /// Those that it compiles for, as 10 times the major and the minor compute capability.
    architectures: Vec<i32>,
}

impl Nvrtc {
    /// Asks the library what it is.
    pub fn new(library: Library) -> Result<Nvrtc> {
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> NvrtcResult;
        type Ints = unsafe extern "C" fn(*mut c_int) -> NvrtcResult;
        // SAFETY: the signatures are NVRTC's.
        let (version, count, list): (Version, Ints, Ints) = unsafe {
            (
                library.function(c"nvrtcVersion")?,
                library.function(c"nvrtcGetNumSupportedArchs")?,
                library.function(c"nvrtcGetSupportedArchs")?,
            )
        };
        let (mut major, mut minor, mut number) = (0, 0, 0);
        // SAFETY: it writes two ints.
        check(&library, "nvrtcVersion", unsafe { version(&raw mut major, &raw mut minor) })?;
        // SAFETY: it writes one int.
        check(&library, "nvrtcGetNumSupportedArchs", unsafe { count(&raw mut number) })?;
        let mut architectures = vec![0; usize::try_from(number).unwrap_or(0)];
        if !architectures.is_empty() {
            // SAFETY: it writes as many ints as it said before.
            check(&library, "nvrtcGetSupportedArchs", unsafe { list(architectures.as_mut_ptr()) })?;
        }
        Ok(Nvrtc { library, version: (major, minor), architectures })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Its version, "13.2" for instance.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The architectures that it compiles for: 90 for compute capability 9.0.
    pub fn architectures(&self) -> &[i32] {
        &self.architectures
    }
}

/// An error for any code but 0.
fn check(library: &Library, function: &'static str, code: NvrtcResult) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the signature is NVRTC's.
    let text: Option<unsafe extern "C" fn(NvrtcResult) -> *const c_char> =
        unsafe { library.find(c"nvrtcGetErrorString") };
    // SAFETY: any number is allowed.
    let said = text.map(|text| unsafe { text(code) }).filter(|said| !said.is_null());
    // SAFETY: NVRTC's texts are static and NUL-terminated.
    let name = said.map(|said| line(unsafe { CStr::from_ptr(said) }.to_bytes()));
    Err(library.failed(function, name.unwrap_or_else(|| "an error without a name".to_owned()), code))
}
