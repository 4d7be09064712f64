//! Compiling the sources of kernels to machine code.

use std::ffi::{CStr, CString};
use std::fmt::Write;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::kernel_cache::Cache;
use crate::kernels::{PROGRAMS, Program};
use crate::nvrtc::{Nvrtc, Source};

/// The files that programs include: name and text.
const HEADERS: [(&CStr, &str); 4] = [
    (c"convert.cuh", include_str!("../kernels/convert.cuh")),
    (c"device.cuh", include_str!("../kernels/device.cuh")),
    (c"elementwise.cuh", include_str!("../kernels/elementwise.cuh")),
    (c"minmax_u8.cuh", include_str!("../kernels/minmax_u8.cuh")),
];

/// The options of every program: no contraction and no approximations.
const OPTIONS: [&str; 6] = [
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    // The sign of the NaN that an invalid operation gives on this host's processor. Kernels return the same NaN.
    if cfg!(target_arch = "x86_64") { "-DDEFAULT_NAN_SIGN=1u" } else { "-DDEFAULT_NAN_SIGN=0u" },
];

/// Returns the program with that name.
pub fn program(name: &str) -> Result<&'static Program> {
    PROGRAMS.iter().find(|program| program.name == name).ok_or_else(|| Error::NoProgram {
        program: name.to_owned(),
        known: PROGRAMS.map(|program| program.name).join(", "),
    })
}

fn compile(nvrtc: &Nvrtc, program: &'static Program, architecture: i32) -> Result<Vec<u8>> {
    let headers: Vec<_> = HEADERS.iter().map(|(name, text)| (*name, text_of(text))).collect();
    let headers: Vec<_> = headers.iter().map(|(name, text)| (*name, text.as_c_str())).collect();
    let options: Vec<_> = options(architecture).map(|option| text_of(&option)).collect();
    let text = text_of(program.source);
    nvrtc.compile(Source { name: program.name, text: &text, headers: &headers }, architecture, &options)
}

/// Returns the machine code of a program for an architecture (90: compute capability 9.0), from the cache or newly
/// compiled and put there. Needs no driver.
pub fn cubin(nvrtc: &Nvrtc, cache: &Cache, program: &'static Program, architecture: i32) -> Result<Vec<u8>> {
    let name = entry(program, architecture, &nvrtc.version());
    if let Some(code) = cache.get(&name) {
        return Ok(code);
    }
    let code = compile(nvrtc, program, architecture)?;
    cache.put(&name, &code);
    Ok(code)
}

fn options(architecture: i32) -> impl Iterator<Item = String> {
    std::iter::once(format!("--gpu-architecture=sm_{architecture}")).chain(OPTIONS.map(str::to_owned))
}

/// Returns the name of a cache entry. Programs that may differ always have different names.
fn entry(program: &Program, architecture: i32, nvrtc: &str) -> String {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    add(nvrtc);
    options(architecture).for_each(|option| add(&option));
    HEADERS.iter().for_each(|(_, text)| add(text));
    add(program.source);
    let mut name = format!("{}.sm_{architecture}.", program.name);
    for byte in &hash.finalize()[..16] {
        write!(name, "{byte:02x}").expect("a String takes every text");
    }
    name + ".cubin"
}

/// Converts one of our own texts to a C string. Our texts contain no zero bytes.
fn text_of(text: &str) -> CString {
    CString::new(text).expect("no zero byte")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_differ_by_source_options_architecture_and_version() {
        let [one, other, ..] = &PROGRAMS;
        let name = entry(one, 90, "13.2");
        assert!(name.starts_with(&format!("{}.sm_90.", one.name)) && name.ends_with(".cubin"), "{name}");
        assert_eq!(name, entry(one, 90, "13.2"));
        let changed = Program { source: "// changed", ..*one };
        for different in
            [entry(other, 90, "13.2"), entry(one, 80, "13.2"), entry(one, 90, "12.9"), entry(&changed, 90, "13.2")]
        {
            assert_ne!(name, different);
        }
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_with_those_that_are() {
        let error = program("onebit").unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no program of kernels named 'onebit'; known: minmax_u8, minmax_u8_reduce, convert, convert_reduce, update, feedback, average"
        );
        assert_eq!(program("update").unwrap().name, "update");
    }
}
