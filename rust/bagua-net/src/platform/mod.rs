//! The calls to Linux that the standard library and rustix do not offer in the form that this project needs.

#![allow(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("Bagua runs on Linux only: it needs memfd, futexes on shared memory and abstract sockets");

mod cpu_set;

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::fs;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::net::{RecvFlags, SendFlags, sockopt};
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::thread::futex;

use crate::error::{Error, Result};
pub use cpu_set::Processors;

/// Flags for every send on a socket. Sending on a closed connection returns an error instead of raising SIGPIPE.
pub const NO_SIGNAL: SendFlags = SendFlags::NOSIGNAL;

/// Flags for receiving descriptors. Programs that this process starts do not inherit them.
pub const CLOSE_ON_EXEC: RecvFlags = RecvFlags::CMSG_CLOEXEC;

/// The directory with one entry per open descriptor of this process, including the descriptor that reads it.
pub const OPEN_DESCRIPTORS: &str = "/proc/self/fd";

/// Returns the number of open descriptors of this process.
///
/// # Errors
/// When [`OPEN_DESCRIPTORS`] cannot be read.
pub fn open_descriptors() -> io::Result<usize> {
    // Since Linux 6.2 the size of the directory is the number of its entries; before, it was 0.
    match fs::metadata(OPEN_DESCRIPTORS)?.len() {
        // One of the entries is the descriptor that reads the directory.
        0 => Ok(fs::read_dir(OPEN_DESCRIPTORS)?.count().saturating_sub(1)),
        open => Ok(usize::try_from(open).unwrap_or(usize::MAX)),
    }
}

/// Sleeps while `*word == seen`, for at most `timeout`. May return early. Works across processes on shared memory.
#[inline]
pub fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    let timeout = futex::Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // After every outcome (woken, changed, timed out, interrupted), the caller checks its condition again.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
}

/// Wakes every thread that sleeps on `word`, in every process.
#[inline]
pub fn futex_wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Creates an anonymous file of `len` zeros, for memory that processes share. `label` shows in `/proc/<pid>/maps`.
///
/// The size is sealed, because a process that shrank the file would make the others die of SIGBUS.
pub fn shared_file(label: &str, len: usize) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(label, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Returns the size of a file that another process created with [`shared_file`], or `None` if the file could shrink.
pub fn sealed_len(file: BorrowedFd<'_>) -> io::Result<Option<usize>> {
    if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return Ok(None);
    }
    Ok(Some(usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0)))
}

/// Allocates and maps every page now. Otherwise the first access to each page costs 1 to 2.5 us.
///
/// Has no effect before Linux 5.14.
///
/// # Errors
/// When there is not enough memory.
///
/// # Safety
/// The range is mapped, readable and writable, and starts at a page boundary.
pub unsafe fn populate(begin: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: mapped, by this function's promise; the advice leaves the contents as they are.
    match unsafe { rustix::mm::madvise(begin, len, rustix::mm::Advice::LinuxPopulateWrite) } {
        Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Limits how many unsent bytes the buffer of a connection holds.
///
/// # Errors
/// When the kernel refuses the option.
pub fn limit_unsent(stream: &TcpStream, bytes: u32) -> io::Result<()> {
    socket2::SockRef::from(stream).set_tcp_notsent_lowat(bytes)
}

/// Prefers the packets of a connection that carries few bytes. This host sends them before those of other connections,
/// and retransmits lost ones at a constant interval instead of a growing one (tcp(7), TCP_THIN_LINEAR_TIMEOUTS).
///
/// # Errors
/// When the kernel refuses an option.
pub fn expedite(stream: BorrowedFd<'_>) -> io::Result<()> {
    /// TC_PRIO_INTERACTIVE: the first band of pfifo_fast and prio (linux/pkt_sched.h, tc-prio(8)).
    const INTERACTIVE: u32 = 6;
    sockopt::set_tcp_thin_linear_timeouts(stream, true)?;
    socket2::SockRef::from(&stream).set_priority(INTERACTIVE)
}

/// Returns the number of sent bytes that the peer has not acknowledged, or `None` if the kernel refuses.
pub fn unsent(stream: &TcpStream) -> Option<usize> {
    const OUTQ: Opcode = libc::TIOCOUTQ as Opcode;
    // SAFETY: on a socket, this request writes one int (tcp(7), SIOCOUTQ).
    let bytes = unsafe { ioctl(stream.as_fd(), Getter::<OUTQ, c_int>::new()) };
    bytes.ok().and_then(|bytes| usize::try_from(bytes).ok())
}

/// Returns true if packets of a connection are on their way, or lost: the peer's kernel has not acknowledged them.
/// Bytes that wait because the peer reads nothing are not on their way. `None` if the kernel refuses.
pub fn is_in_flight(stream: &TcpStream) -> Option<bool> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into memory of that size.
    let code = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &mut len)
    };
    // SAFETY: all fields are integers, for which zeros are valid.
    (code == 0).then(|| unsafe { info.assume_init() }.tcpi_unacked > 0)
}

/// Returns the number of the processor on which this thread runs.
#[inline]
pub fn processor() -> Option<u32> {
    Some(rustix::thread::sched_getcpu() as u32)
}

/// Returns the number of this thread for [`processors`].
pub fn thread_number() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Returns the processors that a thread may use. `thread` is a [`thread_number`], or 0 for the calling thread.
pub fn processors(thread: i32) -> io::Result<Processors> {
    let mut set = Processors::NONE;
    // SAFETY: the call writes at most this many bytes, and any bytes are a valid set.
    let code = unsafe { libc::sched_getaffinity(thread, size_of::<Processors>(), (&raw mut set).cast()) };
    if code == 0 { Ok(set) } else { Err(io::Error::last_os_error()) }
}

/// Restricts the calling thread to some processors.
pub fn set_processors(set: &Processors) -> io::Result<()> {
    // SAFETY: the call reads exactly this many bytes.
    let code = unsafe { libc::sched_setaffinity(0, size_of::<Processors>(), ptr::from_ref(set).cast()) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the identity of the host: the boot id and the network namespace. Processes with the same identity can
/// connect to each other through [`listen_by_name`].
///
/// # Errors
/// `System` when the kernel's files cannot be read.
pub fn host_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let boot = fs::read_to_string(path).map_err(|e| Error::system(path, e))?;
    let path = "/proc/self/ns/net";
    let namespace = fs::metadata(path).map_err(|e| Error::system(path, e))?;
    Ok(format!("{}:{}:{}", boot.trim(), namespace.dev(), namespace.ino()))
}

/// Returns the host name of the system.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "localhost".to_owned() } else { name.trim().to_owned() }
}

/// Returns the number of this process's PID namespace, or 0 if it is unknown. Processes in different namespaces must
/// not compare process ids.
pub fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// Returns true if a process of this host is stopped by SIGSTOP or by a debugger. Returns false if it has ended.
pub fn is_stopped(process: u32) -> bool {
    // The state is near the start of the file, so one read suffices.
    let mut stat = [0; 128];
    let read = fs::File::open(format!("/proc/{process}/stat")).and_then(|mut file| file.read(&mut stat));
    let Ok(read) = read else { return false };
    // The line is `pid (name) state …`. The name may contain any characters, so search for the last parenthesis.
    let stat = &stat[..read];
    let state = stat.iter().rposition(|byte| *byte == b')').and_then(|at| stat.get(at + 2));
    matches!(state, Some(b'T' | b't'))
}

/// Listens at an abstract name (unix(7)), which is in no file system and disappears with the process.
pub fn listen_by_name(name: &[u8]) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Returns the path to connect to for a name of [`listen_by_name`].
pub fn path_of_name(name: &[u8]) -> PathBuf {
    // The zero byte in front makes it abstract (unix(7)).
    OsString::from_vec([&[0], name].concat()).into()
}

/// Fills memory with random bytes from the kernel.
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(())
}

#[repr(C)]
struct LinkMap {
    /// Difference between the addresses in the file and those in memory.
    base: usize,
    /// NUL-terminated path of the file.
    name: *const c_char,
}

/// The request of `dlinfo` for the entry of a library, in glibc and musl. The crate libc defines it for glibc only.
const RTLD_DI_LINKMAP: c_int = 2;

unsafe extern "C" {
    fn dlinfo(handle: *mut c_void, request: c_int, into: *mut c_void) -> c_int;
}

/// Returns the file that a handle of `dlopen` belongs to, or `None` if the loader does not know it.
///
/// # Safety
/// The handle is open, and never closed.
pub unsafe fn file_of_library(handle: NonNull<c_void>) -> Option<PathBuf> {
    let mut map: *const LinkMap = ptr::null();
    // SAFETY: the handle is open, by this function's promise, and this request writes one pointer.
    let code = unsafe { dlinfo(handle.as_ptr(), RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if code != 0 || map.is_null() {
        return None;
    }
    // SAFETY: dlinfo succeeded, and the entry lives as long as the library, which is never closed.
    let name = unsafe { (*map).name };
    if name.is_null() {
        return None;
    }
    // SAFETY: the loader's names are NUL-terminated and live as long as the entry.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    (!name.is_empty()).then(|| PathBuf::from(OsStr::from_bytes(name)))
}

/// Wakes a thread that waits in `poll` for this descriptor among others.
pub struct Waker(OwnedFd);

impl Waker {
    /// Creates a waker whose descriptor is not readable.
    ///
    /// # Errors
    /// When this process has no descriptor left.
    pub fn new() -> io::Result<Waker> {
        Ok(Waker(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the descriptor readable until the next [`Waker::clear`].
    pub fn wake(&self) {
        // The write fails only if the counter is full, which makes the descriptor readable too.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next [`Waker::wake`].
    pub fn clear(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.0, &mut count);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests;
