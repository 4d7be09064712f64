//! The exchange of addresses, opening connections, and asking whether ranks run.

use super::network::{Event, OPENING, SECOND};
use super::ranks::{ADDRESS, Condition, HEARTBEAT_TIMEOUT, PERIOD, World};
use crate::control::Action;

/// The most ranks that are asked at a time, as in `control/probe.rs`.
const AT_A_TIME: usize = 8;

/// Bytes of a hello, a proof and an answer.
const HANDSHAKE: usize = 200;

/// The time in which a rank is killed while joining.
const WINDOW: u64 = SECOND / 1000;

/// The rank that sends the addresses to a rank other than 0.
pub(super) fn parent(rank: usize) -> usize {
    rank.saturating_sub(1) / 16
}

impl World {
    /// All ranks start within a millisecond and register.
    pub(super) fn start(&mut self) {
        for rank in 1..self.size() {
            let begins = self.network.draw(SECOND / 1000);
            self.network.send(begins, rank, 0, ADDRESS + HANDSHAKE, 3, Event::Register);
        }
    }

    /// At rank 0.
    pub(super) fn registered(&mut self) {
        self.registrations += 1;
        if self.registrations + 1 < self.size() {
            return;
        }
        self.has_list(0);
        let mut last = self.now;
        for rank in 1..self.size() {
            last = if parent(rank) == 0 {
                self.send_list(0, rank)
            } else {
                self.network.send(self.now, 0, rank, 32, 1, Event::MayFetch)
            };
        }
        if self.victims.contains(&0) && self.scenario_is_joining() {
            let at = last + self.network.draw(WINDOW);
            self.network.at(at, 0, Event::Fault);
        }
    }

    fn send_list(&mut self, from: usize, to: usize) -> u64 {
        let bytes = self.size() * (ADDRESS + 2);
        self.network.send(self.now, from, to, bytes, 1, Event::List)
    }

    /// A child asks for the list.
    pub(super) fn asked_for_list(&mut self, rank: usize, child: usize) {
        match (self.nodes[rank].state, self.nodes[rank].has_list) {
            (Condition::Ended | Condition::GaveUp, _) => {
                let at = self.now + self.network.latency(rank, child);
                self.network.at(at, child, Event::NoList(self.why_gave_up(rank)));
            }
            (_, true) => _ = self.send_list(rank, child),
            (_, false) => self.nodes[rank].fetching.push(child),
        }
    }

    fn why_gave_up(&self, rank: usize) -> usize {
        let named = self.nodes[rank].named.first();
        if self.nodes[rank].state == Condition::GaveUp { named.copied().unwrap_or(rank) } else { rank }
    }

    /// A rank that will not get the list: it fails, and its children with it.
    pub(super) fn gives_up(&mut self, rank: usize, lost: usize) {
        if self.nodes[rank].has_list {
            return;
        }
        self.nodes[rank].state = Condition::GaveUp;
        self.names(rank, lost);
        for child in std::mem::take(&mut self.nodes[rank].fetching) {
            self.network.send(self.now, rank, child, 64, 1, Event::NoList(lost));
        }
    }

    /// A rank has the list of addresses: it sends it on and connects.
    pub(super) fn has_list(&mut self, rank: usize) {
        if std::mem::replace(&mut self.nodes[rank].has_list, true) {
            return;
        }
        self.list_known = self.now;
        for child in std::mem::take(&mut self.nodes[rank].fetching) {
            self.send_list(rank, child);
        }
        if rank > 0 && self.victims.contains(&rank) && self.scenario_is_joining() {
            let at = self.now + self.network.draw(WINDOW);
            self.network.at(at, rank, Event::Fault);
        }
        for lower in self.nodes[rank].overlay.not_connected().into_iter().filter(|other| *other < rank) {
            self.dial(rank, lower);
        }
        for other in std::mem::take(&mut self.nodes[rank].waiting) {
            self.accept(rank, other);
        }
        self.network.at(self.now + PERIOD, rank, Event::Tick);
        self.nodes[rank].is_ticking = true;
    }

    /// A rank opens a connection, unless that is in progress.
    pub(super) fn dial(&mut self, rank: usize, to: usize) {
        if !self.nodes[rank].dialling.insert(to) {
            return;
        }
        if self.network.separates(rank, to) {
            return self.no_answer(rank, to);
        }
        self.network.handle(self.now, rank, OPENING, 0);
        self.network.send(self.now, rank, to, HANDSHAKE, 3, Event::Accept);
    }

    /// A rank that another one asks or connects to does not answer.
    fn no_answer(&mut self, rank: usize, of: usize) {
        let is_cut = self.network.separates(rank, of);
        let (wait, ended) = match self.nodes[of].state {
            Condition::Ended | Condition::GaveUp if !is_cut => (2 * self.network.latency(rank, of), true),
            _ => (HEARTBEAT_TIMEOUT, false),
        };
        self.network.at(self.now + wait, rank, Event::NoAnswer { rank: of, ended });
    }

    /// A connection arrives.
    pub(super) fn accept(&mut self, rank: usize, from: usize) {
        match self.nodes[rank].state {
            Condition::Runs if self.nodes[rank].has_list => {
                self.now = self.network.handle(self.now, rank, OPENING, 0);
                let mut out = Vec::new();
                let is_new = self.nodes[rank].overlay.link_up(from, &mut out);
                let answer = if is_new { Event::Accepted } else { Event::Duplicate };
                self.network.send(self.now, rank, from, 0, 1, answer);
                self.perform(rank, out);
                self.check_neighbours(rank);
            }
            Condition::Runs => self.nodes[rank].waiting.push(from),
            // While joining it tries until the deadline, and asks whether the rank runs; later it asks first.
            _ if self.nodes[from].were_connected => self.no_answer(from, rank),
            _ => {}
        }
    }

    /// A connection is accepted.
    pub(super) fn accepted(&mut self, rank: usize, by: usize) {
        self.nodes[rank].dialling.remove(&by);
        let mut out = Vec::new();
        if self.nodes[rank].overlay.link_up(by, &mut out) {
            self.perform(rank, out);
            self.check_neighbours(rank);
        } else {
            // The connection is dropped.
            self.network.end(self.now, rank, by);
        }
    }

    /// When the last neighbour is connected for the first time, continues the assembly.
    pub(super) fn check_neighbours(&mut self, rank: usize) {
        let node = &mut self.nodes[rank];
        if !node.were_connected && node.overlay.not_connected().is_empty() {
            node.were_connected = true;
            let step = node.assembly.connected(false);
            self.assemble(rank, step);
        }
    }

    /// The time between two heartbeats has passed: see `Plane::repair` and `control/probe.rs`.
    pub(super) fn tick(&mut self, rank: usize) {
        let now = self.now;
        let node = &mut self.nodes[rank];
        node.is_ticking = false;
        let wanted = node.overlay.not_connected();
        if node.state != Condition::Runs || wanted.is_empty() {
            node.missing.clear();
            return;
        }
        node.is_ticking = true;
        self.network.at(now + PERIOD, rank, Event::Tick);
        let node = &mut self.nodes[rank];
        if !node.were_connected {
            if std::mem::replace(&mut node.seen, wanted.len()) == wanted.len() {
                let asked: Vec<usize> =
                    wanted.iter().copied().filter(|other| *other >= node.first).take(AT_A_TIME).collect();
                node.first = asked.last().map_or(0, |last| last + 1);
                for other in asked {
                    if self.nodes[other].state != Condition::Runs || self.network.separates(rank, other) {
                        self.no_answer(rank, other);
                    }
                }
            }
            return;
        }
        node.missing.retain(|other, _| wanted.contains(other));
        let mut out = Vec::new();
        for other in wanted {
            if now - *node.missing.entry(other).or_insert(now) > 2 * HEARTBEAT_TIMEOUT {
                node.overlay.lost(other, false, "no connection to it", &mut out);
            }
        }
        node.overlay.connect(node.overlay.not_connected(), &mut out);
        self.perform(rank, out);
    }

    /// Performs what the overlay of a rank asks for. Messages leave in the order in which they were decided on, as in `Connections::send`.
    pub(super) fn perform(&mut self, rank: usize, actions: Vec<Action>) {
        let mut others = Vec::new();
        for action in actions {
            match action {
                Action::Send(to, message) => self.send(rank, &to, message),
                other => others.push(other),
            }
        }
        for action in others {
            match action {
                Action::Dial(other) => self.dial(rank, other),
                Action::Notice(notice) => self.noticed(rank, notice),
                Action::Deliver(from, body) => self.delivered(rank, from, body),
                // Sent above. Ranks that leave are not simulated.
                _ => {}
            }
        }
    }
}
