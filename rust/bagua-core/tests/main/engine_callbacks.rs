//! Callbacks of handles, on the jobs of a worker. The numbers are those of `engine`'s invariants.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use bagua_core::collective::Solo;
use bagua_core::engine::{Handle, LaneWorker, wait_for_callbacks};
use bagua_core::error::{Error, Result};
use bagua_core::group::{Lane, Lanes};
use bagua_core::health::GroupHealth;
use bagua_core::stats::Stats;
use bagua_core::wait::Waited;

const LONG: Duration = Duration::from_secs(60);

fn worker() -> LaneWorker {
    let health = GroupHealth::local(0, 1);
    let lane = Lane::new(Box::new(Solo::new()), health.clone(), Arc::new(Stats::default()), 0, 0, LONG);
    LaneWorker::over(lane, health, "world")
}

/// A job that runs until the sender is dropped.
fn held(worker: &LaneWorker, result: Result<()>) -> (Handle, mpsc::Sender<()>) {
    let (handle, open, _) = begun(worker, result);
    (handle, open)
}

/// Starts a job as [`held`] does. The first receiver gets a message when the job runs.
fn begun(worker: &LaneWorker, result: Result<()>) -> (Handle, mpsc::Sender<()>, mpsc::Receiver<()>) {
    let (open, opened) = mpsc::channel::<()>();
    let (began, begins) = mpsc::channel();
    let job = move |_: &mut Lanes| {
        // The receiver may have been dropped.
        let _ = began.send(());
        let _ = opened.recv();
        result
    };
    (worker.submit("a held job", Box::new(job)).unwrap(), open, begins)
}

#[test]
fn a_callback_that_blocks_delays_other_callbacks_and_no_job() {
    let worker = worker();
    let (first, open) = held(&worker, Ok(()));
    let (began, begins) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    first
        .on_done(move |_| {
            began.send(std::thread::current().name().map(str::to_owned)).unwrap();
            let _ = released.recv();
        })
        .unwrap();
    drop(open);
    assert_eq!(begins.recv().unwrap().as_deref(), Some("bagua-callbacks"));
    let (second, open) = held(&worker, Ok(()));
    let (sender, ran) = mpsc::channel();
    second.on_done(move |_| sender.send(()).unwrap()).unwrap();
    drop(open);
    second.wait(Some(LONG)).unwrap();
    assert_eq!(worker.run(|_| Ok(7)).unwrap(), 7);
    assert!(ran.try_recv().is_err(), "callbacks run one after another");
    assert_eq!(wait_for_callbacks(Duration::ZERO), Waited::Pending);
    drop(release);
    ran.recv().unwrap();
    assert_eq!(wait_for_callbacks(LONG), Waited::Done(Ok(())));
}

#[test]
fn a_callback_may_submit_a_job_and_add_a_callback_to_it() {
    let worker = Arc::new(worker());
    let (first, open) = held(&worker, Ok(()));
    let (sender, ran) = mpsc::channel();
    let inside = worker.clone();
    first
        .on_done(move |_| {
            let second = inside.submit("a note", Box::new(|_| Err(Error::InvalidArgument("no".into())))).unwrap();
            second.on_done(move |result| sender.send(result.clone()).unwrap()).unwrap();
        })
        .unwrap();
    drop(open);
    assert_eq!(ran.recv().unwrap(), Err(Error::InvalidArgument("no".into())));
    assert_eq!(wait_for_callbacks(LONG), Waited::Done(Ok(())));
    assert_eq!(worker.run(|_| Ok(7)).unwrap(), 7, "the callback got the error");
}

#[test]
fn an_error_that_a_callback_gets_does_not_reach_the_next_call() {
    // Invariant 2.
    let worker = worker();
    let (handle, open) = held(&worker, Err(Error::InvalidArgument("given to a callback".into())));
    let (sender, ran) = mpsc::channel();
    handle.on_done(move |result| sender.send(result.clone()).unwrap()).unwrap();
    drop(handle);
    drop(open);
    assert_eq!(worker.run(|_| Ok(7)).unwrap(), 7);
    assert_eq!(ran.recv().unwrap(), Err(Error::InvalidArgument("given to a callback".into())));
}

#[test]
fn shutdown_calls_the_callbacks_of_queued_jobs_with_its_error() {
    // Invariant 3.
    let worker = worker();
    let (running, open, begins) = begun(&worker, Ok(()));
    begins.recv().unwrap();
    let (queued, _) = held(&worker, Ok(()));
    let (sender, ran) = mpsc::channel();
    for (name, handle) in [("running", &running), ("queued", &queued)] {
        let sender = sender.clone();
        handle.on_done(move |result| sender.send((name, result.clone())).unwrap()).unwrap();
    }
    std::thread::scope(|scope| {
        scope.spawn(|| worker.shutdown());
        let aborted = Err(Error::Aborted("world was shut down".into()));
        assert_eq!(ran.recv().unwrap(), ("queued", aborted));
        drop(open);
    });
    assert_eq!(ran.recv().unwrap(), ("running", Ok(())));
}
