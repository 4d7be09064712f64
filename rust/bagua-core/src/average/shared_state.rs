//! The state that the averaging thread shares with the other threads of its rank.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::{AveragerState, AveragerStats};
use crate::error::{Error, Result};
use crate::group::{Group, OwnerProcess};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::wait::Waited;

/// A group that a thread can leave to end its waits. Each model has its own groups.
pub(super) trait Leave: Clone {
    fn leave(&self);
}

impl Leave for Group {
    fn leave(&self) {
        Group::leave(self);
    }
}

pub(super) struct SharedControl<G = Group> {
    state: Mutex<Control>,
    changed: Condvar,
    /// Number of optimizer steps counted by [`Averager::count_step`].
    pub(super) steps: AtomicU64,
    /// Value of `steps` at the snapshot of the last completed round.
    pub(super) averaged_steps: AtomicU64,
    /// The caller's count of forward passes, which a joining rank takes over.
    pub(super) forwards: AtomicU64,
    pub(super) owner: OwnerProcess,
    /// The group of the thread. Leaving it ends the thread's waits.
    group: Mutex<G>,
}

/// The requests to the thread, and its progress.
pub(super) struct Control {
    pub(super) takes_part: bool,
    /// True while the thread is in a round in which this rank takes part, and may write to the weights.
    pub(super) in_round: bool,
    /// Number of `synchronize` calls so far, which is also the number of the last call.
    pub(super) synchronize_calls: u64,
    /// Waiting calls that no round has served. A round serves those that all ranks knew of before it started.
    pub(super) synchronizing: BTreeSet<u64>,
    /// All calls up to this number have been served by a round.
    pub(super) synchronized: u64,
    /// Job ranks that synchronized in an exchange since this rank started to. They may have given up since.
    pub(super) synchronized_too: BTreeSet<usize>,
    /// Job ranks that took part in the last exchange and are not in `synchronized_too`.
    pub(super) not_synchronizing: Vec<usize>,
    /// True if this rank does not have the weights of the job yet.
    pub(super) is_new: bool,
    /// True if the thread has to end.
    pub(super) stopping: bool,
    /// The reason why the thread ended.
    pub(super) failure: Option<Error>,
    pub(super) stats: AveragerStats,
}

impl<G: Leave> SharedControl<G> {
    /// Creates the state for an averaging with these job ranks.
    pub(super) fn new(ranks: Vec<usize>, group: G, is_new: bool, takes_part: bool) -> SharedControl<G> {
        let stats = AveragerStats {
            state: if takes_part { AveragerState::Running } else { AveragerState::Stopped },
            view: 1,
            ranks,
            rounds: 0,
            round: Duration::ZERO,
            staleness: 0,
            unaveraged_steps: 0,
            payload_bytes: 0,
            wire_bytes_sent: 0,
            wire_bytes_received: 0,
            lost: BTreeMap::new(),
            joined: 0,
        };
        SharedControl {
            state: Mutex::new(Control {
                takes_part,
                in_round: false,
                synchronize_calls: 0,
                synchronizing: BTreeSet::new(),
                synchronized: 0,
                synchronized_too: BTreeSet::new(),
                not_synchronizing: Vec::new(),
                is_new,
                stopping: false,
                failure: None,
                stats,
            }),
            changed: Condvar::new(),
            steps: AtomicU64::new(0),
            averaged_steps: AtomicU64::new(0),
            forwards: AtomicU64::new(0),
            owner: OwnerProcess::current(),
            group: Mutex::new(group),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Control> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, for at most `limit`. May return early.
    pub(super) fn wait<'a>(&self, control: MutexGuard<'a, Control>, limit: Duration) -> MutexGuard<'a, Control> {
        self.changed.wait_timeout(control, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    pub(super) fn wait_until(&self, limit: Duration, outcome: impl Fn(&Control) -> Option<Result<()>>) -> Waited<()> {
        let start = Instant::now();
        let mut control = self.lock();
        loop {
            if let Some(outcome) = outcome(&control) {
                return Waited::Done(outcome);
            }
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Waited::Pending;
            }
            control = self.wait(control, left);
        }
    }

    pub(super) fn group(&self) -> MutexGuard<'_, G> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the thread's group. Returns false if the thread has to end.
    pub(super) fn replace_group(&self, group: G) -> bool {
        *self.group() = group;
        !self.lock().stopping
    }

    /// Makes the thread end: ends its waits, and leaves the group.
    pub(super) fn stop(&self) {
        self.lock().stopping = true;
        self.notify();
        let group = self.group().clone();
        group.leave();
    }

    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Sleeps until `due` or until a thread calls `synchronize`. Returns false if the thread has to end.
    pub(super) fn sleep(&self, due: Instant) -> bool {
        let mut control = self.lock();
        loop {
            if control.stopping {
                return false;
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() || (!control.synchronizing.is_empty() && control.takes_part) {
                return true;
            }
            control = self.wait(control, left);
        }
    }
}
