//! The agreement over the control plane on a paused clock: deaths, cuts and freezes at every moment, in many orders of
//! delivery. And its answers to single messages.

use std::collections::BTreeMap;
use std::time::Duration;

use super::action::{Action, Outcome};
use super::agreement::{Agreement, Gone, Quorum};
use super::message::{Endpoint, GoneRank, ViewMessage};
use world::Fault::{Cut, Freeze, Kill};
use world::{Fault, World};

/// An agreement that gets messages that no correct rank sends.
#[cfg(not(model))]
pub(super) mod replay;
mod world;

/// Moments of an agreement, which takes about 2 ms if nothing happens.
fn moments(every: usize) -> impl Iterator<Item = Duration> + Clone {
    (0..3000).step_by(every).map(|micros| Duration::from_micros(micros as u64))
}

/// Runs an agreement of all ranks with these faults.
async fn agreed(size: usize, seed: u64, faults: &[(Duration, Fault)]) -> World {
    let mut world = World::new(size, seed, Quorum::Majority).await;
    world.run(faults.iter().copied()).await;
    world
}

#[tokio::test(start_paused = true)]
async fn ranks_that_all_live_agree_on_a_view_of_all() {
    for size in [1, 2, 3, 4, 5, 13] {
        for seed in 0..10 {
            let world = agreed(size, seed, &[]).await;
            let everybody: Vec<usize> = (0..size).collect();
            for outcome in world.outcomes.values() {
                assert_eq!(outcome, &Outcome::Opened(2, everybody.clone()));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_death_at_any_moment_of_the_agreement_leaves_the_survivors_in_one_view() {
    for (size, seeds, every) in [(2, 3, 100), (3, 3, 100), (4, 3, 100), (13, 1, 250)] {
        for (seed, at) in (0..seeds).flat_map(|seed| moments(every).map(move |at| (seed, at))) {
            for who in 0..size {
                let world = agreed(size, seed, &[(at, Kill(who))]).await;
                world.check_together(&format!("{size} ranks, seed {seed}, rank {who} dies after {at:?}"));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn two_deaths_at_any_two_moments_leave_the_survivors_in_one_view() {
    for (size, pairs) in [(3, &[(0, 1), (1, 0), (0, 2), (1, 2)][..]), (8, &[(0, 1), (1, 0), (0, 7), (3, 5)])] {
        for (seed, first) in (0..2).flat_map(|seed| moments(300).map(move |at| (seed, at))) {
            for second in moments(300).filter(|second| *second >= first) {
                for (who, other) in pairs {
                    let world = agreed(size, seed, &[(first, Kill(*who)), (second, Kill(*other))]).await;
                    let case = format!("{who} dies after {first:?}, {other} after {second:?}");
                    world.check_together(&format!("{size} ranks, seed {seed}: {case}"));
                }
            }
        }
    }
}

/// True if the members in `here` may continue when the others are cut off.
fn is_quorum(here: &[usize], members: &[usize]) -> bool {
    2 * here.len() > members.len() || (2 * here.len() == members.len() && here.contains(&members[0]))
}

/// Checks that at most one part could shrink its view further. Returns the number of parts that could.
fn check_parts(world: &World, case: &str) -> usize {
    let mut views: BTreeMap<(u64, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for (rank, outcome) in &world.outcomes {
        match outcome {
            Outcome::Opened(view, members) => views.entry((*view, members.clone())).or_default().push(*rank),
            Outcome::Excluded(_) | Outcome::Refused(_) | Outcome::TimedOut(_) => {}
        }
    }
    let go_on = views.iter().filter(|((_, members), here)| is_quorum(here, members)).count();
    assert!(go_on <= 1, "{case}: {views:?}");
    go_on
}

#[tokio::test(start_paused = true)]
async fn of_parts_that_are_cut_off_from_each_other_at_any_moment_at_most_one_goes_on_and_no_rank_hangs() {
    let parts: [&[usize]; 6] = [&[0], &[1], &[3], &[0, 1], &[1, 2], &[0, 3]];
    let mut one_went_on = 0;
    for size in [2, 3, 4] {
        for (seed, at) in (0..3).flat_map(|seed| moments(200).map(move |at| (seed, at))) {
            for part in parts.iter().filter(|part| part.len() < size && part.iter().all(|rank| *rank < size)) {
                let others = (0..size).filter(|rank| !part.contains(rank));
                let cuts: Vec<(Duration, Fault)> =
                    others.flat_map(|other| part.iter().map(move |inside| (at, Cut(*inside, other)))).collect();
                let world = agreed(size, seed, &cuts).await;
                let case = format!("{size} ranks, seed {seed}, {part:?} cut off after {at:?}");
                one_went_on += check_parts(&world, &case);
            }
        }
    }
    assert!(one_went_on > 200, "{one_went_on}");
}

#[tokio::test(start_paused = true)]
async fn a_broken_line_between_two_ranks_at_any_moment_leaves_at_most_one_part_and_no_rank_hangs() {
    for size in [3, 4] {
        for (seed, at) in (0..3).flat_map(|seed| moments(200).map(move |at| (seed, at))) {
            for (a, b) in (0..size).flat_map(|a| (a + 1..size).map(move |b| (a, b))) {
                let world = agreed(size, seed, &[(at, Cut(a, b))]).await;
                check_parts(&world, &format!("{size} ranks, seed {seed}, {a} and {b} cut after {at:?}"));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_cannot_reach_the_coordinator_is_left_behind_by_the_others() {
    for (seed, cut) in (0..10).flat_map(|seed| [1, 2].map(|cut| (seed, cut))) {
        let mut world = World::new(3, seed, Quorum::Majority).await;
        world.inflict(Cut(0, cut));
        let others: Vec<usize> = (0..3).filter(|rank| *rank != cut).collect();
        world.until_gone(&others, &[cut]).await;
        world.call(0..3);
        world.finish().await;
        for rank in &others {
            let Some(Outcome::Opened(_, members)) = world.outcomes.get(rank) else { panic!("seed {seed}") };
            assert_eq!(*members, others);
        }
        let ended = &world.outcomes[&cut];
        assert!(
            matches!(ended, Outcome::Refused(text) if text.contains("quorum"))
                || matches!(ended, Outcome::Excluded(by) if *by != cut),
            "{ended:?}"
        );
    }
}

/// The outcomes of a group that has lost some ranks before it agrees: frozen or killed.
async fn outcomes_without(size: usize, gone: &[usize], how: Gone, quorum: Quorum) -> Vec<Outcome> {
    let mut world = World::new(size, 7, quorum).await;
    let living: Vec<usize> = (0..size).filter(|rank| !gone.contains(rank)).collect();
    for rank in gone {
        world.inflict(if how == Gone::Ended { Kill(*rank) } else { Freeze(*rank, true) });
    }
    world.until_gone(&living, gone).await;
    world.call(living);
    world.finish().await;
    world.outcomes.into_values().collect()
}

#[tokio::test(start_paused = true)]
async fn the_smaller_part_is_refused_by_all_its_ranks_and_the_error_names_the_ranks_that_may_be_alive() {
    for outcome in outcomes_without(4, &[0, 3], Gone::Silent, Quorum::Majority).await {
        let Outcome::Refused(text) = outcome else { panic!("{outcome:?}") };
        let expected = "no quorum: 2 of the 4 ranks whose process is not known to have ended are here (ranks 1, 2), and ranks 0, 3 may live on";
        assert_eq!(text, expected);
    }
    for (why, size, gone, how, quorum, goes_on) in [
        ("half with the lowest", 4, &[1, 3][..], Gone::Silent, Quorum::Majority, true),
        ("more than half", 4, &[3], Gone::Silent, Quorum::Majority, true),
        ("ranks that ended do not count", 4, &[0, 1, 2], Gone::Ended, Quorum::Majority, true),
        ("too few", 3, &[0, 1], Gone::Silent, Quorum::Majority, false),
        ("waived", 3, &[0, 1], Gone::Silent, Quorum::Any, true),
    ] {
        let outcomes = outcomes_without(size, gone, how, quorum).await;
        assert!(
            outcomes.iter().all(|outcome| matches!(outcome, Outcome::Opened(..)) == goes_on),
            "{why}: {outcomes:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_has_not_called_is_named_and_a_second_call_succeeds_when_it_calls() {
    let mut world = World::new(3, 3, Quorum::Majority).await;
    world.call([0, 2]);
    world.finish().await;
    for rank in [0, 2] {
        assert_eq!(world.outcomes[&rank], Outcome::TimedOut(vec![1]));
    }
    world.call(0..3);
    world.finish().await;
    world.check_together("the second call");
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_the_others_left_behind_is_excluded_when_it_continues() {
    for seed in 0..10 {
        let mut world = World::new(3, seed, Quorum::Majority).await;
        world.inflict(Freeze(1, true));
        world.until_gone(&[0, 2], &[1]).await;
        world.call(0..3);
        world.finish().await;
        assert!(matches!(world.outcomes[&0], Outcome::Opened(_, _)));
        world.inflict(Freeze(1, false));
        world.finish().await;
        assert!(matches!(world.outcomes[&1], Outcome::Excluded(0 | 2)), "{:?}", world.outcomes[&1]);
    }
}

/// The endpoint of a rank that listens at this port.
fn at(port: u16) -> Endpoint {
    Endpoint { port, unix: true }
}

/// Returns the messages among these actions.
fn sent(out: &[Action]) -> Vec<&ViewMessage> {
    let messages = out.iter().filter_map(|action| match action {
        Action::Send(_, message) => Some(message),
        _ => None,
    });
    messages.collect()
}

#[test]
fn losses_that_come_together_are_said_together() {
    let (mut agreement, mut out) = (Agreement::new(5, 8, 1), Vec::new());
    agreement.lost([(7, Gone::Ended)], &mut out);
    agreement.call(Quorum::Majority, &mut out);
    agreement.lost([(6, Gone::Ended)], &mut out);
    agreement.lost([(4, Gone::Silent)], &mut out);
    assert_eq!(out, [Action::SayLater]);
    out.clear();
    agreement.say(|view| Ok(at(view as u16)), &mut out);
    let gone = [(4, false), (6, true), (7, true)].map(|(rank, ended)| GoneRank { rank, ended }).to_vec();
    assert_eq!(out, [Action::Send(vec![0], ViewMessage::Ready { view: 4, any: false, gone, endpoint: at(4) })]);
    // The next loss makes the rank ready again, for a later view.
    out.clear();
    agreement.lost([(3, Gone::Ended)], &mut out);
    assert_eq!(out, [Action::SayLater]);
}

#[test]
fn a_rank_to_which_nothing_comes_reminds_the_leader_less_and_less_often_and_one_to_which_something_came_does_not() {
    let (mut agreement, mut out) = (Agreement::new(1, 3, 1), Vec::new());
    agreement.call(Quorum::Majority, &mut out);
    agreement.say(|_| Ok(at(7)), &mut out);
    let reminds = |agreement: &mut Agreement| {
        let mut out = Vec::new();
        agreement.remind(&mut out);
        sent(&out).len()
    };
    let times: Vec<usize> = (0..20).filter(|_| reminds(&mut agreement) > 0).collect();
    assert_eq!(times, [1, 2, 4, 8, 16]);
    // The leader is ready for a later view, and so is this rank again.
    let ready = ViewMessage::Ready { view: 3, any: false, gone: Vec::new(), endpoint: at(3) };
    agreement.received(0, ready, &mut out);
    agreement.say(|_| Ok(at(8)), &mut out);
    assert_eq!([0; 2].map(|_| reminds(&mut agreement)), [0, 1]);
}

/// Returns the agreement of rank 0 of three, which has proposed view 2, or of rank 1, which got the proposal. Both are
/// ready.
fn ready_agreement(me: usize) -> (Agreement, Vec<Action>) {
    let (mut agreement, mut out) = (Agreement::new(me, 3, 1), Vec::new());
    agreement.call(Quorum::Majority, &mut out);
    agreement.say(|_| Ok(at(me as u16)), &mut out);
    for other in (0..3).filter(|other| *other != me) {
        let ready = ViewMessage::Ready { view: 2, any: false, gone: Vec::new(), endpoint: at(other as u16) };
        agreement.received(other, ready, &mut out);
    }
    (agreement, out)
}

#[test]
fn a_proposal_says_where_all_listen_and_is_made_again_to_a_rank_that_is_still_ready_for_it() {
    let (mut leader, out) = ready_agreement(0);
    let endpoints: Vec<Endpoint> = [0, 1, 2].map(at).to_vec();
    let proposal = ViewMessage::Propose { view: 2, gone: Vec::new(), endpoints: endpoints.clone() };
    let build = Action::Build { view: 2, endpoints, members: vec![0, 1, 2] };
    assert_eq!(out[2..], [Action::Send(vec![1, 2], proposal.clone()), build]);
    let mut out = Vec::new();
    let ready = |view| ViewMessage::Ready { view, any: false, gone: Vec::new(), endpoint: at(2) };
    leader.received(2, ready(2), &mut out);
    assert_eq!(out, [Action::Send(vec![2], proposal)]);
    // Rank 0 does not send the proposal to a rank that has given the view up.
    out.clear();
    leader.received(2, ready(3), &mut out);
    assert_eq!(out, [Action::Cancel(Some(2))]);
    out.clear();
    leader.received(1, ready(2), &mut out);
    assert_eq!(out, []);
}

#[test]
fn a_rank_accepts_a_proposal_only_of_the_leader_for_all_ranks_that_are_not_gone_with_where_it_listens_itself() {
    let propose = |view, gone: &[usize], ports: &[u16]| {
        let endpoints = ports.iter().copied().map(at).collect();
        ViewMessage::Propose { view, gone: gone.to_vec(), endpoints }
    };
    let builds = |from, proposal| {
        let (mut agreement, mut out) = ready_agreement(1);
        agreement.received(from, proposal, &mut out);
        out.iter().any(|action| matches!(action, Action::Build { .. }))
    };
    assert!(builds(0, propose(2, &[], &[0, 1, 2])));
    assert!(!builds(2, propose(2, &[], &[0, 1, 2])), "it is not the leader's");
    assert!(!builds(0, propose(3, &[], &[0, 1, 2])), "of another view");
    assert!(!builds(0, propose(2, &[2], &[0, 1])), "without a rank that is not gone");
    assert!(!builds(0, propose(2, &[], &[0, 1])), "too few");
    assert!(!builds(0, propose(2, &[], &[0, 1, 2, 3])), "too many");
    assert!(!builds(0, propose(2, &[], &[0, 9, 2])), "it listens elsewhere");
}

#[test]
fn a_rank_that_cannot_listen_refuses_the_view_for_all() {
    let (mut agreement, mut out) = (Agreement::new(1, 3, 1), Vec::new());
    agreement.call(Quorum::Majority, &mut out);
    out.clear();
    agreement.say(|_| Err("no descriptor".to_owned()), &mut out);
    let refused = ViewMessage::Refused { view: 2, text: "no descriptor".to_owned() };
    let finished = Action::Finish(Outcome::Refused("no descriptor".to_owned()));
    assert_eq!(out, [Action::Publish(refused), finished]);
}
