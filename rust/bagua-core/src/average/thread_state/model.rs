//! Models of [`SharedControl`]: shutdown against the averaging thread, which sleeps or goes on in a view that has opened.

use std::sync::Arc;
use std::time::{Duration, Instant};

use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::{Leave, SharedControl};
use crate::sync::model::explore;

/// A group whose waits end when it is left, and not before.
#[derive(Clone)]
struct Waits(Arc<(Mutex<bool>, Condvar)>);

impl Waits {
    fn new() -> Waits {
        Waits(Arc::new((Mutex::new(false), Condvar::new())))
    }

    /// What the averaging thread does in a group: it waits for others, until this rank leaves.
    fn wait(&self) {
        let mut left = self.0.0.lock().unwrap();
        while !*left {
            left = self.0.1.wait(left).unwrap();
        }
    }
}

impl Leave for Waits {
    fn leave(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

/// Deadlocks when the thread goes on in a new group that `stop` does not leave.
#[test]
fn a_shutdown_while_a_view_opens_ends_the_waits_in_it_or_the_thread_ends_before() {
    explore(|| {
        let (first, second) = (Waits::new(), Waits::new());
        let shared = Arc::new(SharedControl::new(vec![0, 1], first.clone(), false, true));
        let averaging = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // A wait in the first group has ended because a rank was lost; the survivors have opened the second one.
                if shared.replace_group(second.clone()) {
                    second.wait();
                }
                assert!(shared.lock().stopping);
            })
        };
        shared.stop();
        averaging.join().unwrap();
    });
}

/// As above, for a view that opens right after another one.
#[test]
fn a_shutdown_while_one_view_after_the_other_opens_ends_the_waits_in_the_last() {
    explore(|| {
        let (first, second) = (Waits::new(), Waits::new());
        let shared = Arc::new(SharedControl::new(vec![0, 1], Waits::new(), false, true));
        let averaging = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if shared.replace_group(first) && shared.replace_group(second.clone()) {
                    second.wait();
                }
            })
        };
        shared.stop();
        averaging.join().unwrap();
    });
}

/// Deadlocks when the thread falls asleep without having seen that it has to end: the waits of a model have no time limit.
#[test]
fn a_shutdown_wakes_a_thread_that_sleeps_until_its_next_round() {
    explore(|| {
        let shared = Arc::new(SharedControl::new(vec![0], Waits::new(), false, true));
        let averaging = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || assert!(!shared.sleep(Instant::now() + Duration::from_secs(3600))))
        };
        shared.stop();
        averaging.join().unwrap();
    });
}
