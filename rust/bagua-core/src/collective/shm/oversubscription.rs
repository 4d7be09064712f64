//! More ranks than cores: spreading them evenly.
//!
//! Ranks that let each other run while they wait never sleep for long. So a kernel that has once put three of four ranks on one of
//! two cores leaves them there: what it takes from a busy core it takes when another one has been idle for a while, or every tenth
//! of a second. An operation lasts as long as its fullest core needs. So each rank says where it runs, and one that is too many
//! where it is moves to where there is room. It is not bound there: the kernel may move it on.

use std::cell::Cell;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Waits between two looks, so that ranks and kernel, if they disagree, do so at little cost: a move takes about 20 us.
const PATIENCE: u32 = 16;

/// What a rank knows of where it may run.
#[derive(Default)]
pub(super) struct Oversubscription {
    /// Waits until the next look.
    patience: Cell<u32>,
}

/// The number of this thread's processor, plus one.
pub(super) fn here() -> u32 {
    sched_getcpu() as u32 + 1
}

impl Oversubscription {
    /// A look around, now and then. `places` is where each rank was last, as [`here`] said it there; 0 when it has not said yet.
    pub(super) fn spread(&self, me: usize, places: impl Iterator<Item = u32>) {
        if let Some(patience) = self.patience.get().checked_sub(1) {
            self.patience.set(patience);
            return;
        }
        let places: Vec<u32> = places.collect();
        let Some(free) = better(me, &places, || allowed().unwrap_or_default()) else { return };
        self.patience.set(PATIENCE);
        // A thread that may not be moved stays: nothing depends on it but speed.
        let _ = hop(free);
    }
}

/// Processors that this thread may use.
fn allowed() -> rustix::io::Result<Vec<u32>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32 + 1).collect())
}

/// Where rank `me` should go: to a processor with two ranks fewer. Of several ranks that could go the last one does.
fn better(me: usize, places: &[u32], allowed: impl FnOnce() -> Vec<u32>) -> Option<u32> {
    let on = |cpu: u32| places.iter().filter(|place| **place == cpu).count();
    let here = places[me];
    if places.contains(&0) || on(here) < 2 || places[me + 1..].contains(&here) {
        return None;
    }
    let emptiest = allowed().into_iter().min_by_key(|cpu| on(*cpu))?;
    (on(emptiest) + 2 <= on(here)).then_some(emptiest)
}

/// Has this thread continue on a processor, and lets it free again.
fn hop(to: u32) -> rustix::io::Result<()> {
    let before = sched_getaffinity(None)?;
    let mut only = CpuSet::new();
    only.set(to as usize - 1);
    sched_setaffinity(None, &only)?;
    sched_setaffinity(None, &before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_three_goes_where_one_is_and_nobody_else_does() {
        let cores = || vec![1, 2];
        let moves = |places: &[u32]| (0..places.len()).map(|me| better(me, places, cores)).collect::<Vec<_>>();
        assert_eq!(moves(&[1, 2, 1, 1]), [None, None, None, Some(2)]);
        assert_eq!(moves(&[2, 2, 1, 2]), [None, None, None, Some(1)]);
        assert_eq!(moves(&[1, 1, 2]), [None; 3]);
        assert_eq!(moves(&[2, 1, 2, 1]), [None; 4]);
        assert_eq!(moves(&[1, 1, 1, 0]), [None; 4], "one has not said yet where it is");
        assert_eq!(better(2, &[1, 1, 1], || vec![1]), None, "bound to where it is");
    }

    #[test]
    fn a_thread_that_hops_is_there_and_may_use_all_processors_as_before() {
        let before = allowed().unwrap();
        for cpu in &before {
            hop(*cpu).unwrap();
            assert_eq!(allowed().unwrap(), before);
        }
    }
}
