//! Models of [`Handle`]: the thread that ends a job, threads that wait for it, and the lane that keeps a failed handle until its
//! error is seen.
//!
//! Each found the mistakes that are named beside it, when they were made by hand in `handle.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use loom::thread;

use super::super::completion::PendingCallback;
use super::Handle;
use crate::error::{Error, Result};
use crate::sync::AtomicU32;
use crate::sync::model::explore;

/// A wait that has passed before it began: every measured time is a millisecond in a model.
const PASSED: Option<Duration> = Some(Duration::from_millis(1));

fn failure() -> Error {
    Error::Aborted("the job".to_owned())
}

/// Deadlocks when one waiter is notified or none; and finds `done` set after the lock was released.
#[test]
fn two_waiters_get_the_result_and_see_the_job_completed() {
    explore(|| {
        let handle = Handle::pending(0);
        let waiters = [(); 2].map(|()| {
            let handle = handle.clone();
            thread::spawn(move || {
                handle.wait(None).unwrap();
                assert!(handle.is_completed());
            })
        });
        handle.finish(Ok(()));
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}

/// Finds `done` set or read with `Relaxed`, and `done` set before the result is.
#[test]
fn what_a_job_wrote_is_seen_by_who_sees_it_completed() {
    explore(|| {
        let (handle, tensor) = (Handle::pending(0), Arc::new(AtomicU32::new(0)));
        let worker = {
            let (handle, tensor) = (handle.clone(), Arc::clone(&tensor));
            thread::spawn(move || {
                tensor.store(1, Relaxed);
                handle.finish(Ok(()));
            })
        };
        if handle.is_completed() {
            assert_eq!(tensor.load(Relaxed), 1);
            handle.wait(PASSED).unwrap();
        }
        handle.wait(None).unwrap();
        assert_eq!(tensor.load(Relaxed), 1);
        worker.join().unwrap();
    });
}

/// Finds `lost_error` without its fence, and a wait that does not count as having seen the error.
#[test]
fn an_error_that_was_seen_is_not_reported_again() {
    explore(|| {
        let handle = Handle::pending(0);
        handle.finish(Err(failure()));
        let user = {
            let handle = handle.clone();
            thread::spawn(move || assert!(handle.wait(None).is_err()))
        };
        assert!(handle.lost_error().is_none());
        user.join().unwrap();
        assert!(handle.was_seen() && handle.lost_error().is_none());
    });
}

/// Finds a wait that counts as having seen the result before there is one.
#[test]
fn an_error_is_raised_by_the_wait_or_reported_later_and_never_both() {
    explore(|| {
        let handle = Handle::pending(0);
        let user = {
            let handle = handle.clone();
            thread::spawn(move || !matches!(handle.wait(PASSED), Err(Error::Timeout { .. })))
        };
        handle.finish(Err(failure()));
        let early = handle.lost_error().is_some();
        let raised = user.join().unwrap();
        assert_eq!(handle.lost_error().is_some(), !raised);
        assert!(!(early && raised));
    });
}

/// Finds a callback that is added after the result was set, and one that is called by both threads.
#[test]
fn a_callback_is_called_once_by_the_thread_that_adds_it_or_by_the_one_that_ends_the_job() {
    explore(|| {
        let (handle, calls) = (Handle::pending(0), Arc::new(AtomicU32::new(0)));
        let user = {
            let (handle, calls) = (handle.clone(), Arc::clone(&calls));
            thread::spawn(move || {
                let count = move |result: &Result<()>| {
                    assert!(result.is_err());
                    calls.fetch_add(1, Relaxed);
                };
                let register = |count| Ok(PendingCallback::without_thread(Box::new(count)));
                if let Some((count, result)) = handle.outcome.add_callback(count, register).unwrap() {
                    count(&result);
                }
            })
        };
        for callback in handle.outcome.set_result(Err(failure())) {
            callback.call(&Err(failure()));
        }
        user.join().unwrap();
        assert_eq!(calls.load(Relaxed), 1);
        assert!(handle.lost_error().is_none(), "the callback got the error");
    });
}
