//! A forked child refuses to communicate, keeps no connections open, and does not affect its parent's group.

use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::alone;
use crate::group_world::{AT_ONCE, NEVER_SILENT, cause, exit_code, fork, mixed, run_commands, until, world_with};
use bagua_group::{Group, Options, PerProcess, TransportChoice};
use bagua_kernels::error::Error;
use bagua_net::platform::OPEN_DESCRIPTORS;
use bagua_net::wait::lock;
use rustix::process::Signal;

#[test]
#[ignore = "the other tests start processes that run this"]
fn entry_of_processes() {
    run_commands();
}

fn sockets() -> usize {
    let open = std::fs::read_dir(OPEN_DESCRIPTORS).unwrap();
    let targets = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn a_forked_child_gets_errors_closes_its_copies_and_does_not_affect_the_group() {
    let _alone = alone();
    for transport in [TransportChoice::Auto, TransportChoice::Tcp] {
        let groups = world_with(2, |config| config.transport = transport);
        let lanes: Vec<_> = std::thread::scope(|scope| {
            let used = |group: &Group| {
                let mut lane = group.lane().unwrap();
                lane.barrier(&Options::default()).unwrap();
                lane
            };
            let threads: Vec<_> = groups.iter().map(|group| scope.spawn(move || used(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let streams = groups[0].stats().data_opened.load(Relaxed);
        assert_eq!(streams > 0, transport == TransportChoice::Tcp);
        assert!(sockets() > 0);
        let (inherited_groups, mut inherited_lanes) = (groups.clone(), lanes);
        let child = fork(move || {
            // All sockets of the group are closed.
            assert_eq!(sockets(), 0);
            let is_fork_error =
                |error: &Error| matches!(error, Error::System { message, .. } if message.contains("forked"));
            assert!(is_fork_error(&inherited_groups[0].lane().map(|_| ()).unwrap_err()));
            assert!(is_fork_error(&inherited_groups[0].subgroup(&[0], "one").map(|_| ()).unwrap_err()));
            let mut first = inherited_lanes.remove(0);
            assert!(first.barrier(&Options::default()).is_err());
            inherited_groups[0].raise("ValueError", "from the child");
            inherited_groups[1].leave();
            // Dropping the inherited objects must not close a file that the child has opened.
            let file = std::fs::File::open("/dev/null").unwrap();
            drop((first, inherited_lanes, inherited_groups));
            file.metadata().unwrap();
        });
        assert_eq!(exit_code(child), 0);
        groups.iter().for_each(|group| group.health().check().unwrap());
    }
}

#[test]
fn the_group_of_the_parent_works_after_a_fork() {
    let _alone = alone();
    let groups = world_with(2, |config| config.heartbeat_timeout = Duration::from_secs(1));
    let child = fork(|| std::thread::sleep(Duration::from_millis(1500)));
    assert_eq!(exit_code(child), 0);
    groups[0].health().check().unwrap();
    groups[1].raise("ValueError", "bad number");
    assert!(matches!(cause(&groups[0]), Error::PeerRaised { rank: 1, .. }));
}

#[test]
fn a_rank_that_dies_is_lost_at_once_although_its_child_still_runs() {
    let _alone = alone();
    let (groups, mut processes) = mixed("fork::entry_of_processes", 2, &[1], NEVER_SILENT);
    processes[0].write("fork");
    processes[0].read_after("FORKED");
    processes[0].signal(Signal::KILL);
    let took = until("the loss is detected", || groups[0].health().cause().is_some());
    assert!(took < AT_ONCE, "{took:?}");
    assert!(matches!(cause(&groups[0]), Error::PeerLost { rank: 1, .. }));
}

#[test]
fn a_child_has_locks_of_its_own_where_a_thread_held_its_parents_at_the_fork() {
    let _alone = alone();
    static VALUE: PerProcess<Mutex<u32>> = PerProcess::new();
    let (held, hold) = std::sync::mpsc::channel();
    let (free, freed) = std::sync::mpsc::channel::<()>();
    let holder = std::thread::spawn(move || {
        let mut value = lock(VALUE.get());
        *value = 5;
        held.send(()).unwrap();
        freed.recv().unwrap();
    });
    hold.recv().unwrap();
    let child = fork(|| assert_eq!(VALUE.get().try_lock().map(|value| *value).ok(), Some(0)));
    assert_eq!(exit_code(child), 0);
    free.send(()).unwrap();
    holder.join().unwrap();
    assert_eq!(*lock(VALUE.get()), 5);
}
