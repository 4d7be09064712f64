//! The agreement on a view as a state machine: one rank's part, without I/O, clock or socket.
//!
//! Each method is an event and appends the actions that it causes. The driver performs them in order and reports what came of them.

use std::collections::{BTreeMap, BTreeSet};

use super::message::{GoneRank, ViewMessage};

/// How many views may fail in a row without any rank being lost before the agreement ends with the error.
const FAILURES_LIMIT: u32 = 4;

/// Which ranks may go on without the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quorum {
    /// More than half of the ranks whose process is not known to have ended, or half of them with the lowest.
    #[default]
    Majority,
    /// Any. Parts of the group that cannot reach each other may then both go on.
    Any,
}

/// What is known of a rank that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gone {
    /// Its process has ended or it has left the group.
    Ended,
    /// It cannot be reached, or its connection broke; its process may live on.
    Silent,
    /// It is in another view.
    Moved,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Send a message to these ranks.
    Send(Vec<usize>, ViewMessage),
    /// Bind for a view of these members and report [`Agreement::bound`].
    Bind(Vec<usize>),
    /// Drop what was bound.
    Discard,
    /// Connect to the members, open their lanes, make a barrier, and report [`Agreement::passed`] or [`Agreement::failed`].
    Build {
        /// The addresses of the members, in the order of their ranks.
        addresses: Vec<Vec<u8>>,
        /// The members.
        members: Vec<usize>,
    },
    /// End the build soon: because of this rank, or because the deadline has passed.
    Cancel(Option<usize>),
    /// Notify the members of the built group that this rank does not use it, and drop it.
    Abandon,
    /// The agreement has ended.
    Finish(Outcome),
}

/// How an agreement ends on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The built group is the view of this number with these members.
    Opened(u64, Vec<usize>),
    /// The others go on without this rank, as this one of them says.
    Excluded(usize),
    /// There is no view, for this reason.
    Refused(String),
    /// The deadline passed before these ranks had done their part.
    TimedOut(Vec<usize>),
}

/// How far this rank is.
#[derive(Clone, Debug)]
enum Phase {
    /// It does not take part.
    Idle,
    /// It is ready for the current view.
    Waiting,
    /// It has accepted a proposal of the current view, and waits for the members' addresses.
    Bound(Vec<usize>),
    /// It connects, opens lanes, or waits in the barrier.
    Building(Build),
    /// It has passed the barrier of a view, or a member has.
    Opened(u64, Vec<usize>),
}

/// A view that is being built.
#[derive(Clone, Debug)]
struct Build {
    view: u64,
    members: Vec<usize>,
    /// The driver was asked to end it.
    cancelled: bool,
    /// A member has passed the barrier.
    known_open: bool,
}

/// The last `Ready` of another rank.
#[derive(Clone, Debug)]
struct Ready {
    view: u64,
    any: bool,
    gone: Vec<GoneRank>,
}

/// One rank's part in the agreement on the next view.
#[derive(Clone, Debug)]
pub(super) struct Agreement {
    me: usize,
    size: usize,
    /// The view that this rank is ready for, or will be when its build has ended. Never decreases.
    view: u64,
    /// `Ready` was sent for `view`.
    said: bool,
    quorum: Quorum,
    gone: BTreeMap<usize, Gone>,
    /// By rank; not of those that are gone.
    ready: BTreeMap<usize, Ready>,
    /// Of the members of `view`.
    addresses: BTreeMap<usize, Vec<u8>>,
    phase: Phase,
    /// A view whose barrier this rank has entered but not passed, see invariant 3.
    candidate: Option<(u64, Vec<usize>)>,
    /// Who has opened the view that is being built or is open.
    opened_by: BTreeSet<usize>,
    /// A rank that goes on without this one.
    excluded_by: Option<usize>,
    /// Another rank's refusal.
    refused: Option<String>,
    /// The deadline has passed.
    expired: bool,
    /// Views that failed since a rank was lost.
    failures: u32,
}

impl Agreement {
    /// Rank `me` of `size` in a group that is itself view `view`.
    pub(super) fn new(me: usize, size: usize, view: u64) -> Agreement {
        Agreement {
            me,
            size,
            view: view + 1,
            said: false,
            quorum: Quorum::default(),
            gone: BTreeMap::new(),
            ready: BTreeMap::new(),
            addresses: BTreeMap::new(),
            phase: Phase::Idle,
            candidate: None,
            opened_by: BTreeSet::new(),
            excluded_by: None,
            refused: None,
            expired: false,
            failures: 0,
        }
    }

    /// This rank takes part.
    pub(super) fn call(&mut self, quorum: Quorum, out: &mut Vec<Action>) {
        self.quorum = quorum;
        (self.refused, self.expired, self.failures) = (None, false, 0);
        if self.said {
            // The others must not take what an earlier call said for this one.
            self.set_view(self.view + 1);
        }
        self.phase = Phase::Waiting;
        if self.excluded_by.is_none() {
            self.say_ready(out);
        }
        self.advance(out);
    }

    /// A rank is gone, as the control plane of this rank found.
    pub(super) fn lost(&mut self, rank: usize, gone: Gone, out: &mut Vec<Action>) {
        self.learn(rank, gone, 0, out);
        self.advance(out);
    }

    /// A message has arrived. Those of ranks that are gone have no effect: their connections may have broken in one direction only.
    pub(super) fn received(&mut self, from: usize, message: ViewMessage, out: &mut Vec<Action>) {
        if from >= self.size || from == self.me || self.gone.contains_key(&from) {
            return;
        }
        match message {
            ViewMessage::Ready { view, any, gone } => self.received_ready(from, Ready { view, any, gone }, out),
            ViewMessage::Withdrawn => {
                self.ready.remove(&from);
                let waits_for_it = match &self.phase {
                    Phase::Bound(members) => members.contains(&from),
                    Phase::Building(build) => build.members.contains(&from) && !build.cancelled,
                    Phase::Idle | Phase::Waiting | Phase::Opened(..) => false,
                };
                if waits_for_it {
                    self.raise(self.view + 1, Some(from), out);
                }
            }
            ViewMessage::Propose { view, members } => {
                let living = self.living();
                let mine = matches!(self.phase, Phase::Waiting) && view == self.view;
                if mine && living.first() == Some(&from) && members == living {
                    self.accept(members, out);
                }
            }
            ViewMessage::Address { view, address } if view == self.view => _ = self.addresses.insert(from, address),
            ViewMessage::Address { .. } => {}
            ViewMessage::Refused { view, text } => {
                self.ready.remove(&from);
                if !matches!(self.phase, Phase::Idle) && view >= self.view {
                    self.refused = Some(text);
                }
            }
            ViewMessage::Opened { view, members } => self.received_opened(from, view, &members, out),
            ViewMessage::Abandoned => self.learn(from, Gone::Moved, 0, out),
        }
        self.advance(out);
    }

    /// What became of [`Action::Bind`]: this rank's address, or the text of the error.
    pub(super) fn bound(&mut self, outcome: Result<Vec<u8>, String>, out: &mut Vec<Action>) {
        let Phase::Bound(members) = &self.phase else { return };
        match outcome {
            Ok(address) => {
                let others = members.iter().copied().filter(|rank| *rank != self.me).collect();
                self.addresses.insert(self.me, address.clone());
                out.push(Action::Send(others, ViewMessage::Address { view: self.view, address }));
            }
            Err(text) => return self.refuse(text, out),
        }
        self.advance(out);
    }

    /// The barrier of the view was passed: every member has opened it.
    pub(super) fn passed(&mut self, out: &mut Vec<Action>) {
        if let Phase::Building(Build { view, members, .. }) = self.phase.clone() {
            self.open(view, members, out);
        }
        self.advance(out);
    }

    /// The view could not be built. `entered`: this rank was in the barrier, so that another may have passed it.
    pub(super) fn failed(&mut self, entered: bool, text: &str, out: &mut Vec<Action>) {
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
        if !(self.expired || self.excluded_by.is_some() || self.refused.is_some()) {
            self.say_ready(out);
        }
        self.advance(out);
    }

    /// The deadline has passed.
    pub(super) fn expire(&mut self, out: &mut Vec<Action>) {
        self.expired = true;
        self.advance(out);
    }

    /// True when a view is open here and only the others' [`ViewMessage::Opened`] is waited for.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Opened(..))
    }

    /// This rank has waited long enough for the others' [`ViewMessage::Opened`].
    pub(super) fn linger_ended(&mut self, out: &mut Vec<Action>) {
        if let Phase::Opened(view, members) = self.phase.clone() {
            self.finish(Outcome::Opened(view, members), out);
        }
    }

    /// The view that this rank is ready for or has accepted.
    pub(super) fn view(&self) -> u64 {
        self.view
    }

    fn living(&self) -> Vec<usize> {
        (0..self.size).filter(|rank| !self.gone.contains_key(rank)).collect()
    }

    fn others(&self) -> Vec<usize> {
        (0..self.size).filter(|rank| *rank != self.me).collect()
    }

    /// Records that a rank is gone, and gives up the current view for one of at least number `least`.
    fn learn(&mut self, rank: usize, gone: Gone, least: u64, out: &mut Vec<Action>) {
        match self.gone.get(&rank) {
            None => _ = self.gone.insert(rank, gone),
            // Who is in another view may leave this group or end there: no sign that it took no part in it.
            Some(Gone::Silent) if gone == Gone::Ended => {
                self.gone.insert(rank, gone);
                return;
            }
            Some(_) => return,
        }
        self.ready.remove(&rank);
        self.failures = 0;
        match self.phase {
            Phase::Opened(..) => {}
            // It has said nothing of the current view, or says so of a later one when it takes part.
            Phase::Idle => self.raise(least, Some(rank), out),
            Phase::Waiting | Phase::Bound(_) | Phase::Building(_) => {
                self.raise(least.max(self.view + 1), Some(rank), out);
            }
        }
    }

    fn received_ready(&mut self, from: usize, ready: Ready, out: &mut Vec<Action>) {
        for GoneRank { rank, ended } in ready.gone.iter().copied() {
            if rank == self.me {
                // Of two ranks that cannot reach each other the higher one goes.
                if from < self.me {
                    self.excluded_by = Some(from);
                } else {
                    return self.learn(from, Gone::Silent, ready.view, out);
                }
            } else if from < rank && rank < self.size {
                self.learn(rank, if ended { Gone::Ended } else { Gone::Silent }, ready.view, out);
            }
        }
        let view = ready.view;
        self.ready.insert(from, ready);
        if !matches!(self.phase, Phase::Opened(..)) {
            self.raise(view, Some(from), out);
        }
    }

    fn received_opened(&mut self, from: usize, view: u64, members: &[usize], out: &mut Vec<Action>) {
        if !members.contains(&self.me) {
            self.excluded_by = Some(from);
            return;
        }
        if let Phase::Building(build) = &mut self.phase
            && build.view == view
        {
            build.known_open = true;
            self.opened_by.insert(from);
        } else if matches!(self.phase, Phase::Opened(open, _) if open == view) {
            self.opened_by.insert(from);
        } else if let Some((_, members)) = self.candidate.take_if(|(candidate, _)| *candidate == view) {
            if matches!(self.phase, Phase::Bound(_)) {
                out.push(Action::Discard);
            }
            self.opened_by.insert(from);
            self.open(view, members, out);
        }
    }

    fn set_view(&mut self, view: u64) {
        self.view = view;
        self.said = false;
        self.addresses.clear();
    }

    /// Gives up the current view for this later one.
    fn raise(&mut self, view: u64, because_of: Option<usize>, out: &mut Vec<Action>) {
        if view <= self.view {
            return;
        }
        self.set_view(view);
        match &mut self.phase {
            Phase::Idle | Phase::Opened(..) => {}
            Phase::Waiting => self.say_ready(out),
            Phase::Bound(_) => {
                out.push(Action::Discard);
                self.phase = Phase::Waiting;
                self.say_ready(out);
            }
            // Invariant 3: it may still pass the barrier, and is ready only when it has not.
            Phase::Building(build) => {
                if !build.cancelled {
                    build.cancelled = true;
                    out.push(Action::Cancel(because_of));
                }
            }
        }
    }

    fn say_ready(&mut self, out: &mut Vec<Action>) {
        self.said = true;
        let gone = self.gone.iter().map(|(rank, gone)| GoneRank { rank: *rank, ended: *gone == Gone::Ended }).collect();
        let any = self.quorum == Quorum::Any;
        // Also to those that are gone: one that was frozen learns so that it is.
        out.push(Action::Send(self.others(), ViewMessage::Ready { view: self.view, any, gone }));
    }

    /// What follows from what is known now.
    fn advance(&mut self, out: &mut Vec<Action>) {
        let ends = self.excluded_by.is_some() || self.refused.is_some() || self.expired;
        match self.phase.clone() {
            Phase::Idle => {}
            Phase::Waiting | Phase::Bound(_) if ends => self.give_up(out),
            Phase::Waiting => self.propose(out),
            Phase::Bound(members) => {
                if members.iter().all(|rank| self.addresses.contains_key(rank)) {
                    let addresses = members.iter().filter_map(|rank| self.addresses.remove(rank)).collect();
                    let (view, cancelled, known_open) = (self.view, false, false);
                    self.opened_by.clear();
                    self.phase = Phase::Building(Build { view, members: members.clone(), cancelled, known_open });
                    out.push(Action::Build { addresses, members });
                }
            }
            Phase::Building(build) => {
                if ends && !build.cancelled {
                    self.phase = Phase::Building(Build { cancelled: true, ..build });
                    out.push(Action::Cancel(self.excluded_by));
                }
            }
            Phase::Opened(view, members) => {
                let waits_for = |rank: &usize| !self.opened_by.contains(rank) && !self.gone.contains_key(rank);
                if !members.iter().any(waits_for) {
                    self.finish(Outcome::Opened(view, members), out);
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
        out.push(Action::Send(self.others(), ViewMessage::Withdrawn));
        self.finish(outcome, out);
    }

    /// Ends the agreement on all ranks without a view.
    fn refuse(&mut self, text: String, out: &mut Vec<Action>) {
        out.push(Action::Send(self.others(), ViewMessage::Refused { view: self.view, text: text.clone() }));
        self.finish(Outcome::Refused(text), out);
    }

    fn finish(&mut self, outcome: Outcome, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Bound(_)) {
            out.push(Action::Discard);
        }
        if self.candidate.take().is_some() {
            out.push(Action::Abandon);
        }
        self.phase = Phase::Idle;
        out.push(Action::Finish(outcome));
    }

    fn open(&mut self, view: u64, members: Vec<usize>, out: &mut Vec<Action>) {
        self.opened_by.insert(self.me);
        out.push(Action::Send(self.others(), ViewMessage::Opened { view, members: members.clone() }));
        self.phase = Phase::Opened(view, members);
    }

    /// Accepts a proposal of the current view.
    fn accept(&mut self, members: Vec<usize>, out: &mut Vec<Action>) {
        // Invariant 3: every rank that is not gone was ready for this view, so none has passed the barrier of an earlier one.
        if self.candidate.take().is_some() {
            out.push(Action::Abandon);
        }
        self.phase = Phase::Bound(members.clone());
        out.push(Action::Bind(members));
    }

    /// Proposes the current view if that is this rank's part and all are ready for it.
    fn propose(&mut self, out: &mut Vec<Action>) {
        let living = self.living();
        if living.first() != Some(&self.me) || living.iter().any(|rank| *rank != self.me && !self.agrees(*rank)) {
            return;
        }
        if let Err(text) = self.check_quorum(&living) {
            return self.refuse(text, out);
        }
        let others = living.iter().copied().filter(|rank| *rank != self.me).collect();
        out.push(Action::Send(others, ViewMessage::Propose { view: self.view, members: living.clone() }));
        self.accept(living, out);
    }

    /// True when a rank is ready for the current view and knows the same ranks to be gone.
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
        let ended =
            |rank: usize| ready.iter().flat_map(|ready| &ready.gone).any(|gone| gone.rank == rank && gone.ended);
        let may_live = |(rank, gone): &(&usize, &Gone)| match gone {
            Gone::Ended => false,
            Gone::Silent => !ended(**rank),
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

    /// Whom this rank waits for.
    fn missing(&self) -> Vec<usize> {
        let others = self.living().into_iter().filter(|rank| *rank != self.me);
        match &self.phase {
            Phase::Bound(members) => {
                members.iter().copied().filter(|rank| !self.addresses.contains_key(rank)).collect()
            }
            Phase::Waiting => {
                let others: Vec<usize> = others.collect();
                let absent: Vec<usize> = others.iter().copied().filter(|rank| !self.ready.contains_key(rank)).collect();
                let disagree = others.iter().copied().filter(|rank| !self.agrees(*rank));
                let disagree: Vec<usize> = if absent.is_empty() { disagree.collect() } else { absent };
                if disagree.is_empty() { others.into_iter().take(1).collect() } else { disagree }
            }
            Phase::Idle | Phase::Building(_) | Phase::Opened(..) => others.collect(),
        }
    }
}

/// "rank 1" or "ranks 1, 2".
fn named(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}") }
}
