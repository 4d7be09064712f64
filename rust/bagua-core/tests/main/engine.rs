//! The public interface of the engine: order of operations, errors, timeouts, shutdown. Numbers refer to the invariants
//! of `engine`.
//!
//! Ranks are threads of this process; the collectives have their own contract test.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use bagua_core::bucket::{Bucket, Tensor};
use bagua_core::collective::{Collective, Net, Solo};
use bagua_core::engine::{Engine, Handle, LaneWorker, SharedBucket};
use bagua_core::error::{Error, Result};
use bagua_core::group::{Lane, Lanes};
use bagua_core::health::GroupHealth;
use bagua_core::memory::Region;
use bagua_core::op::{BucketCx, CallbackOp, CentralizedOp, Op};
use bagua_core::stats::Stats;
use bagua_core::transport::local_mesh;
use bagua_core::types::DType;
use bagua_core::wait::{Waited, wait_in_slices};

const LONG: Option<Duration> = Some(Duration::from_secs(60));

fn lane(health: &Arc<GroupHealth>, collective: impl Collective + 'static) -> Lane {
    Lane::new(Box::new(collective), health.clone(), Arc::new(Stats::default()), 0, 0, Duration::from_secs(60))
}

fn single_rank_engine() -> (Engine, Arc<GroupHealth>) {
    let health = GroupHealth::local(0, 1);
    (Engine::over(lane(&health, Solo::new()), health.clone(), "model").unwrap(), health)
}

/// Waits as `wait` does, in slices of zero length.
fn in_slices<E>(
    engine: &Engine,
    timeout: Option<Duration>,
    between: impl FnMut() -> std::result::Result<(), E>,
) -> std::result::Result<Result<usize>, E> {
    let wait = |limit| engine.wait_for(limit, None);
    wait_in_slices(timeout, Duration::ZERO, wait, between, |after| engine.timed_out(after))
}

fn single_rank_worker() -> (LaneWorker, Arc<GroupHealth>) {
    let health = GroupHealth::local(0, 1);
    (LaneWorker::over(lane(&health, Solo::new()), health.clone(), "world"), health)
}

/// Leaked memory with these values: its address and a region on it.
fn memory(values: &[f32]) -> (usize, Region) {
    let leaked: &'static mut [f32] = values.to_vec().leak();
    // SAFETY: leaked, so valid for ever; tests read it only after `wait`.
    let region = unsafe { Region::new(leaked.as_mut_ptr().cast(), leaked.len(), DType::F32).unwrap() };
    (region.address(), region)
}

fn values(address: usize, count: usize) -> Vec<f32> {
    // SAFETY: `memory` returned the address for at least `count` elements, and the engine has finished with it.
    unsafe { std::slice::from_raw_parts(address as *const f32, count) }.to_vec()
}

fn tensor(name: &str, region: Region) -> Tensor {
    Tensor { name: name.to_owned(), region, padding: false }
}

fn bucket(name: &str, tensors: Vec<Tensor>) -> SharedBucket {
    SharedBucket::new(Bucket::new(name, tensors).unwrap())
}

/// Returns buckets described by a text: "ab c" is bucket 0 with tensors a and b, and bucket 1 with tensor c.
fn buckets(text: &str) -> Vec<SharedBucket> {
    let tensors = |letters: &str| letters.chars().map(|letter| tensor(&letter.to_string(), memory(&[1.0]).1)).collect();
    text.split_whitespace().enumerate().map(|(index, letters)| bucket(&index.to_string(), tensors(letters))).collect()
}

/// An operation that records the bucket's name.
fn recorder() -> (Arc<dyn Op>, Arc<Mutex<Vec<String>>>) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let inside = log.clone();
    let note = move |bucket: &str| {
        inside.lock().unwrap().push(bucket.to_owned());
        Ok(())
    };
    (Arc::new(CallbackOp::new(note)), log)
}

/// An operation that sends a message when it starts, and ends when it receives one or its sender is dropped.
fn gate() -> (Arc<dyn Op>, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (began, begins) = mpsc::channel();
    let (open, opened) = mpsc::channel::<()>();
    let ends = Mutex::new((began, opened));
    let op = CallbackOp::new(move |_| {
        let ends = ends.lock().unwrap();
        let _ = ends.0.send(());
        let _ = ends.1.recv();
        Ok(())
    });
    (Arc::new(op), begins, open)
}

fn text<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

fn mark(engine: &Engine, tensors: &str) {
    tensors.chars().for_each(|tensor| engine.mark_ready(number(engine, &tensor.to_string()), None, None).unwrap());
}

/// Returns the number of the tensor with this name, or an invalid number for an unknown name.
fn number(engine: &Engine, name: &str) -> usize {
    engine.tensors().iter().position(|known| known == name).unwrap_or(usize::MAX)
}

#[test]
fn buckets_are_communicated_in_registered_order_while_the_caller_continues() {
    let (engine, _) = single_rank_engine();
    let (op, log) = recorder();
    let (hold, begins, open) = gate();
    let buckets = buckets("ab c de");
    buckets[0].lock().append(hold).unwrap();
    buckets.iter().for_each(|bucket| bucket.lock().append(op.clone()).unwrap());
    engine.register(buckets).unwrap();
    mark(&engine, "cab");
    begins.recv().unwrap();
    // Invariant 4: marking does not wait for bucket 0, which is blocked in its first operation.
    assert_eq!(engine.unready(), ["d", "e"]);
    mark(&engine, "ed");
    assert!(engine.unready().is_empty());
    assert!(
        text(engine.mark_ready(number(&engine, "a"), None, None)).contains("bucket '0' is still being communicated")
    );
    drop(open);
    assert_eq!(engine.wait(LONG).unwrap(), 3);
    assert_eq!(*log.lock().unwrap(), ["0", "1", "2"]);
    mark(&engine, "edcba");
    assert_eq!(engine.wait(LONG).unwrap(), 3);
    assert_eq!(*log.lock().unwrap(), ["0", "1", "2", "0", "1", "2"]);
    assert_eq!(engine.wait(LONG).unwrap(), 0);
}

#[test]
fn operations_of_a_bucket_run_in_the_order_in_which_they_were_appended() {
    let (engine, _) = single_rank_engine();
    let log = Arc::new(Mutex::new(Vec::new()));
    let buckets = buckets("a");
    for step in 0..3 {
        let log = log.clone();
        let note = move |_: &str| {
            log.lock().unwrap().push(step);
            Ok(())
        };
        buckets[0].lock().append(Arc::new(CallbackOp::new(note))).unwrap();
    }
    assert_eq!(buckets[0].lock().ops(), ["callback"; 3]);
    engine.register(buckets).unwrap();
    mark(&engine, "a");
    engine.wait(LONG).unwrap();
    assert_eq!(*log.lock().unwrap(), [0, 1, 2]);
}

#[test]
fn an_incomplete_step_names_the_unmarked_tensors_and_starts_again() {
    let (engine, health) = single_rank_engine();
    engine.register(buckets("a bc d")).unwrap();
    mark(&engine, "ab");
    assert_eq!(engine.unready(), ["c", "d"]);
    let error = text(engine.wait(LONG));
    assert_eq!(error, "engine 'model': the step is incomplete, 1 tensor was not marked ready: 'c'");
    assert!(health.check().is_ok());
    mark(&engine, "abcd");
    assert_eq!(engine.wait(LONG).unwrap(), 3);
}

#[test]
fn a_tensor_marked_twice_or_unknown_is_refused_and_the_step_continues() {
    let (engine, _) = single_rank_engine();
    engine.register(buckets("ab")).unwrap();
    mark(&engine, "a");
    assert!(text(engine.mark_ready(number(&engine, "a"), None, None)).contains("'a' was marked ready twice"));
    assert!(text(engine.mark_ready(2, None, None)).contains("no tensor has number 2"));
    mark(&engine, "b");
    assert_eq!(engine.wait(LONG).unwrap(), 1);
}

#[test]
fn registration_refuses_duplicate_names_and_shared_memory_and_names_both_buckets() {
    let (engine, _) = single_rank_engine();
    let twice = [buckets("a"), vec![bucket("other", vec![tensor("a", memory(&[1.0]).1)])]].concat();
    assert_eq!(text(engine.register(twice)), "tensor 'a' is in bucket '0' and in bucket 'other'");
    let (address, whole) = memory(&[0.0; 4]);
    // SAFETY: the last element of leaked memory; never communicated.
    let part = unsafe { Region::new((address + 12) as *mut u8, 1, DType::F32).unwrap() };
    let overlap = vec![bucket("x", vec![tensor("whole", whole)]), bucket("y", vec![tensor("part", part)])];
    let refused = "tensors 'whole' of bucket 'x' and 'part' of bucket 'y' share memory";
    assert_eq!(text(engine.register(overlap)), refused);
}

#[test]
fn empty_tensors_and_an_empty_list_of_buckets_are_valid() {
    let (engine, _) = single_rank_engine();
    // SAFETY: no elements.
    let empty = |name| tensor(name, unsafe { Region::new(std::ptr::null_mut(), 0, DType::F32).unwrap() });
    engine.register(vec![bucket("empty", vec![empty("e"), empty("f")])]).unwrap();
    mark(&engine, "ef");
    assert_eq!(engine.wait(LONG).unwrap(), 1);
    engine.register(vec![]).unwrap();
    assert_eq!(engine.wait(LONG).unwrap(), 0);
}

#[test]
fn the_error_of_a_callback_names_its_bucket_and_is_returned_by_this_and_every_later_call() {
    // Invariant 2.
    let (engine, health) = single_rank_engine();
    let buckets = buckets("a b");
    buckets[0].lock().append(Arc::new(CallbackOp::new(|_| Err(Error::InvalidArgument("no".into()))))).unwrap();
    engine.register(buckets.clone()).unwrap();
    mark(&engine, "a");
    let expected = Error::InvalidArgument("in the callback of bucket '0': no".into());
    assert_eq!(engine.wait(LONG), Err(expected.clone()));
    assert_eq!(health.cause(), Some(expected.clone()));
    assert_eq!(engine.mark_ready(number(&engine, "b"), None, None), Err(expected.clone()));
    assert_eq!(engine.wait(LONG), Err(expected.clone()));
    assert_eq!(engine.worker().submit("a job", Box::new(|_| Ok(()))).err(), Some(expected));
    // The bucket is no longer in use.
    buckets[0].lock().clear_ops().unwrap();
}

#[test]
fn a_panic_in_an_operation_is_an_error_and_ends_every_wait() {
    // Invariant 3.
    let (engine, health) = single_rank_engine();
    let buckets = buckets("a b");
    buckets[0].lock().append(Arc::new(CallbackOp::new(|bucket| panic!("boom in {bucket}")))).unwrap();
    engine.register(buckets).unwrap();
    mark(&engine, "a");
    assert_eq!(text(engine.wait(LONG)), "an operation of engine 'model' panicked: boom in 0");
    assert!(matches!(health.cause(), Some(Error::System { .. })));
}

#[test]
fn a_wait_that_times_out_leaves_the_bucket_running() {
    let (engine, _) = single_rank_engine();
    let (hold, begins, open) = gate();
    let buckets = buckets("a");
    buckets[0].lock().append(hold).unwrap();
    engine.register(buckets).unwrap();
    mark(&engine, "a");
    begins.recv().unwrap();
    let short = Duration::from_millis(5);
    assert!(matches!(engine.wait(Some(short)), Err(Error::Timeout { after, .. }) if after == short));
    drop(open);
    assert_eq!(engine.wait(LONG).unwrap(), 1);
}

#[test]
fn a_bucket_that_is_done_between_two_slices_of_a_wait_is_no_timeout() {
    let (engine, _) = single_rank_engine();
    let (hold, begins, open) = gate();
    let buckets = buckets("a b");
    buckets[0].lock().append(hold).unwrap();
    engine.register(buckets).unwrap();
    mark(&engine, "ab");
    begins.recv().unwrap();
    assert_eq!(engine.wait_for(Duration::ZERO, None), Waited::Pending);
    let mut open = Some(open);
    let finish_both = || {
        if open.take().is_some() {
            // The worker runs jobs in order, so the buckets are done when this job is done.
            engine.worker().submit("a job", Box::new(|_| Ok(()))).unwrap().wait(LONG).unwrap();
        }
        Ok::<(), ()>(())
    };
    assert_eq!(in_slices(&engine, LONG, finish_both), Ok(Ok(2)));
}

#[test]
fn a_peer_lost_during_a_wait_in_slices_is_the_error_of_the_wait() {
    // The group has failed, and the operation that waits for the peer has not noticed yet.
    let (engine, health) = single_rank_engine();
    let (hold, begins, open) = gate();
    let buckets = buckets("a b");
    buckets[0].lock().append(hold).unwrap();
    engine.register(buckets).unwrap();
    mark(&engine, "ab");
    begins.recv().unwrap();
    let lost = health.fail(health.peer_lost(0, "no heartbeat for 5.0 s"));
    let mut slices = 0;
    let mut open = Some(open);
    let notice_late = || {
        slices += 1;
        if slices == 100 {
            drop(open.take());
        }
        Ok::<(), ()>(())
    };
    assert_eq!(in_slices(&engine, None, notice_late), Ok(Err(lost)));
    assert!(slices >= 100);
}

#[test]
fn marking_with_new_memory_communicates_that_memory() {
    struct Doubles;
    impl Op for Doubles {
        fn name(&self) -> &'static str {
            "doubles"
        }
        fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
            for value in cx.tensors[0].as_host_mut()?.chunks_exact_mut(4) {
                let doubled = 2.0 * f32::from_ne_bytes(value.try_into().unwrap());
                value.copy_from_slice(&doubled.to_ne_bytes());
            }
            Ok(())
        }
    }
    let (engine, _) = single_rank_engine();
    let buckets = buckets("a");
    buckets[0].lock().append(Arc::new(Doubles)).unwrap();
    engine.register(buckets).unwrap();
    let (address, region) = memory(&[21.0]);
    engine.mark_ready(number(&engine, "a"), Some(region), None).unwrap();
    engine.wait(LONG).unwrap();
    assert_eq!(values(address, 1), [42.0]);
    let wrong = memory(&[1.0, 2.0]).1;
    assert!(text(engine.mark_ready(number(&engine, "a"), Some(wrong), None)).contains("its new memory has 2"));
    mark(&engine, "a");
    engine.wait(LONG).unwrap();
    assert_eq!(values(address, 1), [84.0]);
}

#[test]
fn shutdown_fails_queued_buckets_and_ends_a_running_operation() {
    // Invariant 3: the first operation waits until the group is poisoned, like a collective whose peer does not take
    // part.
    let (engine, health) = single_rank_engine();
    let (op, log) = recorder();
    let buckets = buckets("a b");
    let (began, begins) = mpsc::channel();
    let (began, seen) = (Mutex::new(began), health.clone());
    let endless = CallbackOp::new(move |_| {
        let _ = began.lock().unwrap().send(());
        loop {
            seen.check()?;
            std::thread::yield_now();
        }
    });
    buckets[0].lock().append(Arc::new(endless)).unwrap();
    buckets[1].lock().append(op).unwrap();
    engine.register(buckets.clone()).unwrap();
    mark(&engine, "ab");
    begins.recv().unwrap();
    let start = Instant::now();
    engine.shutdown();
    engine.shutdown();
    assert!(start.elapsed() < Duration::from_secs(30));
    let cause = "aborted: engine 'model' was shut down while bucket '0' was running";
    assert_eq!(health.cause().unwrap().to_string(), cause);
    assert_eq!(text(engine.wait(LONG)), cause);
    assert!(log.lock().unwrap().is_empty(), "bucket 1 never ran");
    // Neither bucket is in use any more.
    buckets.iter().for_each(|bucket| bucket.lock().clear_ops().unwrap());
}

#[test]
fn dropping_an_idle_engine_does_not_poison_its_group() {
    let (engine, health) = single_rank_engine();
    engine.register(buckets("a b")).unwrap();
    mark(&engine, "a");
    engine.worker().submit("a job", Box::new(|_| Ok(()))).unwrap().wait(LONG).unwrap();
    engine.shutdown();
    assert_eq!(text(engine.mark_ready(number(&engine, "b"), None, None)), "aborted: engine 'model' was shut down");
    drop(engine);
    assert!(health.check().is_ok());
}

#[test]
fn adjacent_tensors_are_averaged_in_place_with_their_padding() {
    std::thread::scope(|scope| {
        for (rank, mesh) in local_mesh(2).into_iter().enumerate() {
            scope.spawn(move || {
                let health = GroupHealth::local(rank, 2);
                let engine = Engine::over(lane(&health, Net::new(mesh)), health.clone(), "model").unwrap();
                let (address, _) = memory(&[rank as f32, 4.0 * rank as f32, 1.0]);
                // SAFETY: the three elements of leaked memory, one region each.
                let part = |at: usize| unsafe { Region::new((address + 4 * at) as *mut u8, 1, DType::F32).unwrap() };
                let padding = Tensor { name: "p".into(), region: part(2), padding: true };
                let shared = bucket("flat", vec![tensor("a", part(0)), tensor("b", part(1)), padding]);
                shared.lock().append(Arc::new(CentralizedOp::new(true, false, false))).unwrap();
                engine.register(vec![shared]).unwrap();
                mark(&engine, "ba");
                assert_eq!(engine.wait(LONG).unwrap(), 1);
                assert_eq!(values(address, 3), [0.5, 2.0, 1.0]);
            });
        }
    });
}

#[test]
fn submitted_jobs_and_blocking_calls_run_in_program_order() {
    // Invariant 1.
    let (worker, _) = single_rank_worker();
    let log = Arc::new(Mutex::new(Vec::new()));
    for step in 0..60 {
        let inside = log.clone();
        let note = move |_: &mut Lanes| {
            inside.lock().unwrap().push(step);
            Ok(())
        };
        if step % 3 == 2 {
            worker.run(note).unwrap();
            assert_eq!(log.lock().unwrap().len(), step + 1);
        } else {
            worker.submit("a note", Box::new(note)).unwrap();
        }
    }
    assert_eq!(*log.lock().unwrap(), (0..60).collect::<Vec<_>>());
}

#[test]
fn every_clone_of_a_handle_returns_the_same_error_and_the_worker_continues() {
    let (worker, health) = single_rank_worker();
    let handle = worker.submit("a note", Box::new(|_| Err(Error::UnsupportedType("avg of int32".into())))).unwrap();
    let clones: Vec<Handle> = (0..3).map(|_| handle.clone()).collect();
    for clone in clones {
        assert_eq!(clone.wait(LONG), Err(Error::UnsupportedType("avg of int32".into())));
        assert!(clone.is_completed());
    }
    // The argument error occurred before any communication, and a handle returned it.
    assert!(health.check().is_ok());
    assert_eq!(worker.run(|_| Ok(7)).unwrap(), 7);
}

#[test]
fn the_error_of_a_dropped_handle_is_returned_by_the_next_call_once() {
    // Invariant 2.
    let (worker, _) = single_rank_worker();
    drop(worker.submit("a note", Box::new(|_| Err(Error::InvalidArgument("lost".into())))).unwrap());
    let ran = AtomicUsize::new(0);
    let count = |_: &mut Lanes| Ok(ran.fetch_add(1, Ordering::Relaxed));
    assert_eq!(worker.run(count), Err(Error::InvalidArgument("lost".into())));
    assert_eq!(worker.run(count), Ok(0));
    assert_eq!(ran.load(Ordering::Relaxed), 1);
}

#[test]
fn a_timeout_of_a_handle_leaves_its_job_running() {
    let (worker, _) = single_rank_worker();
    let (open, opened) = mpsc::channel::<()>();
    let job = move |_: &mut Lanes| {
        let _ = opened.recv();
        Ok(())
    };
    let handle = worker.submit("a wait", Box::new(job)).unwrap();
    let error = handle.wait(Some(Duration::from_millis(2))).unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing.is_empty()));
    assert!(error.to_string().contains("the communication thread"), "{error}");
    assert!(!handle.is_completed());
    drop(open);
    handle.wait(LONG).unwrap();
}

#[test]
fn the_first_cause_wins_over_its_consequences() {
    let (worker, health) = single_rank_worker();
    let cause = health.peer_lost(0, "its connection broke");
    let (first, inside) = (cause.clone(), health.clone());
    let error = worker.run(move |_| -> Result<()> {
        let _ = inside.fail(first);
        Err(Error::other("a consequence"))
    });
    assert_eq!(error, Err(cause.clone()));
    assert_eq!(worker.submit("more", Box::new(|_| Ok(()))).err(), Some(cause));
}

#[test]
fn jobs_queued_behind_a_failure_end_with_its_cause() {
    let (worker, _) = single_rank_worker();
    let (open, opened) = mpsc::channel::<()>();
    let fails = move |_: &mut Lanes| {
        let _ = opened.recv();
        Err(Error::other("broken"))
    };
    let first = worker.submit("a wait", Box::new(fails)).unwrap();
    let second = worker.submit("a note", Box::new(|_| panic!("must not run"))).unwrap();
    drop(open);
    assert_eq!(second.wait(LONG), Err(Error::other("broken")));
    assert_eq!(first.wait(LONG), Err(Error::other("broken")));
}

#[test]
fn a_completed_step_is_not_failed_by_a_later_failure() {
    let (engine, health) = single_rank_engine();
    engine.register(buckets("a")).unwrap();
    engine.mark_ready(number(&engine, "a"), None, None).unwrap();
    // Runs after the bucket, so the bucket is done when this is.
    engine.worker().submit("a job", Box::new(|_| Ok(()))).unwrap().wait(LONG).unwrap();
    let _ = health.fail(Error::Aborted("a peer failed in its next step".to_owned()));
    assert_eq!(engine.wait(LONG).unwrap(), 1);
    assert!(matches!(engine.mark_ready(number(&engine, "a"), None, None), Err(Error::Aborted(_))));
    assert!(matches!(engine.wait(LONG), Err(Error::Aborted(_))));
}
