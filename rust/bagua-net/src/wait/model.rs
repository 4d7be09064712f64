//! Models of the doorbell: a ring that comes while its owner looks for work or lies down is not missed.
//!
//! Each found the mistakes that are named beside it, when they were made by hand in `wait.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use loom::thread;

use super::Doorbell;
use crate::sync::AtomicU32;
use crate::sync::model::explore;

/// Sleeps on the bell until the work counter has reached `all`, as every owner of a bell does. A missed ring is a deadlock.
fn wait_for_work(bell: &Doorbell, work: &AtomicU32, all: u32) {
    loop {
        let seen = bell.rings();
        if work.load(Acquire) == all {
            return;
        }
        bell.wait(seen, Duration::from_secs(60));
    }
}

/// Deadlocks when any of the four accesses of `ring` and `wait` that are `SeqCst` is weaker, and when the sleeper is counted after the
/// rings are compared; also when a ring wakes no thread, or is counted or read with `Relaxed`.
#[test]
fn a_ring_between_looking_and_sleeping_is_not_missed() {
    explore(|| {
        let (bell, work) = (Doorbell::local(), Arc::new(AtomicU32::new(0)));
        let ringer = {
            let (bell, work) = (bell.clone(), Arc::clone(&work));
            thread::spawn(move || {
                work.store(1, Release);
                bell.ring();
            })
        };
        wait_for_work(&bell, &work, 1);
        ringer.join().unwrap();
    });
}

/// As above, with a second sleeper.
#[test]
fn two_ringers_wake_two_sleepers() {
    explore(|| {
        let (bell, work) = (Doorbell::local(), Arc::new(AtomicU32::new(0)));
        let threads = [true, false].map(|rings| {
            let (bell, work) = (bell.clone(), Arc::clone(&work));
            thread::spawn(move || {
                if rings {
                    work.fetch_add(1, Release);
                    bell.ring();
                } else {
                    wait_for_work(&bell, &work, 2);
                }
            })
        });
        work.fetch_add(1, Release);
        bell.ring();
        wait_for_work(&bell, &work, 2);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Finds a ring that is counted, or rings that are read, with `Relaxed`.
#[test]
fn what_was_done_before_a_ring_is_seen_by_who_counts_it() {
    explore(|| {
        let (bell, work) = (Doorbell::local(), Arc::new(AtomicU32::new(0)));
        let seen = bell.rings();
        let ringer = {
            let (bell, work) = (bell.clone(), Arc::clone(&work));
            thread::spawn(move || {
                work.store(1, Relaxed);
                bell.ring();
            })
        };
        if bell.rings() != seen {
            assert_eq!(work.load(Relaxed), 1);
        }
        ringer.join().unwrap();
    });
}
