//! What this project takes from the operating system beyond POSIX. All that is specific to Linux is here.
//!
//! | file | what it is |
//! |---|---|
//! | `linux` | Linux |
//! | `portable` | every other system, macOS for one: POSIX alone |
//! | `processors` | a set of processors |
//!
//! The functions here say what each of the two gives. Where POSIX has nothing, `portable` says so by what it returns, and the caller does
//! without: ranks of one host share no memory there, and use TCP ([`SHARES_MEMORY`]). No other file asks for which system it is compiled.
//! `--cfg bagua_portable` takes `portable` on Linux too, so that it is compiled and tested there:
//! `RUSTFLAGS="--cfg bagua_portable" cargo nextest run -p bagua-net -p bagua-group --target-dir target/portable`.

#![allow(unsafe_code)]

#[cfg(all(target_os = "linux", not(bagua_portable)))]
mod linux;
#[cfg(all(target_os = "linux", not(bagua_portable)))]
use linux as system;

#[cfg(any(not(target_os = "linux"), bagua_portable))]
mod portable;
#[cfg(any(not(target_os = "linux"), bagua_portable))]
use portable as system;

mod processors;

use std::ffi::c_void;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags};

use crate::error::Result;
pub use processors::Processors;

/// Whether the ranks of a host can share memory: they pass its descriptor to each other, and a store wakes a thread of another process.
pub const SHARES_MEMORY: bool = system::SHARES_MEMORY;

/// Flags of every send on a socket: a closed connection is an error, independent of the program's handling of SIGPIPE. None where that is an
/// option of sockets, which std, tokio and socket2 set when they make one (SO_NOSIGPIPE of macOS).
pub const NO_SIGNAL: SendFlags = system::NO_SIGNAL;

/// Flags of a receive of descriptors: programs that this one starts do not get them.
pub const CLOSE_ON_EXEC: RecvFlags = system::CLOSE_ON_EXEC;

/// The directory with an entry for each open descriptor of this process, the one by which it is read among them.
pub const OPEN_DESCRIPTORS: &str = system::OPEN_DESCRIPTORS;

/// The number of open descriptors of this process. Linux 6.2 and later know it; elsewhere [`OPEN_DESCRIPTORS`] is read, which takes as long as
/// there are many.
///
/// # Errors
/// When that directory cannot be read.
pub fn open_descriptors() -> io::Result<usize> {
    match system::open_descriptors() {
        Some(open) => Ok(open),
        // One of them is that of the directory.
        None => Ok(std::fs::read_dir(OPEN_DESCRIPTORS)?.count().saturating_sub(1)),
    }
}

/// Sleeps while `*word == seen`, at most `timeout`. May return early.
///
/// Linux: a futex, which works across processes on shared memory. Elsewhere a sleep of at most a millisecond, which nothing ends.
#[inline]
pub fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    system::futex_wait(word, seen, timeout);
}

/// Wakes every thread that sleeps on `word`, in every process.
#[inline]
pub fn futex_wake(word: &AtomicU32) {
    system::futex_wake(word);
}

/// A new anonymous file of `len` zeros, for memory that processes share. No process can change its size from here on: one that shrank it
/// would let the others die of SIGBUS. `label` shows in `/proc/<pid>/maps`.
///
/// # Errors
/// What the kernel says; `Unsupported` without [`SHARES_MEMORY`].
pub fn shared_file(label: &str, len: usize) -> io::Result<OwnedFd> {
    system::shared_file(label, len)
}

/// The size of a file that another process made by [`shared_file`]; `None` of one that could shrink.
///
/// # Errors
/// As [`shared_file`].
pub fn sealed_len(file: BorrowedFd<'_>) -> io::Result<Option<usize>> {
    system::sealed_len(file)
}

/// Gives every page its memory and its place in this process's page table, which would otherwise cost 1 to 2.5 us per page when it is
/// first touched. Linux before 5.14 and other systems do it at first touch.
///
/// # Errors
/// When there is not enough memory.
///
/// # Safety
/// The bytes are mapped, readable and writable, from the beginning of a page on.
pub unsafe fn populate(begin: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: by this function's promise.
    unsafe { system::populate(begin, len) }
}

/// Limits how long the kernel retransmits unacknowledged bytes of a connection before it closes it, and the unsent bytes in its buffer. Linux
/// only: elsewhere the heartbeat of a group finds a lost peer, and buffers grow.
///
/// # Errors
/// When the kernel refuses an option.
pub fn limit_stream(stream: &TcpStream, unacknowledged: Duration, unsent: u32) -> io::Result<()> {
    system::limit_stream(stream, unacknowledged, unsent)
}

/// For a connection that carries few bytes, which should not wait for the many of others: this host sends its packets first, and those that
/// are lost again and again after the same time, not after ever longer ones (tcp(7), TCP_THIN_LINEAR_TIMEOUTS). Linux only.
///
/// # Errors
/// When the kernel refuses an option.
pub fn expedite(stream: BorrowedFd<'_>) -> io::Result<()> {
    system::expedite(stream)
}

/// Bytes that were sent on a connection and that the peer has not acknowledged; `None` where the kernel does not say.
pub fn unsent(stream: &TcpStream) -> Option<usize> {
    system::unsent(stream)
}

/// The number of the processor on which this thread runs; `None` where the kernel does not say.
#[inline]
pub fn processor() -> Option<u32> {
    system::processor()
}

/// The number of this thread for [`processors`]; 0 without [`processors`].
pub fn thread_number() -> i32 {
    system::thread_number()
}

/// The processors that a thread may use, which is a [`thread_number`], or 0 for this one.
///
/// # Errors
/// What the kernel says; `Unsupported` where threads cannot be kept to processors.
pub fn processors(thread: i32) -> io::Result<Processors> {
    system::processors(thread)
}

/// Keeps this thread to some processors.
///
/// # Errors
/// As [`processors`].
pub fn set_processors(set: &Processors) -> io::Result<()> {
    system::set_processors(set)
}

/// Identity of the host: equal on processes that can connect to each other by [`listen_by_name`]. Linux: the boot id and the network
/// namespace; elsewhere the host name.
///
/// # Errors
/// `System` when the kernel does not say.
pub fn host_id() -> Result<String> {
    system::host_id()
}

/// The host name of the system.
pub fn host_name() -> String {
    let name = system::host_name();
    if name.trim().is_empty() { "localhost".to_owned() } else { name.trim().to_owned() }
}

/// Number of this process's namespace of process ids on its host; 0 where other processes must not draw conclusions from its process id.
pub fn pid_namespace() -> u64 {
    system::pid_namespace()
}

/// True when a process of this host is stopped, by SIGSTOP or by a debugger. False as well where it has ended, which its connections show,
/// and where the kernel does not say.
pub fn is_stopped(process: u32) -> bool {
    system::is_stopped(process)
}

/// Listens at a name of this host that is in no file system, and ends with its process.
///
/// # Errors
/// What the kernel says; `Unsupported` without [`SHARES_MEMORY`].
pub fn listen_by_name(name: &[u8]) -> io::Result<UnixListener> {
    system::listen_by_name(name)
}

/// The path to connect to for a name of [`listen_by_name`].
///
/// # Errors
/// `Unsupported` without [`SHARES_MEMORY`].
pub fn path_of_name(name: &[u8]) -> io::Result<PathBuf> {
    system::path_of_name(name)
}

/// Fills memory with random bytes of the system.
///
/// # Errors
/// What the kernel says.
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    system::random(bytes)
}

/// Gives memory back to the system that the allocator of C keeps for later, where it can.
pub fn release_memory() {
    system::release_memory();
}

/// The file that a handle of `dlopen` belongs to; `None` where the loader does not say.
///
/// # Safety
/// The handle is open, and never closed.
pub unsafe fn file_of_library(handle: NonNull<c_void>) -> Option<PathBuf> {
    // SAFETY: by this function's promise.
    unsafe { system::file_of_library(handle) }
}

/// Wakes a thread that waits for its descriptor, among others, by `poll`.
pub struct Waker(system::Waker);

impl Waker {
    /// One without a call of [`Waker::wake`] so far.
    ///
    /// # Errors
    /// When descriptors are short.
    pub fn new() -> io::Result<Waker> {
        system::Waker::new().map(Waker)
    }

    /// Makes the descriptor readable until the next [`Waker::clear`].
    pub fn wake(&self) {
        self.0.wake();
    }

    /// Forgets the calls of [`Waker::wake`] before this one.
    pub fn clear(&self) {
        self.0.clear();
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests;
