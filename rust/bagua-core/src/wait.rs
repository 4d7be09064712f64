//! Waiting: deadlines, a spin that gives up, and doorbells that a peer rings from another thread or process.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::sync::{AtomicU32, Instant, futex};

/// The longest any wait sleeps before it looks at its [`crate::health::GroupHealth`] and its deadline again.
/// An abort is therefore seen within this time, without anybody having to wake the sleeper.
pub const SLICE: Duration = Duration::from_millis(20);

/// When an operation must be done.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    /// A deadline this far in the future.
    pub fn after(limit: Duration) -> Deadline {
        Deadline { start: Instant::now(), limit }
    }

    /// The time that was given.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Time left; zero when it has passed.
    pub fn left(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    /// True when it has passed.
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }
}

/// What a thread does around a wait that may take long: it gets the wait and has to run it, once.
pub type BlockingHook = fn(&mut (dyn FnMut() + Send));

thread_local! {
    /// What this thread does around its long waits; `None`: nothing.
    static BLOCKING_HOOK: Cell<Option<BlockingHook>> = const { Cell::new(None) };
}

/// While `work` runs, the long waits of this thread run inside `around`. A caller that holds something which others need (an
/// interpreter's lock) so keeps it through a short operation, and lets go of it only when there is something to wait for.
pub fn with_blocking_hook<T>(around: BlockingHook, work: impl FnOnce() -> T) -> T {
    struct Restore(Option<BlockingHook>);
    impl Drop for Restore {
        fn drop(&mut self) {
            BLOCKING_HOOK.set(self.0);
        }
    }
    let _restore = Restore(BLOCKING_HOOK.replace(Some(around)));
    work()
}

/// Runs a wait that may take longer than a spin does.
pub fn blocking_wait(mut wait: impl FnMut() + Send) {
    match BLOCKING_HOOK.get() {
        None => wait(),
        Some(around) => around(&mut wait),
    }
}

/// Waits while `*word == seen`, at most `timeout`. May return early. Works across processes on shared memory.
pub fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    blocking_wait(|| futex::wait(word, seen, timeout));
}

/// Wakes everybody who waits on `word`, in every process.
pub fn futex_wake(word: &AtomicU32) {
    futex::wake(word);
}

/// Where a doorbell's two words live: an `Arc` for threads, an arena for processes.
pub trait BellWords: Send + Sync {
    /// The counter of rings, and the number of sleepers.
    fn words(&self) -> (&AtomicU32, &AtomicU32);
}

/// The words of a doorbell that only threads of this process use.
#[derive(Debug, Default)]
pub struct ThreadBell {
    rings: AtomicU32,
    sleepers: AtomicU32,
}

impl BellWords for ThreadBell {
    fn words(&self) -> (&AtomicU32, &AtomicU32) {
        (&self.rings, &self.sleepers)
    }
}

/// A counter that peers increase when they have changed something its owner may wait for.
///
/// Use: read [`Doorbell::rings`], look for work, and if there is none call [`Doorbell::wait`] with what was read.
/// A ring in between makes the wait return at once, so none is missed.
#[derive(Clone)]
pub struct Doorbell {
    words: Arc<dyn BellWords>,
}

impl Doorbell {
    /// A doorbell on these words.
    pub fn new(words: Arc<dyn BellWords>) -> Doorbell {
        Doorbell { words }
    }

    /// A doorbell for threads of this process.
    pub fn local() -> Doorbell {
        Doorbell::new(Arc::new(ThreadBell::default()))
    }

    /// How often it rang (modulo 2^32).
    #[inline]
    pub fn rings(&self) -> u32 {
        self.words.words().0.load(Ordering::Acquire)
    }

    /// Rings. Free of system calls when nobody sleeps.
    #[inline]
    pub fn ring(&self) {
        let (rings, sleepers) = self.words.words();
        rings.fetch_add(1, Ordering::SeqCst);
        if sleepers.load(Ordering::SeqCst) > 0 {
            futex_wake(rings);
        }
    }

    /// Sleeps until it rings once more than `seen`, at most `timeout`. May return early.
    pub fn wait(&self, seen: u32, timeout: Duration) {
        let (rings, sleepers) = self.words.words();
        sleepers.fetch_add(1, Ordering::SeqCst);
        if rings.load(Ordering::SeqCst) == seen {
            futex_wait(rings, seen, timeout);
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, model))]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_between_looking_and_waiting_is_not_missed() {
        let bell = Doorbell::local();
        let seen = bell.rings();
        bell.ring();
        let start = Instant::now();
        bell.wait(seen, Duration::from_secs(60));
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_sleeper_is_woken_by_another_thread() {
        let bell = Doorbell::local();
        let seen = bell.rings();
        let ringer = {
            let bell = bell.clone();
            std::thread::spawn(move || bell.ring())
        };
        while bell.rings() == seen {
            bell.wait(seen, Duration::from_secs(60));
        }
        ringer.join().unwrap();
        assert_eq!(bell.rings(), seen.wrapping_add(1));
    }

    #[test]
    fn only_a_wait_that_may_take_long_runs_inside_what_was_asked_for() {
        thread_local!(static SEEN: Cell<u32> = const { Cell::new(0) });
        let word = AtomicU32::new(7);
        let wait = || futex_wait(&word, 7, Duration::from_millis(1));
        with_blocking_hook(
            |wait| {
                SEEN.set(SEEN.get() + 1);
                wait();
            },
            || {
                assert_eq!(SEEN.get(), 0);
                wait();
                wait();
            },
        );
        assert_eq!(SEEN.get(), 2);
        wait();
        assert_eq!(SEEN.get(), 2, "it outlived what it was meant for");
    }

    #[test]
    fn a_deadline_passes_and_says_what_was_given() {
        let deadline = Deadline::after(Duration::ZERO);
        assert!(deadline.passed());
        assert!(!Deadline::after(Duration::from_secs(60)).passed());
        assert_eq!(Deadline::after(Duration::from_secs(60)).limit(), Duration::from_secs(60));
    }
}
