//! The agreement over scripted connections: deaths, cuts and freezes at every step, in many orders of delivery.

use std::collections::BTreeMap;

use super::action::{Action, Outcome};
use super::agreement::{Agreement, Gone, Quorum};
use super::message::{Endpoint, GoneRank, ViewMessage};
use script::{Event, Script};

/// An agreement that gets messages that no correct rank sends.
#[cfg(not(model))]
pub(super) mod replay;
mod script;

fn death(at: usize, who: usize) -> Event {
    (at, Box::new(move |script| script.kill(who)))
}

/// Returns the number of steps of a run without a death.
fn length(size: usize, seed: u64) -> usize {
    let mut script = Script::new(size, seed, Quorum::Majority);
    script.run(Vec::new());
    script.check_together("no rank dies");
    script.steps
}

#[test]
fn ranks_that_all_live_agree_on_a_view_of_all() {
    for size in 1..=5 {
        for seed in 0..50 {
            let mut script = Script::new(size, seed, Quorum::Majority);
            script.run(Vec::new());
            let everybody: Vec<usize> = (0..size).collect();
            for node in &script.nodes {
                assert_eq!(node.outcome, Some(Outcome::Opened(2, everybody.clone())));
            }
        }
    }
}

#[test]
fn a_death_at_any_step_of_the_agreement_leaves_the_survivors_in_one_view() {
    for size in 2..=4 {
        for seed in 0..15 {
            for at in 0..=length(size, seed) {
                for who in 0..size {
                    let mut script = Script::new(size, seed, Quorum::Majority);
                    script.run(vec![death(at, who)]);
                    script.check_together(&format!("{size} ranks, seed {seed}, rank {who} dies at step {at}"));
                }
            }
        }
    }
}

#[test]
fn two_deaths_at_any_two_steps_leave_the_survivors_in_one_view() {
    for size in 3..=4 {
        for seed in 0..4 {
            let steps = length(size, seed) + 40;
            for first in (seed as usize % 3..steps).step_by(3) {
                for second in (first..steps).step_by(5) {
                    for (who, other) in (0..size).flat_map(|who| (0..size).map(move |other| (who, other))) {
                        if who != other {
                            let mut script = Script::new(size, seed, Quorum::Majority);
                            script.run(vec![death(first, who), death(second, other)]);
                            let text = format!("rank {who} dies at step {first}, rank {other} at step {second}");
                            script.check_together(&format!("{size} ranks, seed {seed}, {text}"));
                        }
                    }
                }
            }
        }
    }
}

/// True if these members may continue when the other members are cut off.
fn is_quorum(here: &[usize], members: &[usize]) -> bool {
    2 * here.len() > members.len() || (2 * here.len() == members.len() && here.contains(&members[0]))
}

#[test]
fn of_parts_that_are_cut_off_from_each_other_at_any_step_at_most_one_goes_on_and_no_rank_hangs() {
    let parts: [&[usize]; 6] = [&[0], &[1], &[3], &[0, 1], &[1, 2], &[0, 3]];
    let mut one_went_on = 0;
    for size in [2, 3, 4] {
        for seed in 0..10 {
            for at in 0..=length(size, seed) {
                for part in parts.iter().filter(|part| part.len() < size && part.iter().all(|rank| *rank < size)) {
                    let part = part.to_vec();
                    let mut script = Script::new(size, seed, Quorum::Majority);
                    let text = format!("{size} ranks, seed {seed}, {part:?} cut off at step {at}");
                    let cut: Box<dyn Fn(&mut Script)> = Box::new(move |script| {
                        for inside in &part {
                            (0..size).filter(|outside| !part.contains(outside)).for_each(|outside| {
                                script.cut_off(*inside, outside);
                            });
                        }
                    });
                    script.run(vec![(at, cut)]);
                    script.expire();
                    one_went_on += check_parts(&script, &text);
                }
            }
        }
    }
    assert!(one_went_on > 1000, "{one_went_on}");
}

/// Checks that every rank has ended, and that at most one part could shrink its view further. Returns the number of
/// parts that could.
fn check_parts(script: &Script, text: &str) -> usize {
    let mut views: BTreeMap<(u64, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for rank in 0..script.nodes.len() {
        match script.nodes[rank].outcome.as_ref().unwrap_or_else(|| panic!("{text}: rank {rank} hangs")) {
            Outcome::Opened(view, members) => views.entry((*view, members.clone())).or_default().push(rank),
            Outcome::Excluded(_) | Outcome::Refused(_) | Outcome::TimedOut(_) => {}
        }
    }
    let go_on = views.iter().filter(|((_, members), here)| is_quorum(here, members)).count();
    assert!(go_on <= 1, "{text}: {views:?}");
    go_on
}

#[test]
fn a_broken_line_between_two_ranks_at_any_step_leaves_at_most_one_part_and_no_rank_hangs() {
    for size in [3, 4] {
        for seed in 0..10 {
            for at in 0..=length(size, seed) {
                for (a, b) in (0..size).flat_map(|a| (a + 1..size).map(move |b| (a, b))) {
                    let mut script = Script::new(size, seed, Quorum::Majority);
                    script.run(vec![(at, Box::new(move |script| script.cut_off(a, b)))]);
                    script.expire();
                    check_parts(&script, &format!("{size} ranks, seed {seed}, {a} and {b} cut at step {at}"));
                }
            }
        }
    }
}

#[test]
fn a_line_that_was_broken_before_leaves_the_lower_rank_with_the_others_and_ends_the_higher_one() {
    for seed in 0..50 {
        let mut script = Script::new(3, seed, Quorum::Majority);
        script.run(vec![(0, Box::new(|script| script.cut_off(0, 1)))]);
        script.expire();
        for rank in [0, 2] {
            let Some(Outcome::Opened(_, members)) = &script.nodes[rank].outcome else { panic!("seed {seed}") };
            assert_eq!(members, &[0, 2]);
        }
        // Rank 2 prefers rank 0. Rank 1 is alone, or was notified that the other ranks continued.
        let ended = script.nodes[1].outcome.as_ref().unwrap();
        assert!(
            matches!(ended, Outcome::Refused(text) if text.contains("quorum"))
                || matches!(ended, Outcome::Excluded(0 | 2)),
            "{ended:?}"
        );
    }
}

fn outcomes_without(size: usize, gone: &[usize], how: Gone, quorum: Quorum) -> Vec<Option<Outcome>> {
    let mut script = Script::new(size, 7, quorum);
    for rank in gone {
        script.nodes[*rank].alive = false;
        script.end_lines(*rank);
        for other in (0..size).filter(|other| !gone.contains(other)) {
            let ended = how == Gone::Ended;
            script.lines.remove(&(*rank, other));
            script.control(other, |overlay, out| overlay.lost(*rank, ended, "gone", out));
        }
    }
    script.run(Vec::new());
    let nodes = script.nodes.into_iter().enumerate().filter(|(rank, _)| !gone.contains(rank));
    nodes.map(|(_, node)| node.outcome).collect()
}

#[test]
fn the_smaller_part_is_refused_by_all_its_ranks_and_the_error_names_the_ranks_that_may_be_alive() {
    let goes_on = |size, gone: &[usize], how, quorum| {
        let outcomes = outcomes_without(size, gone, how, quorum);
        outcomes.iter().all(|outcome| matches!(outcome, Some(Outcome::Opened(..))))
    };
    for outcome in outcomes_without(4, &[0, 3], Gone::Silent, Quorum::Majority) {
        let Some(Outcome::Refused(text)) = outcome else { panic!("{outcome:?}") };
        let expected = "no quorum: 2 of the 4 ranks whose process is not known to have ended are here (ranks 1, 2), and ranks 0, 3 may live on";
        assert_eq!(text, expected);
    }
    assert!(goes_on(4, &[1, 3], Gone::Silent, Quorum::Majority), "half with the lowest");
    assert!(goes_on(4, &[3], Gone::Silent, Quorum::Majority), "more than half");
    assert!(goes_on(4, &[0, 1, 2], Gone::Ended, Quorum::Majority), "those that ended do not count");
    assert!(!goes_on(3, &[0, 1], Gone::Silent, Quorum::Majority));
    assert!(goes_on(3, &[0, 1], Gone::Silent, Quorum::Any), "waived");
}

#[test]
fn who_has_not_called_is_named_and_a_second_call_goes_on_when_it_has() {
    let mut script = Script::new(3, 3, Quorum::Majority);
    // Rank 1 runs, but does not call.
    let absent = |script: &mut Script, absent: bool| script.nodes[1].called = absent;
    absent(&mut script, true);
    script.run(Vec::new());
    script.nodes[1].outcome = Some(Outcome::Refused(String::new()));
    script.expire();
    for rank in [0, 2] {
        assert_eq!(script.nodes[rank].outcome, Some(Outcome::TimedOut(vec![1])));
    }
    for node in &mut script.nodes {
        (node.outcome, node.called) = (None, false);
    }
    script.run(Vec::new());
    script.check_together("the second call");
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

#[test]
fn a_rank_that_the_others_left_behind_is_excluded_when_it_continues() {
    for seed in 0..50 {
        let mut script = Script::new(3, seed, Quorum::Majority);
        script.nodes[1].frozen = true;
        for other in [0, 2] {
            script.control(other, |overlay, out| overlay.lost(1, false, "no heartbeat", out));
        }
        script.run(Vec::new());
        assert!(matches!(script.nodes[0].outcome, Some(Outcome::Opened(_, _))));
        script.nodes[1].frozen = false;
        script.run(Vec::new());
        assert!(matches!(script.nodes[1].outcome, Some(Outcome::Excluded(0 | 2))), "{:?}", script.nodes[1].outcome);
    }
}

#[test]
fn deaths_of_the_leader_of_its_successor_and_of_a_rank_that_passes_messages_on_leave_the_survivors_in_one_view() {
    for seed in 0..24 {
        let size = 8 + seed as usize % 7;
        let sparse = || Script::connected(size, seed, Quorum::Majority, 2);
        let mut whole = sparse();
        whole.run(Vec::new());
        for at in (seed as usize * 41 % 197..whole.steps).step_by(197) {
            // The rank has the connection to the leader that the ranks behind it use.
            let (inner, later) = (2 << (at % 2), at + at % 60);
            for who in [vec![0, inner], vec![inner, 0], vec![0, 1], vec![0, 1, inner]] {
                let mut script = sparse();
                let text = format!("{size} ranks, seed {seed}, {who:?} die at steps {at} and {later}");
                let deaths = who.iter().enumerate().map(|(nth, who)| death(if nth == 0 { at } else { later }, *who));
                script.run(deaths.collect());
                script.check_together(&text);
            }
        }
    }
}

#[test]
fn a_death_at_many_steps_leaves_the_survivors_in_one_view_also_where_messages_pass_by_others() {
    for (size, seed) in [(8, 1), (9, 2), (11, 3), (13, 4)] {
        let sparse = |seed| Script::connected(size, seed, Quorum::Majority, 2);
        let mut whole = sparse(seed);
        whole.run(Vec::new());
        whole.check_together("no rank dies");
        for at in (0..whole.steps).step_by(37) {
            for who in (0..size).step_by(2) {
                let mut script = sparse(seed);
                script.run(vec![death(at, who), death(at + at % 50, (who + 1 + at % 3) % size)]);
                script.check_together(&format!("{size} ranks, seed {seed}, rank {who} dies at step {at}"));
            }
        }
    }
}
