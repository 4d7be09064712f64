//! The ranks: their state machines, and what events do to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::network::{COST, Event, Item, LATENCY, Network, OPENING, SECOND};
use super::views::{Build, Building};
use super::{PerRank, Report, Scenario, seconds};
use crate::collecting::Collecting;
use crate::control::{Assembly, Body, FULL, Message, Notice, Overlay, Presence, Step};
use crate::views::{Agreement, ViewMessage, collecting};
use crate::wire::Encoding;

/// As [`Config::heartbeat_timeout`](crate::Config::heartbeat_timeout) by default.
pub(super) const HEARTBEAT_TIMEOUT: u64 = 5 * SECOND;
/// The time between two heartbeats, as `control/session.rs` chooses it for that timeout.
pub(super) const PERIOD: u64 = SECOND;
/// Bytes of a rank's address.
pub(super) const ADDRESS: usize = 200;
/// How long after all have joined the fault happens.
const PAUSE: u64 = SECOND / 100;
/// How long after the start a run ends that does not end.
const LIMIT: u64 = 200 * SECOND;

/// What a message is about.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Joining,
    Loss,
    View,
    Repair,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    Runs,
    /// It does nothing, and its connections stay open.
    Frozen,
    /// Its process has ended.
    Ended,
    /// It failed while joining, and listens no more.
    GaveUp,
}

/// How the agreement ended at a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// In the view of this index in [`World::views`].
    Opened(usize),
    Refused,
    Other,
}

/// One rank.
pub(super) struct Node {
    pub(super) overlay: Overlay,
    pub(super) assembly: Assembly,
    pub(super) agreement: Agreement,
    pub(super) state: Condition,
    ended_at: u64,
    /// It knows the addresses of all.
    pub(super) has_list: bool,
    /// The ranks that asked for the list before this one had it.
    pub(super) fetching: Vec<usize>,
    /// The ranks that connected before this one had the list.
    pub(super) waiting: Vec<usize>,
    pub(super) dialling: BTreeSet<usize>,
    /// As in `Plane`: the neighbours were connected once; since when others are missing.
    pub(super) were_connected: bool,
    pub(super) missing: BTreeMap<usize, u64>,
    /// As in `control/probe.rs`: how many were missing when it looked last, and whom it asks next.
    pub(super) seen: usize,
    pub(super) first: usize,
    pub(super) is_ticking: bool,
    has_joined: bool,
    /// Whom it knows to be lost.
    pub(super) named: BTreeSet<usize>,
    known_at: Option<u64>,
    /// Messages about views before it takes part.
    pub(super) inbox: Vec<(usize, ViewMessage)>,
    pub(super) called: bool,
    /// As in `views/shrink.rs`.
    pub(super) losses: Collecting,
    pub(super) building: Option<Building>,
    pub(super) end: Option<(u64, End)>,
    /// By [`Kind`]: messages received. Those for others that the rank passed on count too.
    pub(super) received: [u64; 4],
}

/// All ranks.
pub(super) struct World {
    scenario: Scenario,
    pub(super) nodes: Vec<Node>,
    pub(super) network: Network,
    /// The time of the rank whose event is handled.
    pub(super) now: u64,
    /// Time 0, for what takes times of the real clock.
    pub(super) begun: Instant,
    /// Who is killed or frozen.
    pub(super) victims: BTreeSet<usize>,
    pub(super) registrations: usize,
    /// When the last rank had the list.
    pub(super) list_known: u64,
    joined: usize,
    pub(super) joined_at: Option<u64>,
    connections: Option<PerRank>,
    fault_at: Option<u64>,
    pub(super) builds: Vec<Build>,
    /// The views that were opened.
    pub(super) views: Vec<(u64, Vec<usize>)>,
    /// Ranks that have not come to the end of the scenario.
    pub(super) unfinished: usize,
}

impl World {
    pub(super) fn new(scenario: Scenario, size: usize, seed: u64) -> World {
        let mut network = Network::new(size, seed, if scenario == Scenario::Loss { 100 } else { 0 });
        let node = |rank| Node {
            overlay: Overlay::new(rank, size, FULL),
            assembly: Assembly::new(rank, size),
            agreement: Agreement::new(rank, size, 0),
            state: Condition::Runs,
            ended_at: u64::MAX,
            has_list: false,
            fetching: Vec::new(),
            waiting: Vec::new(),
            dialling: BTreeSet::new(),
            were_connected: false,
            missing: BTreeMap::new(),
            seen: usize::MAX,
            first: 0,
            is_ticking: false,
            has_joined: false,
            named: BTreeSet::new(),
            known_at: None,
            inbox: Vec::new(),
            called: false,
            losses: collecting(size),
            building: None,
            end: None,
            received: [0; 4],
        };
        if scenario == Scenario::Slow {
            for _ in 0..size / 10 {
                let rank = network.draw(size as u64) as usize;
                network.slow_down(rank);
            }
        }
        let mut victims = BTreeSet::new();
        let count = match scenario {
            Scenario::NoFault | Scenario::Cut => 0,
            Scenario::KillPercent => (size / 100).max(1),
            Scenario::KillAgreeing => 3,
            _ => 1,
        };
        if scenario == Scenario::KillAgreeing {
            victims.extend([0, inner(size)]);
        }
        while victims.len() < count {
            victims.insert(match scenario {
                Scenario::KillRootJoining => 0,
                Scenario::KillInnerJoining => 2,
                _ => network.draw(size as u64) as usize,
            });
        }
        World {
            scenario,
            nodes: (0..size).map(node).collect(),
            network,
            now: 0,
            begun: Instant::now(),
            victims,
            registrations: 0,
            list_known: 0,
            joined: 0,
            joined_at: None,
            connections: None,
            fault_at: None,
            builds: Vec::new(),
            views: Vec::new(),
            unfinished: if scenario == Scenario::NoFault { size } else { size - count },
        }
    }

    pub(super) fn size(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn scenario_is_joining(&self) -> bool {
        self.scenario.is_joining()
    }

    /// Runs to the end of the scenario, and until the last message about it has arrived.
    pub(super) fn run(&mut self) {
        self.start();
        while let Some((at, item)) = self.network.next() {
            if self.unfinished > 0 && at > LIMIT {
                break;
            }
            if self.unfinished > 0 || matches!(item.event, Event::Message(_)) {
                self.happen(at, item);
            }
        }
    }

    fn happen(&mut self, at: u64, item: Item) {
        let Item { from, to, departed, bytes, event } = item;
        let (from, rank) = (from as usize, to as usize);
        self.now = at;
        let event = match event {
            // It was not written before the sender ended.
            Event::List if self.nodes[from].ended_at < departed => Event::NoList(from),
            _ if self.nodes[from].ended_at < departed => return,
            event => event,
        };
        if self.nodes[rank].state != Condition::Runs {
            return self.happen_without(rank, from, event);
        }
        let (cost, kind) = match &event {
            Event::Message(message) => (COST, Some(kind_of(message))),
            Event::Register => (OPENING, Some(Kind::Joining)),
            Event::Fetch | Event::MayFetch | Event::List | Event::NoList(_) => (COST, Some(Kind::Joining)),
            Event::Barrier(..) => (COST, Some(Kind::View)),
            Event::Accepted | Event::End => (COST, None),
            _ => (0, None),
        };
        self.now = self.network.handle(at, rank, cost, bytes);
        if let Some(kind) = kind {
            self.nodes[rank].received[kind as usize] += 1;
        }
        match event {
            Event::Message(message) => self.received(rank, from, message),
            Event::End => self.control(rank, |overlay, out| {
                if overlay.links().contains(&from) {
                    overlay.link_down(from, true, "its process died or its connection broke (end of stream)", out);
                }
            }),
            Event::Silent(of) => {
                self.control(rank, |overlay, out| overlay.lost(of, false, "no heartbeat for 5.0 s", out));
            }
            Event::Accept => self.accept(rank, from),
            Event::Accepted => self.accepted(rank, from),
            Event::Duplicate => _ = self.nodes[rank].dialling.remove(&from),
            Event::NoAnswer { rank: of, ended } => {
                self.nodes[rank].dialling.remove(&of);
                self.control(rank, |overlay, out| overlay.lost(of, ended, "no answer", out));
            }
            Event::Register => self.registered(),
            Event::MayFetch => {
                let parent = super::joining::parent(rank);
                self.network.send(self.now, rank, parent, ADDRESS, 3, Event::Fetch);
            }
            Event::Fetch => self.asked_for_list(rank, from),
            Event::List => self.has_list(rank),
            Event::NoList(lost) => self.gives_up(rank, lost),
            Event::Tick => self.tick(rank),
            Event::Say => self.say(rank),
            Event::Remind => self.remind(rank),
            Event::Connected(build) => self.enter_barrier(rank, build as usize),
            Event::Barrier(build, round) => self.received_round(rank, build as usize, round),
            Event::Fault => self.fault(rank),
        }
    }

    /// What happens at a rank that does not run.
    fn happen_without(&mut self, rank: usize, from: usize, event: Event) {
        match event {
            Event::Fetch => self.asked_for_list(rank, from),
            Event::Accept => self.accept(rank, from),
            // The other end has an open connection, whose end it has not seen.
            Event::Accepted if self.nodes[rank].state == Condition::Frozen => self.silent(from, rank),
            Event::Accepted => self.network.end(self.now, rank, from),
            _ => {}
        }
    }

    fn fault(&mut self, rank: usize) {
        let now = self.now;
        self.fault_at.get_or_insert(now);
        match self.scenario {
            Scenario::NoFault => {}
            Scenario::Cut => {
                self.network.is_cut = true;
                for one in 0..self.size() {
                    for other in self.nodes[one].overlay.links().clone() {
                        if self.network.separates(one, other) {
                            self.silent(one, other);
                        }
                    }
                }
            }
            Scenario::Freeze => {
                self.nodes[rank].state = Condition::Frozen;
                for other in self.nodes[rank].overlay.links().clone() {
                    self.silent(other, rank);
                }
            }
            Scenario::Kill
            | Scenario::KillPercent
            | Scenario::Slow
            | Scenario::Loss
            | Scenario::KillAgreeing
            | Scenario::KillRootJoining
            | Scenario::KillInnerJoining => {
                (self.nodes[rank].state, self.nodes[rank].ended_at) = (Condition::Ended, now);
                for other in self.nodes[rank].overlay.links().clone() {
                    self.network.end(now, rank, other);
                }
            }
        }
    }

    /// A rank gets no more heartbeats from another.
    fn silent(&mut self, rank: usize, of: usize) {
        let after = HEARTBEAT_TIMEOUT + self.network.draw(HEARTBEAT_TIMEOUT / 5);
        self.network.at(self.now + after, rank, Event::Silent(of));
    }

    /// An event of the overlay of a rank, and what follows from it.
    pub(super) fn control(&mut self, rank: usize, event: impl FnOnce(&mut Overlay, &mut Vec<crate::control::Action>)) {
        let mut out = Vec::new();
        event(&mut self.nodes[rank].overlay, &mut out);
        self.perform(rank, out);
    }

    pub(super) fn send(&mut self, rank: usize, to: &[usize], message: Message) {
        let bytes = message.frame().len();
        let message = Arc::new(message);
        for other in to {
            self.network.send(self.now, rank, *other, bytes, 1, Event::Message(Arc::clone(&message)));
        }
    }

    fn received(&mut self, rank: usize, from: usize, message: Arc<Message>) {
        let node = &mut self.nodes[rank];
        let is_known = matches!(&*message, Message::Notice(notice) if node.overlay.knows(notice));
        // A copy of a notice that has no effect would be most of a run.
        if is_known || !node.overlay.links().contains(&from) {
            return;
        }
        match Arc::unwrap_or_clone(message) {
            Message::Connected { apart } => {
                let step = node.assembly.reported(from, apart);
                self.assemble(rank, step);
            }
            Message::Complete { apart } => {
                let step = node.assembly.completed(apart);
                self.assemble(rank, step);
            }
            Message::Notice(notice) => {
                self.control(rank, |overlay, out| overlay.received_notice(from, notice, out));
            }
            Message::Routed(routed) => self.control(rank, |overlay, out| overlay.received_routed(routed, out)),
            Message::Heartbeat | Message::LeaveAck => {}
        }
    }

    /// Performs a step of the assembly.
    pub(super) fn assemble(&mut self, rank: usize, step: Option<Step>) {
        let Some((to, message)) = step.map(Step::message) else { return };
        let links = self.nodes[rank].overlay.links();
        let to: Vec<usize> = to.into_iter().filter(|other| links.contains(other)).collect();
        self.send(rank, &to, message);
        if self.nodes[rank].assembly.complete().is_some() && !std::mem::replace(&mut self.nodes[rank].has_joined, true)
        {
            self.joined += 1;
            if self.joined == self.size() {
                self.all_have_joined();
            }
        }
    }

    fn all_have_joined(&mut self) {
        self.joined_at = Some(self.now);
        self.connections = Some(self.count_connections());
        match self.scenario {
            Scenario::NoFault => self.unfinished = 0,
            Scenario::Cut => self.network.at(self.now + PAUSE, 0, Event::Fault),
            _ if self.scenario.is_joining() => {}
            _ => {
                for victim in self.victims.clone() {
                    let is_later = self.scenario == Scenario::KillAgreeing && [0, inner(self.size())].contains(&victim);
                    let later = if is_later { self.network.draw(agreeing(self.size())) } else { 0 };
                    self.network.at(self.now + PAUSE + later, victim, Event::Fault);
                }
            }
        }
    }

    fn count_connections(&self) -> PerRank {
        let running = self.nodes.iter().filter(|node| node.state == Condition::Runs);
        PerRank::of(running.map(|node| node.overlay.links().len() as u64))
    }

    /// Whether a rank has to know that another is lost.
    fn must_name(&self, rank: usize, other: usize) -> bool {
        let half = self.size() / 2;
        match self.scenario {
            Scenario::Cut => (rank < half) != (other < half),
            _ => self.victims.contains(&other),
        }
    }

    fn names_to_know(&self, rank: usize) -> usize {
        match (self.scenario, rank < self.size() / 2) {
            (Scenario::Cut, true) => self.size() - self.size() / 2,
            (Scenario::Cut, false) => self.size() / 2,
            _ => self.victims.len(),
        }
    }

    /// A rank knows that another is lost.
    pub(super) fn names(&mut self, rank: usize, lost: usize) {
        let (now, all) = (self.now, self.names_to_know(rank));
        self.nodes[rank].named.insert(lost);
        if self.nodes[rank].known_at.is_none() && self.nodes[rank].named.len() >= all {
            let known = self.nodes[rank].named.iter().filter(|other| self.must_name(rank, **other)).count();
            if known == all {
                self.nodes[rank].known_at = Some(now);
                if self.scenario.is_joining() {
                    self.unfinished -= 1;
                }
            }
        }
        if !std::mem::replace(&mut self.nodes[rank].is_ticking, true) {
            // Each rank has its own moments.
            let since = (now + rank as u64 * 7_919_000) % PERIOD;
            self.network.at(now + PERIOD - since, rank, Event::Tick);
        }
    }

    /// A notice that holds for a rank.
    pub(super) fn noticed(&mut self, rank: usize, notice: Notice) {
        match notice {
            Notice::Lost { rank: lost, .. } if lost == rank => {
                if let Some(by) = self.nodes[rank].overlay.excluded_by() {
                    self.agree(rank, |agreement, out| agreement.exclude(by, out));
                }
            }
            // A report that does not count: see the overlay's invariant 2.
            Notice::Lost { rank: lost, .. } if self.nodes[rank].overlay.presence(lost) == Presence::Present => {}
            Notice::Lost { rank: lost, .. } => {
                self.names(rank, lost);
                if self.joined_at.is_some() && !self.scenario.is_joining() {
                    self.lost(rank, lost);
                }
            }
            Notice::View { from, message } => self.view_message(rank, from, message),
            // No rank leaves, no group fails, and no deadline passes here.
            _ => {}
        }
    }

    pub(super) fn delivered(&mut self, rank: usize, from: usize, body: Body) {
        if let Body::View(message) = body {
            self.view_message(rank, from, message);
        }
    }

    pub(super) fn report(&self) -> Report {
        let running = || self.nodes.iter().enumerate().filter(|(_, node)| node.state == Condition::Runs);
        let since = |last: Option<u64>| Some(seconds(last?.saturating_sub(self.fault_at?)));
        let traffic = |kind: Kind| PerRank::of(running().map(|(_, node)| node.received[kind as usize]));
        let gave_up = |rank: usize| self.nodes[rank].state == Condition::GaveUp;
        let (mut wrong, mut missing) = (0, 0);
        for (rank, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.state != Condition::Ended) {
            wrong += node.named.iter().filter(|lost| !self.must_name(rank, **lost) && !gave_up(**lost)).count();
            if node.state == Condition::Runs {
                let known = node
                    .named
                    .iter()
                    .filter(|lost| self.must_name(rank, **lost) && node.overlay.presence(**lost) != Presence::Present);
                missing += self.names_to_know(rank) - known.count();
            }
        }
        let ends = |end: End| running().filter(|(_, node)| matches!(&node.end, Some((_, e)) if *e == end)).count();
        let opened = running().filter_map(|(_, node)| match node.end {
            Some((at, End::Opened(_))) => Some(at),
            _ => None,
        });
        Report {
            connections: self.connections.unwrap_or_else(|| self.count_connections()),
            joined: if self.scenario.is_joining() { None } else { self.joined_at.map(seconds) },
            joining: traffic(Kind::Joining),
            known: since(running().filter_map(|(_, node)| node.known_at).max()),
            losses: traffic(Kind::Loss),
            view: since(opened.max()),
            views: traffic(Kind::View),
            wrong,
            missing,
            different: self.views.len(),
            refused: ends(End::Refused),
            unfinished: self.unfinished,
        }
    }
}

/// A rank that passes on the messages of rank 0 to a quarter of all.
fn inner(ranks: usize) -> usize {
    (ranks / 4).next_power_of_two()
}

/// For how long the ranks agree on a view after a kill, before they connect: the leader handles a message of each, and sends one to each.
fn agreeing(ranks: usize) -> u64 {
    4 * LATENCY + 2 * COST * ranks as u64
}

fn kind_of(message: &Message) -> Kind {
    match message {
        Message::Connected { .. } | Message::Complete { .. } => Kind::Joining,
        Message::Notice(Notice::View { .. }) => Kind::View,
        Message::Routed(routed) if matches!(routed.body, Body::View(_)) => Kind::View,
        Message::Routed(_) => Kind::Repair,
        Message::Notice(_) | Message::Heartbeat | Message::LeaveAck => Kind::Loss,
    }
}
