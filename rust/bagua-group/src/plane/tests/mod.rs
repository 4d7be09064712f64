//! Many ranks in one process on a paused clock: every scenario with every fault.

pub(crate) mod net;

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::message::{Body, Notice};
use super::rank::{Answer, Event};
use crate::error::Error;
use crate::wait::lock;
use net::{HEARTBEAT, Net, Random, Runner};

/// Longer than a rank may need to find a silent one: the timeout, and the time between two looks.
const FOUND: Duration = Duration::from_secs(8);

/// A world of ranks that runs.
pub(crate) struct World {
    pub(crate) net: std::sync::Arc<Net>,
    pub(crate) ranks: Vec<Runner>,
    random: Random,
}

impl World {
    /// Starts the ranks, at most 8 on a host.
    fn start(size: usize, seed: u64) -> World {
        let net = Net::new(seed);
        let hosts: Vec<usize> = (0..size).map(|rank| rank / 16).collect();
        let ranks = (0..size).map(|rank| net.start(rank, &hosts)).collect();
        World { net, ranks, random: Random(seed ^ 0x5eed) }
    }

    /// Starts the ranks, and waits until all are connected.
    pub(crate) async fn joined(size: usize, seed: u64) -> World {
        let world = World::start(size, seed);
        world
            .until("all ranks are connected", Duration::from_secs(1), |world| {
                world.ranks.iter().all(|rank| rank.handle.status(|status| status.complete.is_some()))
            })
            .await;
        world
    }

    pub(crate) async fn until(&self, what: &str, limit: Duration, is_so: impl Fn(&World) -> bool) {
        let begun = Instant::now();
        while !is_so(self) {
            assert!(begun.elapsed() < limit, "{what}: not after {limit:?}");
            sleep(Duration::from_micros(500)).await;
        }
    }

    pub(crate) fn cut_both(&self, a: usize, b: usize) {
        self.net.cut(a, b);
        self.net.cut(b, a);
    }
}

#[tokio::test(start_paused = true)]
async fn all_ranks_join_and_stay_for_an_hour_of_heartbeats() {
    for (size, minutes) in [(1, 60), (2, 60), (3, 60), (8, 60), (64, 5)] {
        let world = World::joined(size, 1).await;
        sleep(Duration::from_secs(60 * minutes)).await;
        for rank in &world.ranks {
            assert_eq!(rank.lost(), []);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_reaches_the_ranks_that_it_is_for() {
    for size in [3, 64, 160] {
        let world = World::joined(size, 2).await;
        world.ranks[1].handle.send(vec![0, size - 1], Body::LeftGroup { group: 7 });
        sleep(Duration::from_secs(1)).await;
        for (rank, runner) in world.ranks.iter().enumerate() {
            let expected = Event::Deliver(1, Body::LeftGroup { group: 7 });
            let count = lock(&runner.told).iter().filter(|(_, event)| *event == expected).count();
            assert_eq!(count, usize::from([0, size - 1].contains(&rank)), "{rank} of {size}");
        }
    }
}

/// A fault of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The rank's process ends.
    Kill,
    /// The rank's process stops.
    Freeze,
    /// No message from the rank or to the rank arrives.
    Cut,
    /// No message from the rank arrives.
    Mute,
    /// No message to the rank arrives.
    Deaf,
    /// Everything that the rank sends arrives 200 ms later.
    Slow,
}

use Fault::{Cut, Deaf, Freeze, Kill, Mute, Slow};

impl World {
    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn inflict(&self, fault: Fault, who: usize) {
        let others = (0..self.size()).filter(|other| *other != who);
        match fault {
            Kill => self.ranks[who].kill(),
            Freeze => self.ranks[who].freeze(true),
            Cut => others.for_each(|other| self.cut_both(who, other)),
            Mute => others.for_each(|other| self.net.cut(who, other)),
            Deaf => others.for_each(|other| self.net.cut(other, who)),
            Slow => self.net.slow_down(who, Duration::from_millis(200)),
        }
    }

    /// Lets some time pass, different for each seed.
    async fn pause(&mut self, limit: Duration) {
        sleep(Duration::from_micros(self.random.below(limit.as_micros() as u64))).await;
    }

    /// Every rank outside of `who` has these ranks as lost, and no other.
    fn assert_lost(&self, who: &[usize], expected: &[usize], case: &str) {
        for (rank, runner) in self.ranks.iter().enumerate().filter(|(rank, _)| !who.contains(rank)) {
            let mut lost = runner.lost();
            lost.sort_unstable();
            assert_eq!(lost, expected, "on rank {rank}: {case}");
        }
    }
}

/// The ranks of a fault: the coordinator, the deputy, a member, and each two of them at once.
fn victims(size: usize) -> Vec<Vec<usize>> {
    let last = size - 1;
    let all = [vec![0], vec![1], vec![last], vec![0, 1], vec![0, last], vec![1, last]];
    all.into_iter().filter(|who| who.len() < size && (who.len() == 1 || who[0] != who[1])).collect()
}

#[tokio::test(start_paused = true)]
async fn every_fault_while_idle_is_named_on_every_other_rank_and_nothing_else_is() {
    for (size, seeds) in [(2, 4), (3, 4), (8, 2), (64, 1)] {
        for fault in [Kill, Freeze, Cut, Mute, Slow] {
            for who in victims(size).into_iter().filter(|who| size < 64 || who.len() > 1) {
                for seed in 0..seeds {
                    let mut world = World::joined(size, seed).await;
                    for rank in &who {
                        world.pause(Duration::from_millis(2)).await;
                        world.inflict(fault, *rank);
                    }
                    let limit = if fault == Kill { Duration::from_millis(500) } else { 2 * FOUND };
                    sleep(limit).await;
                    let expected = if fault == Slow { &[][..] } else { &who };
                    world.assert_lost(&who, expected, &format!("{fault:?} of {who:?} of {size}, seed {seed}"));
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_that_hears_nothing_is_lost_and_takes_no_other_with_it() {
    for size in [3, 8, 64] {
        let world = World::joined(size, 3).await;
        world.inflict(Deaf, size - 1);
        sleep(2 * FOUND).await;
        world.assert_lost(&[size - 1], &[size - 1], "deaf");
    }
}

#[tokio::test(start_paused = true)]
async fn a_coordinator_that_freezes_and_returns_is_told_that_the_others_go_on_without_it() {
    for size in [2, 3, 8, 64] {
        let world = World::joined(size, 4).await;
        world.inflict(Freeze, 0);
        sleep(2 * FOUND).await;
        world.ranks[0].freeze(false);
        sleep(FOUND).await;
        assert_eq!(world.ranks[0].lost(), [0]);
        assert!(world.ranks[0].handle.status(|status| status.excluded_by.is_some()));
        world.assert_lost(&[0], &[0], "frozen for a while");
    }
}

#[tokio::test(start_paused = true)]
async fn two_halves_each_find_the_other_lost() {
    for size in [5, 8] {
        let world = World::joined(size, 5).await;
        for low in 0..2 {
            (2..size).for_each(|high| world.cut_both(low, high));
        }
        sleep(4 * FOUND).await;
        let high: Vec<usize> = (2..size).collect();
        world.assert_lost(&high, &high, "the lower part");
        world.assert_lost(&[0, 1], &[0, 1], "the higher part");
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_cut_from_the_coordinator_alone_is_the_one_that_is_lost() {
    for size in [3, 8] {
        let world = World::joined(size, 6).await;
        world.cut_both(0, size - 1);
        sleep(4 * FOUND).await;
        world.assert_lost(&[size - 1], &[size - 1], "one line");
        assert_eq!(world.ranks[size - 1].lost().first(), Some(&(size - 1)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_dies_while_the_others_join_is_lost_or_awaited_and_no_other_is() {
    for size in [2, 3, 8, 64] {
        for who in victims(size) {
            for seed in 0..if size < 64 { 8 } else { 1 } {
                let mut world = World::start(size, seed);
                for rank in &who {
                    world.pause(Duration::from_millis(2)).await;
                    world.inflict(Kill, *rank);
                }
                sleep(FOUND).await;
                for (rank, runner) in world.ranks.iter().enumerate().filter(|(rank, _)| !who.contains(rank)) {
                    let (lost, case) = (runner.lost(), format!("rank {rank} of {size} without {who:?}, seed {seed}"));
                    assert!(lost.iter().all(|lost| who.contains(lost)), "{case}: {lost:?}");
                }
                let is_known = |victim: &usize| {
                    let knows = |runner: &Runner| {
                        runner.lost().contains(victim) || runner.handle.status(|status| status.awaited.contains(victim))
                    };
                    world.ranks.iter().enumerate().any(|(rank, runner)| !who.contains(&rank) && knows(runner))
                };
                assert!(who.iter().any(is_known), "{who:?} of {size}, seed {seed}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn ranks_leave_in_any_order_and_none_is_lost() {
    for (size, seeds) in [(1, 1), (2, 200), (3, 200), (8, 60), (64, 2)] {
        for seed in 0..seeds {
            let mut world = World::joined(size, seed).await;
            let mut order: Vec<usize> = (0..size).collect();
            for at in (1..size).rev() {
                order.swap(at, world.random.below(at as u64 + 1) as usize);
            }
            let longest = [1, 500, 5000][seed as usize % 3];
            for rank in order {
                world.pause(Duration::from_micros(longest)).await;
                world.ranks[rank].handle.leave(false);
            }
            for (rank, runner) in world.ranks.iter_mut().enumerate() {
                let acknowledged = timeout(HEARTBEAT, &mut runner.task).await;
                let case = format!("rank {rank} of {size}, seed {seed}");
                assert!(matches!(acknowledged, Ok(Ok(true))), "{case}: {acknowledged:?}");
                assert_eq!(runner.lost(), [], "{case}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_leaves_while_another_dies_is_not_lost_and_leaves_in_time() {
    for (size, seeds) in [(3, 6), (8, 3), (64, 1)] {
        for dies in victims(size).into_iter().filter(|who| who.len() == 1).map(|who| who[0]) {
            for leaves in [0, 1, size - 1].into_iter().filter(|leaves| *leaves != dies) {
                for (fault, seed) in
                    [Kill, Freeze].into_iter().flat_map(|fault| (0..seeds).map(move |seed| (fault, seed)))
                {
                    let mut world = World::joined(size, seed).await;
                    world.ranks[leaves].handle.leave(false);
                    world.pause(Duration::from_millis(2)).await;
                    world.inflict(fault, dies);
                    let case = format!("{leaves} of {size} leaves, {fault:?} of {dies}, seed {seed}");
                    let limit = 2 * HEARTBEAT + Duration::from_secs(1);
                    let left = timeout(limit, &mut world.ranks[leaves].task).await;
                    assert!(left.is_ok(), "{case}");
                    sleep(2 * FOUND).await;
                    for (rank, runner) in world.ranks.iter().enumerate() {
                        if rank != dies && rank != leaves {
                            assert_eq!((runner.lost(), runner.left()), (vec![dies], vec![leaves]), "{rank}: {case}");
                        }
                    }
                }
            }
        }
    }
}

fn failed(text: &str) -> Notice {
    Notice::Failed { group: 7, members: Vec::new(), cause: Error::Aborted(text.to_owned()) }
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_fails_and_dies_is_known_to_have_failed_first() {
    for size in [2, 3, 8, 64] {
        for who in [0, 1, size - 1] {
            for seed in 0..if size < 64 { 10 } else { 2 } {
                let mut world = World::joined(size, seed).await;
                world.ranks[who].handle.tell(failed("the cause"));
                // A link delivers what was sent before its end, so the task only has to have written it.
                sleep(Duration::from_millis(1)).await;
                world.inflict(Kill, who);
                world.pause(Duration::from_millis(2)).await;
                sleep(Duration::from_secs(1)).await;
                for (rank, runner) in world.ranks.iter().enumerate().filter(|(rank, _)| *rank != who) {
                    let told = lock(&runner.told);
                    let notices: Vec<_> = told.iter().filter(|(_, event)| matches!(event, Event::Notice(_))).collect();
                    let case = format!("{rank} of {size}, {who} fails, seed {seed}: {notices:?}");
                    assert_eq!(notices.len(), 2, "{case}");
                    assert_eq!(notices[0].1, Event::Notice(failed("the cause")), "{case}");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn ranks_that_die_together_with_the_coordinator_are_known_at_once() {
    for size in [3, 8, 64] {
        for seed in 0..6 {
            let world = World::joined(size, seed).await;
            let dead = [0, size - 1];
            dead.iter().for_each(|rank| world.inflict(Kill, *rank));
            sleep(Duration::from_millis(100)).await;
            world.assert_lost(&dead, &dead, &format!("{dead:?} of {size}, seed {seed}"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_the_others_have_given_up_leaves_at_once_when_it_continues() {
    for size in [2, 3, 8] {
        let who = size - 1;
        let mut world = World::joined(size, 3).await;
        world.inflict(Freeze, who);
        sleep(FOUND).await;
        world.assert_lost(&[who], &[who], "frozen");
        world.ranks[who].freeze(false);
        sleep(Duration::from_secs(2)).await;
        assert!(world.ranks[who].handle.status(|status| status.excluded_by.is_some()), "{size}");
        world.ranks[who].handle.leave(false);
        let left = timeout(Duration::from_millis(100), &mut world.ranks[who].task).await;
        assert!(left.is_ok(), "{size}: it waits for the others");
    }
}

#[tokio::test(start_paused = true)]
async fn a_coordinator_that_was_frozen_names_itself_also_when_the_others_have_left() {
    for size in [3, 4, 8] {
        let mut world = World::joined(size, 5).await;
        world.inflict(Freeze, 0);
        sleep(FOUND).await;
        world.assert_lost(&[0], &[0], "frozen");
        for runner in &mut world.ranks[1..] {
            runner.handle.leave(false);
        }
        for runner in &mut world.ranks[1..] {
            assert!(matches!((&mut runner.task).await, Ok(true)));
        }
        world.ranks[0].freeze(false);
        sleep(FOUND).await;
        assert_eq!((world.ranks[0].lost(), world.ranks[0].left()), (vec![0], vec![]), "{size}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_does_not_overtake_what_its_sender_has_told_all_before() {
    for size in [3, 8, 160] {
        for who in [0, 1, 2, size - 1] {
            for seed in 0..if size < 100 { 10 } else { 1 } {
                let world = World::joined(size, seed).await;
                world.ranks[who].handle.tell(failed("the cause"));
                world.ranks[who].handle.send((0..size).collect(), Body::LeftGroup { group: 7 });
                sleep(Duration::from_secs(1)).await;
                for (rank, runner) in world.ranks.iter().enumerate().filter(|(rank, _)| *rank != who) {
                    let told = lock(&runner.told);
                    let at = |event: &Event| told.iter().position(|(_, known)| known == event);
                    let cause = at(&Event::Notice(failed("the cause")));
                    let message = at(&Event::Deliver(who, Body::LeftGroup { group: 7 }));
                    assert!(cause.is_some() && cause < message, "{rank} of {size}, from {who}: {cause:?}, {message:?}");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_rank_learns_of_a_failure_before_it_learns_that_others_leave() {
    for size in [3, 8, 24] {
        for seed in 0..20 {
            let mut world = World::joined(size, seed).await;
            world.ranks[size - 1].handle.tell(failed("the cause"));
            // Each rank leaves when it knows, the coordinators one after the other.
            let has_failed = |event: &(Instant, Event)| event.1 == Event::Notice(failed("the cause"));
            for rank in 0..size {
                while rank < size - 1 && !lock(&world.ranks[rank].told).iter().any(has_failed) {
                    sleep(Duration::from_micros(20)).await;
                }
                world.ranks[rank].handle.leave(false);
                world.pause(Duration::from_micros(100)).await;
            }
            for (rank, runner) in world.ranks.iter_mut().enumerate() {
                assert!(matches!((&mut runner.task).await, Ok(true)), "{rank} of {size}, seed {seed}");
                let is_left = |event: &(Instant, Event)| matches!(event.1, Event::Notice(Notice::Left { .. }));
                let told = lock(&runner.told);
                let (failed, left) = (told.iter().position(has_failed), told.iter().position(is_left));
                drop(told);
                assert!(failed.is_some() && failed < left, "{rank} of {size}, seed {seed}: {failed:?}, {left:?}");
                assert_eq!(runner.lost(), [], "{rank} of {size}, seed {seed}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_cause_of_a_broken_stream_is_the_end_of_the_peer_or_nothing() {
    for size in [2, 3, 8, 64] {
        for about in [0, 1, size - 1] {
            for from in [0, 1, size - 1].into_iter().filter(|from| *from != about) {
                for fault in [None, Some(Kill), Some(Freeze)] {
                    let world = World::joined(size, 9).await;
                    if let Some(fault) = fault {
                        world.inflict(fault, about);
                    }
                    let asked = Instant::now();
                    let (answered, answer) = tokio::sync::oneshot::channel();
                    world.ranks[from].handle.ask(about, |answer| _ = answered.send(answer));
                    let answer = answer.await;
                    let expected = if fault.is_some() { Answer::IsGone } else { Answer::Lives };
                    assert_eq!(answer, Ok(expected), "{from} asks about {about} of {size}, {fault:?}");
                    let limit = if fault == Some(Freeze) { FOUND } else { Duration::from_millis(100) };
                    assert!(asked.elapsed() < limit, "{:?}", asked.elapsed());
                    if fault.is_some() {
                        assert_eq!(world.ranks[from].lost(), [about]);
                    }
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_thousand_ranks_on_64_hosts_join_name_the_dead_and_leave() {
    for who in [vec![0], vec![16, 17], (32..48).collect()] {
        let mut world = World::joined(1024, 11).await;
        assert!(world.ranks[0].handle.status(|status| status.links.len()) <= 63 + 15 + 64);
        who.iter().for_each(|rank| world.inflict(Kill, *rank));
        sleep(FOUND).await;
        world.assert_lost(&who, &who, &format!("{who:?} of 1024"));
        for (rank, runner) in world.ranks.iter().enumerate().rev() {
            if !who.contains(&rank) {
                runner.handle.leave(false);
            }
        }
        for (rank, runner) in world.ranks.iter_mut().enumerate().filter(|(rank, _)| !who.contains(rank)) {
            let left = (&mut runner.task).await;
            assert!(matches!(left, Ok(true)), "rank {rank}");
            assert_eq!(runner.lost().len(), who.len());
        }
    }
}
