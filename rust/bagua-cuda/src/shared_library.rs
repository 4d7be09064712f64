//! Finding and loading one shared library.
//!
//! If a variable names a file, only that file is tried. Otherwise the order is: an already loaded library, the names
//! that the loader knows, and `nvidia/*/lib` in Python's site-packages, where torch's packages put it.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use bagua_core::platform::file_of_library;

use crate::error::{Error, Result};

/// The names of a library, and the places where it may be.
#[derive(Clone, Copy, Debug)]
pub struct Search<'a> {
    /// The library's name in error texts, for example `libcuda`.
    pub library: &'static str,
    /// Name of the environment variable that may name a file, for error texts.
    pub variable: &'static str,
    /// Value of the variable.
    pub file: Option<&'a Path>,
    /// Names of the library for the loader, best first.
    pub names: &'static [&'static CStr],
    /// Folders that may contain `nvidia/*/lib`.
    pub site_packages: &'a [PathBuf],
}

impl Search<'_> {
    /// Loads the first library that is found.
    pub fn load(&self) -> Result<Library> {
        if let Some(file) = self.file {
            let library = format!("{} ({}={})", self.library, self.variable, line(file.as_os_str().as_bytes()));
            return Library::at(self.library, file).map_err(|loader| Error::NotLoaded { library, loader });
        }
        // dlopen finds a loaded library by the name in its header, no matter from where it was loaded.
        if let Some(loaded) =
            self.names.iter().find_map(|name| Library::open(self.library, name, libc::RTLD_NOLOAD).ok())
        {
            return Ok(loaded);
        }
        let mut said: Vec<String> = Vec::new();
        for name in self.names {
            match Library::open(self.library, name, 0) {
                Ok(library) => return Ok(library),
                Err(loader) => said.push(loader),
            }
        }
        for file in self.files() {
            match Library::at(self.library, &file) {
                Ok(library) => return Ok(library),
                Err(loader) => said.push(loader),
            }
        }
        Err(Error::NotLoaded { library: self.library.to_owned(), loader: said.join("; ") })
    }

    /// Returns the existing files with these names in `nvidia/*/lib`, best name first.
    fn files(&self) -> Vec<PathBuf> {
        let mut folders = Vec::new();
        for site in self.site_packages {
            let entries = std::fs::read_dir(site.join("nvidia")).into_iter().flatten();
            let mut here: Vec<_> = entries.flatten().map(|entry| entry.path().join("lib")).collect();
            here.sort();
            folders.extend(here);
        }
        let candidates = self
            .names
            .iter()
            .flat_map(|name| folders.iter().map(move |folder| folder.join(OsStr::from_bytes(name.to_bytes()))));
        candidates.filter(|file| file.exists()).collect()
    }
}

/// A loaded library. It is never unloaded, because CUDA libraries start threads and register exit handlers.
#[derive(Debug)]
pub struct Library {
    /// dlopen's handle, valid until the process ends.
    handle: NonNull<c_void>,
    name: &'static str,
    /// Path of the file, as the loader reports it.
    path: PathBuf,
}

// SAFETY: any thread may use a handle of dlopen.
unsafe impl Send for Library {}
// SAFETY: several threads may call dlsym at once.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a file, or returns the loader's message.
    fn at(library: &'static str, file: &Path) -> std::result::Result<Library, String> {
        // Without a slash, dlopen would search the loader's folders.
        let relative = !file.as_os_str().as_bytes().contains(&b'/');
        let file = if relative { Path::new(".").join(file) } else { file.to_owned() };
        let name = CString::new(file.as_os_str().as_bytes()).map_err(|_| "its name has a zero byte".to_owned())?;
        Library::open(library, &name, 0)
    }

    /// Loads what dlopen finds by this name, with additional flags, or returns the loader's message.
    fn open(library: &'static str, name: &CStr, flags: c_int) -> std::result::Result<Library, String> {
        // Resolves all symbols now. Otherwise a missing one would end the process in the call that needs it.
        // SAFETY: the name is NUL-terminated. The initialisers belong to the library that the user or system chose.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | flags) };
        let handle = NonNull::new(handle).ok_or_else(|| loader_error(name))?;
        // SAFETY: the handle was opened above and is never closed.
        let path =
            unsafe { file_of_library(handle) }.unwrap_or_else(|| PathBuf::from(OsStr::from_bytes(name.to_bytes())));
        Ok(Library { handle, name: library, path })
    }

    /// Returns the file, as reported by the loader.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name and file, for error texts.
    pub fn text(&self) -> String {
        format!("{} ({})", self.name, line(self.path.as_os_str().as_bytes()))
    }

    /// Returns the address of a symbol, if the library has it.
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is never closed, and the name is NUL-terminated.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })
    }

    pub(crate) fn address(&self, name: &'static CStr) -> Result<NonNull<c_void>> {
        self.symbol(name).ok_or_else(|| self.lacks(name))
    }

    /// Returns the function with that name, if the library has it.
    ///
    /// # Safety
    /// `F` must be the function pointer type of the library's function.
    pub unsafe fn find<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.symbol(name)?.as_ptr();
        // SAFETY: F is a function pointer, guaranteed by the caller, of the address's size, as asserted. It is not
        // null.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }

    /// Returns the function with that name.
    ///
    /// # Safety
    /// The conditions of [`Library::find`].
    pub unsafe fn function<F: Copy>(&self, name: &'static CStr) -> Result<F> {
        // SAFETY: the caller gives the same guarantee.
        unsafe { self.find(name) }.ok_or_else(|| self.lacks(name))
    }

    /// Returns the error for a missing function.
    pub fn lacks(&self, function: &'static CStr) -> Error {
        Error::NoFunction { library: self.text(), function }
    }

    /// Returns the error for a function that returned a code.
    pub fn failed(&self, function: &'static str, name: String, code: i32) -> Error {
        Error::Call { library: self.text(), function, name, code }
    }
}

/// Returns the last message of dlopen on this thread.
fn loader_error(name: &CStr) -> String {
    // SAFETY: dlerror returns null, or a text that is valid until this thread's next call of a dl function.
    let said = unsafe { libc::dlerror() };
    if said.is_null() {
        return format!("{}: the loader gave no reason", line(name.to_bytes()));
    }
    // SAFETY: as above.
    line(unsafe { CStr::from_ptr(said) }.to_bytes())
}

pub(crate) fn line(bytes: &[u8]) -> String {
    let mut text = String::new();
    for char in String::from_utf8_lossy(bytes).chars() {
        if char.is_control() {
            write!(text, "{}", char.escape_default()).unwrap_or_default();
        } else {
            text.push(char);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOWHERE: Search<'static> = Search {
        library: "libnothing",
        variable: "BAGUA_LIBNOTHING",
        file: None,
        names: &[c"libbagua-nothing.so.2", c"libbagua-nothing.so.1"],
        site_packages: &[],
    };

    /// Creates an empty folder for a test.
    fn folder(test: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("bagua-cuda-{}-{test}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn an_absent_library_is_an_error_with_the_loaders_words_for_each_name() {
        let error = NOWHERE.load().unwrap_err();
        assert_eq!(error, NOWHERE.load().unwrap_err());
        let text = error.to_string();
        assert!(text.starts_with("libnothing does not load: libbagua-nothing.so.2: "), "{text}");
        assert!(text.contains("; libbagua-nothing.so.1: "), "{text}");
    }

    #[test]
    fn a_file_that_is_named_is_the_only_one_that_is_tried() {
        let folder = folder("named");
        let empty = folder.join("a\nb.so");
        std::fs::write(&empty, "").unwrap();
        // The C library can be found by its name.
        let search = Search { file: Some(&empty), names: &[c"libc.so.6"], ..NOWHERE };
        let text = search.load().unwrap_err().to_string();
        assert!(text.starts_with("libnothing (BAGUA_LIBNOTHING="), "{text}");
        assert!(text.contains(r"a\nb.so) does not load: ") && !text.contains('\n'), "{text}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_library_that_is_loaded_already_comes_before_the_loaders_other_names() {
        let search = Search { names: &[c"libbagua-nothing.so.1", c"libc.so.6"], ..NOWHERE };
        let library = search.load().unwrap();
        assert!(library.path().file_name().unwrap().to_str().unwrap().starts_with("libc"), "{library:?}");
        assert!(library.symbol(c"getpid").is_some());
        assert!(library.symbol(c"cuInit").is_none());
        assert_eq!(
            library.lacks(c"cuInit").to_string(),
            format!("libnothing ({}) has no function cuInit", library.path().display())
        );
    }

    #[test]
    fn the_files_of_site_packages_are_listed_by_name_then_folder() {
        let site = folder("site");
        for (part, name) in
            [("b", "libbagua-nothing.so.1"), ("a", "libbagua-nothing.so.1"), ("b", "libbagua-nothing.so.2")]
        {
            let lib = site.join("nvidia").join(part).join("lib");
            std::fs::create_dir_all(&lib).unwrap();
            std::fs::write(lib.join(name), "no library").unwrap();
        }
        let sites = [site.join("absent"), site.clone()];
        let search = Search { site_packages: &sites, ..NOWHERE };
        let at = |path: &str| site.join("nvidia").join(path);
        let expected =
            ["b/lib/libbagua-nothing.so.2", "a/lib/libbagua-nothing.so.1", "b/lib/libbagua-nothing.so.1"].map(at);
        assert_eq!(search.files(), expected);
        let text = search.load().unwrap_err().to_string();
        assert!(text.contains(expected[0].to_str().unwrap()), "{text}");
        std::fs::remove_dir_all(site).unwrap();
    }
}
