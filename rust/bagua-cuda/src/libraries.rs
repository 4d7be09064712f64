//! The CUDA libraries of one process. Each is searched for once, at its first use, and the result is kept.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::compile;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::kernel_cache::Cache;
use crate::loaded_kernels::Compiler;
use crate::nccl::{self, Nccl};
use crate::nvrtc::Nvrtc;
use crate::shared_library::Search;

/// Paths of libraries, from the environment and Python.
#[derive(Clone, Debug, Default)]
pub struct LibraryPaths {
    /// `BAGUA_LIBCUDA`.
    pub libcuda: Option<PathBuf>,
    /// `BAGUA_LIBNVRTC`.
    pub libnvrtc: Option<PathBuf>,
    /// `BAGUA_LIBNCCL`.
    pub libnccl: Option<PathBuf>,
    /// Folders of Python's packages.
    pub site_packages: Vec<PathBuf>,
    /// `NCCL_MULTI_RANK_GPU_ENABLE=1`: NCCL 2.30 lets several ranks use one device.
    pub nccl_multi_rank_gpu: bool,
}

impl LibraryPaths {
    fn libcuda(&self) -> Search<'_> {
        self.search("libcuda", "BAGUA_LIBCUDA", self.libcuda.as_deref(), &[c"libcuda.so.1"])
    }

    fn libnvrtc(&self) -> Search<'_> {
        let names = &[c"libnvrtc.so.13", c"libnvrtc.so.12"];
        self.search("libnvrtc", "BAGUA_LIBNVRTC", self.libnvrtc.as_deref(), names)
    }

    fn libnccl(&self) -> Search<'_> {
        self.search("libnccl", "BAGUA_LIBNCCL", self.libnccl.as_deref(), &[c"libnccl.so.2"])
    }

    fn search<'a>(
        &'a self,
        library: &'static str,
        variable: &'static str,
        file: Option<&'a Path>,
        names: &'static [&'static std::ffi::CStr],
    ) -> Search<'a> {
        Search { library, variable, file, names, site_packages: &self.site_packages }
    }
}

/// The libraries of the process that created this object. Creating it loads nothing.
pub struct Libraries {
    /// Id of the process that created this value. A driver does not work in a forked child of the process that
    /// initialised it.
    owner: u32,
    driver: OnceLock<Result<Driver>>,
    nvrtc: OnceLock<Result<Nvrtc>>,
    nccl: OnceLock<Result<Arc<Nccl>>>,
}

impl Libraries {
    /// Creates the libraries of this process.
    #[expect(clippy::new_without_default, reason = "when it is created decides whose it is")]
    pub fn new() -> Libraries {
        let owner = std::process::id();
        Libraries { owner, driver: OnceLock::new(), nvrtc: OnceLock::new(), nccl: OnceLock::new() }
    }

    /// Returns the driver, even if it does not work. `places` is used only in the first call.
    pub fn driver(&self, places: &LibraryPaths) -> Result<&Driver> {
        self.check_owner()?;
        self.driver.get_or_init(|| places.libcuda().load().map(Driver::new)).as_ref().map_err(Error::clone)
    }

    /// Returns NVRTC. `places` is used only in the first call.
    pub fn nvrtc(&self, places: &LibraryPaths) -> Result<&Nvrtc> {
        self.check_owner()?;
        self.nvrtc.get_or_init(|| places.libnvrtc().load().and_then(Nvrtc::new)).as_ref().map_err(Error::clone)
    }

    /// Returns the function that compiles kernels with NVRTC from these places, and keeps the machine code in `cache`.
    pub fn compiler(self: &Arc<Libraries>, places: LibraryPaths, cache: Cache) -> Compiler {
        // A weak reference, because the libraries own the contexts that own this function.
        let libraries = Arc::downgrade(self);
        Box::new(move |program, architecture| {
            let libraries = libraries.upgrade().expect("a context belongs to libraries that live");
            compile::cubin(libraries.nvrtc(&places)?, &cache, program, architecture)
        })
    }

    /// Returns NCCL. `places` is used only in the first call.
    pub fn nccl(&self, places: &LibraryPaths) -> Result<&Arc<Nccl>> {
        self.check_owner()?;
        let load = || places.libnccl().load().and_then(Nccl::new).map(Arc::new);
        self.nccl.get_or_init(load).as_ref().map_err(Error::clone)
    }

    /// Returns a source of NCCL from these places. NCCL is searched for when a collective needs it.
    pub fn nccl_source(self: &Arc<Libraries>, places: LibraryPaths) -> nccl::Source {
        // As in `compiler`.
        let libraries = Arc::downgrade(self);
        let several = places.nccl_multi_rank_gpu;
        let load = Box::new(move || {
            let libraries = libraries.upgrade().expect("a context belongs to libraries that live");
            libraries.nccl(&places).cloned()
        });
        nccl::Source { load, several }
    }

    /// Returns the reason why no CUDA device can be used, or `None` if one can. Always the same result.
    pub fn why_not(&self, places: &LibraryPaths) -> Option<Error> {
        self.driver(places).and_then(Driver::devices).err()
    }

    /// Returns an error in a forked child, where another thread of the parent may have half initialised a cell.
    fn check_owner(&self) -> Result<()> {
        if self.owner == std::process::id() { Ok(()) } else { Err(Error::Forked { owner: self.owner }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_first_holds() {
        let nowhere = LibraryPaths { libcuda: Some("/nowhere/libcuda.so.1".into()), ..LibraryPaths::default() };
        let elsewhere = LibraryPaths { libcuda: Some("/elsewhere/libcuda.so.1".into()), ..LibraryPaths::default() };
        let libraries = Libraries::new();
        let why = libraries.why_not(&nowhere).unwrap();
        let text = why.to_string();
        assert!(text.starts_with("libcuda (BAGUA_LIBCUDA=/nowhere/libcuda.so.1) does not load: "), "{text}");
        assert_eq!(libraries.why_not(&elsewhere), Some(why));
    }

    #[test]
    fn libraries_of_another_process_are_not_touched() {
        let libraries = Libraries { owner: 0, ..Libraries::new() };
        assert_eq!(libraries.why_not(&LibraryPaths::default()), Some(Error::Forked { owner: 0 }));
        assert_eq!(libraries.nvrtc(&LibraryPaths::default()).err(), Some(Error::Forked { owner: 0 }));
        assert_eq!(libraries.nccl(&LibraryPaths::default()).err(), Some(Error::Forked { owner: 0 }));
    }
}
