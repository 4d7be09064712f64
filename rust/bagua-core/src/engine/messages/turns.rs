//! Decides which thread makes progress: the thread of messages, or a caller that waits for a message.
//!
//! A thread that waits for a message moves the bytes itself, as in MPI. A message then costs one wake-up instead of
//! two, and none if it arrives while the caller spins. The thread of messages rests meanwhile and for [`REST`]
//! afterwards. It then continues with the messages that no thread waits for. If several threads wait, one of them makes
//! progress. When its own message is done, it wakes the thread of messages.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::platform::Waker;
use crate::transport::SPIN;
use crate::wait::{SLICE, lock, wait_on_for};

/// How long the thread of messages rests after a caller moved bytes. Callers in a ping-pong wait again before that.
const REST: Duration = Duration::from_millis(2);

/// The result of one attempt to make progress.
#[derive(PartialEq)]
pub(super) enum Round {
    Moved,
    /// No bytes moved, even after a sleep.
    Idle,
    Over,
}

/// The turns of threads to make progress. `T` is state that only the thread whose turn it is uses.
pub(super) struct Turns<T> {
    turn: Mutex<T>,
    /// Ends the sleep of the thread that makes progress.
    waker: Waker,
    /// True while the thread of messages has the turn.
    taken: AtomicBool,
    /// True while a caller has the turn, or waits for the thread to pass it on.
    driven: AtomicBool,
    /// Number of turns that callers took.
    drives: AtomicU64,
    /// Number of callers that wait, even if they do not make progress.
    waiting: AtomicUsize,
    /// True if the thread must stop resting.
    called: Mutex<bool>,
    calls: Condvar,
}

impl<T> Turns<T> {
    pub(super) fn new(turn: T) -> Result<Turns<T>> {
        Ok(Turns {
            turn: Mutex::new(turn),
            waker: Waker::new().map_err(|e| Error::system("cannot open a descriptor for messages", e))?,
            taken: AtomicBool::new(false),
            driven: AtomicBool::new(false),
            drives: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            called: Mutex::new(false),
            calls: Condvar::new(),
        })
    }

    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    pub(super) fn is_driven(&self) -> bool {
        self.driven.load(SeqCst)
    }

    /// Calls `round` whenever no caller does, until it returns `Over`. This is the thread's main function.
    pub(super) fn run(&self, mut round: impl FnMut(&mut T) -> Round) {
        loop {
            let mut turn = lock(&self.turn);
            self.taken.store(true, SeqCst);
            let over = loop {
                // A caller that starts after this line finds `taken` set, and wakes this thread again.
                self.waker.clear();
                if self.is_driven() {
                    break false;
                }
                if round(&mut turn) == Round::Over {
                    break true;
                }
            };
            self.taken.store(false, SeqCst);
            drop(turn);
            if over {
                return;
            }
            self.rest();
        }
    }

    /// Sleeps until no caller makes progress any more.
    fn rest(&self) {
        let (mut seen, mut pause) = (self.drives.load(SeqCst), REST);
        let mut called = lock(&self.called);
        while !*called {
            called = wait_on_for(&self.calls, called, pause);
            let drives = self.drives.load(SeqCst);
            // If a caller waits for long, this thread checks less often. If others wait too, the caller wakes this
            // thread.
            pause = if drives == seen { (2 * pause).min(SLICE) } else { REST };
            if drives == std::mem::replace(&mut seen, drives) && !self.is_driven() {
                break;
            }
        }
        *called = false;
    }

    /// Makes progress on a caller's thread, unless another caller already does: calls `round`, with the time that it
    /// may sleep, until `done` returns true or `limit` has passed. Calls `sleep` afterwards if it is still not done.
    pub(super) fn drive(
        &self,
        done: &dyn Fn() -> bool,
        limit: Duration,
        sleep: &mut dyn FnMut(),
        round: impl FnMut(&mut T, Duration) -> Round,
    ) {
        self.waiting.fetch_add(1, SeqCst);
        if !done() && !self.driven.swap(true, SeqCst) {
            let over = self.drive_alone(done, limit, round);
            self.driven.store(false, SeqCst);
            // Callers that started to wait before this line are asleep. Later callers make progress themselves.
            if over || self.waiting.load(SeqCst) > 1 {
                *lock(&self.called) = true;
                self.calls.notify_one();
            }
        }
        if !done() {
            sleep();
        }
        self.waiting.fetch_sub(1, SeqCst);
    }

    /// Returns true if the messenger has ended.
    fn drive_alone(
        &self,
        done: &dyn Fn() -> bool,
        limit: Duration,
        mut round: impl FnMut(&mut T, Duration) -> Round,
    ) -> bool {
        let start = Instant::now();
        self.drives.fetch_add(1, SeqCst);
        if self.taken.load(SeqCst) {
            self.waker.wake();
        }
        let mut turn = lock(&self.turn);
        let mut idle = Instant::now();
        while !done() {
            let spins = idle.elapsed() < SPIN;
            if !spins {
                self.waker.clear();
            }
            let left = limit.saturating_sub(start.elapsed());
            match round(&mut turn, if spins { Duration::ZERO } else { left }) {
                Round::Moved => idle = Instant::now(),
                Round::Idle => {}
                Round::Over => return true,
            }
            // Checked last, so that calls with no time to wait make progress too. The thread rests meanwhile.
            if start.elapsed() >= limit {
                break;
            }
        }
        false
    }
}
