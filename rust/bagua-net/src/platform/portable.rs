//! The functions of the module above on systems of which it knows no more than POSIX.

use std::ffi::{CStr, c_void};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags};

use super::Processors;
use crate::error::Result;

pub const SHARES_MEMORY: bool = false;
pub const NO_SIGNAL: SendFlags = SendFlags::empty();
pub const CLOSE_ON_EXEC: RecvFlags = RecvFlags::empty();
pub const OPEN_DESCRIPTORS: &str = "/dev/fd";

/// The longest sleep of a wait, which nothing ends: only tests wait for a word where no memory is shared.
const LONGEST: Duration = Duration::from_millis(1);

/// The longest name of a host that POSIX has.
const HOST_NAME: usize = 255;

/// The most bytes that `getentropy` gives at once.
const ENTROPY: usize = 256;

pub fn open_descriptors() -> Option<usize> {
    None
}

pub fn release_memory() {}

pub fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    if word.load(Ordering::SeqCst) == seen {
        std::thread::sleep(timeout.min(LONGEST));
    }
}

pub fn futex_wake(_word: &AtomicU32) {}

pub fn shared_file(_label: &str, _len: usize) -> io::Result<OwnedFd> {
    Err(ErrorKind::Unsupported.into())
}

pub fn sealed_len(_file: BorrowedFd<'_>) -> io::Result<Option<usize>> {
    Err(ErrorKind::Unsupported.into())
}

/// # Safety
/// None is needed; the function of the module above has one for others.
pub unsafe fn populate(_begin: *mut c_void, _len: usize) -> io::Result<()> {
    Ok(())
}

pub fn limit_stream(_stream: &TcpStream, _unacknowledged: Duration, _unsent: u32) -> io::Result<()> {
    Ok(())
}

pub fn expedite(_stream: BorrowedFd<'_>) -> io::Result<()> {
    Ok(())
}

pub fn unsent(_stream: &TcpStream) -> Option<usize> {
    None
}

pub fn processor() -> Option<u32> {
    None
}

pub fn thread_number() -> i32 {
    0
}

pub fn processors(_thread: i32) -> io::Result<Processors> {
    Err(ErrorKind::Unsupported.into())
}

pub fn set_processors(_set: &Processors) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

pub fn host_id() -> Result<String> {
    Ok(super::host_name())
}

pub fn host_name() -> String {
    // One more than the longest, so that the last one is NUL.
    let mut name = [0; HOST_NAME + 1];
    // SAFETY: writes at most so many bytes.
    if unsafe { libc::gethostname(name.as_mut_ptr().cast(), HOST_NAME) } != 0 {
        return String::new();
    }
    CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned())
}

pub fn pid_namespace() -> u64 {
    0
}

pub fn is_stopped(_process: u32) -> bool {
    false
}

pub fn listen_by_name(_name: &[u8]) -> io::Result<UnixListener> {
    Err(ErrorKind::Unsupported.into())
}

pub fn path_of_name(_name: &[u8]) -> io::Result<PathBuf> {
    Err(ErrorKind::Unsupported.into())
}

pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    for chunk in bytes.chunks_mut(ENTROPY) {
        // SAFETY: writes so many bytes.
        if unsafe { libc::getentropy(chunk.as_mut_ptr().cast(), chunk.len()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// # Safety
/// None is needed; the function of the module above has one for others.
pub unsafe fn file_of_library(_handle: NonNull<c_void>) -> Option<PathBuf> {
    None
}

/// A connection of this process with itself.
pub struct Waker {
    readable: UnixStream,
    writable: UnixStream,
}

impl Waker {
    pub fn new() -> io::Result<Waker> {
        let (readable, writable) = UnixStream::pair()?;
        readable.set_nonblocking(true)?;
        writable.set_nonblocking(true)?;
        Ok(Waker { readable, writable })
    }

    pub fn wake(&self) {
        // One without room refuses, and has bytes that wake too.
        let _ = (&self.writable).write(&[0]);
    }

    pub fn clear(&self) {
        let mut bytes = [0; 64];
        while (&self.readable).read(&mut bytes).is_ok_and(|count| count == bytes.len()) {}
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}
