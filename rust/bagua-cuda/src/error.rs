//! The reasons why CUDA cannot be used. Each is one line that names the library.

use std::ffi::CStr;

/// A reason why this process cannot use a CUDA library.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The loader did not accept the library's file in any of the places where it was searched.
    #[error("{library} does not load: {loader}")]
    NotLoaded {
        /// The library, and the variable that names its file if there is one.
        library: String,
        /// The loader's messages, one per place.
        loader: String,
    },
    /// The library lacks a function that every supported version has.
    #[error("{library} has no function {}", function.to_string_lossy())]
    NoFunction {
        /// The library and its file.
        library: String,
        /// Name of the missing symbol.
        function: &'static CStr,
    },
    /// A call failed.
    #[error("{library}: {function} failed: {name} ({code})")]
    Call {
        /// The library and its file.
        library: String,
        /// Name of the function.
        function: &'static str,
        /// Name of the code in the library's header.
        name: String,
        /// Returned code.
        code: i32,
    },
    /// NVRTC rejected one of our programs.
    #[error("{library}: {program} does not compile for sm_{architecture}: {log}")]
    Compile {
        /// NVRTC and its file.
        library: String,
        /// Name of the program.
        program: &'static str,
        /// 10 times the major plus the minor compute capability.
        architecture: i32,
        /// NVRTC's message, in one line.
        log: String,
    },
    /// There is no program with that name.
    #[error("there is no program of kernels named '{program}'; known: {known}")]
    NoProgram {
        /// The unknown name.
        program: String,
        /// The known names.
        known: String,
    },
    /// The driver works but finds no device.
    #[error("{library}: cuDeviceGetCount found no device")]
    NoDevice {
        /// The driver and its file.
        library: String,
    },
    /// This process is a forked child of the process that loaded the libraries.
    #[error(
        "libcuda is not used in a forked child: this process was forked after bagua.cuda was imported (in process {owner})"
    )]
    Forked {
        /// Id of the process that loaded the libraries.
        owner: u32,
    },
}

/// The result of an operation that needs a CUDA library.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Error> for bagua_core::error::Error {
    /// Converts to the error of an operation that cannot use a device at all. The text is that of `why_not`.
    fn from(error: Error) -> bagua_core::error::Error {
        bagua_core::error::Error::Unavailable(error.to_string())
    }
}
