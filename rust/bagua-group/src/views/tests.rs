//! The agreement over scripted connections: deaths, cuts and freezes at every step, in many orders of delivery.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::control::{Action as ControlAction, Body, FULL, Message, Notice, Overlay, Presence};
use super::super::wire::Encoding;
use super::agreement::{Action, Agreement, Gone, Outcome, Quorum};
use super::message::ViewMessage;

/// An agreement that gets messages that no correct rank sends.
#[cfg(not(model))]
pub(super) mod replay;

/// A run that takes more steps than this hangs in a loop.
const STEPS_LIMIT: usize = 100_000;

/// A sequence of choices that a seed determines.
struct Choices(u64);

impl Choices {
    fn below(&mut self, limit: usize) -> usize {
        // Marsaglia's xorshift64.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit
    }
}

/// What travels on a connection, in order.
#[derive(Clone, Debug)]
enum Item {
    Message(Message),
    /// The connection has ended.
    End,
}

/// What the control plane of a rank has for its agreement.
#[derive(Clone, Debug)]
enum Known {
    Message(usize, ViewMessage),
    Gone(usize, Gone),
    Excluded(usize),
}

/// The addresses of a view, by which two views of equal numbers are distinguished.
type Key = Vec<Vec<u8>>;

/// One rank.
struct Node {
    agreement: Agreement,
    overlay: Overlay,
    alive: bool,
    /// It does nothing, and what is sent to it waits.
    frozen: bool,
    called: bool,
    /// What the agreement gets next.
    inbox: VecDeque<Known>,
    /// Actions that are not performed yet.
    todo: VecDeque<Action>,
    /// The build in progress, whether its barrier is entered, and whether it is cancelled.
    build: Option<(Key, bool, bool)>,
    outcome: Option<Outcome>,
    /// It leaves the group, and has left it.
    leaving: bool,
    left: bool,
}

/// What may happen next.
#[derive(Clone, Copy, Debug)]
enum Step {
    Call(usize),
    Act(usize),
    Take(usize),
    Deliver(usize, usize),
    Repair(usize),
    Enter(usize),
    Pass(usize),
    Fail(usize),
    Leave(usize),
}

/// What happens before the step of this number.
type Event = (usize, Box<dyn Fn(&mut Script)>);

/// Ranks, what travels between them, and the groups that they build.
struct Script {
    nodes: Vec<Node>,
    quorum: Quorum,
    choices: Choices,
    /// The connections, each direction for itself.
    lines: BTreeMap<(usize, usize), VecDeque<Item>>,
    /// Pairs of ranks between which nothing arrives.
    cut: BTreeSet<(usize, usize)>,
    /// By view: its members, and those that began to build it, entered its barrier, and gave up.
    builds: BTreeMap<Key, [BTreeSet<usize>; 4]>,
    addresses: usize,
    steps: usize,
}

impl Script {
    fn new(size: usize, seed: u64, quorum: Quorum) -> Script {
        Script::connected(size, seed, quorum, FULL)
    }

    /// Ranks with connections between every two, or in a world larger than `full` a few for each.
    fn connected(size: usize, seed: u64, quorum: Quorum, full: usize) -> Script {
        let nodes = (0..size).map(|rank| Node {
            agreement: Agreement::new(rank, size, 1),
            overlay: Overlay::new(rank, size, full),
            alive: true,
            frozen: false,
            called: false,
            inbox: VecDeque::new(),
            todo: VecDeque::new(),
            build: None,
            outcome: None,
            leaving: false,
            left: false,
        });
        let mut script = Script {
            nodes: nodes.collect(),
            quorum,
            choices: Choices(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            lines: BTreeMap::new(),
            cut: BTreeSet::new(),
            builds: BTreeMap::new(),
            addresses: 0,
            steps: 0,
        };
        for rank in 0..size {
            for other in script.nodes[rank].overlay.neighbours().into_iter().filter(|other| *other < rank) {
                script.connect(rank, other);
            }
        }
        script
    }

    /// Opens a connection between two ranks.
    fn connect(&mut self, a: usize, b: usize) {
        for (own, other) in [(a, b), (b, a)] {
            self.lines.insert((own, other), VecDeque::new());
            self.control(own, |overlay, out| {
                overlay.link_up(other, out);
            });
        }
    }

    fn takes_part(&self, rank: usize) -> bool {
        self.nodes[rank].alive && self.nodes[rank].outcome.is_none()
    }

    fn enabled(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (rank, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.alive && !node.frozen && !node.left) {
            let from = self.lines.iter().filter(|((_, to), line)| *to == rank && !line.is_empty());
            steps.extend(from.map(|((from, _), _)| Step::Deliver(*from, rank)));
            if node.leaving {
                let knows = |other: &usize| {
                    let other = &self.nodes[*other];
                    !other.alive || other.left || other.overlay.presence(rank) != Presence::Present
                };
                let none_comes = self.lines.iter().all(|((_, to), line)| *to != rank || line.is_empty());
                if none_comes && node.overlay.links().iter().all(knows) {
                    steps.push(Step::Leave(rank));
                }
                continue;
            }
            if !node.overlay.not_connected().is_empty() {
                steps.push(Step::Repair(rank));
            }
            if node.outcome.is_some() {
                continue;
            }
            if !node.called {
                steps.push(Step::Call(rank));
                continue;
            }
            if !node.todo.is_empty() {
                steps.push(Step::Act(rank));
                continue;
            }
            if !node.inbox.is_empty() {
                steps.push(Step::Take(rank));
            }
            let Some((key, entered, cancelled)) = &node.build else { continue };
            let [members, began, inside, gave_up] = &self.builds[key];
            if !entered && began == members {
                steps.push(Step::Enter(rank));
            }
            if *entered && inside == members {
                steps.push(Step::Pass(rank));
            }
            let unreachable = |other: &usize| !self.nodes[*other].alive || self.cut.contains(&(*other, rank));
            if *cancelled || !gave_up.is_empty() || members.iter().any(unreachable) {
                steps.push(Step::Fail(rank));
            }
        }
        steps
    }

    /// Performs one step; false when none is possible.
    fn step(&mut self) -> bool {
        let enabled = self.enabled();
        if enabled.is_empty() {
            return false;
        }
        self.steps += 1;
        assert!(self.steps < STEPS_LIMIT, "the agreement does not end");
        let step = enabled[self.choices.below(enabled.len())];
        let mut out = Vec::new();
        let rank = match step {
            Step::Act(rank) => {
                let action = self.nodes[rank].todo.pop_front().unwrap();
                self.act(rank, action);
                return true;
            }
            Step::Call(rank) => {
                self.nodes[rank].called = true;
                self.nodes[rank].agreement.call(self.quorum, &mut out);
                rank
            }
            Step::Deliver(from, to) => {
                self.deliver(from, to);
                return true;
            }
            Step::Repair(rank) => {
                self.repair(rank);
                return true;
            }
            Step::Leave(rank) => {
                self.nodes[rank].left = true;
                self.end_lines(rank);
                return true;
            }
            Step::Take(rank) => {
                let Node { agreement, inbox, .. } = &mut self.nodes[rank];
                match inbox.pop_front().unwrap() {
                    Known::Message(from, message) => agreement.received(from, message, &mut out),
                    Known::Gone(other, gone) => agreement.lost(other, gone, &mut out),
                    Known::Excluded(by) => agreement.exclude(by, &mut out),
                }
                rank
            }
            Step::Enter(rank) => {
                let (key, entered, _) = self.nodes[rank].build.as_mut().unwrap();
                *entered = true;
                self.builds.get_mut(key).unwrap()[2].insert(rank);
                rank
            }
            Step::Pass(rank) => {
                self.nodes[rank].build = None;
                self.nodes[rank].agreement.passed(&mut out);
                rank
            }
            Step::Fail(rank) => {
                let (key, entered, _) = self.nodes[rank].build.take().unwrap();
                self.builds.get_mut(&key).unwrap()[3].insert(rank);
                self.nodes[rank].agreement.failed(entered, "it failed", &mut out);
                rank
            }
        };
        self.nodes[rank].todo.extend(out);
        true
    }

    /// An event of the control plane of a rank, and what follows from it.
    fn control(&mut self, rank: usize, event: impl FnOnce(&mut Overlay, &mut Vec<ControlAction>)) {
        let mut out = Vec::new();
        event(&mut self.nodes[rank].overlay, &mut out);
        for action in out {
            match action {
                ControlAction::Send(to, message) => {
                    for to in to {
                        // Every message survives its encoding.
                        self.put(rank, to, Item::Message(Message::parse(&message.encode()).unwrap()));
                    }
                }
                ControlAction::Notice(notice) => {
                    let Node { overlay, inbox, .. } = &mut self.nodes[rank];
                    inbox.extend(match notice {
                        Notice::Lost { rank: lost, .. } if lost == rank => overlay.excluded_by().map(Known::Excluded),
                        Notice::Lost { rank: other, .. } | Notice::Left { rank: other, .. } => {
                            let gone = match overlay.presence(other) {
                                Presence::Silent => Gone::Silent,
                                Presence::Moved => Gone::Moved,
                                _ => Gone::Ended,
                            };
                            Some(Known::Gone(other, gone))
                        }
                        Notice::View { from, message } => Some(Known::Message(from, message)),
                        Notice::Failed { .. } | Notice::Unreached { .. } => None,
                    });
                }
                ControlAction::Deliver(from, Body::View(message)) => {
                    self.nodes[rank].inbox.push_back(Known::Message(from, message));
                }
                // See `repair`.
                ControlAction::Dial(_) | ControlAction::Deliver(..) => {}
            }
        }
    }

    fn deliver(&mut self, from: usize, to: usize) {
        let item = self.lines.get_mut(&(from, to)).unwrap().pop_front().unwrap();
        self.control(to, |overlay, out| match item {
            Item::Message(Message::Notice(notice)) => overlay.received_notice(from, notice, out),
            Item::Message(Message::Routed(routed)) => overlay.received_routed(routed, out),
            Item::Message(other) => panic!("{other:?}"),
            Item::End => overlay.link_down(from, true, "end", out),
        });
        if !self.nodes[to].overlay.links().contains(&from) {
            self.lines.remove(&(from, to));
        }
    }

    /// Replaces connections of a rank to ranks that are gone.
    fn repair(&mut self, rank: usize) {
        for other in self.nodes[rank].overlay.not_connected() {
            let theirs = &self.nodes[other];
            let ended = !theirs.alive || theirs.left;
            let is_cut = self.cut.contains(&(rank, other)) || theirs.overlay.presence(rank) != Presence::Present;
            if ended || is_cut {
                self.control(rank, |overlay, out| overlay.lost(other, ended, "no answer", out));
            } else if !theirs.frozen && !theirs.leaving && !theirs.overlay.links().contains(&rank) {
                self.connect(rank, other);
            }
        }
    }

    fn act(&mut self, rank: usize, action: Action) {
        match action {
            Action::Send(to, message) => {
                self.control(rank, |overlay, out| overlay.send(&to, Body::View(message), out));
            }
            Action::Publish(message) => {
                self.control(rank, |overlay, out| overlay.publish(Notice::View { from: rank, message }, out));
            }
            Action::Bind(_) => {
                self.addresses += 1;
                let mut out = Vec::new();
                self.nodes[rank].agreement.bound(Ok(self.addresses.to_le_bytes().to_vec()), &mut out);
                // The actions that follow from binding come before those that were queued: the driver reports it at once.
                let later = std::mem::take(&mut self.nodes[rank].todo);
                self.nodes[rank].todo.extend(out);
                self.nodes[rank].todo.extend(later);
            }
            Action::Discard | Action::Abandon => {}
            Action::Build { addresses, members } => {
                let members: BTreeSet<usize> = members.into_iter().collect();
                let entry = self.builds.entry(addresses.clone()).or_default();
                assert!(entry[0].is_empty() || entry[0] == members, "two member lists for one view");
                entry[0] = members;
                entry[1].insert(rank);
                self.nodes[rank].build = Some((addresses, false, false));
            }
            Action::Cancel(_) => {
                if let Some((_, _, cancelled)) = &mut self.nodes[rank].build {
                    *cancelled = true;
                }
            }
            Action::Finish(outcome) => {
                if matches!(outcome, Outcome::Opened(..)) {
                    // It leaves the old group in order.
                    self.control(rank, |overlay, out| overlay.publish(Notice::Left { rank, moved: false }, out));
                    self.nodes[rank].leaving = true;
                }
                self.nodes[rank].outcome = Some(outcome);
            }
        }
    }

    fn put(&mut self, from: usize, to: usize, item: Item) {
        if !self.cut.contains(&(from, to))
            && let Some(line) = self.lines.get_mut(&(from, to))
        {
            line.push_back(item);
        }
    }

    fn end_lines(&mut self, rank: usize) {
        for to in (0..self.nodes.len()).filter(|to| *to != rank) {
            self.put(rank, to, Item::End);
            self.lines.remove(&(to, rank));
        }
    }

    /// Kills a rank; some of its last messages may not have left it.
    fn kill(&mut self, rank: usize) {
        if !self.takes_part(rank) {
            return;
        }
        self.nodes[rank].alive = false;
        for to in (0..self.nodes.len()).filter(|to| *to != rank) {
            let Some(line) = self.lines.get_mut(&(rank, to)) else { continue };
            let unsent = self.choices.below(line.len().min(3) + 1);
            line.truncate(line.len() - unsent);
        }
        self.end_lines(rank);
    }

    /// Cuts two ranks off from each other, of which both learn by missing heartbeats.
    fn cut_off(&mut self, a: usize, b: usize) {
        for (from, to) in [(a, b), (b, a)] {
            self.cut.insert((from, to));
            if let Some(line) = self.lines.get_mut(&(from, to)) {
                line.clear();
            }
            if self.nodes[to].alive && !self.nodes[to].left && self.nodes[to].overlay.links().contains(&from) {
                self.control(to, |overlay, out| overlay.lost(from, false, "no heartbeat", out));
            }
        }
    }

    /// Runs to the end, with these events before the steps of these numbers. Ranks that wait repeat what they said, a few times.
    fn run(&mut self, mut events: Vec<Event>) {
        let mut reminders = 0;
        loop {
            let (due, later): (Vec<_>, Vec<_>) = events.into_iter().partition(|(at, _)| *at <= self.steps);
            events = later;
            due.into_iter().for_each(|(_, event)| event(self));
            if self.step() {
                continue;
            }
            reminders += 1;
            if reminders > 3 {
                break;
            }
            let waits = |node: &&mut Node| node.alive && node.called && !node.frozen && node.outcome.is_none();
            for Node { agreement, todo, .. } in self.nodes.iter_mut().filter(waits) {
                let mut out = Vec::new();
                agreement.remind(&mut out);
                todo.extend(out);
            }
        }
    }

    /// The deadline passes on every rank that still takes part.
    fn expire(&mut self) {
        for late in [false, true] {
            for rank in 0..self.nodes.len() {
                if self.takes_part(rank) {
                    let mut out = Vec::new();
                    self.nodes[rank].agreement.expire(late, &mut out);
                    self.nodes[rank].todo.extend(out);
                }
            }
            self.run(Vec::new());
        }
    }

    fn survivors(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|rank| self.nodes[*rank].alive).collect()
    }

    /// All survivors are in the same view.
    #[track_caller]
    fn check_together(&self, script: &str) {
        let survivors = self.survivors();
        let mut views = BTreeSet::new();
        for rank in &survivors {
            match &self.nodes[*rank].outcome {
                Some(Outcome::Opened(view, members)) => _ = views.insert((*view, members.clone())),
                other => panic!("{script}: rank {rank} ended with {other:?}"),
            }
        }
        assert!(views.len() <= 1, "{script}: survivors are in different views: {views:?}");
        for (_, members) in views {
            assert!(survivors.iter().all(|rank| members.contains(rank)), "{script}: {members:?} lacks a survivor");
        }
    }
}

fn death(at: usize, who: usize) -> Event {
    (at, Box::new(move |script| script.kill(who)))
}

/// Steps of a run without a death.
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

/// Whether these of the members may go on when the others are cut off.
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

/// Every rank has ended, and at most one part could shrink its view further. The number of parts that could.
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
        // Rank 2 prefers rank 0: rank 1 is alone, or is notified that the others went on.
        let ended = script.nodes[1].outcome.as_ref().unwrap();
        assert!(
            matches!(ended, Outcome::Refused(text) if text.contains("quorum")) || matches!(ended, Outcome::Excluded(0 | 2)),
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
    // Rank 1 runs, and does not call.
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
