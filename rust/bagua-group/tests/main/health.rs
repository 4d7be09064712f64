//! Groups: building them, failing on all ranks with the first cause, leaving them, sub-groups.

use std::time::Duration;

use crate::group_world::{
    AT_ONCE, NEVER_SILENT, PATIENCE, cause, config, connect_all, mixed, run_commands, try_world, until, world,
    world_with,
};
use bagua_group::{Bootstrap, Config, TransportChoice};
use bagua_kernels::error::{Error, Exception};
use rustix::process::Signal;

const ENTRY: &str = "health::entry_of_processes";

/// The start of the reason for a killed rank of this host.
const DIED: &str = "its process died on this host";

#[test]
#[ignore = "the other tests start processes that run this"]
fn entry_of_processes() {
    run_commands();
}

#[test]
fn worlds_of_one_to_four_ranks_are_built() {
    for size in 1..=4 {
        let groups = world(size);
        for (rank, group) in groups.iter().enumerate() {
            assert_eq!((group.rank(), group.size(), group.peers_seen(), group.name()), (rank, size, size, "world"));
            assert_eq!(group.ranks(), (0..size).collect::<Vec<_>>());
            assert_eq!(group.hosts(), [(0..size).collect::<Vec<_>>()]);
            group.health().check().unwrap();
        }
    }
}

#[test]
fn ranks_with_equal_host_ids_form_a_host_and_with_tcp_every_rank_is_its_own_host() {
    let two_hosts = world_with(4, |config| config.host_id = ["a", "b"][config.rank % 2].to_owned());
    assert!(two_hosts.iter().all(|group| group.hosts() == vec![vec![0, 2], vec![1, 3]]));
    let by_tcp = world_with(3, |config| config.transport = TransportChoice::Tcp);
    assert!(by_tcp.iter().all(|group| group.hosts() == [[0], [1], [2]]));
    let one_by_tcp = |config: &mut Config| {
        config.transport = [TransportChoice::Auto, TransportChoice::Tcp][usize::from(config.rank == 1)]
    };
    assert!(world_with(3, one_by_tcp).iter().all(|group| group.hosts() == [[0], [1], [2]]));
}

#[test]
fn a_killed_rank_is_lost_on_every_other_at_once() {
    let (groups, processes) = mixed(ENTRY, 4, &[2], NEVER_SILENT);
    processes[0].signal(Signal::KILL);
    let took = until("all ranks have failed", || groups.iter().all(|group| group.health().cause().is_some()));
    assert!(took < AT_ONCE, "{took:?}");
    for group in &groups {
        let Error::PeerLost { rank, host, reason, .. } = cause(group) else { panic!("{:?}", cause(group)) };
        assert_eq!((rank, host.as_str()), (2, group.health().host(2)));
        assert!(reason.starts_with(DIED), "{reason}");
    }
}

#[test]
fn a_frozen_rank_is_lost_within_the_heartbeat_timeout_and_gets_the_cause_when_it_continues() {
    let (groups, mut processes) = mixed(ENTRY, 3, &[1], Duration::from_secs(2));
    processes[0].signal(Signal::STOP);
    let took = until("all ranks have failed", || groups.iter().all(|group| group.health().cause().is_some()));
    assert!(took > Duration::from_secs(1), "{took:?}");
    for group in &groups {
        let Error::PeerLost { rank, reason, .. } = cause(group) else { panic!("{:?}", cause(group)) };
        assert_eq!((rank, reason.as_str()), (1, "no heartbeat for 2.0 s"));
    }
    processes[0].signal(Signal::CONT);
    processes[0].write("cause");
    let cause = processes[0].read_after("CAUSE ");
    assert!(cause.contains("lost rank 1"), "{cause}");
}

#[test]
fn a_frozen_rank_is_lost_on_every_other_of_its_host() {
    let (groups, processes) = mixed(ENTRY, 12, &[5], Duration::from_secs(2));
    processes[0].signal(Signal::STOP);
    for group in &groups {
        assert!(matches!(cause(group), Error::PeerLost { rank: 5, .. }), "{:?}", cause(group));
    }
}

/// Ranks of a world with many members of one coordinator.
const MANY: usize = 24;

#[test]
fn a_member_has_two_control_connections_and_a_killed_one_is_lost_on_all_at_once() {
    let (groups, processes) = mixed(ENTRY, MANY, &[11, 17], NEVER_SILENT);
    let together = vec![(0..MANY).collect::<Vec<_>>()];
    assert!(groups.iter().all(|group| group.peers_seen() == MANY && group.hosts() == together));
    // A member has connections to the coordinator and the deputy, two listeners and the descriptors of its event loop.
    assert!(processes[0].sockets() <= 2 + 4, "{}", processes[0].sockets());
    processes.iter().for_each(|process| process.signal(Signal::KILL));
    let took = until("all ranks have failed", || groups.iter().all(|group| group.health().cause().is_some()));
    assert!(took < AT_ONCE, "{took:?}");
    for group in &groups {
        let Error::PeerLost { rank, host, reason, .. } = cause(group) else { panic!("{:?}", cause(group)) };
        assert!(rank == 11 || rank == 17, "{rank}");
        assert_eq!(host.as_str(), group.health().host(rank));
        assert!(reason.starts_with(DIED), "{reason}");
        until("both are gone", || group.peers_seen() == MANY - 2);
    }
}

#[test]
fn a_frozen_first_rank_is_lost_on_all_of_many_and_names_itself_when_it_continues() {
    let (groups, mut processes) = mixed(ENTRY, MANY, &[0], Duration::from_secs(2));
    processes[0].signal(Signal::STOP);
    for group in &groups {
        assert!(matches!(cause(group), Error::PeerLost { rank: 0, .. }), "{:?}", cause(group));
        until("it is gone", || group.peers_seen() == MANY - 1);
    }
    processes[0].signal(Signal::CONT);
    processes[0].write("cause");
    let cause = processes[0].read_after("CAUSE ");
    assert!(cause.contains("lost rank 0"), "{cause}");
}

#[test]
fn ranks_of_many_that_leave_one_after_the_other_stay_connected_and_failures_of_sub_groups_reach_their_members() {
    let mut groups = world(MANY);
    let ends: Vec<_> =
        [3, 20].map(|rank| groups[rank].subgroup(&[3, 20], "ends").unwrap().unwrap()).into_iter().collect();
    // All that connects the two leaves.
    let kept: Vec<_> = [20, 3].map(|rank| groups.remove(rank)).into();
    drop(groups);
    for group in &kept {
        until("the others have departed", || group.peers_seen() == 2);
        group.health().check().unwrap();
    }
    ends[0].raise("ValueError", "its own");
    assert!(matches!(cause(&ends[1]), Error::PeerRaised { rank: 3, .. }));
    kept[0].raise("ValueError", "of all");
    assert!(matches!(cause(&kept[1]), Error::PeerRaised { rank: 20, .. }));
}

#[test]
fn all_ranks_that_are_missing_are_named_by_every_one_of_many() {
    // Long enough for all the others to connect.
    let short = |rank| Config { connect_timeout: Duration::from_secs(8), ..config(rank, MANY) };
    let mut bootstraps: Vec<Bootstrap> = (0..MANY).map(|rank| Bootstrap::bind(short(rank)).unwrap()).collect();
    let addresses: Vec<Vec<u8>> = bootstraps.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
    // They listen, and do not connect.
    let _absent = [bootstraps.remove(19), bootstraps.remove(6)];
    for result in connect_all(bootstraps, &addresses) {
        let error = result.map(|_| ()).unwrap_err();
        let Error::Timeout { missing, .. } = &error else { panic!("{error:?}") };
        assert_eq!(missing, &[6, 19]);
    }
}

#[test]
fn a_rank_that_was_frozen_for_less_than_the_timeout_is_not_lost_and_loses_no_peer() {
    let (groups, processes) = mixed(ENTRY, 2, &[1], Duration::from_secs(6));
    processes[0].signal(Signal::STOP);
    // Longer than half its timeout, so that it must restart its peer's timeout when it continues.
    std::thread::sleep(Duration::from_millis(3600));
    processes[0].signal(Signal::CONT);
    std::thread::sleep(Duration::from_secs(6));
    groups[0].health().check().unwrap();
    assert_eq!(groups[0].peers_seen(), 2);
}

#[test]
fn an_exception_of_one_rank_reaches_every_other() {
    let (groups, mut processes) = mixed(ENTRY, 3, &[1], Duration::from_secs(5));
    processes[0].write("raise");
    for group in &groups {
        let host = group.health().host(1).to_owned();
        let expected = Error::PeerRaised { rank: 1, host, kind: "ValueError".into(), message: "bad number".into() };
        assert_eq!(cause(group), expected);
    }
    groups[0].raise("TypeError", "too late");
    assert!(matches!(cause(&groups[1]), Error::PeerRaised { rank: 1, .. }));
}

#[test]
fn a_rank_whose_user_code_raised_is_named_on_every_other() {
    let groups = world(2);
    let (kind, message) = ("ValueError".to_owned(), "no".to_owned());
    let exception = Exception { kind: kind.clone(), message: message.clone(), original: Box::new(17) };
    let own = groups[1].health().fail(Error::raised("in a callback: no", exception));
    assert_eq!(own, Error::other("in a callback: no"));
    assert_eq!(own.exception().and_then(|exception| exception.original.downcast_ref()), Some(&17));
    let host = groups[0].health().host(1).to_owned();
    assert_eq!(cause(&groups[0]), Error::PeerRaised { rank: 1, host, kind, message });
}

#[test]
fn a_rank_that_lacks_a_library_is_named_on_every_other() {
    let groups = world(2);
    let own = groups[1].health().fail(Error::Unavailable("no NVRTC".into()));
    assert_eq!(own, Error::Unavailable("no NVRTC".into()));
    let (host, kind) = (groups[0].health().host(1).to_owned(), "BaguaError".into());
    assert_eq!(cause(&groups[0]), Error::PeerRaised { rank: 1, host, kind, message: "no NVRTC".into() });
}

#[test]
fn listeners_on_every_rank_are_called_with_the_first_cause_and_local_ones_only_on_the_rank_that_found_it() {
    let groups = world(3);
    let (send, calls) = std::sync::mpsc::channel();
    let subscriptions: Vec<_> = groups
        .iter()
        .flat_map(|group| {
            let send = |name| {
                let (rank, send) = (group.rank(), send.clone());
                move |cause: &Error| send.send((rank, name, cause.clone())).unwrap()
            };
            let health = group.health();
            [health.subscribe(send("one")), health.subscribe_local(send("local")), health.subscribe(send("two"))]
        })
        .collect();
    groups[1].raise("ValueError", "bad number");
    let first = groups[1].health().cause().unwrap();
    groups.iter().for_each(|group| assert_eq!(cause(group), first));
    let mut seen: Vec<_> = (0..7).map(|_| calls.recv_timeout(PATIENCE).unwrap()).collect();
    // Every listener was called or is dropped now, so that the iteration ends.
    drop((send, groups, subscriptions));
    seen.extend(calls);
    seen.sort_by_key(|(rank, ..)| *rank);
    let expected = [(0, "one"), (0, "two"), (1, "one"), (1, "local"), (1, "two"), (2, "one"), (2, "two")];
    assert_eq!(seen, expected.map(|(rank, name)| (rank, name, first.clone())));
}

#[test]
fn the_cause_arrives_also_when_its_rank_leaves_at_once() {
    for _ in 0..20 {
        let mut groups = world(4);
        let first = groups.remove(0);
        first.raise("ValueError", "bad number");
        first.leave();
        // The second rank leaves as soon as it has the cause.
        let second = groups.remove(0);
        assert!(matches!(cause(&second), Error::PeerRaised { rank: 0, .. }));
        drop((first, second));
        for group in &groups {
            assert!(matches!(cause(group), Error::PeerRaised { rank: 0, .. }), "{:?}", cause(group));
        }
    }
}

#[test]
fn leaving_is_not_a_failure_until_an_operation_needs_the_rank() {
    let groups = world(3);
    groups[1].leave();
    for group in [&groups[0], &groups[2]] {
        until("the peer has departed", || group.health().has_departed(1));
        group.health().check().unwrap();
        assert_eq!(group.peers_seen(), 2);
        let needed = group.health().attribute_disconnect(1, "end of stream");
        assert!(matches!(&needed, Error::PeerLost { rank: 1, reason, .. } if reason == "it left the group"));
    }
    assert!(matches!(groups[1].health().cause(), Some(Error::Aborted(why)) if why.contains("left")));
}

#[test]
fn leaving_twice_or_from_two_threads_is_leaving_once() {
    let groups = world(2);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| groups[0].leave());
        }
    });
    groups[0].leave();
    until("the peer has departed", || groups[1].health().has_departed(0));
    groups[1].health().check().unwrap();
}

#[test]
fn dropping_the_last_clone_leaves_the_group_and_dropping_another_does_not() {
    let mut groups = world(2);
    let first = groups.remove(0);
    let clone = first.clone();
    drop(first);
    clone.health().check().unwrap();
    assert!(!groups[0].health().has_departed(0));
    drop(clone);
    until("the peer has departed", || groups[0].health().has_departed(0));
}

#[test]
fn abort_fails_the_group_and_its_sub_groups_on_every_rank() {
    let groups = world(3);
    let pairs: Vec<_> = [0, 1].map(|rank| groups[rank].subgroup(&[1, 0], "pair").unwrap().unwrap()).into();
    groups[2].abort("enough");
    for group in groups.iter().chain(&pairs) {
        assert_eq!(cause(group), Error::Aborted("enough".to_owned()));
    }
}

#[test]
fn a_lost_rank_fails_the_groups_of_which_it_is_a_member_and_no_others() {
    let (groups, processes) = mixed(ENTRY, 4, &[3], Duration::from_secs(5));
    let without: Vec<_> = [0, 1].map(|rank| groups[rank].subgroup(&[0, 1], "without").unwrap().unwrap()).into();
    let with = groups[2].subgroup(&[3, 2], "with").unwrap().unwrap();
    assert_eq!((with.ranks(), with.rank(), with.hosts()), ([3, 2].as_slice(), 1, vec![vec![0, 1]]));
    processes[0].signal(Signal::KILL);
    for group in groups.iter().chain([&with]) {
        assert!(matches!(cause(group), Error::PeerLost { rank: 3, .. }));
    }
    without.iter().for_each(|group| group.health().check().unwrap());
    without[1].raise("ValueError", "its own");
    assert!(matches!(cause(&without[0]), Error::PeerRaised { rank: 1, .. }));
}

#[test]
fn a_failure_of_a_sub_group_does_not_fail_its_parent() {
    let groups = world(3);
    let pairs: Vec<_> = [0, 2].map(|rank| groups[rank].subgroup(&[0, 2], "pair").unwrap().unwrap()).into();
    pairs[1].raise("ValueError", "bad number");
    assert!(matches!(cause(&pairs[0]), Error::PeerRaised { rank: 2, .. }));
    groups.iter().for_each(|group| group.health().check().unwrap());
    pairs[0].leave();
    groups[0].health().check().unwrap();
    // A second sub-group of the same ranks is a different group.
    let again: Vec<_> = [0, 2].map(|rank| groups[rank].subgroup(&[0, 2], "pair").unwrap().unwrap()).into();
    again.iter().for_each(|group| group.health().check().unwrap());
    drop(again);
}

#[test]
fn a_failure_and_a_departure_reach_a_member_that_builds_the_sub_group_later() {
    let groups = world(3);
    let first = groups[0].subgroup(&[0, 1], "pair").unwrap().unwrap();
    first.raise("ValueError", "early");
    let second = groups[0].subgroup(&[0, 1], "pair").unwrap().unwrap();
    second.leave();
    // Messages of rank 0 arrive in order, so they have arrived before rank 0 departs from the world group.
    groups[0].leave();
    until("the peer has departed", || groups[1].health().has_departed(0));
    let first = groups[1].subgroup(&[0, 1], "pair").unwrap().unwrap();
    assert!(matches!(cause(&first), Error::PeerRaised { rank: 0, .. }));
    let second = groups[1].subgroup(&[0, 1], "pair").unwrap().unwrap();
    assert!(second.health().has_departed(0));
}

#[test]
fn invalid_ranks_of_a_sub_group_are_refused() {
    let groups = world(2);
    for (ranks, word) in [(&[][..], "no ranks"), (&[0, 0], "twice"), (&[0, 2], "not among")] {
        let Err(Error::InvalidArgument(text)) = groups[0].subgroup(ranks, "odd").map(|_| ()) else {
            panic!("{ranks:?}")
        };
        assert!(text.contains(word), "{text}");
    }
    assert!(groups[0].subgroup(&[1], "other").unwrap().is_none());
}

#[test]
fn a_group_can_be_built_again_after_a_failure() {
    for round in 0..3 {
        let groups = world(3);
        groups[round].raise("ValueError", "bad number");
        for group in &groups {
            assert!(matches!(cause(group), Error::PeerRaised { rank, .. } if rank == round));
        }
    }
}

#[test]
fn missing_ranks_are_named_with_their_addresses() {
    let short = |rank| Config { connect_timeout: Duration::from_millis(1500), ..config(rank, 3) };
    let mut bootstraps: Vec<Bootstrap> = (0..3).map(|rank| Bootstrap::bind(short(rank)).unwrap()).collect();
    let addresses: Vec<Vec<u8>> = bootstraps.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
    // It listens, and does not connect.
    let _absent = bootstraps.remove(1);
    let results = connect_all(bootstraps, &addresses);
    for result in results {
        let error = result.map(|_| ()).unwrap_err();
        let Error::Timeout { missing, .. } = &error else { panic!("{error:?}") };
        assert_eq!(missing, &[1]);
        assert!(error.to_string().contains("rank 1 at 127.0.0.1:"), "{error}");
    }
}

#[test]
fn a_rank_with_another_secret_is_refused_with_the_reason() {
    let results = try_world(2, |config| {
        config.connect_timeout = Duration::from_millis(1500);
        if config.rank == 1 {
            config.secret = b"Secret".to_vec();
        }
    });
    let errors: Vec<Error> = results.into_iter().map(|result| result.map(|_| ()).unwrap_err()).collect();
    assert!(matches!(&errors[0], Error::Timeout { missing, .. } if missing == &[1]), "{:?}", errors[0]);
    assert!(matches!(&errors[1], Error::System { message, .. } if message.contains("wrong secret")), "{:?}", errors[1]);
}

#[test]
fn invalid_configurations_are_refused() {
    assert!(matches!(Bootstrap::bind(Config::new(2, 2)).map(|_| ()), Err(Error::InvalidArgument(_))));
    let anywhere = Config { listen: ([0, 0, 0, 0], 0).into(), ..Config::new(0, 2) };
    assert!(matches!(Bootstrap::bind(anywhere).map(|_| ()), Err(Error::InvalidArgument(_))));
}
