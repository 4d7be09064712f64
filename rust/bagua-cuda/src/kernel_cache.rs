//! A folder of compiled machine code.
//!
//! An entry is a file: eight magic bytes, the length of the code as eight bytes, its SHA-256, the code. It is written
//! under another name and then renamed, so that readers never see a part of it and several processes may write the same
//! entry. If anything is wrong with the folder or an entry, the code is compiled again; the cache never returns errors.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

const MAGIC: [u8; 8] = *b"bagua\0cu";
const HEADER: usize = 8 + 8 + 32;

/// A folder of machine code by name.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// Creates a cache in this folder, which need not exist. `None` keeps nothing.
    pub fn new(folder: Option<PathBuf>) -> Cache {
        Cache { folder }
    }

    /// Returns the code with that name, if there is an intact entry.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.folder.as_ref()?.join(name)).ok()?;
        let (header, code) = bytes.split_at_checked(HEADER)?;
        if header != self::header(code) {
            return None;
        }
        bytes.drain(..HEADER);
        Some(bytes)
    }

    /// Writes an entry for the code. If that fails, the code is compiled again next time.
    pub fn put(&self, name: &str, code: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if fs::create_dir_all(folder).is_err() {
            return;
        }
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let part = folder.join(format!("{name}.{}.{number}", std::process::id()));
        let kept = write(&part, code).and_then(|()| fs::rename(&part, folder.join(name)));
        if kept.is_err() {
            // The file may not exist if writing it failed.
            let _ = fs::remove_file(&part);
        }
    }
}

fn write(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let mut file = fs::File::options().write(true).create_new(true).open(path)?;
    file.write_all(&header(code))?;
    file.write_all(code)
}

fn header(code: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..16].copy_from_slice(&(code.len() as u64).to_le_bytes());
    header[16..].copy_from_slice(&Sha256::digest(code));
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an empty folder for a test.
    fn folder(test: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("bagua-cuda-cache-{}-{test}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn what_was_kept_is_found_and_nothing_else_is_in_the_folder() {
        let folder = folder("kept");
        let cache = Cache::new(Some(folder.join("bagua/cuda")));
        assert_eq!(cache.get("a.cubin"), None);
        cache.put("a.cubin", b"code");
        cache.put("a.cubin", b"other code");
        assert_eq!(cache.get("a.cubin").as_deref(), Some(&b"other code"[..]));
        assert_eq!(cache.get("b.cubin"), None);
        let names: Vec<_> =
            fs::read_dir(folder.join("bagua/cuda")).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(names, ["a.cubin"]);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_damaged_entry_is_none() {
        let folder = folder("damaged");
        let cache = Cache::new(Some(folder.clone()));
        cache.put("a.cubin", b"code");
        let whole = fs::read(folder.join("a.cubin")).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(folder.join("a.cubin"), changed).unwrap();
            assert_eq!(cache.get("a.cubin"), None, "byte {at} changed");
            fs::write(folder.join("a.cubin"), &whole[..at]).unwrap();
            assert_eq!(cache.get("a.cubin"), None, "cut to {at} bytes");
        }
        fs::write(folder.join("a.cubin"), &whole).unwrap();
        assert_eq!(cache.get("a.cubin").as_deref(), Some(&b"code"[..]));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_cannot_be_is_no_error() {
        let folder = folder("file");
        fs::write(&folder, "a file").unwrap();
        let cache = Cache::new(Some(folder.join("below")));
        cache.put("a.cubin", b"code");
        assert_eq!(cache.get("a.cubin"), None);
        fs::remove_file(folder).unwrap();
        let none = Cache::default();
        none.put("a.cubin", b"code");
        assert_eq!(none.get("a.cubin"), None);
    }
}
