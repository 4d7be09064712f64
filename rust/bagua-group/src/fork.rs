//! Forked children: the descriptors of a group are closed in a child, and its objects refuse to work there.
//!
//! A child of `fork` (usually a data-loading worker) inherits all descriptors. While it lives, the sockets of a dead
//! parent would stay open, and the peers would not detect the death. Therefore a `pthread_atfork` handler closes the
//! inherited copies. The handler may only do what a signal handler may do: it walks a fixed table of atomics and calls
//! `fstat` and `close`. The owners of closed descriptors must never be dropped in the child, because they would close a
//! number that may belong to another file by then. Therefore owners check their [`OwnerProcess`] first.
//!
//! If a fork happens between the creation of a descriptor and its registration, a few instructions later, the child
//! keeps that descriptor open.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Maximum number of registered descriptors. A rank holds a few per peer and lane. Unused slots occupy no memory.
const SLOTS: usize = 1 << 16;

/// Value of a free slot. It is 0, so that the table lies in zero-initialised memory.
const FREE: i32 = 0;

/// Value of a slot that a thread is filling in.
const CLAIMED: i32 = -1;

/// One registered descriptor. The inode shows whether the number still refers to the same socket.
struct Slot {
    /// The descriptor plus 1, [`FREE`] or [`CLAIMED`].
    fd: AtomicI32,
    inode: AtomicU64,
}

static TABLE: [Slot; SLOTS] = [const { Slot { fd: AtomicI32::new(FREE), inode: AtomicU64::new(0) } }; SLOTS];

/// Hint for a free slot: slots below this index are in use, except after a race between two registrations. Without the
/// hint, each of n registrations would search all slots before its own.
static FREE_HINT: AtomicUsize = AtomicUsize::new(0);

/// Index of the first slot that was never used. The fork handler stops there.
static USED_END: AtomicUsize = AtomicUsize::new(0);

/// Number of forks between the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

fn inode(fd: RawFd) -> Option<u64> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat writes a whole stat into memory of that size, or fails. Any number is allowed as a descriptor.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: fstat succeeded and wrote the stat.
    Some(unsafe { stat.assume_init() }.st_ino)
}

/// Runs in the child, before `fork` returns there.
extern "C" fn close_in_child() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
    FREE_HINT.store(0, Ordering::SeqCst);
    for slot in &TABLE[..USED_END.load(Ordering::SeqCst)] {
        let fd = slot.fd.swap(FREE, Ordering::SeqCst) - 1;
        if fd >= 0 && inode(fd) == Some(slot.inode.load(Ordering::SeqCst)) {
            // SAFETY: the number still refers to the registered socket, and its owner in this child never uses it
            // again.
            unsafe { libc::close(fd) };
        }
    }
}

/// Installs [`close_in_child`] once per process. Returns 0 or the error code.
fn install_handler() -> i32 {
    static INSTALLED: OnceLock<i32> = OnceLock::new();
    // SAFETY: the handler exists as long as the program, and only does what is allowed between fork and exec.
    *INSTALLED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(close_in_child)) })
}

/// The process that created an object, as opposed to its forked children. A check costs one load. `getpid` costs 130
/// ns.
#[derive(Clone, Copy, Debug)]
pub struct OwnerProcess(u64);

impl OwnerProcess {
    /// Returns this process, for objects that need the fork handler.
    pub(super) fn install() -> Result<OwnerProcess> {
        match install_handler() {
            0 => Ok(OwnerProcess(GENERATION.load(Ordering::SeqCst))),
            code => Err(Error::system("pthread_atfork", std::io::Error::from_raw_os_error(code))),
        }
    }

    /// Returns this process. If the handler cannot be installed, a child counts as its parent. No group can be built
    /// then.
    pub fn current() -> OwnerProcess {
        install_handler();
        OwnerProcess(GENERATION.load(Ordering::SeqCst))
    }

    /// True in the process that created this value, false in a forked child.
    pub fn is_current(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }

    /// Returns an error in a forked child.
    pub(super) fn check(self) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(Error::other(
            "this process was forked from the process that built the group; only that process can communicate"
                .to_owned(),
        ))
    }
}

/// One value per process. A forked child gets a new value, because a thread of the parent may have held a lock of the
/// parent's value at the fork.
pub struct PerProcess<T> {
    /// Null, or the value and the process that created it. Never freed, so it leaks one value per fork between the
    /// first process and this one.
    current: AtomicPtr<(OwnerProcess, T)>,
}

impl<T: Default + Send + Sync + 'static> Default for PerProcess<T> {
    fn default() -> PerProcess<T> {
        PerProcess::new()
    }
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    /// Creates it without a value.
    pub const fn new() -> PerProcess<T> {
        PerProcess { current: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns the value of this process. The first call creates it.
    pub fn get(&self) -> &'static T {
        let mut current = self.current.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or a pointer that the exchange below published. Its target is never freed or changed.
            if let Some((owner, value)) = unsafe { current.as_ref::<'static>() }
                && owner.is_current()
            {
                return value;
            }
            let created = Box::into_raw(Box::new((OwnerProcess::current(), T::default())));
            match self.current.compare_exchange(current, created, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => current = created,
                Err(other) => {
                    // SAFETY: created by `into_raw` above and not published.
                    drop(unsafe { Box::from_raw(created) });
                    current = other;
                }
            }
        }
    }
}

/// A registered descriptor. Dropping this value unregisters the descriptor.
#[derive(Debug)]
pub(super) struct ForkFd {
    /// Index in the table. `None` if the table was full.
    slot: Option<usize>,
    /// [`GENERATION`] of the process that registered the descriptor. In a child, the slots are free and may be in use
    /// by other descriptors.
    owner: u64,
}

impl ForkFd {
    /// Registers an open descriptor. If the table is full, the descriptor stays open in children.
    pub(super) fn new(of: &impl AsRawFd) -> ForkFd {
        let fd = of.as_raw_fd();
        let owner = GENERATION.load(Ordering::SeqCst);
        let slot = inode(fd).and_then(|inode| {
            let first = FREE_HINT.load(Ordering::SeqCst);
            let at = (first..SLOTS).chain(0..first).find(|at| {
                TABLE[*at].fd.compare_exchange(FREE, CLAIMED, Ordering::SeqCst, Ordering::Relaxed).is_ok()
            })?;
            // This comes before the slot is filled, so that a fork in between finds the slot.
            USED_END.fetch_max(at + 1, Ordering::SeqCst);
            TABLE[at].inode.store(inode, Ordering::SeqCst);
            TABLE[at].fd.store(fd + 1, Ordering::SeqCst);
            FREE_HINT.store((at + 1) % SLOTS, Ordering::SeqCst);
            Some(at)
        });
        ForkFd { slot, owner }
    }
}

impl Drop for ForkFd {
    fn drop(&mut self) {
        if let Some(slot) = self.slot
            && self.owner == GENERATION.load(Ordering::SeqCst)
        {
            TABLE[slot].fd.store(FREE, Ordering::SeqCst);
            FREE_HINT.fetch_min(slot, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_of_a_process_get_one_value() {
        static VALUE: PerProcess<AtomicUsize> = PerProcess::new();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        VALUE.get().fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(VALUE.get().load(Ordering::Relaxed), 8000);
    }

    #[test]
    fn a_freed_slot_is_used_again() {
        let file = std::fs::File::open("/dev/null").unwrap();
        // Registers more descriptors in all than there are slots, but never many at the same time, because other tests
        // of this process register too.
        for _ in 0..SLOTS / 1000 + 1 {
            let fork_fds: Vec<ForkFd> = (0..1000).map(|_| ForkFd::new(&file)).collect();
            assert!(fork_fds.iter().all(|fork_fd| fork_fd.slot.is_some()));
            let slots: std::collections::HashSet<_> = fork_fds.iter().map(|fork_fd| fork_fd.slot).collect();
            assert_eq!(slots.len(), fork_fds.len());
        }
        assert!(
            USED_END.load(Ordering::SeqCst) < SLOTS / 2,
            "freed slots are used first, so that the fork handler checks few"
        );
    }
}
