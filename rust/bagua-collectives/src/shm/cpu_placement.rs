//! Placement of the ranks on processors: ranks that share a processor while another one is free move apart.
//!
//! Two ranks on one processor take turns whenever one of them waits. A call then costs two switches between processes:
//! 10 to 30 us instead of 2 to 4. The kernel itself brings ranks together: when it wakes a thread, it prefers the
//! waker's processor. On a virtual machine it always does so, because an idle processor there counts as taken away by
//! the hypervisor. The kernel separates two ranks only if a tick of its clock finds both runnable. That hardly ever
//! happens if each sleeps until the other wakes it. Therefore:
//!
//! 1. Each rank publishes its processor once per operation, and when it begins to wait.
//! 2. **A sleeping rank stays where it is** ([`Placement::mask_asleep`]). While a rank sleeps for a peer, its affinity
//!    mask contains only its own processor and, if it is the next to move, the processors with fewer ranks. So a
//!    wake-up does not bring it to its peer. The mask is restored before the wait returns: code of the program never
//!    runs with a changed mask, and no thread inherits one.
//! 3. **Ranks move apart** ([`Placement::leave_shared`]). After [`IN_A_ROW`] waits for a peer on its own processor, a
//!    rank moves to the processor with the fewest ranks, if that one has at least two ranks fewer. Its mask is restored
//!    at once, so the kernel may move it again.
//! 4. **A rank spins even on a shared processor** (`protocol`), so that the kernel may find both ranks runnable.
//!
//! Rules:
//!
//! - **L1.** Of the ranks on one processor, only the last in rank order moves, and then the one before it. So no two of
//!   them choose the same free processor. A rank that finds no better processor publishes that it stays ([`STAYS`]),
//!   and then the rank before it decides.
//! - **L2.** A rank moves only to a processor in the affinity mask that the kernel reports now. If the mask cannot be
//!   read, it does not move.
//! - **L3.** Only speed depends on the published values, which may be out of date. If two ranks that had stayed find
//!   the same processor free at the same moment, both may move there, and the later one moves on.
//!
//! A limit: the restored mask is that which the kernel reported, so the thread gains nothing if its cpuset grows later.
//!
//! Measured with `benchmarks/collectives.py --placement --ranks 2 --sizes 1KiB --peers`, on two cores of an Intel Xeon
//! (Sapphire Rapids, virtual), 2026-11-24. The ranks sleep for 50 ms before each batch of 200 calls. A batch is slow if
//! it takes more than 3 times as long as the best one. Each run has 80 batches.
//!
//! | rules | slow batches in each run |
//! |---|---|
//! | 3 (a rank on a shared processor sleeps without spinning) | 79, both ranks on one processor |
//! | 2 and 3, with pauses of up to 16,384 waits between moves | 22, 3 |
//! | 2 and 3, with pauses of up to 64, and of always 16 waits | 18, and 2 |
//! | 3 and 4 | 75 |
//! | 2 and 4 | 22 |
//! | 2, 3 and 4, but the mask of every sleeping rank contains the processors with fewer ranks | 0, 1, 2, 4 |
//! | 2, 3 and 4, as implemented | 0, 0 |
//!
//! If the same processes also call gloo before each batch, 9 of 80 batches remain slow, because gloo's threads bring
//! the ranks together again.
//!
//! Pauses between moves ([`LONGEST`]) matter if many other programs run and the kernel moves a rank back. Without
//! pauses, four ranks next to 15 runnable threads took 862 us in one of three runs, compared with 6.4 us without any
//! placement (AMD EPYC, Zen 5).

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::atomic::Ordering::Relaxed;

use super::segment_layout::Segment;
use crate::platform::{Processors, processor, processors, set_processors};

/// Number of consecutive waits for a peer on the same processor before a rank looks for another processor. One wait is
/// not enough: if the kernel has just moved a rank, its peers know only the processor that it published before.
const IN_A_ROW: u32 = 2;
/// Number of waits between two decisions. A move takes about 20 us.
const PAUSE: u32 = 16;
/// Longest pause. A pause is twice as long as the one before if the kernel has moved the rank back at once, as it does
/// if other programs use the processors. Waits on a shared processor take 10 us and more, so one move in this many
/// waits costs little.
const LONGEST: u32 = 64;
/// Number of waits since the last move that needed no move, after which the next pause is short again.
const LASTING: u32 = 32;
/// Flag in a published word: this rank found no better processor than its own.
const STAYS: u32 = 1 << 31;

#[derive(Default)]
pub(super) struct Placement {
    /// The last published word: the number of its processor plus one, possibly with [`STAYS`]. 0 before the first.
    published: Cell<u32>,
    /// Number of consecutive waits for a peer on the same processor.
    in_a_row: Cell<u32>,
    left: Cell<u32>,
    pause: Cell<u32>,
    /// Number of waits since this thread last moved to another processor. No wait among them required a move.
    lasted: Cell<u32>,
    /// Table of the last decision, kept to reuse its memory.
    table: RefCell<Vec<u32>>,
}

impl Placement {
    /// Publishes the processor that this thread runs on.
    #[inline]
    pub(super) fn publish(&self, segment: &Segment) {
        let here = here();
        if self.published.get() & !STAYS != here {
            self.write(segment, here);
        }
    }

    /// Writes the word, which is on the line of this rank's arrivals. Peers spin on that line, so callers write only if
    /// the word changes.
    fn write(&self, segment: &Segment, word: u32) {
        self.published.set(word);
        segment.processor(segment.index).store(word, Relaxed);
    }

    /// Moves this rank to another processor if it has shared its own with peers that it waited for. Called when it must
    /// wait for a peer.
    pub(super) fn part_from(&self, segment: &Segment, peer: usize) {
        self.publish(segment);
        if self.shares_with(segment, peer) {
            self.leave_shared(segment);
        }
    }

    /// True if this rank and a peer published the same processor.
    fn shares_with(&self, segment: &Segment, peer: usize) -> bool {
        let own = self.published.get() & !STAYS;
        let shares = own != 0 && segment.processor(peer).load(Relaxed) & !STAYS == own;
        if !shares {
            self.in_a_row.set(0);
            self.needs_no_move();
        }
        shares
    }

    /// Handles a wait for a peer on the same processor. Returns true if this rank has moved to another one.
    fn leave_shared(&self, segment: &Segment) -> bool {
        let in_a_row = self.in_a_row.get() + 1;
        self.in_a_row.set(in_a_row.min(IN_A_ROW));
        in_a_row >= IN_A_ROW && self.spread(segment)
    }

    fn needs_no_move(&self) {
        self.lasted.set(self.lasted.get().saturating_add(1));
    }

    /// Moves this rank if that spreads the ranks more evenly, with pauses between two moves. Returns true if it moved.
    pub(super) fn spread(&self, segment: &Segment) -> bool {
        if let Some(left) = self.left.get().checked_sub(1) {
            self.left.set(left);
            return false;
        }
        let mut table = self.table.borrow_mut();
        table.clear();
        table.extend((0..segment.ranks).map(|rank| segment.processor(rank).load(Relaxed)));
        match decide(segment.index, &table, allowed) {
            Decision::Wait => {
                self.needs_no_move();
                false
            }
            Decision::Stay => {
                self.write(segment, self.published.get() | STAYS);
                self.needs_no_move();
                self.left.set(PAUSE);
                false
            }
            Decision::Move(to) => {
                let pause = pause_after(self.pause.get(), self.lasted.replace(0));
                self.pause.set(pause);
                self.left.set(pause);
                self.in_a_row.set(0);
                // If the kernel refuses, the rank stays.
                let moved = move_to(to).is_ok();
                self.publish(segment);
                moved
            }
        }
    }
}

impl Placement {
    /// Returns the affinity mask for a sleep of this rank, or `None` if it can sleep with its own mask.
    pub(super) fn mask_asleep(&self, segment: &Segment) -> Option<MaskAsleep> {
        self.publish(segment);
        let here = self.published.get() & !STAYS;
        if here == 0 || segment.ranks < 2 {
            return None;
        }
        // If the kernel does not report the mask, leave it alone.
        let awake = processors(0).ok()?;
        let mut table = self.table.borrow_mut();
        table.clear();
        table.extend((0..segment.ranks).map(|rank| segment.processor(rank).load(Relaxed) & !STAYS));
        let asleep = processors_asleep(segment.index, &mut table, awake)?;
        Some(MaskAsleep { awake, asleep })
    }
}

/// Returns the processors on which rank `me` may be woken: its own and, only if it is the next to move (L1), those in
/// its mask that fewer ranks use. If more ranks got those, a later rank that moves first would wake this rank on the
/// processor to which it has just moved.
///
/// Returns `None` if the result is the whole mask or empty. `table` contains the number of each rank's processor plus
/// one, and is sorted by this call.
fn processors_asleep(me: usize, table: &mut [u32], awake: Processors) -> Option<Processors> {
    let here = table[me];
    let mut asleep = awake;
    if table[me + 1..].contains(&here) {
        asleep = Processors::NONE;
        if awake.contains(here as usize - 1) {
            asleep.add(here as usize - 1);
        }
    } else {
        table.sort_unstable();
        let own = table.iter().filter(|cpu| **cpu == here).count();
        for ranks in table.chunk_by(|one, next| one == next) {
            // A peer that has not published yet has 0. A peer that writes nonsense has a number that is in no mask.
            let cpu = (ranks[0] as usize).wrapping_sub(1);
            if ranks[0] != here && ranks.len() >= own && cpu < Processors::MAX {
                asleep.remove(cpu);
            }
        }
    }
    (asleep != awake && asleep.count() > 0).then_some(asleep)
}

/// The affinity masks of a thread outside and during a sleep.
#[derive(Clone, Copy)]
pub(super) struct MaskAsleep {
    awake: Processors,
    asleep: Processors,
}

impl MaskAsleep {
    /// Runs `sleep` with the mask, and restores the previous one. `sleep` must not run code of the program, which could
    /// see the mask or pass it on to a new thread. A mask that another thread sets meanwhile is lost.
    pub(super) fn during(&self, sleep: impl FnOnce()) {
        struct Restore(Processors);
        impl Drop for Restore {
            fn drop(&mut self) {
                // The kernel refuses only if the cpuset has lost all those processors, and then gives it others.
                let _ = set_processors(&self.0);
            }
        }
        // If the kernel refuses, the thread sleeps with its own mask.
        let _restore = set_processors(&self.asleep).ok().map(|()| Restore(self.awake));
        sleep();
    }
}

/// Returns the number of this thread's processor plus one. Returns 0 if the kernel does not report it, and in models,
/// whose threads have no processor and publish nothing.
fn here() -> u32 {
    if cfg!(model) { 0 } else { processor().map_or(0, |number| number + 1) }
}

/// Returns the processors that this thread may use, each plus one. Empty if the kernel does not report them.
fn allowed() -> Vec<u32> {
    processors(0).map_or_else(|_| Vec::new(), |set| set.iter().map(|cpu| cpu as u32 + 1).collect())
}

/// The decision of a rank about its processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    /// Nothing: the rank has no processor to leave, or a later rank on the same processor moves first.
    Wait,
    /// Stay: it is this rank's turn, but no allowed processor is better.
    Stay,
    Move(u32),
}

/// Decides for rank `me` from the published words (L1). `allowed` returns the processors in its affinity mask (L2). It
/// is a system call, so it comes last.
fn decide(me: usize, table: &[u32], allowed: impl FnOnce() -> Vec<u32>) -> Decision {
    let on = |cpu: u32| table.iter().filter(|word| **word & !STAYS == cpu).count();
    let here = table[me] & !STAYS;
    if table.contains(&0) || on(here) < 2 || table[me + 1..].contains(&here) {
        return Decision::Wait;
    }
    // Among equally empty processors, the nearest by number is the most likely to share caches with this one.
    match allowed().into_iter().min_by_key(|cpu| (on(*cpu), cpu.abs_diff(here))) {
        Some(best) if on(best) + 2 <= on(here) => Decision::Move(best),
        _ => Decision::Stay,
    }
}

/// Returns the pause after a move, from the previous pause (0 for none) and the number of later waits without a move.
fn pause_after(last: u32, lasted: u32) -> u32 {
    if last == 0 || lasted >= LASTING { PAUSE } else { (2 * last).min(LONGEST) }
}

/// Moves this thread to a processor and restores its affinity mask. A mask that another thread sets in between is lost.
fn move_to(cpu: u32) -> io::Result<()> {
    let before = processors(0)?;
    set_processors(&Processors::only(cpu as usize - 1))?;
    set_processors(&before)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::segment_layout::segment_len;
    use super::*;
    use crate::memory::Arena;

    use Decision::{Move, Stay, Wait};

    const STAYS_ON_1: u32 = 1 | STAYS;

    /// Returns the decision of each rank if rank r published processor `table[r]`. Every rank may use the `allowed`
    /// ones.
    fn decisions(table: &[u32], allowed: &[u32]) -> Vec<Decision> {
        (0..table.len()).map(|me| decide(me, table, || allowed.to_vec())).collect()
    }

    #[test]
    fn ranks_with_a_processor_each_do_not_move() {
        assert_eq!(decisions(&[1, 2], &[1, 2]), [Wait; 2]);
        assert_eq!(decisions(&[3, 1, 2], &[1, 2, 3, 4]), [Wait; 3]);
    }

    #[test]
    fn of_two_ranks_on_one_processor_the_second_moves_to_the_free_one() {
        assert_eq!(decisions(&[1, 1], &[1, 2]), [Wait, Move(2)]);
        assert_eq!(decisions(&[2, 2], &[1, 2]), [Wait, Move(1)]);
    }

    #[test]
    fn of_three_ranks_on_one_of_two_processors_the_last_moves() {
        assert_eq!(decisions(&[1, 1, 1], &[1, 2]), [Wait, Wait, Move(2)]);
        assert_eq!(decisions(&[1, 2, 1, 1], &[1, 2]), [Wait, Wait, Wait, Move(2)]);
        assert_eq!(decisions(&[2, 2, 1, 2], &[1, 2]), [Wait, Wait, Wait, Move(1)]);
    }

    #[test]
    fn more_ranks_than_processors_that_are_even_stay() {
        assert_eq!(decisions(&[1, 1, 2], &[1, 2]), [Wait, Stay, Wait]);
        assert_eq!(decisions(&[2, 1, 2, 1], &[1, 2]), [Wait, Wait, Stay, Stay]);
    }

    #[test]
    fn a_rank_moves_only_to_a_processor_of_its_mask() {
        assert_eq!(decide(1, &[1, 1], || vec![1, 3]), Move(3));
        assert_eq!(decide(1, &[1, 1], || vec![1]), Stay);
        assert_eq!(decide(1, &[1, 1], Vec::new), Stay, "the mask cannot be read");
    }

    #[test]
    fn the_rank_before_one_that_cannot_move_does() {
        let table = [1, STAYS_ON_1];
        assert_eq!(decide(0, &table, || vec![1, 2]), Move(2));
        assert_eq!(decide(1, &table, || vec![1]), Stay);
    }

    #[test]
    fn a_rank_that_stayed_moves_once_a_processor_of_its_mask_is_free() {
        assert_eq!(decide(1, &[1, STAYS_ON_1], || vec![1, 2]), Move(2));
        assert_eq!(decide(2, &[2, 1, STAYS_ON_1], || vec![1, 2]), Stay);
    }

    #[test]
    fn ranks_on_two_shared_processors_choose_different_free_ones() {
        assert_eq!(decisions(&[1, 1, 4, 4], &[1, 2, 3, 4]), [Wait, Move(2), Wait, Move(3)]);
    }

    #[test]
    fn four_ranks_on_one_processor_have_one_each_after_three_moves() {
        let mut table = vec![2; 4];
        for moves in 0..3 {
            let found = decisions(&table, &[1, 2, 3, 4]);
            let movers: Vec<usize> = (0..4).filter(|me| matches!(found[*me], Move(_))).collect();
            let [mover] = movers[..] else { panic!("{movers:?} move in round {moves}") };
            let Move(to) = found[mover] else { unreachable!() };
            table[mover] = to;
        }
        table.sort_unstable();
        assert_eq!(table, [1, 2, 3, 4]);
    }

    #[test]
    fn no_rank_moves_before_all_have_published() {
        assert_eq!(decisions(&[1, 1, 1, 0], &[1, 2])[..3], [Wait; 3]);
    }

    #[test]
    fn a_rank_that_the_kernel_moves_back_waits_longer_each_time() {
        assert_eq!(pause_after(0, 0), PAUSE);
        assert_eq!(pause_after(PAUSE, 0), 2 * PAUSE);
        assert_eq!(pause_after(2 * PAUSE, LASTING - 1), 4 * PAUSE);
        assert_eq!(pause_after(4 * PAUSE, LASTING), PAUSE);
        assert_eq!(pause_after(LONGEST, 0), LONGEST);
    }

    #[test]
    fn a_rank_leaves_a_shared_processor_at_the_second_wait_in_a_row() {
        let arena = Arc::new(Arena::create("bagua-test", segment_len(2)).unwrap());
        let segment = Segment::new(arena, 1, 2).unwrap();
        let placement = Placement::default();
        let others = allowed().len() > 1;
        let share = || {
            placement.publish(&segment);
            segment.processor(0).store(placement.published.get(), Relaxed);
            placement.shares_with(&segment, 0)
        };
        assert!(share() && !placement.leave_shared(&segment));
        assert!(share());
        assert_eq!(placement.leave_shared(&segment), others, "where there is another processor");
        assert!(share() && !placement.leave_shared(&segment), "moves again before a pause");
        segment.processor(0).store(!STAYS, Relaxed);
        assert!(!placement.shares_with(&segment, 0));
        assert_eq!(placement.in_a_row.get(), 0);
    }

    /// Returns the processors, each plus one, on which a rank may be woken.
    fn asleep(me: usize, table: &[u32], awake: &[u32]) -> Option<Vec<u32>> {
        let mut mask = Processors::NONE;
        awake.iter().for_each(|cpu| mask.add(*cpu as usize - 1));
        let found = processors_asleep(me, &mut table.to_vec(), mask)?;
        Some(found.iter().map(|cpu| cpu as u32 + 1).collect())
    }

    #[test]
    fn a_sleeping_rank_is_woken_on_its_own_processor_or_where_it_is_next_to_move_on_one_with_fewer_ranks() {
        for (me, table, awake, expected) in [
            (0, &[1, 2][..], &[1, 2][..], Some(vec![1])),
            (1, &[1, 2], &[1, 2], Some(vec![2])),
            (0, &[1, 1], &[1, 2], Some(vec![1])),
            (1, &[1, 1], &[1, 2], None),
            (0, &[1, 2, 1, 2], &[1, 2], Some(vec![1])),
            (2, &[1, 2, 1, 2], &[1, 2], Some(vec![1])),
            (0, &[1, 2, 1, 1], &[1, 2], Some(vec![1])),
            (3, &[1, 2, 1, 1], &[1, 2], None),
            (3, &[1, 2, 2, 1, 3], &[1, 2, 3, 4], Some(vec![1, 3, 4])),
            (0, &[3, 1], &[1, 2, 3, 4], Some(vec![2, 3, 4])),
            (0, &[1, 2], &[1], None),
            (0, &[1, 1], &[1], None),
            (0, &[1, 2], &[2], None),
            (0, &[1, 1], &[2], None),
            (0, &[1, 0], &[1, 2], None),
            (0, &[1, !STAYS], &[1, 2], None),
        ] {
            assert_eq!(asleep(me, table, awake), expected, "rank {me} of {table:?}, mask {awake:?}");
        }
    }

    #[test]
    fn the_mask_of_a_sleep_ends_with_it() {
        let own = || processors(0).ok();
        let before = own().unwrap();
        let asleep = Processors::only(allowed()[0] as usize - 1);
        let seen = Cell::new(None);
        MaskAsleep { awake: before, asleep }.during(|| seen.set(own()));
        assert_eq!((seen.get(), own()), (Some(asleep), Some(before)));
        MaskAsleep { awake: before, asleep: Processors::NONE }.during(|| seen.set(own()));
        assert_eq!((seen.get(), own()), (Some(before), Some(before)), "the kernel refuses an empty mask");
    }

    #[test]
    fn a_thread_that_moves_runs_there_and_keeps_its_affinity_mask() {
        let before = allowed();
        assert!(!before.is_empty());
        for cpu in &before {
            move_to(*cpu).unwrap();
            assert_eq!(allowed(), before);
        }
    }
}
