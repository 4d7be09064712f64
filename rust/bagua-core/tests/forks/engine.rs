//! Invariant 5 of `engine`: a forked child cannot use the engine.

use std::sync::Arc;
use std::time::Duration;

use bagua_core::bucket::{Bucket, Tensor};
use bagua_core::collective::Solo;
use bagua_core::engine::{Engine, SharedBucket};
use bagua_core::error::Error;
use bagua_core::group::Lane;
use bagua_core::health::GroupHealth;
use bagua_core::memory::Region;
use bagua_core::op::NoOp;
use bagua_core::stats::Stats;
use bagua_core::types::DType;

#[test]
fn in_a_forked_child_calls_are_errors_and_drop_returns_and_the_parent_continues() {
    let health = GroupHealth::local(0, 1);
    let stats = Arc::new(Stats::default());
    let lane = Lane::new(Box::new(Solo::new()), health.clone(), stats, 0, 0, Duration::from_secs(60));
    let engine = Engine::over(lane, health, "model").unwrap();
    let mut value = [1.0f32];
    // SAFETY: `value` outlives the engine and is not accessed meanwhile.
    let region = unsafe { Region::new(value.as_mut_ptr().cast(), 1, DType::F32).unwrap() };
    let tensor = Tensor { name: "a".into(), region, padding: false };
    let bucket = SharedBucket::new(Bucket::new("only", vec![tensor]).unwrap());
    bucket.lock().append(Arc::new(NoOp)).unwrap();
    engine.register(vec![bucket]).unwrap();

    // SAFETY: the child only makes calls that take no lock of another thread, and ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = |result: Result<(), Error>| matches!(result, Err(Error::System { message, .. }) if message.contains("forked"));
        let marked = refused(engine.mark_ready(0, None, None));
        let waited = refused(engine.wait(Some(Duration::from_secs(1))).map(drop));
        let submitted = refused(engine.worker().submit("a job", Box::new(|_| Ok(()))).map(drop));
        drop(engine);
        // SAFETY: ends the child at once, without the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!(marked && waited && submitted))) };
    }
    let mut status = 0;
    // SAFETY: waits for the child of this process, with a valid pointer for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child ended with {status}");
    engine.mark_ready(0, None, None).unwrap();
    assert_eq!(engine.wait(Some(Duration::from_secs(60))).unwrap(), 1);
}
