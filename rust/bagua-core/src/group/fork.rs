//! What a forked child must not touch: our descriptors are closed in it, and everything else in it knows that it is a copy.
//!
//! A child of `fork` (a data-loading worker, usually) holds copies of all descriptors. As long as it lives, the sockets of a
//! dead parent would stay open, and nobody would notice the death. So a `pthread_atfork` handler closes the copies. It may
//! only do what a signal handler may: it walks a fixed table of atomics and calls `fstat` and `close`. The owners of those
//! descriptors in the child must then never be dropped ([`OwnerProcess`] tells them), or they would close a number that the child has
//! given to another file by then.
//!
//! Between the birth of a descriptor and its registration there are a few instructions in which a fork is not caught.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Descriptors that can be registered at once. A rank holds a few per peer and lane. What was never used costs no memory.
const SLOTS: usize = 1 << 16;

/// Nothing here. 0, so that the table is memory that the system gives zeroed.
const FREE: i32 = 0;

/// Being filled in.
const CLAIMED: i32 = -1;

/// One registered descriptor. The inode tells whether the number still means the same socket.
struct Slot {
    /// The descriptor and 1.
    fd: AtomicI32,
    inode: AtomicU64,
}

static TABLE: [Slot; SLOTS] = [const { Slot { fd: AtomicI32::new(FREE), inode: AtomicU64::new(0) } }; SLOTS];

/// Where to look for a free slot first: those before it are taken, but for what two threads did at one moment. Without it, each of
/// n registrations would look at all before it.
static FIRST: AtomicUsize = AtomicUsize::new(0);

/// Slots from here on were never taken: a fork does not look at them.
static END: AtomicUsize = AtomicUsize::new(0);

/// How many forks lie between the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Inode of an open descriptor.
fn inode(fd: RawFd) -> Option<u64> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat writes a whole stat into memory of that size, or fails; any number is allowed as a descriptor.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: fstat succeeded and filled it in.
    Some(unsafe { stat.assume_init() }.st_ino)
}

/// Runs in the child, before `fork` returns there.
extern "C" fn in_the_child() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
    FIRST.store(0, Ordering::SeqCst);
    for slot in &TABLE[..END.load(Ordering::SeqCst)] {
        let fd = slot.fd.swap(FREE, Ordering::SeqCst) - 1;
        if fd >= 0 && inode(fd) == Some(slot.inode.load(Ordering::SeqCst)) {
            // SAFETY: the number still means the socket that was registered, and its owner in this child never touches it again.
            unsafe { libc::close(fd) };
        }
    }
}

/// The process that built something, as opposed to its forked children. Asking costs a load; `getpid` costs 130 ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnerProcess(u64);

impl OwnerProcess {
    /// This process. Arms the handler.
    pub(super) fn arm() -> Result<OwnerProcess> {
        static ARMED: OnceLock<i32> = OnceLock::new();
        // SAFETY: the handler lives as long as the program and only does what is allowed between fork and exec.
        let code = *ARMED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) });
        if code != 0 {
            return Err(Error::system("pthread_atfork", std::io::Error::from_raw_os_error(code)));
        }
        Ok(OwnerProcess(GENERATION.load(Ordering::SeqCst)))
    }

    /// This process, for what belongs to a group: building that has armed the handler, or failed.
    pub(crate) fn current() -> OwnerProcess {
        OwnerProcess(GENERATION.load(Ordering::SeqCst))
    }

    /// False in a forked child.
    pub(crate) fn is_current(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }

    /// An error in a forked child.
    pub(super) fn check(self) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(Error::other(
            "this process was forked from the one that built the group; only that one can communicate".to_owned(),
        ))
    }
}

/// A registration; dropping it forgets the descriptor.
#[derive(Debug)]
pub(super) struct ForkFd {
    /// Index in the table; `None` when the table was full.
    slot: Option<usize>,
    /// Who registered it: in a child the slots are free and may be somebody else's.
    owner: u64,
}

impl ForkFd {
    /// Registers an open descriptor. Best effort: in a table that is full the descriptor stays open in children.
    pub(super) fn new(of: &impl AsRawFd) -> ForkFd {
        let fd = of.as_raw_fd();
        let owner = GENERATION.load(Ordering::SeqCst);
        let slot = inode(fd).and_then(|inode| {
            let first = FIRST.load(Ordering::SeqCst);
            let at = (first..SLOTS).chain(0..first).find(|at| {
                TABLE[*at].fd.compare_exchange(FREE, CLAIMED, Ordering::SeqCst, Ordering::Relaxed).is_ok()
            })?;
            // Before the slot is filled: a fork in between must find it.
            END.fetch_max(at + 1, Ordering::SeqCst);
            TABLE[at].inode.store(inode, Ordering::SeqCst);
            TABLE[at].fd.store(fd + 1, Ordering::SeqCst);
            FIRST.store((at + 1) % SLOTS, Ordering::SeqCst);
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
            FIRST.fetch_min(slot, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_becomes_free_is_taken_again() {
        let file = std::fs::File::open("/dev/null").unwrap();
        // Other tests of this process register too: more fork_fds in all than there are slots, but never many at once.
        for _ in 0..SLOTS / 1000 + 1 {
            let fork_fds: Vec<ForkFd> = (0..1000).map(|_| ForkFd::new(&file)).collect();
            assert!(fork_fds.iter().all(|fork_fd| fork_fd.slot.is_some()));
            let slots: std::collections::HashSet<_> = fork_fds.iter().map(|fork_fd| fork_fd.slot).collect();
            assert_eq!(slots.len(), fork_fds.len());
        }
        assert!(END.load(Ordering::SeqCst) < SLOTS / 2, "freed slots come first, so that a fork looks at few");
    }
}
