//! A store in files: a value is a file whose name ends with its key.
//!
//! Every file is created under another name, and renamed or linked: no process reads a part of it, also on a network
//! file system.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::handshake::random;
use super::{Store, no_number, sum};
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// Larger files are ignored.
const LIMIT: u64 = 64 << 20;

/// How long [`Store::add`] waits for other processes that add to the same key.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A store in files on a file system that all processes share.
#[derive(Debug)]
pub struct FileStore {
    /// The part of a file's path before the key.
    prefix: OsString,
    /// Permissions of a new file.
    mode: u32,
}

impl FileStore {
    /// Values as files of a directory, which exists, readable by their owner only.
    pub fn in_directory(directory: &Path) -> FileStore {
        FileStore { prefix: directory.join("").into_os_string(), mode: 0o600 }
    }

    /// Values as files next to a path, whose names begin with its last component and a dot.
    pub(in super::super) fn next_to(path: &Path) -> FileStore {
        let mut prefix = path.as_os_str().to_owned();
        prefix.push(".");
        FileStore { prefix, mode: 0o666 }
    }

    /// The file with the value of a key.
    pub(in super::super) fn file(&self, key: &str) -> PathBuf {
        let mut name = self.prefix.clone();
        name.push(key.replace('%', "%25").replace('/', "%2F"));
        name.into()
    }

    /// Writes a value under another name, from which `publish` makes the file.
    fn publish(&self, key: &str, value: &[u8], publish: impl FnOnce(&Path, &Path) -> io::Result<()>) -> Result<()> {
        let (file, draft) = (self.file(key), self.file(&format!("{key}.{:032x}", u128::from_le_bytes(random()?))));
        let written = || {
            OpenOptions::new().write(true).create_new(true).mode(self.mode).open(&draft)?.write_all(value)?;
            publish(&draft, &file)
        };
        let outcome = written();
        // After a rename it has gone.
        let _ = fs::remove_file(&draft);
        outcome.map_err(|e| Error::system(&format!("writing {}", file.display()), e))
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.publish(key, value, |draft, file| fs::rename(draft, file))
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let file = self.file(key);
        let read = fs::metadata(&file)
            .and_then(|about| if about.len() > LIMIT { Ok(None) } else { fs::read(&file).map(Some) });
        match read {
            // Network file systems report a stale handle while a file is being replaced.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::StaleNetworkFileHandle) => Ok(None),
            read => read.map_err(|e| Error::system(&format!("reading {}", file.display()), e)),
        }
    }

    fn set_new(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.publish(key, value, |draft, file| match fs::hard_link(draft, file) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        })?;
        self.get(key)?.ok_or_else(|| Error::other(format!("{} is not a value of a store", self.file(key).display())))
    }

    /// Files do not show whether their writer lives, so this replaces what another process has set.
    fn claim(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.set(key, value)?;
        Ok(value.to_vec())
    }

    fn remove(&self, key: &str) -> Result<()> {
        match fs::remove_file(self.file(key)) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::system(&format!("removing {key:?}"), e)),
            _ => Ok(()),
        }
    }

    fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let before = self.prefix.as_bytes();
        let (directory, beginning) =
            before.split_at(before.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1));
        let directory = if directory.is_empty() { Path::new(".") } else { Path::new(OsStr::from_bytes(directory)) };
        let failed = |e| Error::system(&format!("reading the directory {}", directory.display()), e);
        let mut keys = Vec::new();
        for entry in fs::read_dir(directory).map_err(failed)? {
            if let Some(key) = entry.map_err(failed)?.file_name().as_bytes().strip_prefix(beginning) {
                keys.push(String::from_utf8_lossy(key).replace("%2F", "/").replace("%25", "%"));
            }
        }
        keys.retain(|key| key.starts_with(prefix));
        keys.sort_unstable();
        Ok(keys)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let path = self.file(&format!("{key}.lock"));
        let failed = |e: io::Error| Error::system(&format!("locking {}", path.display()), e);
        let lock = File::options().write(true).create(true).truncate(false).mode(self.mode).open(&path);
        let lock = lock.map_err(failed)?;
        let deadline = Deadline::after(LOCK_TIMEOUT);
        // The kernel releases the lock when the process that holds it ends.
        while let Err(e) = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            if e != rustix::io::Errno::WOULDBLOCK || deadline.passed() {
                return Err(failed(e.into()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let sum = sum(self.get(key)?.as_deref(), amount).ok_or_else(|| no_number(key))?;
        self.set(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }
}
