//! Whose turn it is to make progress: the thread of messages, or a caller that waits for one.
//!
//! As in MPI, a thread that waits for a message moves the bytes itself. A message then costs one wake-up instead of two, and none where it
//! comes while the caller spins. The thread of messages rests meanwhile and for [`REST`] afterwards; then it goes on with the messages that
//! no thread waits for. Where several threads wait, one makes progress, and wakes the thread of messages when it has what it waited for.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::platform::Waker;
use crate::transport::SPIN;
use crate::wait::{SLICE, lock, wait_on_for};

/// How long after a caller the thread of messages rests: callers that send and receive in turn come back sooner.
const REST: Duration = Duration::from_millis(2);

/// What came of an attempt to make progress.
#[derive(PartialEq)]
pub(super) enum Round {
    /// Bytes moved.
    Moved,
    /// None did, also after a sleep.
    Idle,
    /// There will be no more.
    Over,
}

/// See the module. `T` is what whoever makes progress has to itself.
pub(super) struct Turns<T> {
    turn: Mutex<T>,
    /// Ends the sleep of whoever makes progress.
    waker: Waker,
    /// The thread of messages has the turn.
    taken: AtomicBool,
    /// A caller has the turn or waits for the thread to pass it on.
    driven: AtomicBool,
    /// Turns that callers took.
    drives: AtomicU64,
    /// Callers that wait, whether or not they make progress.
    waiting: AtomicUsize,
    /// The thread must not rest any longer.
    called: Mutex<bool>,
    calls: Condvar,
}

impl<T> Turns<T> {
    pub(super) fn new(turn: T) -> Result<Turns<T>> {
        Ok(Turns {
            turn: Mutex::new(turn),
            waker: Waker::new().map_err(|e| Error::system("a descriptor for the thread of messages", e))?,
            taken: AtomicBool::new(false),
            driven: AtomicBool::new(false),
            drives: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            called: Mutex::new(false),
            calls: Condvar::new(),
        })
    }

    /// What ends the sleep of whoever makes progress.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// True while a caller makes progress.
    pub(super) fn is_driven(&self) -> bool {
        self.driven.load(SeqCst)
    }

    /// The thread: calls `round` whenever no caller does, until it is over.
    pub(super) fn run(&self, mut round: impl FnMut(&mut T) -> Round) {
        loop {
            let mut turn = lock(&self.turn);
            self.taken.store(true, SeqCst);
            let over = loop {
                // A caller that comes later finds `taken`, and wakes this thread again.
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
            // A caller that waits for long need not be looked after often: when others wait, it calls.
            pause = if drives == seen { (2 * pause).min(SLICE) } else { REST };
            if drives == std::mem::replace(&mut seen, drives) && !self.is_driven() {
                break;
            }
        }
        *called = false;
    }

    /// A caller: calls `round`, with how long it may sleep, until `done` or for `limit`; then, or at once while another caller makes
    /// progress, `sleep`, unless it is done.
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
            // Whoever waits since before this line sleeps; whoever comes after it makes progress itself.
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

    /// True when it is over.
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
            // Last, so that calls without any time to wait make progress too: the thread rests while they come.
            if start.elapsed() >= limit {
                break;
            }
        }
        false
    }
}
