//! Processors of the ranks: ranks that share one while another is free move apart.
//!
//! Two ranks on one processor let each other run whenever one of them waits, so neither is ever waiting for the processor when the
//! kernel balances its run queues, and the kernel leaves both there. A call then costs two switches between processes. With more
//! ranks than processors the same keeps three of four ranks on one of two, and an operation lasts as long as the fullest processor
//! needs.
//!
//! So each rank publishes the processor on which it runs, once per operation and when it begins to wait. A rank that waits for a
//! peer on its own processor does not spin, because a spin keeps the peer from running: it sleeps at once. After [`IN_A_ROW`] such
//! waits it moves to the processor with the fewest ranks, if that has two ranks fewer. It is not bound there: its affinity mask is
//! restored at once, and the kernel may move it again.
//!
//! - **L1.** Of the ranks on one processor only the last in rank order moves, then the one before it, so no two choose the same free
//!   processor. A rank that finds no better processor publishes that it stays ([`STAYS`]), and the rank before it decides.
//! - **L2.** A rank moves only to a processor of its own affinity mask as the kernel has it now, and does not move when that cannot
//!   be read.
//! - **L3.** Nothing but speed depends on what is published: it may be out of date. Where two ranks that both stayed find a processor
//!   free at the same moment, both may move there, and the later one moves on.
//!
//! A limit: the restored mask is the one that the kernel reported, so a cpuset that grows later does not give the thread more processors.
//!
//! Measured (`cargo bench --bench shm_placement`): all_reduce of 1 KiB in batches of 200 calls, 20 rounds of 48 batches, each of which
//! the ranks begin on one of two processors; microseconds per call and the share of batches that took more than 3 times the best of
//! the run, with and without this file. AMD EPYC (Zen 5, virtual, 2 cores), 2026-11-22, while other programs ran; lowest and highest of
//! five runs:
//!
//! | | median with | without | slow batches with | without |
//! |---|---|---|---|---|
//! | 2 ranks | 0.29 to 0.75 | 10.9 to 12.2 | 2.1 to 15.7 % | 87 to 99 % |
//! | 4 ranks | 3.3 to 5.4 | 5.7 to 7.4 | 0.8 to 1.7 % | 1.4 to 28 % |
//! | 2 ranks, bound to a processor each | 0.33 to 0.80 | 0.33 to 0.81 | 0.4 to 5.0 % | 1.1 to 4.6 % |
//!
//! The last row is the cost where nobody moves, and what other programs alone do to the batches. A move at the first wait instead of the
//! second ([`IN_A_ROW`]): 6.2 and 7.8 % slow batches with 2 ranks in two runs, instead of 4.6 and 5.0 %. Without the longer pauses
//! ([`LONGEST`]), in one of three runs beside about 15 runnable threads of other programs: 4 ranks 862 us with and 6.4 us without this
//! file, 77 and 21 % slow batches. The longer pauses are meant for that; they have not been measured at such a load.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering::Relaxed;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use super::segment::Segment;

/// Waits for a peer on the same processor, one directly after the other, before a rank looks for another processor: after a rank
/// was moved by the kernel its peers know only the processor that it published before.
const IN_A_ROW: u32 = 2;
/// Waits between two decisions: a move takes about 20 us.
const PAUSE: u32 = 16;
/// The longest pause. A pause is twice as long as the one before where the kernel has moved a rank back at once: it does so where
/// other programs use the processors.
const LONGEST: u32 = 1 << 14;
/// Waits on a processor that need no move, since the last move, after which the pause is short again.
const LASTING: u32 = 32;
/// In a published word: this rank found no better processor than this one.
const STAYS: u32 = 1 << 31;

/// What a rank knows of its own processor.
#[derive(Default)]
pub(super) struct Placement {
    /// The word that this rank published last: the number of its processor plus one, perhaps with [`STAYS`]; 0 before the first.
    published: Cell<u32>,
    /// Waits in a row for a peer on the same processor.
    in_a_row: Cell<u32>,
    /// Waits until the next decision.
    left: Cell<u32>,
    /// Length of the pause after the last move.
    pause: Cell<u32>,
    /// Waits since the last move that needed none.
    lasted: Cell<u32>,
    /// The table of the last decision, kept for its memory.
    table: RefCell<Vec<u32>>,
}

impl Placement {
    /// Publishes the processor on which this thread runs.
    #[inline]
    pub(super) fn publish(&self, segment: &Segment) {
        let here = here();
        if self.published.get() & !STAYS != here {
            self.write(segment, here);
        }
    }

    /// The word is on the line of this rank's arrivals, on which peers spin: written only where it changes.
    fn write(&self, segment: &Segment, word: u32) {
        self.published.set(word);
        segment.processor(segment.index).store(word, Relaxed);
    }

    /// Whether this rank and a peer published the same processor.
    pub(super) fn shares_with(&self, segment: &Segment, peer: usize) -> bool {
        let own = self.published.get() & !STAYS;
        let shares = own != 0 && segment.processor(peer).load(Relaxed) & !STAYS == own;
        if !shares {
            self.in_a_row.set(0);
            self.needs_no_move();
        }
        shares
    }

    /// Called when this rank has to wait for a peer on its own processor. Returns whether it has moved to another one.
    pub(super) fn leave_shared(&self, segment: &Segment) -> bool {
        let in_a_row = self.in_a_row.get() + 1;
        self.in_a_row.set(in_a_row.min(IN_A_ROW));
        in_a_row >= IN_A_ROW && self.spread(segment)
    }

    fn needs_no_move(&self) {
        self.lasted.set(self.lasted.get().saturating_add(1));
    }

    /// Moves this rank where that makes the ranks more even, with pauses between two moves. Returns whether it has moved.
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
                // Where the kernel refuses, the rank stays.
                let moved = move_to(to).is_ok();
                self.publish(segment);
                moved
            }
        }
    }
}

/// The number of this thread's processor, plus one. 0 in a model, whose threads have none, so that it publishes nothing.
fn here() -> u32 {
    if cfg!(model) { 0 } else { sched_getcpu() as u32 + 1 }
}

/// Processors that this thread may use, each plus one; none when the kernel does not say.
fn allowed() -> Vec<u32> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    let mut left = set.count();
    let mut found = Vec::with_capacity(left as usize);
    for cpu in 0..CpuSet::MAX_CPU {
        if left == 0 {
            break;
        }
        if set.is_set(cpu) {
            found.push(cpu as u32 + 1);
            left -= 1;
        }
    }
    found
}

/// What a rank does about its processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    /// It has no processor to leave, or a rank behind it on the same processor moves first.
    Wait,
    /// It is this rank's turn, and none of its processors would be better.
    Stay,
    /// It moves to this processor.
    Move(u32),
}

/// Decides for rank `me` by what the ranks published (L1). `allowed` are the processors of its affinity mask (L2); it is a system
/// call, so it comes last.
fn decide(me: usize, table: &[u32], allowed: impl FnOnce() -> Vec<u32>) -> Decision {
    let on = |cpu: u32| table.iter().filter(|word| **word & !STAYS == cpu).count();
    let here = table[me] & !STAYS;
    if table.contains(&0) || on(here) < 2 || table[me + 1..].contains(&here) {
        return Decision::Wait;
    }
    // Of equally empty ones the nearest by number, which is likely to share caches with this one.
    match allowed().into_iter().min_by_key(|cpu| (on(*cpu), cpu.abs_diff(here))) {
        Some(best) if on(best) + 2 <= on(here) => Decision::Move(best),
        _ => Decision::Stay,
    }
}

/// The pause after a move, by the one after the last move (0 for none) and the waits that needed no move since.
fn pause_after(last: u32, lasted: u32) -> u32 {
    if last == 0 || lasted >= LASTING { PAUSE } else { (2 * last).min(LONGEST) }
}

/// Moves this thread to a processor and restores its affinity mask. A mask that another thread sets in between is lost.
fn move_to(cpu: u32) -> rustix::io::Result<()> {
    let before = sched_getaffinity(None)?;
    let mut only = CpuSet::new();
    only.set(cpu as usize - 1);
    sched_setaffinity(None, &only)?;
    sched_setaffinity(None, &before)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::segment::segment_len;
    use super::*;
    use crate::memory::Arena;

    use Decision::{Move, Stay, Wait};

    const STAYS_ON_1: u32 = 1 | STAYS;

    /// The decisions of all ranks, which may all use these processors.
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
