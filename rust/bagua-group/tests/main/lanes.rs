//! Lanes of groups: the collective for the group's hosts, operations on it, and failures.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use crate::group_world::{cause, until, world, world_with};
use bagua_collectives::{Collective, CollectiveFactory, Io, Verb};
use bagua_group::{Config, Group, Lane, Options, TransportChoice};
use bagua_kernels::error::{Error, Result};
use bagua_kernels::types::{DType, ReduceOp};
use bagua_net::memory::{Device, Region};
use bagua_net::request::PartLayout;

/// Opens a lane on every rank at the same time.
fn lanes(groups: &[Group]) -> Vec<Lane> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.iter().map(|group| scope.spawn(|| group.lane().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// How many data connections a rank has opened in a group.
fn opened(group: &Group) -> u64 {
    group.stats().data_opened.load(SeqCst)
}

/// Sums rank + 1 over all ranks, and exchanges a byte with every other rank.
fn exercise(lanes: &mut [Lane]) {
    let size = lanes.len();
    let total = (size * (size + 1) / 2) as i64;
    std::thread::scope(|scope| {
        for (rank, lane) in lanes.iter_mut().enumerate() {
            scope.spawn(move || {
                let mut data: Vec<u8> = (0..1000).flat_map(|_| (rank as i64 + 1).to_le_bytes()).collect();
                lane.run(&Options::default(), DType::I64, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))
                    .unwrap();
                assert!(data.chunks(8).all(|eight| eight == total.to_le_bytes()));
                let own = vec![u8::try_from(rank).unwrap(); size];
                let mut got = vec![255; size];
                let (counts, displs): (Vec<_>, Vec<_>) = (0..size).map(|other| (1, other)).unzip();
                let parts = PartLayout { counts: &counts, displs: &displs };
                let io = Io::split(&own, &mut got);
                lane.run(&Options::default(), DType::U8, Verb::AllToAllV { send: parts, recv: parts }, io).unwrap();
                assert!((0..size).all(|other| usize::from(got[other]) == other));
                lane.barrier(&Options::default()).unwrap();
            });
        }
    });
}

fn two_hosts(config: &mut Config) {
    config.host_id = ["a", "a", "b", "b"][config.rank].to_owned();
}

#[test]
fn the_hosts_of_a_group_determine_its_collective() {
    let by_tcp = |config: &mut Config| config.transport = TransportChoice::Tcp;
    for (groups, name, transports) in [
        (world(1), "solo", vec!["self"]),
        (world(3), "shm", vec!["self", "shm", "shm"]),
        (world_with(2, by_tcp), "net", vec!["self", "tcp"]),
        (world_with(4, two_hosts), "hier", vec!["self", "shm", "tcp", "tcp"]),
        (
            world_with(3, |config| config.host_id = ["a", "b", "b"][config.rank].into()),
            "hier",
            vec!["self", "tcp", "tcp"],
        ),
    ] {
        let mut lanes = lanes(&groups);
        assert!(lanes.iter().all(|lane| lane.collective() == name), "{name}");
        assert_eq!(lanes[0].transports(), transports, "{name}");
        exercise(&mut lanes);
    }
}

/// A device whose memory is never used, and a factory for it that counts its calls.
#[derive(Debug, Default)]
struct Unused(AtomicUsize);

impl Device for Unused {
    fn name(&self) -> &str {
        "unused:0"
    }

    fn kind(&self) -> u8 {
        254
    }

    unsafe fn copy_to_host(&self, _: NonNull<u8>, _: &mut [u8]) -> Result<()> {
        Err(Error::other("a copy"))
    }

    unsafe fn copy_from_host(&self, _: &[u8], _: NonNull<u8>) -> Result<()> {
        Err(Error::other("a copy"))
    }
}

impl CollectiveFactory for Unused {
    fn name(&self) -> &'static str {
        "unused"
    }

    fn device(&self) -> u8 {
        self.kind()
    }

    fn wrap(&self, inner: Box<dyn Collective>, hosts: &[Vec<usize>]) -> Box<dyn Collective> {
        assert_eq!(hosts, vec![vec![0, 1]]);
        self.0.fetch_add(1, SeqCst);
        inner
    }
}

#[test]
fn a_lane_gets_the_collective_of_a_device_when_its_first_memory_comes() {
    let unused = Arc::new(Unused::default());
    let factory = || Arc::clone(&unused) as Arc<dyn CollectiveFactory>;
    let groups = world_with(2, |config| config.factories = vec![factory()]);
    let mut lanes = lanes(&groups);
    exercise(&mut lanes);
    assert_eq!(unused.0.load(SeqCst), 0);
    let device = Arc::new(Unused::default());
    // SAFETY: a device that copies nothing, so the memory is never used.
    let mut region = unsafe { Region::on(device, 64 as *mut u8, 4, DType::F32) }.unwrap();
    assert!(lanes[1].reaches(region.device()));
    for _ in 0..2 {
        let io = Io::InPlace(region.buffer_mut());
        lanes[1].run(&Options::default(), DType::F32, Verb::Broadcast { root: 0 }, io).unwrap_err();
        assert_eq!(unused.0.load(SeqCst), 1, "once, and on this lane only");
    }
}

#[test]
fn two_lanes_of_a_group_work_independently() {
    let groups = world_with(4, two_hosts);
    let (mut first, mut second) = (lanes(&groups), lanes(&groups));
    exercise(&mut second);
    exercise(&mut first);
}

#[test]
fn sub_groups_have_lanes_of_their_own() {
    let groups = world_with(4, two_hosts);
    let across: Vec<Group> = [2, 1]
        .into_iter()
        .map(|rank: usize| groups[rank].subgroup(&[2, 1], "across hosts").unwrap().unwrap())
        .collect();
    let on_host: Vec<Group> =
        [2, 3].into_iter().map(|rank: usize| groups[rank].subgroup(&[2, 3], "on one host").unwrap().unwrap()).collect();
    let (mut across_lanes, mut host_lanes) = (lanes(&across), lanes(&on_host));
    assert_eq!((across_lanes[0].collective(), host_lanes[0].collective()), ("net", "shm"));
    exercise(&mut across_lanes);
    exercise(&mut host_lanes);
}

#[test]
fn a_sub_group_keeps_the_order_of_its_ranks() {
    let by_tcp = |config: &mut Config| config.transport = TransportChoice::Tcp;
    let interleaved = |config: &mut Config| config.host_id = ["a", "b", "a", "b"][config.rank].to_owned();
    let worlds = [world(4), world_with(4, by_tcp), world_with(4, two_hosts), world_with(4, interleaved)];
    for groups in worlds {
        for order in [&[3, 1, 0][..], &[2, 0, 3, 1], &[1, 3, 2, 0], &[2, 0]] {
            let ordered: Vec<Group> =
                order.iter().map(|rank| groups[*rank].subgroup(order, "ordered").unwrap().unwrap()).collect();
            for (rank, group) in ordered.iter().enumerate() {
                assert_eq!((group.rank(), group.ranks()), (rank, order));
                let hosts = group.hosts();
                assert!(hosts.iter().all(|host| host.is_sorted()) && hosts.is_sorted(), "{hosts:?}");
            }
            let mut lanes = lanes(&ordered);
            exercise(&mut lanes);
            // A sub-group of it counts in its ranks.
            let pair: Vec<Group> = [1, 0]
                .into_iter()
                .map(|rank: usize| ordered[rank].subgroup(&[1, 0], "pair").unwrap().unwrap())
                .collect();
            assert_eq!(pair[0].ranks(), [order[1], order[0]]);
            exercise(&mut self::lanes(&pair));
        }
        // A failure names world ranks.
        let order = [2, 0, 1];
        let ordered: Vec<Group> =
            order.iter().map(|rank| groups[*rank].subgroup(&order, "failing").unwrap().unwrap()).collect();
        groups[3].leave();
        ordered.iter().for_each(|group| group.health().check().unwrap());
        ordered[1].raise("ValueError", "bad number");
        assert!(matches!(cause(&ordered[0]), Error::PeerRaised { rank: 0, .. }));
        ordered[2].leave();
        until("the peer has departed", || ordered[0].health().has_departed(2));
        assert!(!ordered[0].health().has_departed(1));
    }
}

#[test]
fn a_rank_may_open_streams_before_its_peer_has_built_the_group() {
    let groups = world_with(2, |config| config.transport = TransportChoice::Tcp);
    let pair = |rank: usize| groups[rank].subgroup(&[0, 1], "pair").unwrap().unwrap();
    let first = pair(1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| first.lane().unwrap().barrier(&Options::default()));
        until("rank 1 has connected", || opened(&first) == 1);
        pair(0).lane().unwrap().barrier(&Options::default()).unwrap();
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_failure_of_the_group_ends_opening_a_lane_with_the_first_cause() {
    let groups = world(2);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| groups[0].lane().map(|_| ()));
        groups[1].raise("ValueError", "bad number");
        assert!(matches!(waiting.join().unwrap(), Err(Error::PeerRaised { rank: 1, .. })));
    });
    assert!(matches!(groups[1].lane().map(|_| ()), Err(Error::PeerRaised { rank: 1, .. })));
}

#[test]
fn a_rank_that_does_not_open_a_lane_is_named_in_a_timeout_on_all_ranks() {
    let groups = world_with(2, |config| config.connect_timeout = Duration::from_secs(3));
    let Err(Error::Timeout { missing, .. }) = groups[0].lane().map(|_| ()) else { panic!("no timeout") };
    assert_eq!(missing, [1]);
    assert!(matches!(cause(&groups[1]), Error::Timeout { noticed_by: 0, .. }));
}

#[test]
fn a_waiting_operation_ends_when_a_peer_raises_or_leaves() {
    for by_leaving in [false, true] {
        for transport in [TransportChoice::Auto, TransportChoice::Tcp] {
            let groups = world_with(2, |config| config.transport = transport);
            let mut lanes = lanes(&groups);
            std::thread::scope(|scope| {
                let waiting = lanes.remove(0);
                let blocked = scope.spawn(move || {
                    let mut waiting = waiting;
                    waiting.barrier(&Options::default())
                });
                if by_leaving {
                    groups[1].leave()
                } else {
                    groups[1].raise("ValueError", "bad number")
                }
                match blocked.join().unwrap().unwrap_err() {
                    Error::PeerLost { rank: 1, reason, .. } if by_leaving => assert_eq!(reason, "it left the group"),
                    Error::PeerRaised { rank: 1, .. } if !by_leaving => {}
                    other => panic!("{other:?}"),
                }
            });
        }
    }
}

#[test]
fn who_leaves_ends_its_streams_so_that_no_peer_waits_for_more_from_it() {
    // Less than a rank waits for bytes on a long line that come from one that has left.
    const LIMIT: Duration = Duration::from_secs(4);
    for of_subgroup in [false, true] {
        let worlds = world_with(2, |config| config.transport = TransportChoice::Tcp);
        let subgroups = || worlds.iter().map(|group| group.subgroup(&[0, 1], "pair").unwrap().unwrap()).collect();
        let groups: Vec<Group> = if of_subgroup { subgroups() } else { worlds.clone() };
        let mut lanes = lanes(&groups);
        // Opens the streams; rank 1 keeps its lane.
        exercise(&mut lanes);
        groups[1].leave();
        let error = lanes[0].barrier(&Options { timeout: Some(LIMIT), ..Options::default() }).unwrap_err();
        let Error::PeerLost { rank: 1, reason, .. } = &error else { panic!("{error:?}") };
        assert_eq!(reason, "it left the group");
    }
}
