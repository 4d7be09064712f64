//! Private memory of other processes on this host, which the kernel copies from and to (`process_vm_readv`, `process_vm_writev`).
//!
//! For a broadcast of a large tensor that lies in no arena: copied once, where windows copy twice, and the root can take half of the
//! work. Two ranks (`cargo bench --bench limit -- --copies`): 1.2 to 1.4 times as fast as bare windows from 1 MiB on. What every
//! rank gives to every other gains nothing: both cores are busy anyway, and the kernel's stores fetch what they overwrite.
//!
//! The kernel allows it where it would let one process debug the other: not across users, not in containers that forbid it,
//! and not where Yama restricts debugging to descendants. So each rank publishes the number of its process and where it keeps a random
//! number (its **mark**), and offers its tensor only when it has read the mark of every peer. If one cannot, all use windows.
//!
//! A process number means something within its namespace only, and is used again some time after its process has gone. So the mark
//! is read again before each transfer, of which none takes longer than a fraction of a millisecond.
//!
//! What is lent must not be given back while a peer still writes to it: after an error the owner may do with it what it likes. So
//! (**R1**) a rank says that it writes before it reads the mark, and a rank that fails takes its mark away before it looks who writes,
//! and waits for those: one of the two sees the other. (**R2**) Who has read looks at the mark once more: it is gone if the owner had
//! failed by then. What remains is a rank that is frozen for longer than [`LAST_WRITE`] in the microsecond between its look at the
//! mark and the kernel's copying.

use std::io::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use super::others;
use super::segment::{ALIGN, Segment};

/// The smallest tensor for which two ranks use it, if the caller says nothing else. Measured: 256 KiB take 0.6 of the time. More ranks
/// do not use it: four on two cores took 1.2 times as long at 16 MiB as with windows, which stay in the cache.
pub(super) const FROM: usize = 256 << 10;
/// Bytes per transfer. Measured: with 64 KiB 10 to 15 % slower, with 4 MiB equal.
const TRANSFER: usize = 1 << 20;

/// How long a rank that failed waits for one that is writing to it: a transfer takes a thousandth of that.
const LAST_WRITE: Duration = Duration::from_secs(1);

/// The words that a rank publishes (see [`Segment::process`]).
const PROCESS: usize = 0;
const MARK: usize = 1;
const PLACE: usize = 2;
const WRITES: usize = 3;

/// What this rank knows of its peers' processes.
pub(super) struct Reach {
    /// What peers read here. It has an address of its own for as long as this lives.
    mark: Box<AtomicU64>,
    /// By rank on this host. `None` until all have been asked for their marks; empty when one was not to be had.
    peers: Option<Vec<Peer>>,
    /// The smallest tensor to use it for.
    pub(super) from: usize,
}

/// A process that has shown its mark.
#[derive(Clone, Copy)]
struct Peer {
    process: i32,
    mark: u64,
    /// Where the mark is.
    at: u64,
}

impl Reach {
    /// Tells the peers where to look. A rank whose system has no random numbers tells them nothing.
    pub(super) fn publish(segment: &Segment) -> Reach {
        let mut bytes = [0; 8];
        let random = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) == Ok(bytes.len());
        let mark = Box::new(AtomicU64::new(u64::from_ne_bytes(bytes)));
        if random {
            let word = |at| segment.process(segment.index, at);
            word(MARK).store(mark.load(Ordering::Relaxed), Ordering::Relaxed);
            word(PLACE).store(mark.as_ptr() as u64, Ordering::Relaxed);
            // Release: whoever sees the number of the process sees the rest.
            word(PROCESS).store(std::process::id().into(), Ordering::Release);
        }
        Reach { mark, peers: None, from: if segment.ranks == 2 { FROM } else { usize::MAX } }
    }

    /// Whether this rank reaches all peers, and they could reach `tensor`.
    pub(super) fn spans(&mut self, segment: &Segment, tensor: &[u8]) -> bool {
        if tensor.len() < self.from {
            return false;
        }
        if self.peers.is_none() {
            self.peers = Reach::ask(segment);
        }
        self.peers.as_ref().is_some_and(|peers| !peers.is_empty()) && is_ordinary(tensor)
    }

    /// `None` while a peer has published nothing.
    fn ask(segment: &Segment) -> Option<Vec<Peer>> {
        let published = |rank| {
            let process = segment.process(rank, PROCESS).load(Ordering::Acquire);
            let word = |at| segment.process(rank, at).load(Ordering::Relaxed);
            let process = i32::try_from(process).ok().filter(|process| *process > 0)?;
            Some(Peer { process, mark: word(MARK), at: word(PLACE) })
        };
        let peers: Vec<Peer> = (0..segment.ranks).map(published).collect::<Option<_>>()?;
        let reached = others(segment.index, segment.ranks).all(|rank| peers[rank].shows_its_mark().is_ok());
        Some(if reached { peers } else { Vec::new() })
    }

    /// This rank's part of a broadcast of `data`, its own tensor; the others' lie at these addresses of their processes. The root writes
    /// the last n-th of every tensor of n, and the others read the rest, as where tensors lie in an arena. An error says of whom.
    ///
    /// # Safety
    /// `addresses` are those of tensors as long as `data`, lent to this operation by their owners, who, until this rank's next
    /// arrival, do nothing with what is read or written here.
    pub(super) unsafe fn broadcast(
        &self,
        segment: &Segment,
        root: usize,
        addresses: &[u64],
        data: &mut [u8],
    ) -> std::result::Result<(), (usize, Error)> {
        let peers = self.peers.as_deref().unwrap_or_default();
        let (me, ranks) = (segment.index, peers.len());
        let cut = (data.len() - data.len() / ranks) / ALIGN * ALIGN;
        let steps = |range: Range<usize>| {
            let end = range.end;
            range.step_by(TRANSFER).map(move |begin| begin..(begin + TRANSFER).min(end))
        };
        if me == root {
            for rank in others(me, ranks) {
                for step in steps(cut..data.len()) {
                    let at = addresses[rank] + step.start as u64;
                    let writes = segment.process(me, WRITES);
                    writes.store(1, Ordering::Relaxed);
                    // R1: said before the look at the mark.
                    fence(Ordering::SeqCst);
                    // SAFETY: by this function's promise.
                    let written = unsafe { peers[rank].write(at, &data[step]) };
                    writes.store(0, Ordering::Release);
                    written.map_err(|error| (rank, error))?;
                }
            }
        } else {
            for step in steps(0..cut) {
                let at = addresses[root] + step.start as u64;
                peers[root].read(at, &mut data[step]).map_err(|error| (root, error))?;
            }
        }
        Ok(())
    }

    /// Shows no mark any more.
    pub(super) fn forget(&self) {
        self.mark.store(0, Ordering::Relaxed);
    }

    /// Takes back what this rank has lent, before its caller may do with it what it likes.
    #[cold]
    pub(super) fn take_back(&self, segment: &Segment) {
        self.forget();
        // R1: taken away before the look at who writes.
        fence(Ordering::SeqCst);
        let begun = Instant::now();
        for (rank, peer) in self.peers.iter().flatten().enumerate().filter(|(rank, _)| *rank != segment.index) {
            let writes = || segment.process(rank, WRITES).load(Ordering::Acquire) != 0;
            // One that was killed, or failed itself, writes no more, whatever it said last.
            while writes() && peer.shows_its_mark().is_ok() && begun.elapsed() < LAST_WRITE {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        // The memory may be another's tomorrow, and the mark still be there.
        self.forget();
    }
}

impl Peer {
    fn shows_its_mark(&self) -> Result<()> {
        let mut bytes = [0; 8];
        read_from(self.process, self.at, &mut bytes)?;
        if u64::from_ne_bytes(bytes) == self.mark {
            Ok(())
        } else {
            Err(Error::other(format!("process {} is another one", self.process)))
        }
    }

    /// Copies what lies at an address there.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.shows_its_mark()?;
        read_from(self.process, at, into)?;
        // R2.
        self.shows_its_mark()
    }

    /// Copies to an address there.
    ///
    /// # Safety
    /// The process lent this memory, and does nothing with it meanwhile.
    unsafe fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        self.shows_its_mark()?;
        let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
        let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: from.len() };
        // SAFETY: the kernel only reads what `local` describes, a slice; what it writes there is lent, by this function's promise.
        let moved = unsafe { libc::process_vm_writev(self.process, &raw const local, 1, &raw const remote, 1, 0) };
        whole(moved, from.len())
    }
}

/// Copies what lies at an address of a process.
fn read_from(process: i32, at: u64, into: &mut [u8]) -> Result<()> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: the kernel writes what `local` describes, a slice that nobody else has; it checks the other side itself.
    let moved = unsafe { libc::process_vm_readv(process, &raw const local, 1, &raw const remote, 1, 0) };
    whole(moved, into.len())
}

fn whole(moved: isize, asked: usize) -> Result<()> {
    match usize::try_from(moved) {
        Ok(moved) if moved == asked => Ok(()),
        Ok(moved) => Err(Error::other(format!("{moved} of {asked} bytes moved"))),
        Err(_) => Err(Error::last_os_error()),
    }
}

/// Whether the kernel would copy from this memory: not from what a device driver has mapped. One that begins and ends in
/// ordinary memory lies in such.
fn is_ordinary(tensor: &[u8]) -> bool {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let reads = |byte: Option<&u8>| byte.is_none_or(|byte| read_from(own, &raw const *byte as u64, &mut [0]).is_ok());
    reads(tensor.first()) && reads(tensor.last())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::segment::segment_len;
    use super::*;
    use crate::memory::Arena;

    fn pair() -> [Segment; 2] {
        let arena = Arc::new(Arena::create("bagua-test", segment_len(2)).unwrap());
        [0, 1].map(|index| Segment::new(Arc::clone(&arena), index, 2).unwrap())
    }

    #[test]
    fn a_peer_is_reached_once_it_has_said_where_its_mark_is_and_no_longer_when_that_is_gone() {
        let [mine, theirs] = pair();
        let tensor = vec![0; FROM];
        let mut one = Reach::publish(&mine);
        assert!(!one.spans(&mine, &tensor));
        let other = Reach::publish(&theirs);
        assert!(one.spans(&mine, &tensor));
        assert!(!one.spans(&mine, &tensor[1..]));
        let peer = one.peers.as_ref().unwrap()[1];
        assert!(peer.read(tensor.as_ptr() as u64, &mut [0; 100]).is_ok());
        drop(other);
        assert!(peer.read(tensor.as_ptr() as u64, &mut [0; 100]).is_err());
    }

    #[test]
    fn a_process_without_the_mark_is_not_believed() {
        let [mine, theirs] = pair();
        let mut one = Reach::publish(&mine);
        let _other = Reach::publish(&theirs);
        // Another process, as a number from another namespace may name.
        theirs.process(1, PROCESS).store(1, Ordering::Release);
        assert!(!one.spans(&mine, &vec![0; FROM]));
        let [mine, theirs] = pair();
        let mut one = Reach::publish(&mine);
        let other = Reach::publish(&theirs);
        other.mark.store(other.mark.load(Ordering::Relaxed) ^ 1, Ordering::Relaxed);
        assert!(!one.spans(&mine, &vec![0; FROM]));
    }

    #[test]
    fn who_takes_back_what_it_lent_waits_for_a_peer_that_is_still_writing() {
        let [mine, theirs] = pair();
        let mut one = Reach::publish(&mine);
        let other = Reach::publish(&theirs);
        assert!(one.spans(&mine, &vec![0; FROM]));
        let still_writes = theirs.process(1, WRITES);
        still_writes.store(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| {
                one.take_back(&mine);
                still_writes.load(Ordering::Relaxed)
            });
            // The mark goes first: the writer's next look would end it.
            while one.mark.load(Ordering::Relaxed) != 0 {
                std::thread::yield_now();
            }
            still_writes.store(0, Ordering::Release);
            assert_eq!(taking.join().unwrap(), 0);
        });
        // Killed in the middle of it, it is not waited for.
        still_writes.store(1, Ordering::Relaxed);
        drop(other);
        let begun = Instant::now();
        one.take_back(&mine);
        assert!(begun.elapsed() < LAST_WRITE);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let [mine, theirs] = pair();
        let mut one = Reach::publish(&mine);
        let _other = Reach::publish(&theirs);
        assert!(one.spans(&mine, &vec![0; FROM]));
        let peer = one.peers.as_ref().unwrap()[1];
        assert_eq!(peer.read(8, &mut [0; 8]).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        // SAFETY: nothing lies there.
        assert_eq!(unsafe { peer.write(8, &[0; 8]) }.unwrap_err().raw_os_error(), Some(libc::EFAULT));
    }
}
