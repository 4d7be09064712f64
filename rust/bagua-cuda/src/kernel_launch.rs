//! Loading the machine code of kernels for a device, and launching them.
//!
//! A program is compiled for the device's own architecture, and loaded when one of its kernels is first used. Like the
//! primary context, it stays loaded until the process ends.

use std::collections::BTreeMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr;

use bagua_core::error::{Error, Result};
use bagua_core::wait::lock;
use cudarc::driver::sys::{CUdevice_attribute, CUfunction, CUmodule};

use crate::context::Context;
use crate::driver_functions::{CUstream, checked};
use crate::kernels::{Grid, Program, THREADS, program_of};
use crate::loaded_kernels::{Compiler, Kernel};

impl Context {
    /// Sets the source of machine code for this device. Later calls have no effect.
    pub fn compile_with(&self, compiler: Compiler) {
        let _ = self.kernels().compiler.set(compiler);
    }

    /// Returns the number of multiprocessors of the device.
    pub(crate) fn processors(&self) -> Result<u32> {
        if let Some(known) = self.kernels().processors.get() {
            return Ok(*known);
        }
        let found = self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let found = u32::try_from(found).unwrap_or(1).max(1);
        Ok(*self.kernels().processors.get_or_init(|| found))
    }

    /// Returns the kernel with that name. Takes seconds if its program is neither loaded nor in the cache. Fails with
    /// `Unavailable` if NVRTC is missing or fails, and `Device`.
    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel> {
        let mut loaded = lock(&self.kernels().loaded);
        if let Some(kernel) = loaded.get(name) {
            return Ok(*kernel);
        }
        let program = program_of(name).ok_or_else(|| Error::other(format!("there is no kernel named {name}")))?;
        self.load(program, &mut loaded)?;
        loaded.get(name).copied().ok_or_else(|| Error::other(format!("{} lacks {name}", program.name)))
    }

    fn load(&self, program: &'static Program, loaded: &mut BTreeMap<&'static str, Kernel>) -> Result<()> {
        let architecture = 10 * self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let refused = |why: String| {
            let text = format!("the kernels of {} need NVRTC on cuda:{}: {why}", program.name, self.device());
            Error::Unavailable(text)
        };
        let compiler =
            self.kernels().compiler.get().ok_or_else(|| refused("no path of libnvrtc was given".to_owned()))?;
        let code = compiler(program, architecture).map_err(|error| refused(error.to_string()))?;
        let _entered = self.enter()?;
        let mut module: CUmodule = ptr::null_mut();
        // SAFETY: NVRTC made this ELF file, and its checksum was verified. The function writes one handle.
        unsafe { checked!(self, cuModuleLoadData(&raw mut module, code.as_ptr().cast())) }?;
        for name in program.kernels {
            let symbol = CString::new(*name).expect("no zero byte");
            let mut function: CUfunction = ptr::null_mut();
            // SAFETY: the module was loaded. The function writes one handle.
            unsafe { checked!(self, cuModuleGetFunction(&raw mut function, module, symbol.as_ptr())) }?;
            loaded.insert(name, Kernel(function));
        }
        Ok(())
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: the function writes one int.
        unsafe { checked!(self, cuDeviceGetAttribute(&raw mut value, attribute, self.device())) }?;
        Ok(value)
    }

    /// Launches a kernel on a stream. A 4-byte argument is the lower half of its word.
    ///
    /// # Safety
    /// The arguments must be the kernel's parameters, as listed in `kernels.rs`. They must point to memory of this
    /// device that is large enough, stays allocated, and is not used otherwise, until the work on the stream is done.
    pub(crate) unsafe fn launch(
        &self,
        kernel: Kernel,
        grid: Grid,
        stream: CUstream,
        arguments: &mut [u64],
    ) -> Result<()> {
        // The lower half of a word is its first bytes.
        const { assert!(cfg!(target_endian = "little")) };
        let mut places: Vec<*mut c_void> = arguments.iter_mut().map(|word| ptr::from_mut(word).cast()).collect();
        // SAFETY: guaranteed by the caller.
        unsafe { self.launch_with(kernel, grid, stream, &mut places) }
    }

    /// Launches a kernel like [`Context::launch`]. `places` are the addresses of the arguments, which must have the
    /// sizes of the parameters.
    ///
    /// # Safety
    /// The conditions of [`Context::launch`].
    pub(crate) unsafe fn launch_with(
        &self,
        kernel: Kernel,
        grid: Grid,
        stream: CUstream,
        places: &mut [*mut c_void],
    ) -> Result<()> {
        let [x, y, z] = grid.blocks;
        let _entered = self.enter()?;
        // SAFETY: guaranteed by the caller. The driver copies the arguments before it returns.
        unsafe {
            checked!(
                self,
                cuLaunchKernel(
                    kernel.0,
                    x,
                    y,
                    z,
                    THREADS,
                    1,
                    1,
                    grid.shared,
                    stream as _,
                    places.as_mut_ptr(),
                    ptr::null_mut(),
                )
            )
        }
    }
}
