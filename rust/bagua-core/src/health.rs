//! What a waiting operation must keep an eye on: the first cause of failure, and who has left.
//!
//! One `GroupHealth` per group. The control plane writes to it, every wait reads it. It never blocks for long and holds no
//! socket, so that the transports and the collectives need to know nothing of membership.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::error::{Error, Progress, Result};
use crate::sync::patience;
use crate::wait::blocking_wait;

/// How long an operation whose stream broke waits for the control plane to say why, before it blames the peer itself.
/// Long enough for a control message that is already on its way, short enough to stay within the promised second.
const VERDICT_GRACE: Duration = patience(Duration::from_millis(400));

type Listener = Box<dyn Fn(&Error) + Send + Sync>;

/// The state of a group that ends waits. Ranks in its methods are ranks of the group; errors name world ranks.
pub struct GroupHealth {
    /// The first failure. Set once: later ones are consequences.
    cause: OnceLock<Error>,
    /// Mirror of `cause.is_some()` for a waiter's fast path.
    failed: AtomicBool,
    /// Lets `verdict` sleep until `cause` is set.
    changed: (Mutex<()>, Condvar),
    /// Group ranks that said goodbye. Not a failure until somebody needs them.
    departed: Vec<AtomicBool>,
    /// World rank of each group rank.
    world_ranks: Vec<usize>,
    /// Host name of each group rank.
    hosts: Vec<String>,
    /// This process's rank in the group.
    rank: usize,
    /// Called once with the first cause, when it was found on this rank (not when a peer reported it).
    listener: OnceLock<Listener>,
}

impl GroupHealth {
    /// A health for a group whose members have these world ranks and hosts.
    pub fn new(rank: usize, world_ranks: Vec<usize>, hosts: Vec<String>) -> Arc<GroupHealth> {
        assert_eq!(world_ranks.len(), hosts.len());
        let departed = world_ranks.iter().map(|_| AtomicBool::new(false)).collect();
        Arc::new(GroupHealth {
            cause: OnceLock::new(),
            failed: AtomicBool::new(false),
            changed: (Mutex::new(()), Condvar::new()),
            departed,
            world_ranks,
            hosts,
            rank,
            listener: OnceLock::new(),
        })
    }

    /// A health for `size` ranks of one process, without a control plane: for tests and benchmarks.
    pub fn local(rank: usize, size: usize) -> Arc<GroupHealth> {
        GroupHealth::new(rank, (0..size).collect(), vec!["localhost".to_owned(); size])
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.world_ranks.len()
    }

    /// World rank of a group rank.
    pub fn world_rank(&self, rank: usize) -> usize {
        self.world_ranks[rank]
    }

    /// World ranks of all members, by group rank.
    pub fn world_ranks(&self) -> &[usize] {
        &self.world_ranks
    }

    /// Host name of a group rank.
    pub fn host(&self, rank: usize) -> &str {
        &self.hosts[rank]
    }

    /// Says who is told of the first cause found on this rank. The control plane sets it once, right after `new`.
    pub fn on_failure(&self, listener: impl Fn(&Error) + Send + Sync + 'static) {
        // A second control plane for one group would be a programming error; the first one stays.
        let _ = self.listener.set(Box::new(listener));
    }

    /// Ok, or the first cause.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { Err(self.cause().expect("failed is set after cause")) } else { Ok(()) }
    }

    /// The first cause, if there is one.
    pub fn cause(&self) -> Option<Error> {
        self.cause.get().cloned()
    }

    /// Records a failure found on this rank, tells the listener if it is the first, and returns the first cause:
    /// the error to raise here.
    #[must_use = "the first cause is the error to raise"]
    pub fn fail(&self, error: Error) -> Error {
        if self.record(error.clone())
            && let Some(listener) = self.listener.get()
        {
            listener(&error);
        }
        self.cause().unwrap_or(error)
    }

    /// Records a failure that another rank reported: as `fail`, without telling the listener.
    pub fn fail_from_peer(&self, error: Error) {
        self.record(error);
    }

    fn record(&self, error: Error) -> bool {
        let first = self.cause.set(error).is_ok();
        self.failed.store(true, Ordering::Release);
        drop(self.changed.0.lock());
        self.changed.1.notify_all();
        first
    }

    /// A peer said goodbye: whoever needs it from now on fails, nobody else does.
    pub fn depart(&self, rank: usize) {
        self.departed[rank].store(true, Ordering::Release);
        drop(self.changed.0.lock());
        self.changed.1.notify_all();
    }

    /// True when the peer said goodbye. A waiter asks only after it has looked once more for what it waits for.
    #[inline]
    pub fn has_departed(&self, rank: usize) -> bool {
        self.departed[rank].load(Ordering::Acquire)
    }

    /// The error for a peer of this group that is gone.
    pub fn peer_lost(&self, rank: usize, reason: impl Into<String>) -> Error {
        Error::PeerLost {
            rank: self.world_ranks[rank],
            host: self.hosts[rank].clone(),
            reason: reason.into(),
            noticed_by: self.world_ranks[self.rank],
            progress: None,
        }
    }

    /// The error for a deadline that passed while these group ranks had not done their part.
    pub fn timed_out(&self, after: Duration, missing: &[usize], progress: Progress) -> Error {
        Error::Timeout {
            after,
            missing: missing.iter().map(|rank| self.world_ranks[*rank]).collect(),
            noticed_by: self.world_ranks[self.rank],
            progress: Some(Box::new(progress)),
        }
    }

    /// The error to return when the stream to `rank` ended or broke. Waits a moment for the control plane's own verdict,
    /// so that the first cause wins over its consequences; otherwise the peer itself is to blame.
    pub fn attribute_disconnect(&self, rank: usize, how: &str) -> Error {
        let until = Instant::now() + VERDICT_GRACE;
        blocking_wait(|| {
            let mut guard = self.changed.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            while self.cause.get().is_none() && !self.has_departed(rank) {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                guard = self.changed.1.wait_timeout(guard, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
            }
        });
        let reason = if self.has_departed(rank) { "it left the group" } else { how };
        self.cause().unwrap_or_else(|| self.peer_lost(rank, reason))
    }
}
