//! Models of the doorbell: a ring is not missed if it comes while the owner looks for work or falls asleep.
//!
//! Each model names the bugs in `wait.rs` that it was seen to find.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use loom::thread;

use super::Doorbell;
use crate::sync::AtomicU32;
use crate::sync::model::explore;

/// Sleeps on the bell until the work counter reaches `all`, as every owner of a bell does. A missed ring shows as a
/// deadlock.
fn wait_for_work(bell: &Doorbell, work: &AtomicU32, all: u32) {
    loop {
        let seen = bell.rings();
        if work.load(Acquire) == all {
            return;
        }
        bell.wait(seen, Duration::from_secs(60));
    }
}

/// Deadlocks if any of the four `SeqCst` accesses of `ring` and `wait` is weaker, if `wait` counts the sleeper after it
/// compares the rings, or if `ring` wakes no thread.
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

/// Two ringers and two sleepers on one doorbell.
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

/// Fails if `ring` counts, or `rings` reads, with `Relaxed`.
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
