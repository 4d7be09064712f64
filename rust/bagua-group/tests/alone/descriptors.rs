//! Groups close all descriptors and end all threads.

use crate::alone;
use crate::group_world::{until, world_with};
use bagua_group::{Group, Options, TransportChoice};
use bagua_net::platform::OPEN_DESCRIPTORS;

fn count(path: &str) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

#[test]
fn dropping_groups_with_lanes_closes_all_descriptors_and_ends_all_threads() {
    let _alone = alone();
    let round = || {
        for transport in [TransportChoice::Auto, TransportChoice::Tcp] {
            let groups = world_with(3, |config| {
                config.transport = transport;
                config.host_id = ["a", "a", "b"][config.rank].to_owned();
            });
            if transport == TransportChoice::Tcp {
                let before = count(OPEN_DESCRIPTORS);
                let unused: Vec<_> = groups.iter().map(|group| group.lane().unwrap()).collect();
                assert_eq!(count(OPEN_DESCRIPTORS), before, "a lane that is not used costs none");
                drop(unused);
            }
            let lanes: Vec<_> = std::thread::scope(|scope| {
                let used = |group: &Group| {
                    let mut lane = group.lane().unwrap();
                    lane.barrier(&Options::default()).unwrap();
                    lane
                };
                let threads: Vec<_> = groups.iter().map(|group| scope.spawn(move || used(group))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            groups[0].raise("ValueError", "bad number");
            drop((groups, lanes));
        }
    };
    round();
    let (descriptors, threads) = (count(OPEN_DESCRIPTORS), count("/proc/self/task"));
    for _ in 0..3 {
        round();
    }
    until("the threads have ended", || count("/proc/self/task") <= threads);
    assert_eq!(count(OPEN_DESCRIPTORS), descriptors);
}
