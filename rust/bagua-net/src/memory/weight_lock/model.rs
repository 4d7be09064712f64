//! Models of [`WeightLock`]: a training, the averaging thread and a user's thread.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use loom::thread;

use super::WeightLock;
use crate::sync::AtomicU32;
use crate::sync::model::explore;

const LONG: Duration = Duration::from_secs(60);

/// Adds to the weights in two accesses, as a thread that holds the lock may.
fn change(weights: &AtomicU32) {
    weights.store(weights.load(Relaxed) + 1, Relaxed);
}

/// Deadlocks when `unlock`, `end_training` or a request that is dropped wakes no thread; loses a change when two hold the lock.
#[test]
fn a_training_the_averaging_and_a_wait_that_is_given_up_exclude_each_other() {
    explore(|| {
        let (lock, weights) = (WeightLock::new(), Arc::new(AtomicU32::new(0)));
        let averaging = {
            let (lock, weights) = (Arc::clone(&lock), Arc::clone(&weights));
            thread::spawn(move || {
                let mut request = lock.ask(2, false);
                assert!(request.wait(LONG));
                change(&weights);
                lock.unlock(2).unwrap();
            })
        };
        let user = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || drop(lock.ask(3, false)))
        };
        let mut request = lock.ask(1, true);
        assert!(request.wait(LONG));
        change(&weights);
        lock.end_training();
        averaging.join().unwrap();
        user.join().unwrap();
        assert_eq!(weights.load(Relaxed), 2);
    });
}
