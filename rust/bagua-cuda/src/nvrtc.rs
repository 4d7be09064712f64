//! NVRTC, which compiles kernels: <https://docs.nvidia.com/cuda/nvrtc/>. It needs no driver.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::ptr;

use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};

use crate::calls::{Code, call_at, call_in};
use crate::error::{Error, Result};
use crate::shared_library::{Library, line};

/// A program in CUDA C.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The program's name in error texts.
    pub name: &'static str,
    /// The program's text.
    pub text: &'a CStr,
    /// The files that the program includes: name and text.
    pub headers: &'a [(&'a CStr, &'a CStr)],
}

/// A loaded `libnvrtc`.
pub struct Nvrtc {
    library: Library,
    /// Major and minor version.
    version: (i32, i32),
    /// Supported architectures, as 10 times the major plus the minor compute capability.
    architectures: Vec<i32>,
}

impl Nvrtc {
    /// Asks the library for its version and architectures.
    pub fn new(library: Library) -> Result<Nvrtc> {
        let (mut major, mut minor, mut number) = (0, 0, 0);
        // SAFETY: the function writes two ints.
        let code = unsafe { call_in!(library, nvrtc::nvrtcVersion(&raw mut major, &raw mut minor)) }?;
        check(&library, "nvrtcVersion", code)?;
        // SAFETY: the function writes one int.
        let code = unsafe { call_in!(library, nvrtc::nvrtcGetNumSupportedArchs(&raw mut number)) }?;
        check(&library, "nvrtcGetNumSupportedArchs", code)?;
        let mut architectures = vec![0; usize::try_from(number).unwrap_or(0)];
        if !architectures.is_empty() {
            // SAFETY: the function writes as many ints as `nvrtcGetNumSupportedArchs` returned.
            let code = unsafe { call_in!(library, nvrtc::nvrtcGetSupportedArchs(architectures.as_mut_ptr())) }?;
            check(&library, "nvrtcGetSupportedArchs", code)?;
        }
        Ok(Nvrtc { library, version: (major, minor), architectures })
    }

    /// Returns the library's file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Returns NVRTC's version, for example "13.2".
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Returns the architectures that NVRTC supports: 90 stands for compute capability 9.0.
    pub fn architectures(&self) -> &[i32] {
        &self.architectures
    }

    /// Compiles to machine code for one architecture, an ELF file. Takes seconds.
    pub fn compile(&self, source: Source<'_>, architecture: i32, options: &[CString]) -> Result<Vec<u8>> {
        let name = CString::new(source.name).unwrap_or_default();
        let texts: Vec<_> = source.headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let names: Vec<_> = source.headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let number = c_int::try_from(texts.len()).expect("a handful of headers");
        let mut program = Program { nvrtc: self, handle: ptr::null_mut() };
        let (text, handle) = (source.text.as_ptr(), &raw mut program.handle);
        let (texts, names) = (texts.as_ptr(), names.as_ptr());
        // SAFETY: all strings are NUL-terminated, both lists have `number` entries, and NVRTC copies them.
        let code = unsafe {
            call_in!(self.library, nvrtc::nvrtcCreateProgram(handle, text, name.as_ptr(), number, texts, names))
        }?;
        check(&self.library, "nvrtcCreateProgram", code)?;
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let number = c_int::try_from(options.len()).expect("a handful of options");
        // SAFETY: the program was created, and there are `number` NUL-terminated strings.
        let code =
            unsafe { call_in!(self.library, nvrtc::nvrtcCompileProgram(program.handle, number, options.as_ptr())) }?;
        if code == nvrtcResult::NVRTC_ERROR_COMPILATION as Code {
            // NVRTC ends the text with a zero byte.
            let log = program.bytes("nvrtcGetProgramLog", c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog")?;
            let log = String::from_utf8_lossy(log.split(|byte| *byte == 0).next().unwrap_or_default());
            let log = log.trim_end();
            let library = self.library.text();
            return Err(Error::Compile { library, program: source.name, architecture, log: line(log.as_bytes()) });
        }
        check(&self.library, "nvrtcCompileProgram", code)?;
        program.bytes("nvrtcGetCUBIN", c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN")
    }
}

struct Program<'a> {
    nvrtc: &'a Nvrtc,
    /// Null until the program was created.
    handle: nvrtcProgram,
}

impl Program<'_> {
    fn bytes(&self, function: &'static str, size: &'static CStr, get: &'static CStr) -> Result<Vec<u8>> {
        let library = &self.nvrtc.library;
        let (size, get) = (library.address(size)?, library.address(get)?);
        let mut len = 0;
        // SAFETY: the program was created. The function writes one number, as the size functions of all results do.
        let code = unsafe { call_at!(size, nvrtc::nvrtcGetPTXSize(self.handle, &raw mut len)) };
        check(library, function, code)?;
        let mut bytes = vec![0_u8; len];
        if len > 0 {
            // SAFETY: the function writes as many bytes as `size` returned.
            let code = unsafe { call_at!(get, nvrtc::nvrtcGetPTX(self.handle, bytes.as_mut_ptr().cast())) };
            check(library, function, code)?;
        }
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the program was created and is not used again. An error would change nothing.
            let _ = unsafe { call_in!(self.nvrtc.library, nvrtc::nvrtcDestroyProgram(&raw mut self.handle)) };
        }
    }
}

fn check(library: &Library, function: &'static str, code: Code) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the type is that of NVRTC's function.
    let text: Option<unsafe extern "C" fn(Code) -> *const c_char> = unsafe { library.find(c"nvrtcGetErrorString") };
    // SAFETY: any number is allowed.
    let said = text.map(|text| unsafe { text(code) }).filter(|said| !said.is_null());
    // SAFETY: NVRTC's texts are static and NUL-terminated.
    let name = said.map(|said| line(unsafe { CStr::from_ptr(said) }.to_bytes()));
    Err(library.failed(function, name.unwrap_or_else(|| "an error without a name".to_owned()), code))
}
