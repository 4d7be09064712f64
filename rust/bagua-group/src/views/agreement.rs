//! The agreement on a view as a state machine: one rank's part, without I/O, clock or socket.
//!
//! Each method is an event and appends the actions that it causes. The driver performs the actions in order and reports
//! their results.

use std::collections::{BTreeMap, BTreeSet};

use super::action::{Action, Outcome};
use super::message::{Endpoint, GoneRank, Ready, ViewMessage, named};

/// Number of views in a row that may fail without a lost rank. After more, the agreement ends with the error.
const FAILURES_LIMIT: u32 = 4;

/// Maximum number of calls of [`Agreement::remind`] between two that send something.
const LONGEST_QUIET: u32 = 8;

/// The ranks that may continue without the other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quorum {
    /// More than half of the ranks whose process is not known to have ended. Half of them suffices with the lowest
    /// rank.
    #[default]
    Majority,
    /// Any number of ranks suffices. Parts of the group that cannot reach each other may then both continue.
    Any,
}

/// The way in which a rank is gone, as far as this rank knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Gone {
    /// The rank's process has ended, or the rank has left the group.
    Ended,
    /// The rank cannot be reached, or its connection broke. Its process may still run.
    Silent,
    /// The rank is in another view.
    Moved,
}

/// This rank's progress in the agreement.
#[derive(Clone, Debug)]
enum Phase {
    /// This rank does not take part.
    Idle,
    /// This rank is ready for the current view.
    Waiting,
    /// This rank connects, opens lanes, or waits in the barrier.
    Building(Build),
}

/// A view that is being built.
#[derive(Clone, Debug)]
struct Build {
    view: u64,
    members: Vec<usize>,
    /// Endpoints of the members, only on the leader, which sends the proposal again to a member that did not get it.
    endpoints: Vec<Endpoint>,
    /// True if the driver was asked to cancel the build.
    cancelled: bool,
    /// True if a member has passed the barrier. This rank then uses the view even if a loss makes its barrier fail.
    known_open: bool,
}

/// One rank's part in the agreement on the next view.
#[derive(Clone, Debug)]
pub(in super::super) struct Agreement {
    me: usize,
    size: usize,
    /// The view that this rank is ready for, or will be ready for when its build has ended. Never decreases.
    view: u64,
    /// True if `Ready` was sent for `view`.
    said: bool,
    /// True if [`Action::SayLater`] was returned and [`Agreement::say`] has not been called since.
    says_later: bool,
    /// Calls of [`Agreement::remind`] since the last new message was sent or received. A message in flight must not be
    /// taken for a lost one.
    quiet: u32,
    quorum: Quorum,
    gone: BTreeMap<usize, Gone>,
    /// The last `Ready` of each rank that is not gone. Only the leader gets the messages of all ranks.
    ready: BTreeMap<usize, Ready>,
    /// A rank that had not agreed when the leader looked last. The next search begins at this rank, because the leader
    /// searches after every message.
    awaited: usize,
    /// Ranks that the leader waited for when it gave up.
    missed: Vec<usize>,
    /// This rank's listener for the members of `view`. `Some` once `said` is true.
    endpoint: Option<Endpoint>,
    phase: Phase,
    /// A view whose barrier this rank has entered but not passed, see invariant 3.
    candidate: Option<(u64, Vec<usize>)>,
    /// A rank that continues without this one.
    excluded_by: Option<usize>,
    /// The text of another rank's refusal.
    refused: Option<String>,
    /// True if the deadline has passed.
    expired: bool,
    /// Number of views that failed since the last loss of a rank.
    failures: u32,
}

impl Agreement {
    /// Creates the part of rank `me` of `size` in a group that is itself view `view`.
    pub(in super::super) fn new(me: usize, size: usize, view: u64) -> Agreement {
        Agreement {
            me,
            size,
            view: view + 1,
            said: false,
            says_later: false,
            quiet: 0,
            quorum: Quorum::default(),
            gone: BTreeMap::new(),
            ready: BTreeMap::new(),
            awaited: 0,
            missed: Vec::new(),
            endpoint: None,
            phase: Phase::Idle,
            candidate: None,
            excluded_by: None,
            refused: None,
            expired: false,
            failures: 0,
        }
    }

    /// Starts a call on this rank.
    pub(in super::super) fn call(&mut self, quorum: Quorum, out: &mut Vec<Action>) {
        self.quorum = quorum;
        (self.refused, self.expired, self.failures) = (None, false, 0);
        self.missed.clear();
        if self.said {
            // Start another view, so that a late answer to an earlier call is not mistaken for an answer to this one.
            self.set_view(self.view + 1);
        }
        (self.phase, self.says_later, self.quiet) = (Phase::Waiting, false, 0);
        self.advance(out);
    }

    /// Says that this rank is ready for the current view. `listen` gets the number of the view, opens a listener for
    /// its members, and is called at most once for each view.
    pub(in super::super) fn say(
        &mut self,
        listen: impl FnOnce(u64) -> Result<Endpoint, String>,
        out: &mut Vec<Action>,
    ) {
        self.says_later = false;
        if matches!(self.phase, Phase::Waiting) && !self.said {
            match listen(self.view) {
                Ok(endpoint) => (self.endpoint, self.said, self.quiet) = (Some(endpoint), true, 0),
                Err(text) => return self.refuse(text, out),
            }
            self.say_ready(out);
        }
        self.advance(out);
    }

    /// Records the ranks that this rank's control plane found to be gone. Pass all known ones at once, because each
    /// call makes this rank ready for a later view.
    pub(in super::super) fn lost(&mut self, ranks: impl IntoIterator<Item = (usize, Gone)>, out: &mut Vec<Action>) {
        ranks.into_iter().for_each(|(rank, gone)| self.learn(rank, gone, 0, out));
        self.advance(out);
    }

    /// Called from time to time. Repeats a message that may have been lost with a rank that should have passed it on:
    /// if nothing arrives for one period, and then after two, four and eight periods. More reminders would slow down an
    /// agreement that merely takes long.
    pub(in super::super) fn remind(&mut self, out: &mut Vec<Action>) {
        self.quiet += 1;
        let lasted = self.quiet - 1;
        if lasted == 0 || !(lasted.is_power_of_two() || lasted.is_multiple_of(LONGEST_QUIET)) {
            return;
        }
        match &self.phase {
            Phase::Waiting if self.said => self.say_ready(out),
            Phase::Idle | Phase::Waiting | Phase::Building(_) => {}
        }
    }

    /// Records that the other ranks continue without this rank. Rank `by` said so.
    pub(in super::super) fn exclude(&mut self, by: usize, out: &mut Vec<Action>) {
        self.excluded_by = Some(by);
        self.advance(out);
    }

    /// Handles a message. A message of a gone rank has no effect, except for `Opened`, which other ranks pass on.
    pub(in super::super) fn received(&mut self, from: usize, message: ViewMessage, out: &mut Vec<Action>) {
        let is_opened = matches!(message, ViewMessage::Opened { .. });
        if from >= self.size || from == self.me || (self.gone.contains_key(&from) && !is_opened) {
            return;
        }
        match message {
            ViewMessage::Ready { view, any, gone, endpoint } => {
                self.received_ready(from, Ready { view, any, gone, endpoint }, out);
            }
            ViewMessage::Withdrawn { missing } => {
                self.ready.remove(&from);
                if self.leader() == from {
                    self.missed = missing;
                }
                let waits_for_it = match &self.phase {
                    Phase::Building(build) => build.members.contains(&from) && !build.cancelled,
                    Phase::Idle | Phase::Waiting => false,
                };
                if waits_for_it {
                    self.raise(self.view + 1, Some(from), out);
                }
            }
            ViewMessage::Propose { view, gone, endpoints } => {
                let mine = matches!(self.phase, Phase::Waiting) && view == self.view && self.leader() == from;
                if mine && self.said && gone.iter().eq(self.gone.keys()) && self.is_of_members(&endpoints) {
                    self.accept(endpoints, out);
                }
            }
            ViewMessage::Refused { view, text } => {
                self.ready.remove(&from);
                if !matches!(self.phase, Phase::Idle) && view >= self.view {
                    self.refused = Some(text);
                }
            }
            ViewMessage::Opened { view, gone } => self.received_opened(from, view, &gone, out),
        }
        self.advance(out);
    }

    /// Called when the barrier of the view was passed: every member has opened the view.
    pub(in super::super) fn passed(&mut self, out: &mut Vec<Action>) {
        if let Phase::Building(Build { view, members, .. }) = self.phase.clone() {
            self.open(view, members, out);
        }
        self.advance(out);
    }

    /// Called when the view could not be built. `entered` is true if this rank was in the barrier, which another rank
    /// may have passed.
    pub(in super::super) fn failed(&mut self, entered: bool, text: &str, out: &mut Vec<Action>) {
        let Phase::Building(Build { view, members, known_open, .. }) = self.phase.clone() else { return };
        if entered && known_open {
            self.open(view, members, out);
            return self.advance(out);
        }
        self.candidate = entered.then_some((view, members));
        self.phase = Phase::Waiting;
        self.failures += 1;
        if self.failures > FAILURES_LIMIT {
            return self.refuse(format!("rank {} could not build view {view}: {text}", self.me), out);
        }
        if self.view == view {
            self.set_view(view + 1);
        }
        self.advance(out);
    }

    /// Called when the deadline has passed. The leader knows which ranks are missing, so other ranks wait for its
    /// message until `late` is true.
    pub(in super::super) fn expire(&mut self, late: bool, out: &mut Vec<Action>) {
        let leader = self.leader();
        self.expired |= late || leader == self.me || !self.ready.contains_key(&leader);
        self.advance(out);
    }

    fn living(&self) -> Vec<usize> {
        (0..self.size).filter(|rank| !self.gone.contains_key(rank)).collect()
    }

    /// Returns the leader: the lowest rank that is not gone. It collects the messages of all ranks, and proposes.
    fn leader(&self) -> usize {
        (0..self.size).find(|rank| !self.gone.contains_key(rank)).unwrap_or(self.me)
    }

    /// Records that a rank is gone, and gives up the current view for a view of at least number `least`.
    fn learn(&mut self, rank: usize, gone: Gone, least: u64, out: &mut Vec<Action>) {
        match self.gone.get(&rank) {
            None => _ = self.gone.insert(rank, gone),
            // A rank that is in another view may leave this group or end there. It may still have taken part in that
            // view.
            Some(Gone::Silent) if gone == Gone::Ended => {
                self.gone.insert(rank, gone);
                return;
            }
            Some(_) => return,
        }
        self.ready.remove(&rank);
        self.failures = 0;
        match self.phase {
            // This rank has not said anything about the current view, or will say so again when it takes part.
            Phase::Idle => self.raise(least, Some(rank), out),
            Phase::Waiting | Phase::Building(_) => {
                self.raise(least.max(self.view + 1), Some(rank), out);
            }
        }
    }

    fn received_ready(&mut self, from: usize, ready: Ready, out: &mut Vec<Action>) {
        for GoneRank { rank, ended } in ready.gone.iter().copied() {
            if from < rank && rank < self.size && rank != self.me {
                self.learn(rank, if ended { Gone::Ended } else { Gone::Silent }, ready.view, out);
            }
        }
        let view = ready.view;
        // Messages may overtake each other.
        if self.ready.get(&from).is_some_and(|known| known.view > view) {
            return;
        }
        if self.ready.insert(from, ready).is_none_or(|known| known.view < view) {
            self.quiet = 0;
        }
        match &self.phase {
            // The proposal was lost with a rank that should have passed it on.
            Phase::Building(build) if view == self.view && view == build.view && self.leader() == self.me => {
                self.send_proposal(vec![from], build.endpoints.clone(), out);
            }
            _ => self.raise(view, Some(from), out),
        }
    }

    fn received_opened(&mut self, from: usize, view: u64, gone: &[usize], out: &mut Vec<Action>) {
        if gone.contains(&self.me) {
            self.excluded_by = Some(from);
            return;
        }
        if let Phase::Building(build) = &mut self.phase
            && build.view == view
        {
            build.known_open = true;
        } else if let Some((_, members)) = self.candidate.take_if(|(candidate, _)| *candidate == view) {
            self.open(view, members, out);
        }
    }

    fn set_view(&mut self, view: u64) {
        (self.view, self.said, self.quiet) = (view, false, 0);
        self.endpoint = None;
    }

    /// Gives up the current view for a later one.
    fn raise(&mut self, view: u64, because_of: Option<usize>, out: &mut Vec<Action>) {
        if view <= self.view {
            return;
        }
        self.set_view(view);
        match &mut self.phase {
            Phase::Idle | Phase::Waiting => {}
            // Invariant 3: the build may still pass the barrier. This rank is ready only once the build has failed.
            Phase::Building(build) => {
                if !build.cancelled && !build.known_open {
                    build.cancelled = true;
                    out.push(Action::Cancel(because_of));
                }
            }
        }
    }

    fn say_ready(&self, out: &mut Vec<Action>) {
        let Some(endpoint) = self.endpoint else { return };
        let gone = self.gone.iter().map(|(rank, gone)| GoneRank { rank: *rank, ended: *gone == Gone::Ended }).collect();
        let any = self.quorum == Quorum::Any;
        let to = self.to_leader();
        out.push(Action::Send(to, ViewMessage::Ready { view: self.view, any, gone, endpoint }));
    }

    /// Returns the leader, or all other ranks that are not gone if this rank is the leader.
    fn to_leader(&self) -> Vec<usize> {
        let leader = self.leader();
        if leader != self.me {
            return vec![leader];
        }
        self.living().into_iter().filter(|rank| *rank != self.me).collect()
    }

    /// Takes the next step that the current state allows, and adds its actions to `out`.
    fn advance(&mut self, out: &mut Vec<Action>) {
        let ends = self.excluded_by.is_some() || self.refused.is_some() || self.expired;
        match &mut self.phase {
            Phase::Idle => {}
            Phase::Waiting if ends => self.give_up(out),
            Phase::Waiting if self.said => self.propose(out),
            Phase::Waiting => {
                if !std::mem::replace(&mut self.says_later, true) {
                    out.push(Action::SayLater);
                }
            }
            Phase::Building(build) => {
                if ends && !build.cancelled && !build.known_open {
                    build.cancelled = true;
                    out.push(Action::Cancel(self.excluded_by));
                }
            }
        }
    }

    /// Ends the agreement on this rank without a view.
    fn give_up(&mut self, out: &mut Vec<Action>) {
        let outcome = if let Some(by) = self.excluded_by {
            Outcome::Excluded(by)
        } else if let Some(text) = self.refused.take() {
            Outcome::Refused(text)
        } else {
            Outcome::TimedOut(self.missing())
        };
        let missing = if let Outcome::TimedOut(missing) = &outcome { missing.clone() } else { Vec::new() };
        let to = self.to_leader();
        out.push(Action::Send(to, ViewMessage::Withdrawn { missing }));
        self.finish(outcome, out);
    }

    /// Ends the agreement on all ranks without a view.
    fn refuse(&mut self, text: String, out: &mut Vec<Action>) {
        out.push(Action::Publish(ViewMessage::Refused { view: self.view, text: text.clone() }));
        self.finish(Outcome::Refused(text), out);
    }

    fn finish(&mut self, outcome: Outcome, out: &mut Vec<Action>) {
        if self.candidate.take().is_some() {
            out.push(Action::Abandon);
        }
        self.phase = Phase::Idle;
        out.push(Action::Finish(outcome));
    }

    fn open(&mut self, view: u64, members: Vec<usize>, out: &mut Vec<Action>) {
        let gone = (0..self.size).filter(|rank| members.binary_search(rank).is_err()).collect();
        out.push(Action::Publish(ViewMessage::Opened { view, gone }));
        self.finish(Outcome::Opened(view, members), out);
    }

    /// True if the members with these endpoints are this rank and all other ranks that are not gone.
    fn is_of_members(&self, endpoints: &[Endpoint]) -> bool {
        let before = self.gone.keys().filter(|rank| **rank < self.me).count();
        endpoints.len() == self.size - self.gone.len() && endpoints.get(self.me - before).copied() == self.endpoint
    }

    fn send_proposal(&self, to: Vec<usize>, endpoints: Vec<Endpoint>, out: &mut Vec<Action>) {
        let gone = self.gone.keys().copied().collect();
        out.push(Action::Send(to, ViewMessage::Propose { view: self.view, gone, endpoints }));
    }

    /// Accepts a proposal of the current view with the members at these endpoints.
    fn accept(&mut self, endpoints: Vec<Endpoint>, out: &mut Vec<Action>) {
        // Invariant 3: every rank that is not gone was ready for this view, so no rank has passed an earlier barrier.
        if self.candidate.take().is_some() {
            out.push(Action::Abandon);
        }
        let (view, members) = (self.view, self.living());
        let kept = if self.leader() == self.me { endpoints.clone() } else { Vec::new() };
        let (cancelled, known_open) = (false, false);
        self.phase = Phase::Building(Build { view, members: members.clone(), endpoints: kept, cancelled, known_open });
        out.push(Action::Build { view, endpoints, members });
    }

    /// Proposes the current view if this rank is the leader and all ranks are ready for the view.
    fn propose(&mut self, out: &mut Vec<Action>) {
        if self.leader() != self.me || self.ready.len() + 1 < self.size - self.gone.len() {
            return;
        }
        let disagrees = |rank: &usize| *rank != self.me && !self.gone.contains_key(rank) && !self.agrees(*rank);
        if let Some(rank) = (self.awaited..self.size).chain(0..self.awaited).find(disagrees) {
            self.awaited = rank;
            return;
        }
        let living = self.living();
        if let Err(text) = self.check_quorum(&living) {
            return self.refuse(text, out);
        }
        let endpoint = |rank: &usize| match self.ready.get(rank) {
            Some(ready) => Some(ready.endpoint),
            None => self.endpoint.filter(|_| *rank == self.me),
        };
        let endpoints: Vec<Endpoint> = living.iter().filter_map(endpoint).collect();
        let others = living.into_iter().filter(|rank| *rank != self.me).collect();
        self.send_proposal(others, endpoints.clone(), out);
        self.accept(endpoints, out);
    }

    /// True if a rank is ready for the current view and knows the same ranks to be gone.
    fn agrees(&self, rank: usize) -> bool {
        self.ready.get(&rank).is_some_and(|ready| {
            ready.view == self.view && ready.gone.iter().map(|gone| gone.rank).eq(self.gone.keys().copied())
        })
    }

    fn check_quorum(&self, living: &[usize]) -> Result<(), String> {
        let ready: Vec<&Ready> = living.iter().filter_map(|rank| self.ready.get(rank)).collect();
        if self.quorum == Quorum::Any && ready.iter().all(|ready| ready.any) {
            return Ok(());
        }
        let ended: BTreeSet<usize> =
            ready.iter().flat_map(|ready| &ready.gone).filter(|gone| gone.ended).map(|gone| gone.rank).collect();
        let may_live = |(rank, gone): &(&usize, &Gone)| match gone {
            Gone::Ended => false,
            Gone::Silent => !ended.contains(*rank),
            Gone::Moved => true,
        };
        let absent: Vec<usize> = self.gone.iter().filter(may_live).map(|(rank, _)| *rank).collect();
        let (here, all) = (living.len(), living.len() + absent.len());
        let has_lowest = living.first() < absent.first() || absent.is_empty();
        if 2 * here > all || (2 * here == all && has_lowest) {
            return Ok(());
        }
        Err(format!(
            "no quorum: {here} of the {all} ranks whose process is not known to have ended are here ({}), and {} may live on",
            named(living),
            named(&absent),
        ))
    }

    fn missing(&self) -> Vec<usize> {
        let others = self.living().into_iter().filter(|rank| *rank != self.me);
        match &self.phase {
            Phase::Waiting if !self.missed.is_empty() => {
                self.missed.iter().copied().filter(|rank| *rank != self.me).collect()
            }
            Phase::Waiting if self.leader() != self.me => vec![self.leader()],
            Phase::Waiting => {
                let others: Vec<usize> = others.collect();
                let absent: Vec<usize> = others.iter().copied().filter(|rank| !self.ready.contains_key(rank)).collect();
                let disagree = others.iter().copied().filter(|rank| !self.agrees(*rank));
                let disagree: Vec<usize> = if absent.is_empty() { disagree.collect() } else { absent };
                if disagree.is_empty() { others.into_iter().take(1).collect() } else { disagree }
            }
            Phase::Idle | Phase::Building(_) => others.collect(),
        }
    }
}
