//! Invariant 5 of `engine`, for the callbacks of handles: they run in the process that added them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
const FORKS: usize = 20;

static CALLS: AtomicUsize = AtomicUsize::new(0);

fn worker() -> LaneWorker {
    let health = GroupHealth::local(0, 1);
    let lane = Lane::new(Box::new(Solo::new()), health.clone(), Arc::new(Stats::default()), 0, 0, LONG);
    LaneWorker::over(lane, health, "world")
}

/// Submits a job that runs until the sender is dropped, with a callback.
fn pending(worker: &LaneWorker) -> (Handle, mpsc::Sender<()>) {
    let (open, opened) = mpsc::channel::<()>();
    let job = move |_: &mut Lanes| {
        let _ = opened.recv();
        Ok(())
    };
    let handle = worker.submit("a held job", Box::new(job)).unwrap();
    let count = |_: &Result<()>| {
        CALLS.fetch_add(1, Ordering::SeqCst);
    };
    handle.on_done(count).unwrap();
    (handle, open)
}

/// Returns true if a forked child sees the expected states: of a pending and a completed job of its parent, and of a
/// worker of its own.
fn child(pending_handle: &Handle, done: &Handle) -> bool {
    let refused =
        matches!(pending_handle.on_done(|_| ()), Err(Error::System { message, .. }) if message.contains("forked"));
    let (sender, at_once) = mpsc::channel();
    let called = done.on_done(move |result| sender.send(result.clone()).unwrap()).is_ok();
    let parents = CALLS.load(Ordering::SeqCst);
    let own = worker();
    let (handle, open) = pending(&own);
    drop(open);
    let ended = handle.wait(Some(LONG)).is_ok() && wait_for_callbacks(LONG) == Waited::Done(Ok(()));
    let calls = CALLS.load(Ordering::SeqCst) - parents;
    refused && called && at_once.try_recv() == Ok(Ok(())) && ended && calls == 1
}

#[test]
fn callbacks_run_in_the_process_that_added_them() {
    let worker = worker();
    let (done, open) = pending(&worker);
    drop(open);
    done.wait(Some(LONG)).unwrap();
    assert_eq!(wait_for_callbacks(LONG), Waited::Done(Ok(())));
    let (handle, open) = pending(&worker);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Holds the locks of the queue and of a handle at many of the forks.
        scope.spawn(|| {
            let busy = self::worker();
            while !stop.load(Ordering::Relaxed) {
                let handle = busy.submit("a job", Box::new(|_| Ok(()))).unwrap();
                handle.on_done(|_| ()).unwrap();
                handle.wait(Some(LONG)).unwrap();
            }
        });
        for _ in 0..FORKS {
            // SAFETY: the child takes no lock that another thread of the parent may hold, except malloc's, which the C
            // library makes usable in the child. The child ends with `_exit`.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let right = child(&handle, &done);
                // SAFETY: ends the child at once, without the parent's exit handlers.
                unsafe { libc::_exit(i32::from(!right)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child that was just made.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child ended with {status}");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(CALLS.load(Ordering::SeqCst), 1, "the second job is pending");
    drop(open);
    handle.wait(Some(LONG)).unwrap();
    assert_eq!(wait_for_callbacks(LONG), Waited::Done(Ok(())));
    assert_eq!(CALLS.load(Ordering::SeqCst), 2);
}
