//! Finding and loading one shared library.
//!
//! The order: the file that a variable names, and then nothing else; what this process has loaded already; the names by which the
//! loader knows the library; `nvidia/*/lib` of Python's site-packages, where packages such as torch's put it.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use bagua_core::platform::file_of_library;

use crate::error::{Error, Result};

/// Which library, and where it may be.
#[derive(Clone, Copy, Debug)]
pub struct Search<'a> {
    /// What errors call it: `libcuda`.
    pub library: &'static str,
    /// Variable that may name a file. It is read elsewhere; here it is for errors.
    pub variable: &'static str,
    /// What the variable holds.
    pub file: Option<&'a Path>,
    /// The loader's names of it, the best first.
    pub names: &'static [&'static CStr],
    /// Folders that may hold `nvidia/*/lib`.
    pub site_packages: &'a [PathBuf],
}

impl Search<'_> {
    /// Loads the first that is found.
    pub fn load(&self) -> Result<Library> {
        if let Some(file) = self.file {
            let library = format!("{} ({}={})", self.library, self.variable, line(file.as_os_str().as_bytes()));
            return Library::at(self.library, file).map_err(|loader| Error::NotLoaded { library, loader });
        }
        // dlopen knows a library that was loaded from any place by the name that it gives itself.
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

    /// The files of these names in `nvidia/*/lib`, those of the best name first.
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

/// A loaded library. It is never unloaded: those of CUDA start threads and register exit handlers.
#[derive(Debug)]
pub struct Library {
    /// dlopen's handle, valid until the process ends.
    handle: NonNull<c_void>,
    /// What errors call it.
    name: &'static str,
    /// The file, as the loader has it.
    path: PathBuf,
}

// SAFETY: a handle of dlopen may be used by any thread.
unsafe impl Send for Library {}
// SAFETY: dlsym may be called by several threads at once.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a file. `Err` is what the loader said.
    fn at(library: &'static str, file: &Path) -> std::result::Result<Library, String> {
        // Without a slash dlopen would look for it in the loader's folders.
        let relative = !file.as_os_str().as_bytes().contains(&b'/');
        let file = if relative { Path::new(".").join(file) } else { file.to_owned() };
        let name = CString::new(file.as_os_str().as_bytes()).map_err(|_| "its name has a zero byte".to_owned())?;
        Library::open(library, &name, 0)
    }

    /// Loads what dlopen finds by this name, with further flags. `Err` is what the loader said.
    fn open(library: &'static str, name: &CStr, flags: c_int) -> std::result::Result<Library, String> {
        // All symbols now: one that is absent would end the process at the call that needs it.
        // SAFETY: the name is NUL-terminated; the initialisers that run are those of the library that the user or the system chose.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | flags) };
        let handle = NonNull::new(handle).ok_or_else(|| loader_error(name))?;
        // SAFETY: opened above, and never closed.
        let path =
            unsafe { file_of_library(handle) }.unwrap_or_else(|| PathBuf::from(OsStr::from_bytes(name.to_bytes())));
        Ok(Library { handle, name: library, path })
    }

    /// The file, as the loader has it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What errors call it: the name and the file.
    pub fn text(&self) -> String {
        format!("{} ({})", self.name, line(self.path.as_os_str().as_bytes()))
    }

    /// The address of a symbol, if the library has it.
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is never closed, and the name is NUL-terminated.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })
    }

    /// The address of a symbol.
    pub(crate) fn address(&self, name: &'static CStr) -> Result<NonNull<c_void>> {
        self.symbol(name).ok_or_else(|| self.lacks(name))
    }

    /// The function of that name, if the library has it.
    ///
    /// # Safety
    ///
    /// `F` is the function pointer type of the library's function.
    pub unsafe fn find<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.symbol(name)?.as_ptr();
        // SAFETY: F is a function pointer, as the caller promises, of the address's size, as was asserted; the address is not null.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }

    /// The function of that name.
    ///
    /// # Safety
    ///
    /// As [`Library::find`].
    pub unsafe fn function<F: Copy>(&self, name: &'static CStr) -> Result<F> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.find(name) }.ok_or_else(|| self.lacks(name))
    }

    /// The error for a function that is absent.
    pub fn lacks(&self, function: &'static CStr) -> Error {
        Error::NoFunction { library: self.text(), function }
    }

    /// The error for a function that returned a code.
    pub fn failed(&self, function: &'static str, name: String, code: i32) -> Error {
        Error::Call { library: self.text(), function, name, code }
    }
}

/// What dlopen said last on this thread.
fn loader_error(name: &CStr) -> String {
    // SAFETY: dlerror returns null or a text that is valid until this thread's next call of a dl function.
    let said = unsafe { libc::dlerror() };
    if said.is_null() {
        return format!("{}: the loader gave no reason", line(name.to_bytes()));
    }
    // SAFETY: as above.
    line(unsafe { CStr::from_ptr(said) }.to_bytes())
}

/// Bytes as one line of text.
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

    /// A search for what is nowhere.
    const NOWHERE: Search<'static> = Search {
        library: "libnothing",
        variable: "BAGUA_LIBNOTHING",
        file: None,
        names: &[c"libbagua-nothing.so.2", c"libbagua-nothing.so.1"],
        site_packages: &[],
    };

    /// An empty folder of this test.
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
        // The C library is there by its name.
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
