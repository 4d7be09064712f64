//! A forked child neither communicates nor keeps connections open, and its end harms nobody.

mod group_world;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use bagua_core::error::Error;
use bagua_core::group::{Options, TransportChoice};
use bagua_core::wait::lock;
use group_world::{cause, exit_code, fork, live, mixed, until, world_with};
use rustix::process::Signal;

#[test]
#[ignore = "what the processes of the other tests run"]
fn entry_of_processes() {
    live();
}

/// One test at a time: a socket that another thread opens in the very moment of a fork may escape.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    lock(&ALONE)
}

fn sockets() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn a_forked_child_is_told_so_closes_its_copies_and_harms_nobody() {
    let _alone = alone();
    for transport in [TransportChoice::Auto, TransportChoice::Tcp] {
        let groups = world_with(2, |config| config.transport = transport);
        let lanes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = groups.iter().map(|group| scope.spawn(|| group.lane().unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(sockets() > 0);
        let (groups_there, mut lanes_there) = (groups.clone(), lanes);
        let child = fork(move || {
            // The runtime's own pair for signals is not registered and harmless; ours are gone.
            assert_eq!(sockets(), 0);
            let told = |error: &Error| matches!(error, Error::System { message, .. } if message.contains("forked"));
            assert!(told(&groups_there[0].lane().map(|_| ()).unwrap_err()));
            assert!(told(&groups_there[0].subgroup(&[0], "one").map(|_| ()).unwrap_err()));
            let mut first = lanes_there.remove(0);
            assert!(first.barrier(&Options::default()).is_err());
            groups_there[0].raise("ValueError", "from the child");
            groups_there[1].leave();
            // A file of the child's own must survive the end of the copies.
            let file = std::fs::File::open("/proc/self/status").unwrap();
            drop((first, lanes_there, groups_there));
            file.metadata().unwrap();
        });
        assert_eq!(exit_code(child), 0);
        groups.iter().for_each(|group| group.health().check().unwrap());
    }
}

#[test]
fn the_parent_goes_on_after_a_fork() {
    let _alone = alone();
    let groups = world_with(2, |config| config.heartbeat_timeout = Duration::from_secs(1));
    let child = fork(|| std::thread::sleep(Duration::from_millis(1500)));
    assert_eq!(exit_code(child), 0);
    groups[0].health().check().unwrap();
    groups[1].raise("ValueError", "bad number");
    assert!(matches!(cause(&groups[0]), Error::PeerRaised { rank: 1, .. }));
}

#[test]
fn a_rank_that_dies_is_lost_at_once_although_its_child_lives() {
    let _alone = alone();
    let (groups, mut processes) = mixed("entry_of_processes", 2, &[1], Duration::from_secs(60));
    processes[0].tell("fork");
    processes[0].hear("FORKED");
    processes[0].signal(Signal::KILL);
    let took = until("the loss is noticed", || groups[0].health().cause().is_some());
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(matches!(cause(&groups[0]), Error::PeerLost { rank: 1, .. }));
}
