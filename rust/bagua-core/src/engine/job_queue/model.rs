//! Models of [`Jobs`]: those who submit and wait, the thread, and a shutdown.
//!
//! Each found the mistakes that are named beside it, when they were made by hand in `jobs.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use loom::thread::{self, JoinHandle};

use super::Jobs;
use crate::sync::model::explore;
use crate::sync::{AtomicBool, AtomicU32};

/// A queue of jobs that count how often they were handed out.
#[derive(Clone)]
struct Worker(Arc<Jobs<usize, JoinHandle<()>>>, Arc<[AtomicU32; 2]>);

impl Worker {
    fn new() -> Worker {
        Worker(Arc::new(Jobs::new()), Arc::new([AtomicU32::new(0), AtomicU32::new(0)]))
    }

    /// As `LaneWorker::enqueue`; whether the job was taken.
    fn submit(&self, job: usize) -> bool {
        let worker = self.clone();
        self.0.start(|| Ok(thread::spawn(move || worker.work()))).unwrap();
        self.0.push(|| job)
    }

    /// As `WorkerShared::work`.
    fn work(&self) {
        while let Some(job) = self.0.next(|_| String::new()) {
            self.hand_out(job);
            self.0.settle();
        }
    }

    fn hand_out(&self, job: usize) {
        assert_eq!(self.1[job].fetch_add(1, Relaxed), 0, "job {job} was handed out twice");
    }

    fn was_handed_out(&self, job: usize) -> bool {
        self.1[job].load(Relaxed) == 1
    }

    /// As `LaneWorker::shutdown`.
    fn shutdown(&self) {
        for job in self.0.stop() {
            self.hand_out(job);
            self.0.settle_dropped();
        }
        if let Some(thread) = self.0.take_thread() {
            thread.join().unwrap();
        }
    }
}

/// Finds a job that is taken after `stop` has emptied the queue, and one that is handed out by both; and deadlocks when `stop`
/// does not wake the thread, or a thread starts after `take_thread`.
#[test]
fn a_job_that_is_submitted_beside_a_shutdown_is_refused_or_handed_out_once() {
    explore(|| {
        let worker = Worker::new();
        let submitting = {
            let worker = worker.clone();
            thread::spawn(move || [0, 1].map(|job| worker.submit(job)))
        };
        worker.shutdown();
        let taken = submitting.join().unwrap();
        assert!(worker.0.take_thread().is_none(), "a thread that is never joined");
        assert_eq!(taken, [0, 1].map(|job| worker.was_handed_out(job)));
        assert!(!worker.0.is_busy());
    });
}

/// Deadlocks when `settle_dropped` notifies no waiter, or `settle` only one of two.
#[test]
fn a_wait_for_what_was_submitted_ends_beside_a_shutdown() {
    explore(|| {
        let worker = Worker::new();
        assert!(worker.submit(0));
        let waiting = {
            let worker = worker.clone();
            thread::spawn(move || {
                worker.0.wait_for_submitted();
                assert!(worker.was_handed_out(0) || worker.0.is_stopping());
            })
        };
        worker.shutdown();
        waiting.join().unwrap();
    });
}

/// Finds `pending` counted down before the job has ended, and read with `Relaxed`.
#[test]
fn who_finds_the_queue_idle_sees_what_its_jobs_wrote() {
    explore(|| {
        let jobs: Arc<Jobs<(), ()>> = Arc::new(Jobs::new());
        let wrote = Arc::new(AtomicBool::new(false));
        assert!(jobs.push(|| ()));
        let thread = {
            let (jobs, wrote) = (Arc::clone(&jobs), Arc::clone(&wrote));
            thread::spawn(move || {
                jobs.next(|_| String::new()).unwrap();
                wrote.store(true, Relaxed);
                jobs.settle();
            })
        };
        if !jobs.is_busy() {
            assert!(wrote.load(Relaxed));
        }
        thread.join().unwrap();
        assert!(wrote.load(Acquire));
    });
}
