//! The synchronisation of the ranks of one host: which rank may access which shared memory when.
//!
//! Every rank counts its **arrivals** in a word that only this rank increases. All ranks make the same calls and so
//! arrive at the same points. When every rank's count has reached this rank's count, all ranks have reached the same
//! point. An operation looks like this on every rank:
//!
//! ```text
//! publish fingerprint, fill chunk 0, announce digest and offer
//! arrive; wait for all      <- also compares digests, and chooses the path
//! for each chunk p:         wait for all (if p > 0), fill chunk p + 1, take chunk p, arrive
//! ```
//!
//! The `unsafe` blocks quote these rules by number:
//!
//! - **S1.** Every operation begins by publishing the fingerprint, filling the first chunk, announcing (digest and
//!   offer), arriving, and waiting for all ranks to arrive. A rank that passes this wait in operation k therefore knows
//!   that all peers have finished operation k - 1, and no rank is ever two operations ahead. Fingerprints, digests,
//!   offers and slots exist twice, for even and odd operations, so a slow peer never reads one that is being
//!   overwritten. A rank announces last, because that writes to the cache line of the arrival word, on which peers
//!   spin.
//! - **S2.** A rank's slot is written only by that rank, before the first arrival of the operation.
//! - **W1.** Chunk p lies in the windows of parity p % 2. A rank fills its own window with chunk p before its arrival
//!   number p of the operation (counted from 0). It takes chunk p after all ranks' arrival number p and before its own
//!   next arrival.
//! - **W2.** While a rank fills its window with chunk p + 1, all ranks have therefore taken chunk p - 1 from that
//!   window, and no other rank accesses it.
//! - **W3.** A rank may leave an operation while peers still take its last chunk. The next operation that uses windows
//!   waits for those peers first.
//! - **X1.** A pairwise exchange uses only the windows of parity 0. Chunk p lies in the window of its writer if p is
//!   even, and of its reader if p is odd. After all ranks' arrival number p and before its own next arrival, only one
//!   rank accesses the window with the peer's chunk p: it takes that chunk, and writes its own chunk p + 1 over it.
//! - **D1.** Every rank decides after the first arrival whether the operation is zero-copy. The decision depends only
//!   on what all ranks published before they arrived, so it is the same everywhere. If the operation is not zero-copy,
//!   a rank that offered a tensor has not filled its window, and fills it now. All ranks then arrive once more before
//!   chunk 0, and W1 holds with arrival p + 1 instead of p.
//! - **D2.** In a zero-copy operation, only this operation accesses the offered tensors between the first arrival of
//!   all ranks and the second. The verb defines which rank accesses which range of which tensor.
//! - **D3.** No rank returns from a zero-copy operation before the second arrival of all ranks, except with an error.
//! - **D4.** If all ranks offer tensors in arenas that were not all mapped together, the ranks map them (see
//!   [`super::zero_copy`]), replace their offers by new ones, arrive again and decide again. No rank replaces its offer
//!   before all ranks have read it, because no rank gets the descriptors before all ranks have begun to pass theirs. No
//!   window has been filled yet.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::cpu_placement::Placement;
use super::segment_layout::{Announcement, Buffer, NONSENSE, Segment};
use crate::OpContext;
use crate::error::Result;
use crate::sync::{Instant, SPINS, futex, spin_loop};
use crate::wait::{blocking_wait, futex_wake, processors, slice_among};

/// Time that a rank with its own core spins for a peer. A peer that takes longer is computing, and a thread of this
/// process may need the core to compute, too.
const SPIN: Duration = Duration::from_micros(50);
/// Spin limit while peers do not seem to run at the same time, because other programs use the cores.
const SHORT_SPIN: Duration = Duration::from_micros(2);
/// Number of spins in a row without an arrival after which [`SHORT_SPIN`] applies.
const VAIN: u32 = 2;
/// While [`SHORT_SPIN`] applies, one wait in this many spins for the full time, to notice when the cores are free.
const PROBE: u32 = 16;
/// Time that a rank without its own core yields before it sleeps. With four ranks on two cores, evenly spread, at 1 KiB
/// and 1 MiB, this is 1.4 and 1.75 times as fast as OpenMPI. 50 us is only 1.27 and 1.65 times as fast.
const PATIENT: Duration = Duration::from_micros(200);
/// Flag in an arrival word: a rank sleeps on the word, or is about to.
pub(super) const SLEEPERS: u32 = 1;
/// Flag in an arrival word: its rank has closed the segment and will not arrive any more.
const CLOSED: u32 = 2;
/// Bit position of the count in an arrival word.
const SHIFT: u32 = 2;
/// Mask of a count. Counts have 30 bits and wrap around. Two ranks' counts never differ by half of that range.
const COUNT: u32 = u32::MAX >> SHIFT;

/// The two phases of a chunk. Chunks are numbered from 0.
pub(super) enum Phase {
    /// Write to this rank's own buffer the part of this chunk that its peers need. Also called with the number after
    /// the last chunk, so that a verb can copy results out of the buffer that it filled two chunks before.
    Fill(usize),
    /// Read what all ranks wrote for this chunk. With windows, this directly follows `Fill` of the next chunk, so that
    /// a verb can do both in one pass here.
    Take(usize),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// The operation only synchronises and uses no buffer.
    Nothing,
    /// The operation passes data through slots, with one chunk.
    Slots,
    /// The operation passes data through windows, with this number of chunks, at least one.
    Windows(usize),
}

/// A rank's offer of its tensor for a zero-copy operation, published before the rank arrives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BufferOffer {
    /// This operation is not zero-copy on any rank.
    Never,
    /// The operation could be zero-copy, but this rank's tensor is not in an arena that peers can map.
    Nowhere,
    /// The tensor is in an arena that the peers have not mapped.
    Unmapped,
    /// The tensor is at this place in arenas that all ranks have mapped.
    At(Location),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    /// Id of the set of arenas, [`FIRST_ID`] or above.
    pub(super) arenas: u64,
    /// Offset in the rank's part of the set.
    pub(super) offset: u64,
}

/// Published in place of an id for [`BufferOffer::Nowhere`].
const NOWHERE: u64 = 0;

const UNMAPPED: u64 = 1;

/// First id of a set of mapped arenas.
pub(super) const FIRST_ID: u64 = 2;

/// How an operation continues after the offers of all ranks are known.
enum Path {
    /// Zero-copy. Holds the offset of each rank's tensor in that rank's arena.
    ZeroCopy(Vec<u64>),
    /// The ranks map the arenas of the sets with these ids, and the arenas that have none, and then decide again.
    Map(Vec<u64>),
    /// Copies through windows or slots. Every rank has filled its own.
    AllFilled,
    /// Copies through windows. Ranks that made an offer have not filled their windows yet.
    SomeFilled,
}

/// With more ranks per processor than this, ranks no longer move to processors with fewer ranks.
const CROWDED: usize = 16;

pub(super) struct Protocol {
    pub(super) segment: Segment,
    /// Group rank of each rank on this host, for errors.
    pub(super) members: Vec<usize>,
    /// Number of this rank's arrivals so far, modulo 2^30.
    arrivals: u32,
    /// Number of arrivals after which no peer reads this rank's windows any more.
    windows_free: u32,
    /// Parity of the number of operations so far.
    parity: usize,
    /// True if every rank of this host can have its own core.
    pub(super) spins: bool,
    /// How long a sleep lasts before the rank checks whether the group has failed.
    slice: Duration,
    /// Number of spins, of either length, since the last full-length spin that saw the arrival.
    pub(super) vain: Cell<u32>,
    /// Keeps this rank away from its peers' processors while others are free. `None` leaves that to the kernel.
    pub(super) placement: Option<Placement>,
}

impl Protocol {
    pub(super) fn new(segment: Segment, members: Vec<usize>) -> Protocol {
        let cores = processors();
        let spins = segment.ranks <= cores;
        let slice = slice_among(segment.ranks);
        // If every processor has many ranks, no processor is better than another.
        let placement = (segment.ranks <= CROWDED * cores).then(Placement::default);
        let (arrivals, windows_free, parity, vain) = (0, 0, 0, Cell::new(0));
        Protocol { segment, members, arrivals, windows_free, parity, spins, slice, vain, placement }
    }

    fn buffer(route: Route, parity: usize, chunk: usize) -> Buffer {
        match route {
            Route::Windows(_) => Buffer::Window(chunk % 2),
            Route::Nothing | Route::Slots => Buffer::Slot(parity),
        }
    }

    /// Runs one operation: calls `phase` for each phase of each chunk, with the chunk's buffer. With `collect`, also
    /// calls it with `Fill(c + 1)`, if c is the number of chunks, after all ranks have taken the last chunk. The verb
    /// then copies the last results out of its buffer.
    ///
    /// If all ranks offer tensors in arenas, does not call `phase`, and returns the offsets of the tensors in the
    /// ranks' parts, by rank on this host. The caller then works on the tensors and calls [`Protocol::leave`]. If the
    /// ranks have not mapped all of these arenas, this function first calls `map` with the offered ids. `map` must map
    /// the arenas on all ranks and return the new offer.
    #[expect(clippy::too_many_arguments, reason = "one operation and what its verb supplies")]
    pub(super) fn run(
        &mut self,
        cx: &OpContext<'_>,
        announcement: &Announcement,
        route: Route,
        collect: bool,
        offer: BufferOffer,
        map: impl FnOnce(&[u64]) -> Result<BufferOffer>,
        mut phase: impl FnMut(&Segment, Phase, Buffer),
    ) -> Result<Option<Vec<u64>>> {
        let total = announcement.bytes;
        let chunks = match route {
            Route::Nothing => 0,
            Route::Slots => 1,
            Route::Windows(chunks) => chunks,
        };
        let windows = matches!(route, Route::Windows(_));
        self.parity ^= 1;
        let parity = self.parity;
        let digest = announcement.publish(&self.segment, parity);
        let offers = matches!(offer, BufferOffer::At(_) | BufferOffer::Unmapped);
        if !offers {
            self.fill_first(cx, route, parity, total, &mut phase)?;
        }
        self.announce(digest, offer, parity);
        self.arrive();
        self.wait_for(cx, self.arrivals, 0, total)?;
        for peer in (0..self.segment.ranks).filter(|peer| *peer != self.segment.index) {
            if self.segment.digest(peer, parity).load(Ordering::Relaxed) != digest {
                let theirs = announcement.difference(&self.segment, peer, parity);
                return Err(cx.mismatch(self.members[peer], &theirs));
            }
        }
        let mut path = self.path(offer, parity);
        if let Path::Map(ids) = path {
            // D4.
            let offer = map(&ids)?;
            self.publish_offer(offer, parity);
            self.arrive();
            self.wait_for(cx, self.arrivals, 0, total)?;
            path = self.path(offer, parity);
        }
        match path {
            Path::ZeroCopy(offsets) => return Ok(Some(offsets)),
            Path::AllFilled if !offers => {}
            // After D4 no rank has filled its window, and a rank that could not map the arenas makes no offer.
            Path::AllFilled | Path::SomeFilled | Path::Map(_) => {
                if offers {
                    self.fill_first(cx, route, parity, total, &mut phase)?;
                }
                self.arrive();
                self.wait_for(cx, self.arrivals, 0, total)?;
            }
        }
        for chunk in 0..chunks {
            if chunk > 0 {
                self.wait_for(cx, self.arrivals, part(total, chunk, chunks), total)?;
            }
            if windows {
                phase(&self.segment, Phase::Fill(chunk + 1), Self::buffer(route, parity, chunk + 1));
            }
            phase(&self.segment, Phase::Take(chunk), Self::buffer(route, parity, chunk));
            if windows {
                self.arrive();
            }
        }
        if windows {
            self.windows_free = self.arrivals;
            if collect {
                self.wait_for(cx, self.arrivals, total, total)?;
                phase(&self.segment, Phase::Fill(chunks + 1), Self::buffer(route, parity, chunks + 1));
            }
        }
        Ok(None)
    }

    /// Returns the operation of a peer that has begun the operation after this rank's last one.
    pub(super) fn ahead(&self, peer: usize) -> Option<String> {
        let began_next = self.has_arrived(peer, self.arrivals.wrapping_add(1) & COUNT);
        let text = |announcement: Announcement| announcement.fingerprint.to_string();
        began_next.then(|| {
            Announcement::read_from(&self.segment, peer, self.parity ^ 1).map_or_else(|| NONSENSE.to_owned(), text)
        })
    }

    /// Ends a zero-copy operation: blocks until no rank accesses the tensors any more.
    pub(super) fn leave(&mut self, cx: &OpContext<'_>, total: u64) -> Result<()> {
        self.arrive();
        self.wait_for(cx, self.arrivals, total / 2, total)
    }

    fn fill_first(
        &self,
        cx: &OpContext<'_>,
        route: Route,
        parity: usize,
        total: u64,
        phase: &mut impl FnMut(&Segment, Phase, Buffer),
    ) -> Result<()> {
        if matches!(route, Route::Windows(_)) {
            self.wait_for(cx, self.windows_free, 0, total)?;
        }
        if route != Route::Nothing {
            phase(&self.segment, Phase::Fill(0), Self::buffer(route, parity, 0));
        }
        Ok(())
    }

    /// Publishes the digest and the offer. Peers read them after this rank's next arrival, which orders the accesses.
    fn announce(&self, digest: u64, offer: BufferOffer, parity: usize) {
        self.segment.digest(self.segment.index, parity).store(digest, Ordering::Relaxed);
        if let Some(placement) = &self.placement {
            placement.publish(&self.segment);
        }
        self.publish_offer(offer, parity);
    }

    fn publish_offer(&self, offer: BufferOffer, parity: usize) {
        let (arenas, offset) = match offer {
            BufferOffer::Never => return,
            BufferOffer::Nowhere => (NOWHERE, 0),
            BufferOffer::Unmapped => (UNMAPPED, 0),
            BufferOffer::At(Location { arenas, offset }) => (arenas, offset),
        };
        let word = |at| self.segment.offer(self.segment.index, parity, at);
        word(0).store(arenas, Ordering::Relaxed);
        word(1).store(offset, Ordering::Relaxed);
    }

    /// Returns how the operation continues. The result is the same on every rank (D1).
    fn path(&self, offer: BufferOffer, parity: usize) -> Path {
        if offer == BufferOffer::Never {
            return Path::AllFilled;
        }
        let word = |rank, at| self.segment.offer(rank, parity, at).load(Ordering::Relaxed);
        let ranks = 0..self.segment.ranks;
        let first = word(0, 0);
        let equal = ranks.clone().all(|rank| word(rank, 0) == first);
        match first {
            NOWHERE if equal => Path::AllFilled,
            UNMAPPED if equal => Path::Map(Vec::new()),
            _ if equal => Path::ZeroCopy(ranks.map(|rank| word(rank, 1)).collect()),
            _ if ranks.clone().any(|rank| word(rank, 0) == NOWHERE) => Path::SomeFilled,
            _ => Path::Map(ranks.map(|rank| word(rank, 0)).filter(|id| *id >= FIRST_ID).collect()),
        }
    }

    fn arrive(&mut self) {
        self.arrivals = self.arrivals.wrapping_add(1) & COUNT;
        let word = self.segment.arrived(self.segment.index);
        // Release: a peer that reads the count sees what this rank wrote before it. The swap clears SLEEPERS.
        if word.swap(self.arrivals << SHIFT, Ordering::AcqRel) & SLEEPERS != 0 {
            futex_wake(word);
        }
    }

    fn has_arrived(&self, peer: usize, target: u32) -> bool {
        reached(self.segment.arrived(peer).load(Ordering::Acquire), target)
    }

    /// Blocks until every rank's count has reached `target`.
    #[inline]
    fn wait_for(&self, cx: &OpContext<'_>, target: u32, done: u64, total: u64) -> Result<()> {
        let (ranks, index) = (self.segment.ranks, self.segment.index);
        // Start with the next rank, so that the ranks do not all read the same line first.
        let mut peer = index + 1;
        for _ in 1..ranks {
            if peer >= ranks {
                peer = 0;
            }
            if !self.has_arrived(peer, target) {
                let begun = Instant::now();
                let outcome = self.wait_for_one(cx, peer, target, begun, (done, total));
                cx.stats.add_wait(begun.elapsed());
                outcome?;
            }
            peer += 1;
        }
        Ok(())
    }

    #[cold]
    fn wait_for_one(
        &self,
        cx: &OpContext<'_>,
        peer: usize,
        target: u32,
        begun: Instant,
        (done, total): (u64, u64),
    ) -> Result<()> {
        if self.spins {
            if let Some(placement) = &self.placement {
                placement.part_from(&self.segment, peer);
            }
            // Spin even if the peer is on the same processor: when a tick of the kernel's clock finds both runnable,
            // the kernel separates them.
            if self.spin(peer, target, begun) {
                return Ok(());
            }
        } else if self.yields(peer, target, begun) {
            return Ok(());
        }
        let word = self.segment.arrived(peer);
        loop {
            let seen = word.load(Ordering::Acquire);
            if reached(seen, target) {
                return Ok(());
            }
            if seen & CLOSED != 0 {
                let lost = cx.health.attribute_disconnect(self.members[peer], "its shared memory was closed");
                return Err(lost.during(cx.progress(done, total)));
            }
            let missing = self.missing(target);
            if let Err(error) = cx.check(&missing, done, total) {
                // The peer may have arrived, and closed, during the check.
                return if self.has_arrived(peer, target) { Ok(()) } else { Err(error) };
            }
            // From here on, an arrival or a close changes the word from `seen` and wakes this rank.
            let seen = word.fetch_or(SLEEPERS, Ordering::AcqRel) | SLEEPERS;
            if !reached(seen, target) && seen & CLOSED == 0 {
                let limit = self.slice.min(cx.deadline.left().max(Duration::from_micros(100)));
                let mask = self.placement.as_ref().and_then(|placement| placement.mask_asleep(&self.segment));
                // The affinity mask holds only for the sleep: `blocking_wait` also runs code of the program.
                blocking_wait(|| match &mask {
                    Some(mask) => mask.during(|| futex::wait(word, seen, limit)),
                    None => futex::wait(word, seen, limit),
                });
            }
        }
    }

    /// Spins for a limited time. Returns true once `peer` has arrived.
    fn spin(&self, peer: usize, target: u32, begun: Instant) -> bool {
        let vain = self.vain.get();
        let full = vain < VAIN || vain.is_multiple_of(PROBE);
        let limit = if full { SPIN } else { SHORT_SPIN };
        // Reading the clock costs as much as fetching a line from the peer, so it comes last.
        loop {
            for _ in 0..SPINS {
                if self.has_arrived(peer, target) {
                    if full {
                        self.vain.set(0);
                    }
                    return true;
                }
                spin_loop();
            }
            if begun.elapsed() >= limit {
                break;
            }
        }
        self.vain.set(vain.wrapping_add(1));
        false
    }

    /// Lets other ranks run for a limited time. Returns true once `peer` has arrived.
    fn yields(&self, peer: usize, target: u32, begun: Instant) -> bool {
        if let Some(placement) = &self.placement {
            placement.spread(&self.segment);
        }
        // Keeping the GIL meanwhile made no measurable difference.
        loop {
            blocking_wait(std::thread::yield_now);
            if self.has_arrived(peer, target) {
                return true;
            }
            if begun.elapsed() >= PATIENT {
                return false;
            }
        }
    }

    /// Returns the group ranks whose count has not reached `target`.
    fn missing(&self, target: u32) -> Vec<usize> {
        let absent = |peer: &usize| *peer != self.segment.index && !self.has_arrived(*peer, target);
        (0..self.segment.ranks).filter(absent).map(|peer| self.members[peer]).collect()
    }

    /// Sets the count to `left` arrivals before it wraps. Must be called on every rank.
    #[cfg(test)]
    pub(super) fn wind_forward(&mut self, left: u32) {
        self.arrivals = COUNT - left;
        self.windows_free = self.arrivals;
        self.segment.arrived(self.segment.index).store(self.arrivals << SHIFT, Ordering::Release);
    }
}

impl Drop for Protocol {
    fn drop(&mut self) {
        let word = self.segment.arrived(self.segment.index);
        if word.fetch_or(CLOSED, Ordering::AcqRel) & SLEEPERS != 0 {
            futex_wake(word);
        }
    }
}

fn reached(word: u32, target: u32) -> bool {
    (word >> SHIFT).wrapping_sub(target) & COUNT <= COUNT / 2
}

/// Returns the bytes of `total` that come before chunk `chunk` of `chunks`. Uses u128 because the product may not fit
/// into 64 bits.
fn part(total: u64, chunk: usize, chunks: usize) -> u64 {
    u64::try_from(u128::from(total) * chunk as u128 / chunks as u128).unwrap_or(total)
}
