//! The functions of the module above on Linux.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::fs;
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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

use super::Processors;
use crate::error::{Error, Result};

pub const SHARES_MEMORY: bool = true;
pub const NO_SIGNAL: SendFlags = SendFlags::NOSIGNAL;
pub const CLOSE_ON_EXEC: RecvFlags = RecvFlags::CMSG_CLOEXEC;
pub const OPEN_DESCRIPTORS: &str = "/proc/self/fd";

pub fn open_descriptors() -> Option<usize> {
    let size = fs::metadata(OPEN_DESCRIPTORS).ok()?.len();
    // Before Linux 6.2 it is 0, which it cannot be where a program runs.
    usize::try_from(size).ok().filter(|open| *open > 0)
}

#[inline]
pub fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    let timeout = futex::Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // Every outcome (woken, changed, timed out, interrupted) means the same to the caller: look again.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
}

#[inline]
pub fn futex_wake(word: &AtomicU32) {
    // No sleeper is not an error.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

pub fn shared_file(label: &str, len: usize) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(label, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

pub fn sealed_len(file: BorrowedFd<'_>) -> io::Result<Option<usize>> {
    if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return Ok(None);
    }
    Ok(Some(usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0)))
}

/// # Safety
/// As the function of the module above.
pub unsafe fn populate(begin: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: mapped, by this function's promise; the advice leaves the contents as they are.
    match unsafe { rustix::mm::madvise(begin, len, rustix::mm::Advice::LinuxPopulateWrite) } {
        Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

pub fn limit_stream(stream: &TcpStream, unacknowledged: Duration, unsent: u32) -> io::Result<()> {
    sockopt::set_tcp_user_timeout(stream, u32::try_from(unacknowledged.as_millis()).unwrap_or(u32::MAX))?;
    socket2::SockRef::from(stream).set_tcp_notsent_lowat(unsent)
}

pub fn expedite(stream: BorrowedFd<'_>) -> io::Result<()> {
    /// TC_PRIO_INTERACTIVE: the first band of pfifo_fast and prio (linux/pkt_sched.h, tc-prio(8)).
    const INTERACTIVE: u32 = 6;
    sockopt::set_tcp_thin_linear_timeouts(stream, true)?;
    socket2::SockRef::from(&stream).set_priority(INTERACTIVE)
}

pub fn unsent(stream: &TcpStream) -> Option<usize> {
    const OUTQ: Opcode = libc::TIOCOUTQ as Opcode;
    // SAFETY: on a socket, this request writes one int (tcp(7), SIOCOUTQ).
    let bytes = unsafe { ioctl(stream.as_fd(), Getter::<OUTQ, c_int>::new()) };
    bytes.ok().and_then(|bytes| usize::try_from(bytes).ok())
}

#[inline]
pub fn processor() -> Option<u32> {
    Some(rustix::thread::sched_getcpu() as u32)
}

pub fn thread_number() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

pub fn processors(thread: i32) -> io::Result<Processors> {
    let mut set = Processors::NONE;
    // SAFETY: writes at most so many bytes, of which any is a set.
    let code = unsafe { libc::sched_getaffinity(thread, size_of::<Processors>(), (&raw mut set).cast()) };
    if code == 0 { Ok(set) } else { Err(io::Error::last_os_error()) }
}

pub fn set_processors(set: &Processors) -> io::Result<()> {
    // SAFETY: reads so many bytes.
    let code = unsafe { libc::sched_setaffinity(0, size_of::<Processors>(), ptr::from_ref(set).cast()) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

pub fn host_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let boot = fs::read_to_string(path).map_err(|e| Error::system(path, e))?;
    let path = "/proc/self/ns/net";
    let namespace = fs::metadata(path).map_err(|e| Error::system(path, e))?;
    Ok(format!("{}:{}:{}", boot.trim(), namespace.dev(), namespace.ino()))
}

pub fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default()
}

pub fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

pub fn is_stopped(process: u32) -> bool {
    // One call: the state comes before all numbers but one. A rank looks at several processes in each second.
    let mut stat = [0; 128];
    let read = fs::File::open(format!("/proc/{process}/stat")).and_then(|mut file| file.read(&mut stat));
    let Ok(read) = read else { return false };
    // The state follows the name, which may contain anything.
    let stat = &stat[..read];
    let state = stat.iter().rposition(|byte| *byte == b')').and_then(|at| stat.get(at + 2));
    matches!(state, Some(b'T' | b't'))
}

pub fn listen_by_name(name: &[u8]) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

pub fn path_of_name(name: &[u8]) -> io::Result<PathBuf> {
    // The byte in front makes it abstract (unix(7)).
    Ok(OsString::from_vec([&[0], name].concat()).into())
}

pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(())
}

/// The beginning of `struct link_map` of the dynamic loader.
#[repr(C)]
struct LinkMap {
    /// Difference between the addresses in the file and those in memory.
    base: usize,
    /// NUL-terminated path of the file.
    name: *const c_char,
}

/// The request of `dlinfo` for the entry of a library, of glibc and of musl. The crate libc has both for glibc alone.
const RTLD_DI_LINKMAP: c_int = 2;

pub fn release_memory() {
    // Only glibc has it; its answer says whether there was any.
    #[cfg(target_env = "gnu")]
    // SAFETY: no memory that is in use is given back.
    unsafe {
        libc::malloc_trim(0);
    }
}

unsafe extern "C" {
    fn dlinfo(handle: *mut c_void, request: c_int, into: *mut c_void) -> c_int;
}

/// # Safety
/// As the function of the module above.
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

/// A counter of the kernel.
pub struct Waker(OwnedFd);

impl Waker {
    pub fn new() -> io::Result<Waker> {
        Ok(Waker(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub fn wake(&self) {
        // Only a counter that is full could refuse, and that wakes too.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

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
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::memory::Arena;

    #[test]
    fn memory_that_could_shrink_under_us_is_refused() {
        let file = rustix::fs::memfd_create("bagua-test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert_eq!(sealed_len(file.as_fd()).unwrap(), None);
        assert!(Arena::from_fd(file).is_err());
    }

    #[test]
    fn bytes_count_until_the_peer_has_room_for_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        assert_eq!(unsent(&own), Some(0));
        own.set_nonblocking(true).unwrap();
        let block = vec![1; 1 << 20];
        let mut sent = 0;
        while let Ok(count) = own.write(&block) {
            sent += count;
        }
        assert!(unsent(&own).unwrap() > 0, "{sent} bytes fill both buffers");
        let mut taken = vec![0; sent];
        peer.read_exact(&mut taken).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while unsent(&own).unwrap() > 0 {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_is_kept_to_processors_and_no_other_with_it() {
        let own = processors(0).unwrap();
        let one = own.iter().next().unwrap();
        let kept = move || {
            set_processors(&Processors::only(one)).unwrap();
            assert_eq!(processor(), Some(one as u32));
            assert_eq!(processors(thread_number()).unwrap(), Processors::only(one));
            set_processors(&Processors::NONE).unwrap_err();
        };
        std::thread::spawn(kept).join().unwrap();
        assert_eq!(processors(0).unwrap(), own);
    }
}
