//! Groups that go on without the ranks that they have lost.

use std::time::Duration;

use crate::group_world::{cause, join, mixed, until, world, world_with};
use bagua_group::{Config, Group, Lane, Options, Quorum, TransportChoice, View};
use bagua_kernels::error::{Error, Result};
use rustix::process::Signal;

const ENTRY: &str = "shrink::entry_of_processes";

const HEARTBEAT: Duration = Duration::from_secs(5);

#[test]
#[ignore = "the other tests start processes that run this"]
fn entry_of_processes() {
    let group = join();
    let mut views = Vec::new();
    for line in std::io::stdin().lines().map(|line| line.unwrap()) {
        let Some(quorum) = line.strip_prefix("shrink ") else { panic!("unknown command {line:?}") };
        println!("\nCALLED");
        match shrink(&group, if quorum == "any" { Quorum::Any } else { Quorum::Majority }) {
            Ok(view) => {
                println!("\nRANKS {:?}", view.ranks);
                // Dropping it would leave the new group.
                views.push(view);
            }
            Err(error) => println!("\nERROR {error}"),
        }
    }
}

fn shrink_within(group: &Group, timeout: Option<Duration>, quorum: Quorum) -> Result<View<Lane>> {
    group.shrink(timeout, quorum, Group::lane, |lane| lane.barrier(&Options::default()))
}

fn shrink(group: &Group, quorum: Quorum) -> Result<View<Lane>> {
    shrink_within(group, Some(Duration::from_secs(20)), quorum)
}

/// Shrinks groups of threads of this process at the same time.
fn shrink_all(groups: &[Group], quorum: Quorum) -> Vec<Result<View<Lane>>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.iter().map(|group| scope.spawn(move || shrink(group, quorum))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The views are one group of these former ranks, which works. Its number, which is above that of the former group.
#[track_caller]
fn check_views(views: &mut [View<Lane>], ranks: &[usize], former: u64) -> u64 {
    let number = views[0].group.view();
    assert!(number > former);
    for (rank, view) in views.iter().enumerate() {
        let View { group, .. } = view;
        assert_eq!((group.rank(), group.size(), group.name(), group.view()), (rank, ranks.len(), "world", number));
        assert_eq!(view.ranks, ranks);
    }
    std::thread::scope(|scope| {
        for view in views.iter_mut() {
            scope.spawn(|| view.opened.barrier(&Options::default()).unwrap());
        }
    });
    number
}

#[test]
fn the_ranks_that_are_left_go_on_without_one_that_left_and_all_go_on_after_an_exception() {
    for transport in [TransportChoice::Auto, TransportChoice::Tcp] {
        let mut groups = world_with(4, |config| config.transport = transport);
        groups.remove(2).leave();
        let views = shrink_all(&groups, Quorum::Majority);
        let mut views: Vec<_> = views.into_iter().map(Result::unwrap).collect();
        let number = check_views(&mut views, &[0, 1, 3], 1);
        assert!(views.iter().all(|view| view.lost == [2]));
        // The old groups were left.
        assert!(groups.iter().all(|group| matches!(group.health().cause(), Some(Error::Aborted(_)))));
        let groups: Vec<Group> = views.iter().map(|view| view.group.clone()).collect();
        groups[1].raise("ValueError", "bad number");
        groups.iter().for_each(|group| assert!(matches!(cause(group), Error::PeerRaised { rank: 1, .. })));
        drop(views);
        let mut views: Vec<_> = shrink_all(&groups, Quorum::Majority).into_iter().map(Result::unwrap).collect();
        check_views(&mut views, &[0, 1, 2], number);
        assert!(views.iter().all(|view| view.lost.is_empty()));
    }
}

#[test]
fn the_survivors_of_killed_ranks_go_on_until_one_is_alone() {
    let (mut groups, mut processes) = mixed(ENTRY, 4, &[0, 2, 3], HEARTBEAT);
    let group = groups.remove(0);
    processes[1].signal(Signal::KILL);
    assert!(matches!(cause(&group), Error::PeerLost { rank: 2, .. }));
    processes[0].write("shrink majority");
    processes[2].write("shrink majority");
    let view = shrink(&group, Quorum::Majority).unwrap();
    assert_eq!((view.ranks.as_slice(), view.lost.as_slice()), (&[0, 1, 3][..], &[2][..]));
    assert_eq!(processes[0].read_after("RANKS "), "[0, 1, 3]");
    assert_eq!(processes[2].read_after("RANKS "), "[0, 1, 3]");
    processes[0].signal(Signal::KILL);
    processes[2].signal(Signal::KILL);
    until("both are lost", || view.group.peers_seen() == 1);
    let mut alone = [shrink(&view.group, Quorum::Majority).unwrap()];
    check_views(&mut alone, &[1], view.group.view());
    assert_eq!(alone[0].lost, [0, 2]);
}

#[test]
fn the_survivors_of_many_ranks_go_on() {
    let (groups, mut processes) = mixed(ENTRY, 24, &[0, 1, 5, 16], HEARTBEAT);
    [0, 2, 3].into_iter().for_each(|dies| processes[dies].signal(Signal::KILL));
    groups.iter().for_each(|group| assert!(matches!(cause(group), Error::PeerLost { .. })));
    processes[1].write("shrink majority");
    let mut views: Vec<_> = shrink_all(&groups, Quorum::Majority).into_iter().map(Result::unwrap).collect();
    let left: Vec<usize> = (1..24).filter(|rank| ![5, 16].contains(rank)).collect();
    assert_eq!(processes[1].read_after("RANKS "), format!("{left:?}"));
    assert!(views.iter().all(|view| view.ranks == left && view.lost == [0, 5, 16]));
    processes[1].signal(Signal::KILL);
    let groups: Vec<Group> = views.iter().map(|view| view.group.clone()).collect();
    groups.iter().for_each(|group| assert!(matches!(cause(group), Error::PeerLost { rank: 0, .. })));
    views.clear();
    let mut views: Vec<_> = shrink_all(&groups, Quorum::Majority).into_iter().map(Result::unwrap).collect();
    check_views(&mut views, &(1..21).collect::<Vec<_>>(), groups[0].view());
}

#[test]
fn a_frozen_rank_is_left_behind_and_excluded_when_it_continues() {
    let (groups, mut processes) = mixed(ENTRY, 3, &[1], Duration::from_secs(1));
    processes[0].signal(Signal::STOP);
    groups.iter().for_each(|group| assert!(matches!(cause(group), Error::PeerLost { rank: 1, .. })));
    let mut views: Vec<_> = shrink_all(&groups, Quorum::Majority).into_iter().map(Result::unwrap).collect();
    check_views(&mut views, &[0, 2], 1);
    processes[0].signal(Signal::CONT);
    processes[0].write("shrink any");
    let error = processes[0].read_after("ERROR ");
    assert!(error.contains("lost rank 1"), "{error}");
    check_views(&mut views, &[0, 2], 1);
}

#[test]
fn the_smaller_half_is_refused_with_the_ranks_that_may_be_alive_and_goes_on_with_any_quorum() {
    let (groups, processes) = mixed(ENTRY, 4, &[0, 3], Duration::from_secs(1));
    processes.iter().for_each(|process| process.signal(Signal::STOP));
    until("both are lost", || groups.iter().all(|group| group.peers_seen() == 2));
    for outcome in shrink_all(&groups, Quorum::Majority) {
        let text = outcome.map(|view| view.ranks).unwrap_err().to_string();
        assert!(text.contains("quorum") && text.contains("ranks 0, 3 may live on"), "{text}");
    }
    let mut views: Vec<_> = shrink_all(&groups, Quorum::Any).into_iter().map(Result::unwrap).collect();
    // The number of the view that was refused is not used again.
    check_views(&mut views, &[1, 2], 2);
}

#[test]
fn ranks_that_have_not_called_are_named_and_a_later_call_of_all_succeeds() {
    let groups = world(3);
    std::thread::scope(|scope| {
        for group in [&groups[0], &groups[2]] {
            scope.spawn(|| {
                let limit = Some(Duration::from_millis(300));
                let error = shrink_within(group, limit, Quorum::Majority).map(|view| view.ranks).unwrap_err();
                let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
                // Rank 0 or 2 may have ended first, and then counts as one that has not called.
                assert!(missing.contains(&1), "{error}");
            });
        }
    });
    let mut views: Vec<_> = shrink_all(&groups, Quorum::Majority).into_iter().map(Result::unwrap).collect();
    check_views(&mut views, &[0, 1, 2], 1);
}

#[test]
fn a_rank_that_is_killed_while_the_others_agree_does_not_separate_them() {
    for delay in [0, 200, 500, 1000, 2000, 4000, 8000] {
        let (groups, mut processes) = mixed(ENTRY, 4, &[3], HEARTBEAT);
        groups[0].raise("ValueError", "bad number");
        let mut ranks = std::thread::scope(|scope| {
            let threads: Vec<_> = groups.iter().map(|group| scope.spawn(|| until_alone(group))).collect();
            processes[0].write("shrink majority");
            processes[0].read_after("CALLED");
            std::thread::sleep(Duration::from_micros(delay));
            processes[0].signal(Signal::KILL);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        ranks.dedup();
        assert_eq!(ranks, [vec![0, 1, 2]], "killed after {delay} us");
    }
}

/// Shrinks until rank 3 is gone; the ranks that are left.
fn until_alone(group: &Group) -> Vec<usize> {
    let View { group, ranks, opened, .. } = shrink(group, Quorum::Majority).unwrap();
    drop(opened);
    if ranks == [0, 1, 2] {
        // The members are the first ranks, so that their numbers stay.
        return ranks;
    }
    assert_eq!(ranks, [0, 1, 2, 3]);
    assert!(matches!(cause(&group), Error::PeerLost { .. }));
    until_alone(&group)
}

#[test]
fn a_sub_group_and_a_group_that_was_left_are_not_shrunk() {
    let groups = world(2);
    let pair = groups[0].subgroup(&[0, 1], "pair").unwrap().unwrap();
    let refused = shrink(&pair, Quorum::Majority).map(|view| view.ranks);
    assert!(matches!(&refused, Err(Error::InvalidArgument(text)) if text.contains("sub-group")), "{refused:?}");
    groups[1].leave();
    let left = shrink(&groups[1], Quorum::Majority).map(|view| view.ranks);
    assert!(matches!(&left, Err(Error::Aborted(why)) if why.contains("left")), "{left:?}");
}

#[test]
fn an_error_of_opening_on_one_rank_ends_the_call_on_all() {
    let groups = world(2);
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .iter()
            .map(|group| {
                scope.spawn(move || {
                    let open = |group: &Group| match group.rank() {
                        1 => Err(Error::other("no memory")),
                        _ => group.lane(),
                    };
                    group.shrink(Some(Duration::from_secs(20)), Quorum::Majority, open, |lane: &mut Lane| {
                        lane.barrier(&Options::default())
                    })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap().map(|view| view.ranks).unwrap_err()).collect()
    });
    assert!(outcomes.iter().any(|error| error.to_string().contains("rank 1 could not build")), "{outcomes:?}");
    assert!(outcomes.iter().all(|error| error.to_string().contains("could not build")), "{outcomes:?}");
}

#[test]
fn every_host_of_the_new_view_keeps_its_ranks() {
    let hosts = |config: &mut Config| config.host_id = ["a", "a", "b", "b"][config.rank].to_owned();
    let mut groups = world_with(4, hosts);
    groups.remove(0).leave();
    let views: Vec<_> = shrink_all(&groups, Quorum::Majority).into_iter().map(Result::unwrap).collect();
    let expected = vec![vec![0], vec![1, 2]];
    assert!(views.iter().all(|view| view.group.hosts() == expected));
}
