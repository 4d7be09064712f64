//! Ranks with their control plane and agreement, over scripted connections. A seed determines every step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::super::control::{Action as ControlAction, Body, FULL, Message, Notice, Overlay, Presence};
use super::super::super::wire::Encoding;
use super::super::action::{Action, Outcome};
use super::super::agreement::{Agreement, Gone, Quorum};
use super::super::message::{Endpoint, ViewMessage};

/// A run that takes more steps than this hangs in a loop.
const STEPS_LIMIT: usize = 100_000;

/// A sequence of choices that a seed determines.
pub(super) struct Choices(u64);

impl Choices {
    fn below(&mut self, limit: usize) -> usize {
        // Marsaglia's xorshift64.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit
    }
}

/// An item on a connection. Items arrive in the order in which they were sent.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Message(Message),
    /// The connection has ended.
    End,
}

/// An input that the control plane of a rank has for the rank's agreement.
#[derive(Clone, Debug)]
pub(super) enum Known {
    Message(usize, ViewMessage),
    Gone(usize, Gone),
    Excluded(usize),
}

/// Ports of a view's members. They distinguish two views with the same number, because each rank listens at a new port
/// for each view.
pub(super) type Key = Vec<u16>;

/// One rank.
pub(super) struct Node {
    pub(super) agreement: Agreement,
    overlay: Overlay,
    pub(super) alive: bool,
    /// True while the rank does nothing. Messages to it wait.
    pub(super) frozen: bool,
    pub(super) called: bool,
    /// Inputs that the agreement gets next.
    inbox: VecDeque<Known>,
    /// Actions that are not performed yet.
    todo: VecDeque<Action>,
    /// The build in progress, if any; true if its barrier was entered; true if it was cancelled.
    build: Option<(Key, bool, bool)>,
    pub(super) outcome: Option<Outcome>,
    /// True when the rank begins to leave the group; `left` follows when it has left.
    leaving: bool,
    left: bool,
    /// True if the rank must still pass on which ranks have left.
    passes_later: bool,
    /// True if the agreement must still say that the rank is ready.
    says_later: bool,
}

/// An event that the script may choose next.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Call(usize),
    Act(usize),
    Say(usize),
    Take(usize),
    Deliver(usize, usize),
    Repair(usize),
    Enter(usize),
    Pass(usize),
    Fail(usize),
    Leave(usize),
    Depart(usize),
}

/// A change to the script just before the step with this number.
pub(super) type Event = (usize, Box<dyn Fn(&mut Script)>);

/// Ranks, the messages between them, and the groups that they build.
pub(super) struct Script {
    pub(super) nodes: Vec<Node>,
    quorum: Quorum,
    choices: Choices,
    /// The connections. Each direction has its own queue.
    pub(super) lines: BTreeMap<(usize, usize), VecDeque<Item>>,
    /// Pairs of ranks between which nothing arrives.
    cut: BTreeSet<(usize, usize)>,
    /// For each view: its members, and the ranks that began to build it, entered its barrier, or gave up.
    builds: BTreeMap<Key, [BTreeSet<usize>; 4]>,
    /// The newest port at which a rank listens.
    port: u16,
    pub(super) steps: usize,
}

impl Script {
    pub(super) fn new(size: usize, seed: u64, quorum: Quorum) -> Script {
        Script::connected(size, seed, quorum, FULL)
    }

    /// Creates ranks with a connection between every two of them. In a world larger than `full`, each rank has only a
    /// few.
    pub(super) fn connected(size: usize, seed: u64, quorum: Quorum, full: usize) -> Script {
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
            passes_later: false,
            says_later: false,
        });
        let mut script = Script {
            nodes: nodes.collect(),
            quorum,
            choices: Choices(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            lines: BTreeMap::new(),
            cut: BTreeSet::new(),
            builds: BTreeMap::new(),
            port: 0,
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

    pub(super) fn takes_part(&self, rank: usize) -> bool {
        self.nodes[rank].alive && self.nodes[rank].outcome.is_none()
    }

    fn enabled(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (rank, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.alive && !node.frozen && !node.left) {
            let from = self.lines.iter().filter(|((_, to), line)| *to == rank && !line.is_empty());
            steps.extend(from.map(|((from, _), _)| Step::Deliver(*from, rank)));
            if node.passes_later {
                steps.push(Step::Depart(rank));
            }
            if node.leaving {
                let knows = |other: &usize| {
                    let other = &self.nodes[*other];
                    !other.alive || other.left || other.overlay.presence(rank) != Presence::Present
                };
                let none_comes =
                    !node.passes_later && self.lines.iter().all(|((_, to), line)| *to != rank || line.is_empty());
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
            if node.says_later {
                steps.push(Step::Say(rank));
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

    /// Performs one step. Returns false if no step is possible.
    pub(super) fn step(&mut self) -> bool {
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
            Step::Depart(rank) => {
                self.nodes[rank].passes_later = false;
                self.control(rank, Overlay::pass_departures);
                return true;
            }
            Step::Leave(rank) => {
                self.nodes[rank].left = true;
                self.end_lines(rank);
                return true;
            }
            Step::Say(rank) => {
                let Node { agreement, says_later, .. } = &mut self.nodes[rank];
                *says_later = false;
                self.port += 1;
                agreement.say(|_| Ok(Endpoint { port: self.port, unix: true }), &mut out);
                rank
            }
            Step::Take(rank) => {
                let Node { agreement, inbox, .. } = &mut self.nodes[rank];
                match inbox.pop_front().unwrap() {
                    Known::Message(from, message) => agreement.received(from, message, &mut out),
                    Known::Gone(other, gone) => agreement.lost([(other, gone)], &mut out),
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

    /// Handles an event of a rank's control plane, with everything that follows from it.
    pub(super) fn control(&mut self, rank: usize, event: impl FnOnce(&mut Overlay, &mut Vec<ControlAction>)) {
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
                ControlAction::PassLater => self.nodes[rank].passes_later = true,
                ControlAction::Notice(Notice::Left { ranks, moved }) => {
                    let gone = if moved { Gone::Moved } else { Gone::Ended };
                    self.nodes[rank].inbox.extend(ranks.into_iter().map(|other| Known::Gone(other, gone)));
                }
                ControlAction::Notice(notice) => {
                    let Node { overlay, inbox, .. } = &mut self.nodes[rank];
                    inbox.extend(match notice {
                        Notice::Lost { rank: lost, .. } if lost == rank => overlay.excluded_by().map(Known::Excluded),
                        Notice::Lost { rank: other, .. } => {
                            let gone = match overlay.presence(other) {
                                Presence::Present => continue,
                                Presence::Silent => Gone::Silent,
                                Presence::Moved => Gone::Moved,
                                _ => Gone::Ended,
                            };
                            Some(Known::Gone(other, gone))
                        }
                        Notice::View { from, message } => Some(Known::Message(from, message)),
                        Notice::Left { .. } | Notice::Failed { .. } | Notice::Unreached { .. } => None,
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
            Action::SayLater => self.nodes[rank].says_later = true,
            Action::Abandon => {}
            Action::Build { view: _, endpoints, members } => {
                let key: Key = endpoints.iter().map(|endpoint| endpoint.port).collect();
                let members: BTreeSet<usize> = members.into_iter().collect();
                let entry = self.builds.entry(key.clone()).or_default();
                assert!(entry[0].is_empty() || entry[0] == members, "two member lists for one view");
                entry[0] = members;
                entry[1].insert(rank);
                self.nodes[rank].build = Some((key, false, false));
            }
            Action::Cancel(_) => {
                if let Some((_, _, cancelled)) = &mut self.nodes[rank].build {
                    *cancelled = true;
                }
            }
            Action::Finish(outcome) => {
                if matches!(outcome, Outcome::Opened(..)) {
                    // The rank leaves the old group in order.
                    self.control(rank, |overlay, out| overlay.leave(false, out));
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

    pub(super) fn end_lines(&mut self, rank: usize) {
        for to in (0..self.nodes.len()).filter(|to| *to != rank) {
            self.put(rank, to, Item::End);
            self.lines.remove(&(to, rank));
        }
    }

    /// Kills a rank. Some of its last messages may be lost.
    pub(super) fn kill(&mut self, rank: usize) {
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

    /// Cuts two ranks off from each other. Both notice it by missing heartbeats.
    pub(super) fn cut_off(&mut self, a: usize, b: usize) {
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

    /// Runs to the end, with each event before the step of its number. Waiting ranks repeat their messages a few times.
    pub(super) fn run(&mut self, mut events: Vec<Event>) {
        let mut reminders = 0;
        loop {
            let (due, later): (Vec<_>, Vec<_>) = events.into_iter().partition(|(at, _)| *at <= self.steps);
            events = later;
            due.into_iter().for_each(|(_, event)| event(self));
            if self.step() {
                continue;
            }
            reminders += 1;
            if reminders > 8 {
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

    /// Makes the deadline pass on every rank that still takes part.
    pub(super) fn expire(&mut self) {
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

    pub(super) fn survivors(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|rank| self.nodes[*rank].alive).collect()
    }

    /// Checks that all survivors are in the same view.
    #[track_caller]
    pub(super) fn check_together(&self, script: &str) {
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
