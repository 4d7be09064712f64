//! `CudaLibraries`: which libraries and devices of CUDA this process can use, and the compiler of kernels.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bagua_core::error::Error;
use bagua_cuda::{Cache, Libraries, LibraryPaths, Memory, compile};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::cuda_call::CudaDevice;
use crate::errors;

/// The attributes of `bagua.config.CudaPlaces` that are read here.
#[derive(FromPyObject)]
pub struct LibraryPathsArgument {
    libcuda: Option<PathBuf>,
    libnvrtc: Option<PathBuf>,
    libnccl: Option<PathBuf>,
    site_packages: Vec<PathBuf>,
    nccl_multi_rank_gpu: bool,
}

impl From<LibraryPathsArgument> for LibraryPaths {
    fn from(from: LibraryPathsArgument) -> LibraryPaths {
        let LibraryPathsArgument { libcuda, libnvrtc, libnccl, site_packages, nccl_multi_rank_gpu } = from;
        LibraryPaths { libcuda, libnvrtc, libnccl, site_packages, nccl_multi_rank_gpu }
    }
}

/// The CUDA driver, NVRTC and NCCL in the process that creates this object. A forked child cannot use them.
///
/// The constructor loads nothing. The first use of a library searches the places (`bagua.config.CudaPlaces`) of that
/// call. Later calls use the library that was found.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct CudaLibraries {
    core: Arc<Libraries>,
}

#[pymethods]
impl CudaLibraries {
    #[new]
    fn new() -> CudaLibraries {
        CudaLibraries { core: Arc::new(Libraries::new()) }
    }

    /// Returns one line that says why no device can be used, or None. Every call returns the same. Initialises the
    /// driver.
    fn why_not(&self, py: Python<'_>, places: LibraryPathsArgument) -> Option<String> {
        let places = places.into();
        py.detach(|| self.core.why_not(&places)).map(|error| error.to_string())
    }

    /// Returns the libraries and devices of this process. `driver`, `nvrtc` and `nccl` are dicts with `path`, `version`
    /// and `error`, each None if it does not apply. The dict of `nvrtc` also has `architectures`. `devices` are dicts
    /// with `name`, `capability` (major, minor), `memory` (bytes) and `uuid` (16 bytes), each None if the driver does
    /// not report it. Initialises the driver.
    fn report<'py>(&self, py: Python<'py>, places: LibraryPathsArgument) -> PyResult<Bound<'py, PyDict>> {
        let places = places.into();
        let (driver, nvrtc, nccl) =
            py.detach(|| (self.core.driver(&places), self.core.nvrtc(&places), self.core.nccl(&places)));
        let report = PyDict::new(py);

        let file = driver.as_ref().ok();
        let error = self.core.why_not(&places);
        report.set_item("driver", library(py, file.map(|it| it.path()), file.and_then(|it| it.version()), error)?)?;

        let file = nvrtc.as_ref().ok();
        let entry = library(py, file.map(|it| it.path()), file.map(|it| it.version()), nvrtc.as_ref().err())?;
        entry.set_item("architectures", file.map_or(&[][..], |it| it.architectures()))?;
        report.set_item("nvrtc", entry)?;

        let file = nccl.as_ref().ok();
        let error = nccl.as_ref().map_or_else(|error| Some(error.clone()), |it| it.functions().err());
        report.set_item("nccl", library(py, file.map(|it| it.path()), file.map(|it| it.version()), error)?)?;

        let mut devices = Vec::new();
        for device in driver.and_then(|it| it.devices()).unwrap_or_default() {
            let entry = PyDict::new(py);
            entry.set_item("name", &device.name)?;
            entry.set_item("capability", device.capability)?;
            entry.set_item("memory", device.memory)?;
            entry.set_item("uuid", device.uuid.map(|uuid| PyBytes::new(py, &uuid)))?;
            devices.push(entry);
        }
        report.set_item("devices", devices)?;
        Ok(report)
    }

    /// Returns the machine code of a program for an architecture (90: compute capability 9.0), from the folder `cache`.
    /// If it is not there, compiles it without a driver and stores it. With None, nothing is stored.
    fn cubin<'py>(
        &self,
        py: Python<'py>,
        places: LibraryPathsArgument,
        cache: Option<PathBuf>,
        program: &str,
        architecture: i32,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let places = places.into();
        let code = py.detach(|| {
            let program = compile::program(program)?;
            compile::cubin(self.core.nvrtc(&places)?, &Cache::new(cache), program, architecture)
        });
        Ok(PyBytes::new(py, &code.map_err(|error| raise(py, &error))?))
    }

    /// Returns the device with this number. The first use of a device may create its primary context, which is slow.
    /// The first call for a device fixes the places and the folder `cache` (None: no cache) of its kernels and of NCCL.
    ///
    /// Raises BaguaError with the text of `why_not()` if there is no CUDA, and DeviceError.
    fn device(
        &self,
        py: Python<'_>,
        places: LibraryPathsArgument,
        cache: Option<PathBuf>,
        number: i32,
    ) -> PyResult<CudaDevice> {
        let places: LibraryPaths = places.into();
        let context = py.detach(|| {
            let context = self.core.driver(&places).map_err(Error::from)?.context(number)?;
            context.compile_with(self.core.compiler(places.clone(), Cache::new(cache)));
            context.find_nccl_with(self.core.nccl_source(places.clone()));
            Ok(context)
        });
        context.map(CudaDevice::of).map_err(|e| errors::raise(py, e))
    }

    /// Returns the number of the device that has the memory at an address; None for host memory, -1 for managed memory.
    /// Raises the errors of `device`.
    fn device_of(&self, py: Python<'_>, places: LibraryPathsArgument, address: usize) -> PyResult<Option<i32>> {
        let places = places.into();
        let memory = py.detach(|| self.core.driver(&places).map_err(Error::from)?.memory_at(address));
        Ok(match memory.map_err(|e| errors::raise(py, e))? {
            Memory::Device(number) => Some(number),
            Memory::Managed => Some(-1),
            Memory::Other => None,
        })
    }
}

fn raise(py: Python<'_>, error: &bagua_cuda::Error) -> PyErr {
    let raised = || -> PyResult<PyErr> {
        Ok(PyErr::from_value(py.import("bagua.errors")?.getattr("BaguaError")?.call1((error.to_string(),))?))
    };
    raised().unwrap_or_else(|while_raising| while_raising)
}

/// Returns the report's entry of one library.
fn library<'py>(
    py: Python<'py>,
    path: Option<&Path>,
    version: Option<String>,
    error: Option<impl ToString>,
) -> PyResult<Bound<'py, PyDict>> {
    let entry = PyDict::new(py);
    entry.set_item("path", path.map(Path::as_os_str))?;
    entry.set_item("version", version)?;
    entry.set_item("error", error.map(|error| error.to_string()))?;
    Ok(entry)
}
