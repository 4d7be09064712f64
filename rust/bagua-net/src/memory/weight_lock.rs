//! The lock between the threads that use the weights and the thread that averages them. First come, first served.
//!
//! Terms: a "training hold" is the lock as held by a training step from its forward to the end of its backward.
//!
//! Invariants, quoted by the tests:
//!
//! 1. At most one owner holds the lock. The same owner may lock again, and must then unlock the same number of times.
//! 2. Whoever asks first is served first, for a training hold as well as for an ordinary one.
//! 3. A training hold can lapse. `pause` gives it a time limit, after which the next in the queue takes the lock. To
//!    continue, the training asks again and waits behind those already in the queue. So neither a backward pass that
//!    never runs nor a series of forward passes without a backward pass blocks other threads for ever.
//! 4. A request that is dropped leaves the queue and wakes the request behind it.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sync::{Condvar, Instant, Mutex, MutexGuard};

/// The id of a thread that holds the lock or asks for it. The caller assigns the numbers.
pub type Owner = u64;

/// A fair lock on weights, whose training hold can lapse.
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use bagua_net::memory::WeightLock;
///
/// let lock = WeightLock::new();
/// let guard = lock.lock(1);
/// let mut second = lock.ask(2, false);
/// assert!(!second.wait(Duration::ZERO));
/// drop(guard);
/// assert!(second.wait(Duration::ZERO));
/// lock.unlock(2)?;
/// # Ok::<(), bagua_kernels::error::Error>(())
/// ```
#[derive(Default)]
pub struct WeightLock {
    state: Mutex<LockQueue>,
    /// Notified when another owner may take the lock.
    changed: Condvar,
}

#[derive(Default)]
struct LockQueue {
    holder: Option<Holder>,
    /// Tickets of the waiting requests, oldest first.
    queue: VecDeque<u64>,
    next: u64,
}

struct Holder {
    owner: Owner,
    /// Number of locks by this owner that were not unlocked yet.
    nested: usize,
    /// True if a training step holds the lock too.
    training: bool,
    /// Time of the pause and its limit, if the training hold is paused.
    paused: Option<(Instant, Duration)>,
}

impl Holder {
    fn lapses_in(&self) -> Option<Duration> {
        let (since, limit) = self.paused.filter(|_| self.nested == 0)?;
        Some(limit.saturating_sub(since.elapsed()))
    }
}

impl LockQueue {
    /// True if another owner may take the lock now. Ends a hold that has lapsed.
    fn is_free(&mut self) -> bool {
        if self.holder.as_ref().is_some_and(|holder| holder.lapses_in() == Some(Duration::ZERO)) {
            self.holder = None;
        }
        self.holder.is_none()
    }
}

impl WeightLock {
    /// Creates a free lock.
    pub fn new() -> Arc<WeightLock> {
        Arc::new(WeightLock::default())
    }

    fn state(&self) -> MutexGuard<'_, LockQueue> {
        // No code under this mutex panics in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests the lock. [`Request::wait`] waits until the request is granted. If `training` is true, the request is
    /// for the training hold, which does not nest.
    pub fn ask(self: &Arc<WeightLock>, owner: Owner, training: bool) -> Request {
        let mut state = self.state();
        // If the hold has lapsed, the requests in the queue come first (invariants 2 and 3).
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

    /// Takes the lock and holds it until the guard is dropped.
    pub fn lock(self: &Arc<WeightLock>, owner: Owner) -> WeightGuard {
        let mut request = self.ask(owner, false);
        while !request.wait(Duration::from_secs(60)) {}
        WeightGuard { lock: Arc::clone(self), owner }
    }

    /// Releases a lock that was taken by a request with `training` false.
    ///
    /// # Errors
    /// `System` if this owner does not hold such a lock.
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

    /// Pauses the training hold: after `limit`, another owner may take the lock.
    pub fn pause(&self, limit: Duration) {
        let mut state = self.state();
        if let Some(holder) = state.holder.as_mut().filter(|holder| holder.training) {
            holder.paused = Some((Instant::now(), limit));
            drop(state);
            // Waiting threads must learn the limit.
            self.changed.notify_all();
        }
    }

    /// Ends the training hold, whichever thread began it. Does nothing if the hold has lapsed.
    pub fn end_training(&self) {
        let mut state = self.state();
        if let Some(holder) = state.holder.as_mut().filter(|holder| holder.training) {
            holder.training = false;
            holder.paused = None;
            self.release_if_unused(state);
        }
    }

    /// True if `owner` holds the lock without a time limit. Its thread must then not wait for another owner.
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

/// A place in the queue of a [`WeightLock`]. Dropping the request before it is granted gives up the place.
pub struct Request {
    lock: Arc<WeightLock>,
    owner: Owner,
    training: bool,
    /// Position in the queue, or `None` once the request is granted.
    ticket: Option<u64>,
}

impl Request {
    /// Waits for at most `limit`. Returns true if this owner has the lock.
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
            // When the holder's time is over, the first request in the queue takes the lock, so only that request needs
            // to wake up then.
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

/// A guard that holds a [`WeightLock`] until it is dropped.
pub struct WeightGuard {
    lock: Arc<WeightLock>,
    owner: Owner,
}

impl WeightGuard {
    pub(super) fn holds(&self, lock: &Arc<WeightLock>) -> bool {
        Arc::ptr_eq(&self.lock, lock)
    }
}

impl Drop for WeightGuard {
    fn drop(&mut self) {
        // This owner has held the lock since the guard was created.
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
        // Invariant 2 holds even if the later request checks first.
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
        // Asking again ends the pause, and the training hold does not nest.
        assert!(taken(&lock, 1, true));
        lock.pause(Duration::ZERO);
        assert!(taken(&lock, 2, false), "invariant 3");
        // Thread 2 took the lapsed lock. end_training() now does nothing, and thread 1 must wait for thread 2.
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
        // No thread has checked the lock since it lapsed. The training must not get it back ahead of the queue.
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
        // Another thread of the training asks, as when the backward pass runs on another thread.
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
