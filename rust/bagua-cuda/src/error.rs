//! Why there is no CUDA, each reason in one line that names the library.

use std::ffi::CStr;

/// A reason why this process cannot use a library of CUDA.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// None of the places has a file that the loader takes.
    #[error("{library} does not load: {loader}")]
    NotLoaded {
        /// The library, with the variable that names its file if one does.
        library: String,
        /// What the loader said of each place.
        loader: String,
    },
    /// The library lacks a function that every supported version has.
    #[error("{library} has no function {}", function.to_string_lossy())]
    NoFunction {
        /// The library and its file.
        library: String,
        /// Name of the symbol.
        function: &'static CStr,
    },
    /// A call failed.
    #[error("{library}: {function} failed: {name} ({code})")]
    Call {
        /// The library and its file.
        library: String,
        /// Name of the function.
        function: &'static str,
        /// Name of the code, as the library's header has it.
        name: String,
        /// What the function returned.
        code: i32,
    },
    /// NVRTC refuses a program of ours.
    #[error("{library}: {program} does not compile for sm_{architecture}: {log}")]
    Compile {
        /// NVRTC and its file.
        library: String,
        /// Name of the program.
        program: &'static str,
        /// 10 times the major and the minor compute capability.
        architecture: i32,
        /// What NVRTC said, in one line.
        log: String,
    },
    /// There is no program of that name.
    #[error("there is no program of kernels named '{program}'; known: {known}")]
    NoProgram {
        /// The name.
        program: String,
        /// The names that there are.
        known: String,
    },
    /// The driver works and has no device.
    #[error("{library}: cuDeviceGetCount found no device")]
    NoDevice {
        /// The driver and its file.
        library: String,
    },
    /// This process is a forked child of the one that the libraries belong to.
    #[error(
        "libcuda is not used in a forked child: this process was forked after bagua.cuda was imported (in process {owner})"
    )]
    Forked {
        /// The process that the libraries belong to.
        owner: u32,
    },
}

/// The result of what needs a library of CUDA.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Error> for bagua_core::error::Error {
    /// The error of an operation that cannot use a device at all; its text is that of `why_not`.
    fn from(error: Error) -> bagua_core::error::Error {
        bagua_core::error::Error::Unavailable(error.to_string())
    }
}
