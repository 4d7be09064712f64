//! How the ranks agree on a view and build it.

use std::collections::VecDeque;
use std::time::Duration;

use super::network::{Event, LATENCY, SECOND};
use super::ranks::{End, World};
use crate::control::{Body, Notice, Presence};
use crate::views::{Agreement, Endpoint, Gone, Outcome, Quorum, ViewAction, ViewMessage};

/// As in `views/shrink.rs`.
const REMINDER: u64 = SECOND;

/// Where every rank listens: as long in a message as most of the ports that a system chooses.
const PORT: u16 = 40_000;

/// A view whose members connect or are in its barrier, at one of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Building {
    /// Index in [`World::builds`].
    build: usize,
    /// It is in the barrier.
    entered: bool,
    /// Rounds of it that it has passed.
    round: u32,
    /// By bit: the rounds whose message has come.
    came: u32,
}

/// A view that is built: its members, and how many of them have begun.
pub(super) struct Build {
    view: u64,
    members: Vec<usize>,
    begun: usize,
}

impl World {
    /// A rank learns of a loss, and agrees on a view without it.
    pub(super) fn lost(&mut self, rank: usize, lost: usize) {
        let gone = match self.nodes[rank].overlay.presence(lost) {
            Presence::Silent => Gone::Silent,
            _ => Gone::Ended,
        };
        let is_call = !std::mem::replace(&mut self.nodes[rank].called, true);
        if is_call {
            // In the order of `Driver::run` of views/shrink.rs.
            for (from, message) in std::mem::take(&mut self.nodes[rank].inbox) {
                self.agree(rank, |agreement, out| agreement.received(from, message, out));
            }
        }
        self.agree(rank, |agreement, out| agreement.lost([(lost, gone)], out));
        if is_call {
            self.network.at(self.now + REMINDER, rank, Event::Remind);
            self.agree(rank, |agreement, out| agreement.call(Quorum::Majority, out));
        }
    }

    /// A rank that waits says again what may have been lost.
    pub(super) fn remind(&mut self, rank: usize) {
        if self.nodes[rank].end.is_none() {
            self.network.at(self.now + REMINDER, rank, Event::Remind);
            self.agree(rank, Agreement::remind);
        }
    }

    pub(super) fn view_message(&mut self, rank: usize, from: usize, message: ViewMessage) {
        if self.nodes[rank].called {
            self.agree(rank, |agreement, out| agreement.received(from, message, out));
        } else {
            self.nodes[rank].inbox.push((from, message));
        }
    }

    /// An event of the agreement of a rank, and what follows from it. After its end there are none.
    pub(super) fn agree(&mut self, rank: usize, event: impl FnOnce(&mut Agreement, &mut Vec<ViewAction>)) {
        if self.nodes[rank].end.is_some() {
            return;
        }
        let mut out = Vec::new();
        event(&mut self.nodes[rank].agreement, &mut out);
        let mut actions = VecDeque::from(out);
        while let Some(action) = actions.pop_front() {
            let mut out = Vec::new();
            self.act(rank, action, &mut out);
            actions.extend(out);
        }
    }

    fn act(&mut self, rank: usize, action: ViewAction, out: &mut Vec<ViewAction>) {
        match action {
            ViewAction::Send(to, message) => {
                self.control(rank, |overlay, out| overlay.send(&to, Body::View(message), out));
            }
            ViewAction::Publish(message) => {
                self.control(rank, |overlay, out| overlay.publish(Notice::View { from: rank, message }, out));
            }
            ViewAction::SayLater => {
                let wait = self.nodes[rank].losses.wait(self.begun + Duration::from_nanos(self.now));
                self.network.at(self.now + wait.as_nanos() as u64, rank, Event::Say);
            }
            ViewAction::Abandon => {}
            ViewAction::Build { members, .. } => self.begin_build(rank, members),
            ViewAction::Cancel(_) => {
                if let Some(Building { entered, .. }) = self.nodes[rank].building.take() {
                    self.nodes[rank].agreement.failed(entered, "it was cancelled", out);
                }
            }
            ViewAction::Finish(outcome) => {
                let end = match outcome {
                    Outcome::Opened(view, members) => {
                        let opened = (view, members);
                        let at = self.views.iter().position(|one| *one == opened);
                        End::Opened(at.unwrap_or_else(|| {
                            self.views.push(opened);
                            self.views.len() - 1
                        }))
                    }
                    Outcome::Refused(_) => End::Refused,
                    Outcome::Excluded(_) | Outcome::TimedOut(_) => End::Other,
                };
                self.nodes[rank].end = Some((self.now, end));
                self.unfinished -= 1;
            }
        }
    }

    /// Says that a rank is ready.
    pub(super) fn say(&mut self, rank: usize) {
        self.agree(rank, |agreement, out| agreement.say(|_| Ok(Endpoint { port: PORT, unix: true }), out));
    }

    /// A member knows where all listen.
    fn begin_build(&mut self, rank: usize, members: Vec<usize>) {
        let view = self.nodes[rank].agreement.view();
        let found = self.builds.iter().rposition(|build| build.view == view && build.members == members);
        let build = found.unwrap_or_else(|| {
            self.builds.push(Build { view, members, begun: 0 });
            self.builds.len() - 1
        });
        self.nodes[rank].building = Some(Building { build, entered: false, round: 0, came: 0 });
        self.builds[build].begun += 1;
        if self.builds[build].begun == self.builds[build].members.len() {
            let connected = self.now + self.joined_at.unwrap_or_default().saturating_sub(self.list_known);
            for member in self.builds[build].members.clone() {
                let at = connected + self.network.draw(LATENCY);
                self.network.at(at, member, Event::Connected(build as u64));
            }
        }
    }

    pub(super) fn enter_barrier(&mut self, rank: usize, build: usize) {
        match &mut self.nodes[rank].building {
            Some(building) if building.build == build => building.entered = true,
            _ => return,
        }
        self.send_round(rank, build, 0);
        self.go_through_barrier(rank);
    }

    pub(super) fn received_round(&mut self, rank: usize, build: usize, round: u32) {
        if let Some(building) = &mut self.nodes[rank].building
            && building.build == build
        {
            building.came |= 1 << round;
            self.go_through_barrier(rank);
        }
    }

    /// Sends the message of a round, if there is that round.
    fn send_round(&mut self, rank: usize, build: usize, round: u32) {
        let members = &self.builds[build].members;
        let Ok(own) = members.binary_search(&rank) else { return };
        if 1 << round < members.len() {
            let to = members[(own + (1 << round)) % members.len()];
            self.network.send(self.now, rank, to, 64, 1, Event::Barrier(build as u64, round));
        }
    }

    fn go_through_barrier(&mut self, rank: usize) {
        while let Some(Building { build, entered: true, round, came }) = self.nodes[rank].building {
            if 1 << round >= self.builds[build].members.len() {
                self.nodes[rank].building = None;
                return self.agree(rank, Agreement::passed);
            }
            if came & (1 << round) == 0 {
                return;
            }
            self.nodes[rank].building = Some(Building { build, entered: true, round: round + 1, came });
            self.send_round(rank, build, round + 1);
        }
    }
}
