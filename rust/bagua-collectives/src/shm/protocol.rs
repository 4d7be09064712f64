//! The synchronisation of the ranks of one host: which rank may access which shared memory when.
//!
//! Every rank counts its **arrivals** in a word that only it increases. Ranks that make the same calls arrive equally often, so all
//! ranks have reached the same point when every count has reached this rank's. The `unsafe` blocks quote the rules by number:
//!
//! - **S1.** Every operation begins thus: publish the fingerprint, fill, announce (digest and offer), arrive, wait for the arrival of
//!   all. So a rank that has passed this wait in operation k knows that all peers have finished operation k - 1, and no rank is two
//!   operations ahead. What exists twice, by the parity of the operation (fingerprints, digests, offers, slots), is never overwritten
//!   while a slow peer may read it. A rank announces last, because that writes to the arrival word's cache line, on which peers spin.
//! - **S2.** A rank's slot is written by that rank only, before the operation's first arrival.
//! - **W1.** Piece p lies in the windows of parity p % 2. A rank fills its own window with chunk p before its arrival number p
//!   of the operation (counting from 0), and takes chunk p between the wait for all ranks' arrival number p and its own next arrival.
//! - **W2.** So while a rank fills its window for chunk p + 1, all have taken chunk p - 1 from it: no other rank accesses it.
//! - **W3.** An operation may end while peers still take its last chunk. The next one that uses windows waits for them first.
//! - **X1.** In a pairwise exchange only the windows of parity 0 are used, and chunk p lies in that of its writer when p is even and
//!   in that of its reader when p is odd. Between the wait for all ranks' arrival number p and its own next arrival only one rank
//!   accesses the window in which the peer's chunk p lies: it takes that chunk and writes its own chunk p + 1 there.
//! - **D1.** Every rank decides whether an operation is zero-copy after its first arrival, from what all ranks published before
//!   theirs, so all decide alike. If it is not, a rank that offered a tensor, and so filled no window, fills it then; all ranks arrive
//!   once more before chunk 0, and W1 holds with arrival p + 1 in place of p.
//! - **D2.** Zero-copy: between the first arrival of all ranks and the second, only this operation accesses the tensors that were
//!   offered; the verb defines which rank accesses which range of which tensor.
//! - **D3.** No rank returns from such an operation before the second arrival of all, except with an error.
//! - **D4.** When all ranks offer tensors in arenas that not all have mapped together, all map them (see [`super::zero_copy`]), publish
//!   their new offers in place of the first ones, arrive and decide again. No rank does so before all have read the first offers,
//!   because the descriptors come to no rank before all ranks have begun to pass theirs. No window was filled.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::placement::Placement;
use super::segment::{Announcement, Buffer, NONSENSE, Segment};
use crate::OpContext;
use crate::error::Result;
use crate::sync::{Instant, SPINS, futex, spin_loop};
use crate::wait::{blocking_wait, futex_wake, processors, slice_among};

/// How long a rank with a core of its own spins for a peer. A peer that is later than this computes, and a computing thread of this
/// process may need the core.
const SPIN: Duration = Duration::from_micros(50);
/// How long it spins when the peer does not seem to run at the same time, because other programs use the cores.
const SHORT_SPIN: Duration = Duration::from_micros(2);
/// Spins in a row without an arrival after which it seems so.
const VAIN: u32 = 2;
/// One wait in this many spins for the full time even then, to notice when the cores are free again.
const PROBE: u32 = 16;
/// How long a rank without a core of its own yields before it sleeps. Four ranks on two cores, evenly spread, at 1 KiB and
/// 1 MiB: 1.27 and 1.65 times as fast as OpenMPI with 50 us, 1.4 and 1.75 with this.
const PATIENT: Duration = Duration::from_micros(200);
/// In an arrival word: a rank sleeps on it, or is about to.
pub(super) const SLEEPERS: u32 = 1;
/// In an arrival word: its rank has closed the segment and does not arrive any more.
const CLOSED: u32 = 2;
/// Where the count begins in an arrival word.
const SHIFT: u32 = 2;
/// Counts have 30 bits and wrap; the counts of two ranks never differ by half of that.
const COUNT: u32 = u32::MAX >> SHIFT;

/// The two phases of a chunk. Chunks count from 0.
pub(super) enum Phase {
    /// Write to this rank's own buffer what its peers need of this chunk. Also called with the number after the last chunk, where a
    /// verb may have to copy out of the buffer that it filled two chunks before.
    Fill(usize),
    /// Read what all ranks wrote of this chunk. In windows this follows `Fill` of the next chunk directly, so that a verb may do
    /// both in one pass here.
    Take(usize),
}

/// The buffers through which an operation's chunks pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// None: the operation only synchronises.
    Nothing,
    /// One chunk, in slots.
    Slots,
    /// This many chunks, at least one, in windows.
    Windows(usize),
}

/// Whether and where a rank offers its tensor for a zero-copy operation; published before it arrives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BufferOffer {
    /// This operation is zero-copy on no rank.
    Never,
    /// It could be, but this rank's tensor lies in no arena that peers can map.
    Nowhere,
    /// The tensor lies in an arena that the peers have not mapped.
    Unmapped,
    /// The tensor lies here.
    At(Location),
}

/// A place in arenas that all ranks have mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    /// Their number, [`FIRST_ID`] or above.
    pub(super) arenas: u64,
    /// Offset in the rank's part.
    pub(super) offset: u64,
}

/// What a rank publishes instead of a number for [`BufferOffer::Nowhere`].
const NOWHERE: u64 = 0;

/// The same for [`BufferOffer::Unmapped`].
const UNMAPPED: u64 = 1;

/// The first number of mapped arenas.
pub(super) const FIRST_ID: u64 = 2;

/// How an operation continues, by the offers of all ranks.
enum Path {
    /// Zero-copy, on tensors at these offsets in the ranks' parts.
    ZeroCopy(Vec<u64>),
    /// The ranks map the arenas with these numbers together with those that have none, and decide again.
    Map(Vec<u64>),
    /// Through windows or slots; all ranks have filled theirs.
    AllFilled,
    /// Through windows; the ranks that made an offer have not filled theirs yet.
    SomeFilled,
}

/// Ranks to a processor above which none of them looks for another processor.
const CROWDED: usize = 16;

/// One rank's state in the protocol.
pub(super) struct Protocol {
    pub(super) segment: Segment,
    /// Group rank of each rank on this host, for errors.
    pub(super) members: Vec<usize>,
    /// Own arrivals so far, modulo 2^30.
    arrivals: u32,
    /// The count of arrivals at which no peer reads this rank's windows any more.
    windows_free: u32,
    /// Parity of the number of operations so far.
    parity: usize,
    /// Every rank of this host can have a core of its own.
    pub(super) spins: bool,
    /// How long it sleeps before it looks whether the group has failed.
    slice: Duration,
    /// Spins, of either length, since the last full one that ended with the arrival.
    pub(super) vain: Cell<u32>,
    /// Keeps this rank away from processors of its peers while others are free; `None` leaves that to the kernel.
    pub(super) placement: Option<Placement>,
}

impl Protocol {
    pub(super) fn new(segment: Segment, members: Vec<usize>) -> Protocol {
        let cores = processors();
        let spins = segment.ranks <= cores;
        let slice = slice_among(segment.ranks);
        // Where every processor has many ranks, no other one is better.
        let placement = (segment.ranks <= CROWDED * cores).then(Placement::default);
        let (arrivals, windows_free, parity, vain) = (0, 0, 0, Cell::new(0));
        Protocol { segment, members, arrivals, windows_free, parity, spins, slice, vain, placement }
    }

    /// The buffer of a chunk.
    fn buffer(route: Route, parity: usize, chunk: usize) -> Buffer {
        match route {
            Route::Windows(_) => Buffer::Window(chunk % 2),
            Route::Nothing | Route::Slots => Buffer::Slot(parity),
        }
    }

    /// Runs one operation: calls `phase` with each phase of each chunk and its buffer. With `collect`, it calls it once more when all
    /// ranks have taken the last chunk, with `Fill` of the number two after it.
    ///
    /// If all ranks offer tensors in arenas, it does not call `phase`, and returns the tensors' offsets in the ranks' parts, by rank
    /// on this host. The caller operates on them and then calls [`Protocol::leave`]. Before that it may call `map`, once, with the
    /// numbers that were offered: it maps the arenas on all ranks and returns the new offer.
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
            // After D4 no rank has filled its window, and a rank that could not map the arenas offers none.
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

    /// The operation of a peer that has begun the one after this rank's last.
    pub(super) fn ahead(&self, peer: usize) -> Option<String> {
        let began_next = self.has_arrived(peer, self.arrivals.wrapping_add(1) & COUNT);
        let text = |announcement: Announcement| announcement.fingerprint.to_string();
        began_next
            .then(|| Announcement::of(&self.segment, peer, self.parity ^ 1).map_or_else(|| NONSENSE.to_owned(), text))
    }

    /// Ends a zero-copy operation: returns when no rank accesses the tensors any more.
    pub(super) fn leave(&mut self, cx: &OpContext<'_>, total: u64) -> Result<()> {
        self.arrive();
        self.wait_for(cx, self.arrivals, total / 2, total)
    }

    /// Fills this rank's buffer for chunk 0.
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

    /// Publishes digest and offer. Peers read them after this rank's next arrival, which orders the accesses.
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

    /// How the operation continues; the same on every rank (D1).
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

    /// Increases this rank's count of arrivals.
    fn arrive(&mut self) {
        self.arrivals = self.arrivals.wrapping_add(1) & COUNT;
        let word = self.segment.arrived(self.segment.index);
        // Release: a peer that reads the count sees what this rank wrote before. The swap clears SLEEPERS.
        if word.swap(self.arrivals << SHIFT, Ordering::AcqRel) & SLEEPERS != 0 {
            futex_wake(word);
        }
    }

    fn has_arrived(&self, peer: usize, target: u32) -> bool {
        reached(self.segment.arrived(peer).load(Ordering::Acquire), target)
    }

    /// Returns when every rank's count has reached `target`.
    #[inline]
    fn wait_for(&self, cx: &OpContext<'_>, target: u32, done: u64, total: u64) -> Result<()> {
        let (ranks, index) = (self.segment.ranks, self.segment.index);
        // Beginning with the next rank, so that the ranks do not all read the same line first.
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
            // Also beside a peer on the same processor: a tick of the kernel's clock that finds both runnable parts them.
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
            // From here on an arrival or a close changes the word, which is `seen`, and wakes this rank.
            let seen = word.fetch_or(SLEEPERS, Ordering::AcqRel) | SLEEPERS;
            if !reached(seen, target) && seen & CLOSED == 0 {
                let limit = self.slice.min(cx.deadline.left().max(Duration::from_micros(100)));
                let mask = self.placement.as_ref().and_then(|placement| placement.mask_asleep(&self.segment));
                // The mask inside the hook, which runs code of the program.
                blocking_wait(|| match &mask {
                    Some(mask) => mask.during(|| futex::wait(word, seen, limit)),
                    None => futex::wait(word, seen, limit),
                });
            }
        }
    }

    /// Spins until `peer` has arrived, for a limited time. Returns whether it has.
    fn spin(&self, peer: usize, target: u32, begun: Instant) -> bool {
        let vain = self.vain.get();
        let full = vain < VAIN || vain.is_multiple_of(PROBE);
        let limit = if full { SPIN } else { SHORT_SPIN };
        // The clock costs as much as a line that comes from the peer, so it is read last.
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

    /// Lets other ranks run until `peer` has arrived, for a limited time. Returns whether it has.
    fn yields(&self, peer: usize, target: u32, begun: Instant) -> bool {
        if let Some(placement) = &self.placement {
            placement.spread(&self.segment);
        }
        // Measured: keeping the GIL meanwhile makes no difference beyond noise.
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

    /// Group ranks whose count has not reached `target`.
    fn missing(&self, target: u32) -> Vec<usize> {
        let absent = |peer: &usize| *peer != self.segment.index && !self.has_arrived(*peer, target);
        (0..self.segment.ranks).filter(absent).map(|peer| self.members[peer]).collect()
    }

    /// Sets the count to `left` arrivals before it wraps; called on every rank.
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

/// Whether an arrival word's count has reached `target`.
fn reached(word: u32, target: u32) -> bool {
    (word >> SHIFT).wrapping_sub(target) & COUNT <= COUNT / 2
}

/// Bytes of `total` before chunk number `chunk` of `chunks`; u128 because the product may not fit in 64 bits.
fn part(total: u64, chunk: usize, chunks: usize) -> u64 {
    u64::try_from(u128::from(total) * chunk as u128 / chunks as u128).unwrap_or(total)
}
