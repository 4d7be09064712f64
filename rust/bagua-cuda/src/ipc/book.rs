//! Who has memory of other processes open: a lock on a file in memory that the ranks of a host share.
//!
//! Memory must not be freed while another process has it open, and no call of the driver tells. So each rank holds a shared lock from
//! before it opens anything until it has closed everything, and frees its own memory when nobody holds one. The system takes the lock of a
//! process that dies.

use std::fs::{File, TryLockError};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::{Duration, Instant};

use bagua_core::error::{Error, Result};

/// The longest pause between two questions.
const PAUSE: Duration = Duration::from_millis(5);

/// See the module.
pub(super) struct Book {
    /// An open file of this process's own, which has the lock.
    file: File,
}

impl Book {
    /// A new one.
    ///
    /// # Errors
    /// `System`.
    pub(super) fn new() -> Result<Book> {
        // SAFETY: the name is NUL-terminated.
        let fd = unsafe { libc::memfd_create(c"bagua-ipc".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(Error::system("a file in memory", std::io::Error::last_os_error()));
        }
        // SAFETY: it was just made, and nobody else has it.
        Ok(Book { file: unsafe { File::from_raw_fd(fd) } })
    }

    /// Its number among the files of this process.
    pub(super) fn number(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// The book of another process, or of this one, as a file of its own.
    ///
    /// # Errors
    /// `System` where the process is not visible from here.
    pub(super) fn open(process: u32, number: i32) -> Result<Book> {
        let path = format!("/proc/{process}/fd/{number}");
        // Where processes have numbers of their own, it may be another one's.
        if std::fs::read_link(&path).is_ok_and(|name| !name.to_string_lossy().contains("bagua-ipc")) {
            return Err(Error::other(format!("{path} is not the file of another rank")));
        }
        let file =
            File::open(&path).map_err(|error| Error::system(&format!("opening {path} of another rank"), error))?;
        Ok(Book { file })
    }

    /// From now on this rank may have memory of others open.
    ///
    /// # Errors
    /// `System`.
    pub(super) fn enter(&self) -> Result<()> {
        self.file.try_lock_shared().map_err(|error| Error::system("locking a file in memory", error))
    }

    /// It has none open any more.
    pub(super) fn leave(&self) {
        // Without the lock there is nothing to do.
        let _ = self.file.unlock();
    }

    /// Whether all ranks have left, or do within `limit`.
    pub(super) fn wait_until_left(&self, limit: Duration) -> bool {
        let start = Instant::now();
        let mut pause = Duration::from_micros(50);
        loop {
            match self.file.try_lock() {
                Ok(()) => {
                    self.leave();
                    return true;
                }
                Err(TryLockError::WouldBlock) if start.elapsed() < limit => {
                    std::thread::sleep(pause);
                    pause = PAUSE.min(pause * 2);
                }
                Err(_) => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_book_is_free_when_all_who_entered_have_left() {
        let first = Book::new().unwrap();
        let second = Book::open(std::process::id(), first.number()).unwrap();
        first.enter().unwrap();
        second.enter().unwrap();
        first.leave();
        assert!(!first.wait_until_left(Duration::from_millis(1)));
        second.leave();
        assert!(first.wait_until_left(Duration::ZERO) && second.wait_until_left(Duration::ZERO));
    }

    #[test]
    fn a_book_is_free_when_the_file_of_one_that_did_not_leave_is_closed() {
        let first = Book::new().unwrap();
        let second = Book::open(std::process::id(), first.number()).unwrap();
        second.enter().unwrap();
        drop(second);
        assert!(first.wait_until_left(Duration::ZERO));
    }

    #[test]
    fn a_book_that_is_not_there_is_an_error_that_names_it() {
        let error = Book::open(std::process::id(), 99_999).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("/fd/99999"), "{error}");
    }
}
