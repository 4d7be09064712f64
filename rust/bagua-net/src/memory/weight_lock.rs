//! The lock between the threads that use weights and the thread that averages them: first come, first served.
//!
//! Invariants, quoted by the tests:
//!
//! 1. At most one owner holds the lock. The same owner may take it again; it is free when it was given back as often.
//! 2. Who asks first is served first, whatever it asks for.
//! 3. A training hold lapses: `pause` gives it a time limit, after which the next in the queue takes the lock, and the training
//!    takes it again where it goes on, behind those who wait. So neither a backward that never comes nor forwards without a
//!    backward, one after the other, stop a thread.
//! 4. A wait that is given up leaves the queue, and wakes who came after it.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sync::{Condvar, Instant, Mutex, MutexGuard};

/// Who holds the lock or asks for it: a thread. Numbers are the caller's.
pub type Owner = u64;

/// See the module.
#[derive(Default)]
pub struct WeightLock {
    state: Mutex<LockQueue>,
    /// Notified when the lock may be free for another owner.
    changed: Condvar,
}

/// The holder of the lock, and the threads that wait for it.
#[derive(Default)]
struct LockQueue {
    holder: Option<Holder>,
    /// Tickets of those who wait, in the order in which they asked.
    queue: VecDeque<u64>,
    /// The next ticket.
    next: u64,
}

struct Holder {
    owner: Owner,
    /// How often it was locked and not unlocked.
    nested: usize,
    /// It is held by a training too.
    training: bool,
    /// When the training hold was paused, and for how long; `None` while it is in use.
    paused: Option<(Instant, Duration)>,
}

impl Holder {
    /// Time until the hold lapses; `None` for never.
    fn lapses_in(&self) -> Option<Duration> {
        let (since, limit) = self.paused.filter(|_| self.nested == 0)?;
        Some(limit.saturating_sub(since.elapsed()))
    }
}

impl LockQueue {
    /// True when another owner may take the lock now. A hold that has lapsed ends here.
    fn is_free(&mut self) -> bool {
        if self.holder.as_ref().is_some_and(|holder| holder.lapses_in() == Some(Duration::ZERO)) {
            self.holder = None;
        }
        self.holder.is_none()
    }
}

impl WeightLock {
    /// A free lock.
    pub fn new() -> Arc<WeightLock> {
        Arc::new(WeightLock::default())
    }

    fn state(&self) -> MutexGuard<'_, LockQueue> {
        // Nothing under this lock panics in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for the lock; [`Request::wait`] waits for it. `training`: as a training's hold, which counts once.
    pub fn ask(self: &Arc<WeightLock>, owner: Owner, training: bool) -> Request {
        let mut state = self.state();
        // Who waits for a hold that has lapsed comes first (invariants 2 and 3).
        let passed_on = !state.queue.is_empty() && state.is_free();
        let granted = match &mut state.holder {
            _ if passed_on => false,
            Some(holder) if holder.owner == owner || (training && holder.training) => {
                if training {
                    holder.training = true;
                    holder.paused = None;
                } else {
                    holder.nested += 1;
                }
                true
            }
            _ => false,
        };
        let ticket = (!granted).then(|| {
            let ticket = state.next;
            state.next += 1;
            state.queue.push_back(ticket);
            ticket
        });
        drop(state);
        Request { lock: Arc::clone(self), owner, training, ticket }
    }

    /// Takes the lock, for as long as the guard lives.
    pub fn lock(self: &Arc<WeightLock>, owner: Owner) -> WeightGuard {
        let mut request = self.ask(owner, false);
        while !request.wait(Duration::from_secs(60)) {}
        WeightGuard { lock: Arc::clone(self), owner }
    }

    /// Gives back what a granted request without `training` took.
    ///
    /// # Errors
    /// `System` when this owner does not hold the lock so.
    pub fn unlock(&self, owner: Owner) -> Result<()> {
        let mut state = self.state();
        match &mut state.holder {
            Some(holder) if holder.owner == owner && holder.nested > 0 => {
                holder.nested -= 1;
                self.release_if_unused(state);
                Ok(())
            }
            _ => Err(Error::other("this thread does not hold the weight lock")),
        }
    }

    /// The training does nothing with the weights for now; after `limit` another owner may take the lock.
    pub fn pause(&self, limit: Duration) {
        let mut state = self.state();
        if let Some(holder) = state.holder.as_mut().filter(|holder| holder.training) {
            holder.paused = Some((Instant::now(), limit));
            drop(state);
            // Who waits has to know the limit.
            self.changed.notify_all();
        }
    }

    /// Ends the training's hold, whichever thread began it. Without effect when it has lapsed.
    pub fn end_training(&self) {
        let mut state = self.state();
        if let Some(holder) = state.holder.as_mut().filter(|holder| holder.training) {
            holder.training = false;
            holder.paused = None;
            self.release_if_unused(state);
        }
    }

    /// True when this owner has the lock in use: a wait of its own for another owner would never end.
    pub fn is_used_by(&self, owner: Owner) -> bool {
        let state = self.state();
        state.holder.as_ref().is_some_and(|holder| holder.owner == owner && holder.lapses_in().is_none())
    }

    fn release_if_unused(&self, mut state: MutexGuard<'_, LockQueue>) {
        if state.holder.as_ref().is_some_and(|holder| holder.nested == 0 && !holder.training) {
            state.holder = None;
            drop(state);
            self.changed.notify_all();
        }
    }
}

/// A place in the queue of a [`WeightLock`]. Dropping it before it was granted gives the place up.
pub struct Request {
    lock: Arc<WeightLock>,
    owner: Owner,
    training: bool,
    /// `None` once it is granted.
    ticket: Option<u64>,
}

impl Request {
    /// Waits for at most `limit`; true when the lock is this owner's.
    pub fn wait(&mut self, limit: Duration) -> bool {
        let Some(ticket) = self.ticket else { return true };
        let start = Instant::now();
        let mut state = self.lock.state();
        loop {
            if state.queue.front() == Some(&ticket) && state.is_free() {
                state.queue.pop_front();
                state.holder = Some(Holder {
                    owner: self.owner,
                    nested: usize::from(!self.training),
                    training: self.training,
                    paused: None,
                });
                self.ticket = None;
                return true;
            }
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            let lapse = state.holder.as_ref().and_then(Holder::lapses_in);
            // Only the first in the queue can take over a hold that lapses.
            let lapse = lapse.filter(|_| state.queue.front() == Some(&ticket));
            let slice = lapse.map_or(left, |lapse| left.min(lapse));
            state = self.lock.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.lock.state().queue.retain(|waiting| *waiting != ticket);
            self.lock.changed.notify_all();
        }
    }
}

/// Holds a [`WeightLock`].
pub struct WeightGuard {
    lock: Arc<WeightLock>,
    owner: Owner,
}

impl WeightGuard {
    /// True when it holds this lock.
    pub(super) fn holds(&self, lock: &Arc<WeightLock>) -> bool {
        Arc::ptr_eq(&self.lock, lock)
    }
}

impl Drop for WeightGuard {
    fn drop(&mut self) {
        // Held since it was made, by this owner.
        let _ = self.lock.unlock(self.owner);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn taken(lock: &Arc<WeightLock>, owner: Owner, training: bool) -> bool {
        lock.ask(owner, training).wait(Duration::ZERO)
    }

    #[test]
    fn an_owner_may_lock_again_and_another_gets_it_after_as_many_unlocks() {
        let lock = WeightLock::new();
        assert!(taken(&lock, 1, false) && taken(&lock, 1, false));
        lock.unlock(1).unwrap();
        assert!(!taken(&lock, 2, false));
        lock.unlock(1).unwrap();
        assert!(taken(&lock, 2, false));
        assert!(lock.unlock(1).is_err(), "invariant 1: only the owner unlocks");
        lock.unlock(2).unwrap();
        assert!(lock.unlock(2).is_err());
    }

    #[test]
    fn who_asks_first_is_served_first() {
        let lock = WeightLock::new();
        assert!(taken(&lock, 1, false));
        let (mut second, mut third) = (lock.ask(2, false), lock.ask(3, true));
        lock.unlock(1).unwrap();
        // Invariant 2: also when the later one looks earlier.
        assert!(!third.wait(Duration::ZERO));
        assert!(second.wait(Duration::ZERO));
        assert!(!third.wait(Duration::ZERO));
        lock.unlock(2).unwrap();
        assert!(third.wait(Duration::ZERO));
    }

    #[test]
    fn a_request_that_is_given_up_lets_the_next_one_pass() {
        let lock = WeightLock::new();
        assert!(taken(&lock, 1, false));
        let second = lock.ask(2, false);
        let mut third = lock.ask(3, false);
        lock.unlock(1).unwrap();
        drop(second);
        assert!(third.wait(Duration::ZERO));
    }

    #[test]
    fn a_training_that_pauses_keeps_the_lock_until_its_limit() {
        let lock = WeightLock::new();
        assert!(taken(&lock, 1, true));
        lock.pause(LONG);
        assert!(!taken(&lock, 2, false));
        // Going on ends the pause, and counts once.
        assert!(taken(&lock, 1, true));
        lock.pause(Duration::ZERO);
        assert!(taken(&lock, 2, false), "invariant 3");
        // The training's hold is gone: ending it changes nothing, and it waits like any other thread.
        lock.end_training();
        assert!(!taken(&lock, 1, true));
        lock.unlock(2).unwrap();
        assert!(taken(&lock, 1, true));
        lock.end_training();
        assert!(taken(&lock, 3, false));
    }

    #[test]
    fn a_training_that_goes_on_after_its_limit_waits_for_those_who_waited_before() {
        let lock = WeightLock::new();
        assert!(taken(&lock, 1, true));
        let mut second = lock.ask(2, false);
        lock.pause(Duration::ZERO);
        // No thread has looked at the lock since: the training must not take it once more.
        let mut again = lock.ask(1, true);
        assert!(!again.wait(Duration::ZERO));
        assert!(second.wait(Duration::ZERO));
        lock.unlock(2).unwrap();
        assert!(again.wait(Duration::ZERO));
    }

    #[test]
    fn a_lock_inside_a_paused_training_does_not_lapse() {
        let lock = WeightLock::new();
        assert!(taken(&lock, 1, true));
        lock.pause(Duration::ZERO);
        assert!(taken(&lock, 1, false));
        assert!(!taken(&lock, 2, false));
        assert!(lock.is_used_by(1));
        lock.unlock(1).unwrap();
        assert!(!lock.is_used_by(1));
        assert!(taken(&lock, 2, false));
    }

    #[test]
    fn a_training_ends_on_another_thread_than_it_began_on() {
        let lock = WeightLock::new();
        assert!(taken(&lock, 1, true));
        // Another thread of the training, as a backward that runs elsewhere.
        assert!(taken(&lock, 2, true));
        lock.end_training();
        assert!(taken(&lock, 3, false));
    }

    #[test]
    fn a_waiter_wakes_when_the_lock_is_given_back_and_when_a_hold_lapses() {
        for lapses in [false, true] {
            let lock = WeightLock::new();
            assert!(taken(&lock, 1, true));
            let (asked, waits) = mpsc::channel();
            let waiter = {
                let lock = Arc::clone(&lock);
                thread::spawn(move || {
                    let mut request = lock.ask(2, false);
                    asked.send(()).unwrap();
                    request.wait(LONG)
                })
            };
            waits.recv().unwrap();
            if lapses {
                lock.pause(Duration::from_millis(20))
            } else {
                lock.end_training()
            }
            assert!(waiter.join().unwrap());
        }
    }
}
