//! A transport between two processes of one host, over ring buffers in shared memory.
//!
//! Every ordered pair of ranks has one ring, with one writer and one reader:
//!
//! ```text
//! block of each rank: doorbell | closed flag
//! ring 0 -> 1:        bytes written | bytes read | data
//! ring 0 -> 2:        ...
//! ```
//!
//! Each end keeps its own byte counter in private memory and publishes a copy of it. A peer's counter is accepted only
//! within the ring's size: a peer that writes invalid counters breaks the stream, but cannot make this process access
//! memory outside the ring.
//!
//! Unused rings are never touched, so a large world costs only address space. That is why a rank sets one flag in its
//! own block when it closes its ends, instead of a flag per ring. All links of a rank are dropped together.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Broken, Readiness, Transport};
use crate::memory::Arena;
use crate::sync::{AtomicU32, AtomicU64, buffer_len};
use crate::wait::{BellWords, Doorbell};

/// Size of two cache lines. The hardware prefetches lines in pairs, and different writers must not share a pair.
const LINE: usize = 128;
/// Size of a rank's block: its doorbell, and its [`CLOSED`] flag, which is written only once and has its own lines.
const BLOCK: usize = 2 * LINE;
/// Offset in a block of the flag that says whether its rank has closed its ends of all rings.
const CLOSED: usize = LINE;

/// Offsets of the counters in a ring. The bytes of the ring start at [`DATA`].
const WRITTEN: usize = 0;
const READ: usize = LINE;
const DATA: usize = 2 * LINE;

const fn capacity(ranks: usize) -> usize {
    buffer_len(if ranks <= 16 { 128 << 10 } else { 32 << 10 })
}

/// Returns the size in bytes of the doorbells and rings of `ranks` ranks.
pub const fn rings_len(ranks: usize) -> usize {
    ranks * BLOCK + ranks * ranks.saturating_sub(1) * (DATA + capacity(ranks))
}

/// Returns the transports of rank `index` to each peer over the rings at `offset` of `arena`, and the rank's doorbell.
///
/// The memory must be zeroed before the first call, and `offset` must be a multiple of 128. Every rank must call this
/// once, with the same `offset` and `ranks`. Panics if the rings do not fit into the arena.
pub fn ring_links(
    arena: &Arc<Arena>,
    offset: usize,
    index: usize,
    ranks: usize,
) -> (Vec<Option<Box<dyn Transport>>>, Doorbell) {
    assert!(index < ranks && offset.is_multiple_of(LINE) && offset + rings_len(ranks) <= arena.len());
    let capacity = capacity(ranks);
    let bell = |rank: usize| bell(arena, offset, rank);
    // The ring from `from` to `to` has number from * (ranks - 1) + (index of `to` among the other ranks).
    let ring = |from: usize, to: usize| {
        let number = from * (ranks - 1) + if to > from { to - 1 } else { to };
        Ring {
            arena: Arc::clone(arena),
            offset: offset + ranks * BLOCK + number * (DATA + capacity),
            capacity,
            count: 0,
        }
    };
    let link = |peer: usize| -> Option<Box<dyn Transport>> {
        (peer != index).then(|| {
            let [own, peers] = [index, peer].map(|rank| offset + rank * BLOCK + CLOSED);
            let (out, into) = (ring(index, peer), ring(peer, index));
            Box::new(ShmLink { out, into, bell: bell(peer), closed: (own, peers) }) as Box<dyn Transport>
        })
    };
    ((0..ranks).map(link).collect(), bell(index))
}

/// Closes the rings of a rank that never called [`ring_links`], as dropping its transports would.
pub fn close_rings(arena: &Arc<Arena>, offset: usize, index: usize, ranks: usize) {
    arena.word(offset + index * BLOCK + CLOSED).store(1, Ordering::Release);
    (0..ranks).filter(|peer| *peer != index).for_each(|peer| bell(arena, offset, peer).ring());
}

fn bell(arena: &Arc<Arena>, offset: usize, rank: usize) -> Doorbell {
    Doorbell::new(Arc::new(ArenaBell { arena: Arc::clone(arena), offset: offset + rank * BLOCK }))
}

/// The words of a doorbell in shared memory.
struct ArenaBell {
    arena: Arc<Arena>,
    /// Offset of the first of two 4-byte words.
    offset: usize,
}

impl BellWords for ArenaBell {
    fn words(&self) -> (&AtomicU32, &AtomicU32) {
        (self.arena.word(self.offset), self.arena.word(self.offset + 4))
    }
}

/// One end (writer or reader) of a ring buffer in shared memory, through which one rank sends bytes to another.
struct Ring {
    arena: Arc<Arena>,
    /// Offset of the ring in the arena.
    offset: usize,
    capacity: usize,
    /// Total number of bytes that this end has written or read. Kept here, so that a peer cannot change it.
    count: u64,
}

impl Ring {
    fn long(&self, at: usize) -> &AtomicU64 {
        self.arena.long(self.offset + at)
    }

    /// Copies a prefix of `bytes`, at most `room` bytes, into the ring. The reader does not access it before
    /// [`Ring::publish`].
    fn write(&mut self, bytes: &[u8], room: usize) -> usize {
        let taken = bytes.len().min(room);
        let start = self.position();
        let first = taken.min(self.capacity - start);
        let data = self.offset + DATA;
        // SAFETY: the reader accesses only bytes between its counter and our published counter, which `room` excludes.
        unsafe {
            self.arena.slice_mut(data + start..data + start + first).copy_from_slice(&bytes[..first]);
            self.arena.slice_mut(data..data + taken - first).copy_from_slice(&bytes[first..taken]);
        }
        self.count = self.count.wrapping_add(taken as u64);
        taken
    }

    /// Copies up to `filled` bytes out of the ring. The writer does not reuse their space before [`Ring::publish`].
    fn read(&mut self, into: &mut [u8], filled: usize) -> usize {
        let taken = into.len().min(filled);
        let start = self.position();
        let first = taken.min(self.capacity - start);
        let data = self.offset + DATA;
        // SAFETY: the writer does not access bytes that it has published until we publish that we have read them.
        unsafe {
            into[..first].copy_from_slice(self.arena.slice(data + start..data + start + first));
            into[first..taken].copy_from_slice(self.arena.slice(data..data + taken - first));
        }
        self.count = self.count.wrapping_add(taken as u64);
        taken
    }

    fn position(&self) -> usize {
        // The remainder is below the capacity, which is a usize.
        (self.count % self.capacity as u64) as usize
    }

    fn publish(&self, at: usize) {
        self.long(at).store(self.count, Ordering::Release);
    }

    /// Returns the number of bytes in the ring, or `Broken` if the peer's counter is invalid.
    fn fill(&self, written: u64, read: u64) -> Result<usize, Broken> {
        match usize::try_from(written.wrapping_sub(read)) {
            Ok(fill) if fill <= self.capacity => Ok(fill),
            _ => Err(Broken::new("the counters of its shared-memory ring are corrupt")),
        }
    }
}

/// The rings to and from one peer.
struct ShmLink {
    /// Ring that this rank writes and the peer reads.
    out: Ring,
    /// Ring that the peer writes and this rank reads.
    into: Ring,
    /// The peer's doorbell.
    bell: Doorbell,
    /// Offsets in the arena of the closed flags of this rank and of the peer.
    closed: (usize, usize),
}

impl ShmLink {
    /// True if the peer has closed its ends.
    fn is_closed(&self) -> bool {
        self.out.arena.word(self.closed.1).load(Ordering::Acquire) != 0
    }
}

impl Transport for ShmLink {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken> {
        if self.is_closed() {
            return Err(Broken::new("it closed its shared memory"));
        }
        let read = self.out.long(READ).load(Ordering::Acquire);
        let room = self.out.capacity - self.out.fill(self.out.count, read)?;
        let mut sent = self.out.write(head, room);
        sent += self.out.write(body, room - sent);
        if sent > 0 {
            self.out.publish(WRITTEN);
            self.bell.ring();
        }
        Ok(sent)
    }

    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        let mut written = self.into.long(WRITTEN).load(Ordering::Acquire);
        if written == self.into.count {
            if !self.is_closed() {
                return Ok(0);
            }
            // Bytes that were written before the writer closed the ring are still delivered.
            written = self.into.long(WRITTEN).load(Ordering::Acquire);
            if written == self.into.count {
                return Err(Broken::new("it closed its shared memory"));
            }
        }
        let filled = self.into.fill(written, self.into.count)?;
        let taken = self.into.read(into, filled);
        if taken > 0 {
            self.into.publish(READ);
            self.bell.ring();
        }
        Ok(taken)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Doorbell
    }

    fn is_wire(&self) -> bool {
        false
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        self.out.arena.word(self.closed.0).store(1, Ordering::Release);
        self.bell.ring();
    }
}

#[cfg(all(test, model))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Returns the transports of two ranks, each over its own mapping, with their doorbells.
    fn pair() -> [(Box<dyn Transport>, Doorbell, Arc<Arena>); 2] {
        let arena = Arena::create("bagua-test", rings_len(2)).unwrap();
        [0, 1].map(|index| {
            let own = Arc::new(Arena::from_fd(arena.fd().try_clone_to_owned().unwrap()).unwrap());
            let (mut links, bell) = ring_links(&own, 0, index, 2);
            (links[1 - index].take().unwrap(), bell, own)
        })
    }

    #[test]
    fn bytes_arrive_once_and_in_order_while_the_ring_wraps_around() {
        let [(mut left, left_bell, _), (mut right, right_bell, _)] = pair();
        let total = 10 * capacity(2) + 12_345;
        let byte = |at: usize| (at % 251) as u8;
        let until = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let data: Vec<u8> = (0..total).map(byte).collect();
                let mut sent = 0;
                while sent < total && Instant::now() < until {
                    let seen = left_bell.rings();
                    let split = (sent + 7).min(total);
                    match left.send(&data[sent..split], &data[split..]).unwrap() {
                        0 => left_bell.wait(seen, Duration::from_secs(1)),
                        some => sent += some,
                    }
                }
            });
            let mut got = Vec::new();
            let mut buffer = vec![0; 30_011];
            while got.len() < total && Instant::now() < until {
                let seen = right_bell.rings();
                match right.recv(&mut buffer).unwrap() {
                    0 => right_bell.wait(seen, Duration::from_secs(1)),
                    some => got.extend_from_slice(&buffer[..some]),
                }
            }
            assert!(got == (0..total).map(byte).collect::<Vec<u8>>());
        });
    }

    #[test]
    fn bytes_sent_before_the_peer_closed_arrive_and_then_the_stream_is_broken() {
        let [(mut left, ..), (mut right, ..)] = pair();
        assert_eq!(left.send(b"head ", b"body!").unwrap(), 10);
        drop(left);
        let mut buffer = [0; 64];
        assert_eq!(right.recv(&mut buffer).unwrap(), 10);
        assert_eq!(&buffer[..10], b"head body!");
        assert!(right.recv(&mut buffer).is_err());
        assert!(right.send(b"", b"x").is_err());
    }

    #[test]
    fn a_rank_that_never_made_its_ends_closes_them_too_and_wakes_its_peer() {
        let arena = Arc::new(Arena::create("bagua-test", rings_len(2)).unwrap());
        let (mut links, bell) = ring_links(&arena, 0, 0, 2);
        let mut link = links[1].take().unwrap();
        assert_eq!(link.send(b"", b"unread").unwrap(), 6);
        let seen = bell.rings();
        close_rings(&arena, 0, 1, 2);
        assert_ne!(bell.rings(), seen);
        assert!(link.recv(&mut [0; 8]).is_err() && link.send(b"", b"x").is_err());
    }

    #[test]
    fn a_full_ring_accepts_no_bytes_and_an_empty_one_returns_none() {
        let [(mut left, ..), (mut right, ..)] = pair();
        let many = vec![7; 2 * capacity(2)];
        assert_eq!(right.recv(&mut [0; 8]).unwrap(), 0);
        assert_eq!(left.send(&[], &many).unwrap(), capacity(2));
        assert_eq!(left.send(&[], &many).unwrap(), 0);
        assert_eq!(right.recv(&mut [0; 8]).unwrap(), 8);
        assert_eq!(left.send(&[], &many).unwrap(), 8);
    }

    #[test]
    fn invalid_counters_break_the_stream_and_nothing_else() {
        for invalid in [capacity(2) as u64 + 1, 1 << 40, 1 << 63] {
            let [(mut left, _, arena), (mut right, ..)] = pair();
            let ring = 2 * BLOCK;
            arena.long(ring + WRITTEN).store(invalid, Ordering::Release);
            assert!(right.recv(&mut [0; 64]).is_err());
            arena.long(ring + READ).store(invalid, Ordering::Release);
            assert!(left.send(b"", b"x").is_err());
        }
    }
}
