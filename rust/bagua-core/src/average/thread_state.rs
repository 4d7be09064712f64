//! What the averaging thread shares with the other threads of its rank.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::{AveragerState, AveragerStats};
use crate::error::{Error, Result};
use crate::group::{Group, OwnerProcess};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::wait::Waited;

/// What ends the waits of a thread in a group; a model has groups of its own.
pub(super) trait Leave: Clone {
    /// Leaves the group, for all its clones.
    fn leave(&self);
}

impl Leave for Group {
    fn leave(&self) {
        Group::leave(self);
    }
}

/// What the thread shares with the others.
pub(super) struct SharedControl<G = Group> {
    state: Mutex<Control>,
    /// Notified when `state` changes.
    changed: Condvar,
    /// Steps of the optimizer that [`Averager::count_step`] has counted.
    pub(super) steps: AtomicU64,
    /// Value of `steps` at the snapshot of the last completed round.
    pub(super) averaged_steps: AtomicU64,
    /// The caller's count of forwards, which a joining rank takes over.
    pub(super) forwards: AtomicU64,
    pub(super) owner: OwnerProcess,
    /// The group of the thread; leaving it ends the thread's waits.
    group: Mutex<G>,
}

/// What is wanted of the thread, and what it does.
pub(super) struct Control {
    /// This rank wants to take part.
    pub(super) takes_part: bool,
    /// The thread is in a round in which this rank takes part; it may write to the weights.
    pub(super) in_round: bool,
    /// Calls of `synchronize` so far; the last one has this number.
    pub(super) synchronize_calls: u64,
    /// Those that no round has served and that wait still. A round serves those that all ranks
    /// knew of before it began.
    pub(super) synchronizing: BTreeSet<u64>,
    /// A round has served all calls up to this number.
    pub(super) synchronized: u64,
    /// Ranks in the job that synchronized in an exchange since this rank began to. They may have given up since.
    pub(super) synchronized_too: BTreeSet<usize>,
    /// Ranks in the job that took part in the last exchange and are none of these.
    pub(super) not_synchronizing: Vec<usize>,
    /// This rank has no weights of the job yet.
    pub(super) is_new: bool,
    /// The thread has to end.
    pub(super) stopping: bool,
    /// Why the thread ended.
    pub(super) failure: Option<Error>,
    pub(super) stats: AveragerStats,
}

impl<G: Leave> SharedControl<G> {
    /// For a rank that is in the averaging with these ranks of the job.
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

    /// Waits for at most `limit` until `outcome` sees one.
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

    /// The thread goes on in another group. False when it has to end instead.
    pub(super) fn replace_group(&self, group: G) -> bool {
        *self.group() = group;
        !self.lock().stopping
    }

    /// Has the thread end: its waits end, and this rank leaves.
    pub(super) fn stop(&self) {
        self.lock().stopping = true;
        self.notify();
        let group = self.group().clone();
        group.leave();
    }

    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Sleeps until `due`, until a thread calls `synchronize`, or until the thread has to end: then false.
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
