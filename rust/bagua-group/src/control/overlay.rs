//! Which ranks a rank is connected to, what it passes on between them, and which ranks are gone: a state machine without I/O, clock or
//! socket. Each method is an event and appends the actions that it causes.
//!
//! Up to a number of ranks every two are connected. Above it the ranks are a ring with skips: each is connected to the ranks at the
//! distances 1, 2, 4, … in both directions, at most 2 log2 n of them, as the fingers of Chord (Stoica et al., 2001). When a rank is gone, the next
//! present one beyond it takes its place; where there is none as far as the next skip, only the ring is closed.
//!
//! Two kinds of messages travel over several connections:
//!
//! - A [`Notice`] concerns all ranks. Each rank passes it on once, to all its connections but the one by which it came.
//! - A [`Routed`] message is for some ranks. Each rank passes it on to the connected rank that is nearest to the receiver on the ring; a
//!   message for many divides on its route.
//!
//! Often all ranks leave at the same time. Each says so to those that it is connected to, and these pass it on a little later, together with
//! what has come meanwhile. A new connection gets all that have left in one notice, however many there were. The ranks of a group that has
//! failed leave while many of them have not had a processor to raise that: there only a rank that leaves itself passes on which others have
//! left, and no connection is replaced, so that the end of one rank is no work for ranks that it has no connection to. Both change where
//! ranks agree on the next view.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Notices of one rank arrive in order.** A rank passes notices on in the order in which they came first, and sends a new connection
//!    all of them in that order. So on each connection a notice comes before those that its origin published later.
//! 2. **A rank trusts its own connection to a peer**, and reports of others about the rest. One rank's report that another is silent may be
//!    the fault of the line between the two: of these the higher goes, so that a report counts only from a lower rank, or from a second one.
//!    A report that does not count is passed on all the same: who made it fails for that reason, and may leave.
//! 3. **Whoever agrees on a view knows who has left, or waits for a rank that does.** A rank passes on the departures that it knows before
//!    its first message about a view, and when it leaves.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use super::super::views::{RANKS_LIMIT, ViewMessage};
use super::message::{Body, Message, Notice, Routed};

/// The largest world in which every two ranks are connected.
pub(in super::super) const FULL: usize = 16;

/// The most notices that are kept for new connections; the oldest are dropped first.
const KEPT: usize = 1 << 16;

/// The most routed messages that wait for a connection towards their receivers; the oldest are dropped first.
const HELD: usize = 4096;

/// What is known of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Presence {
    /// It takes part.
    Present,
    /// It has left the group.
    Left,
    /// It has left the group, because it is in another view.
    Moved,
    /// It is lost, and its process is known to have ended.
    Ended,
    /// It is lost, but its process may live on: it is frozen, cut off, or sends what cannot be understood.
    Silent,
}

impl Presence {
    /// Whether the rank is lost, without having left.
    pub(in super::super) fn is_lost(self) -> bool {
        matches!(self, Presence::Ended | Presence::Silent)
    }
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq)]
pub(in super::super) enum Action {
    /// Send a message to these connected ranks.
    Send(Vec<usize>, Message),
    /// Open a connection to this rank.
    Dial(usize),
    /// A notice that holds for this rank. `Lost` of this rank itself: the others go on without it.
    Notice(Notice),
    /// A routed message for this rank, and its sender.
    Deliver(usize, Body),
    /// Call [`Overlay::pass_departures`] after a while.
    PassLater,
}

/// What distinguishes a notice from others: of equal ones only the first is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Ended(usize),
    /// By a rank whose report counts.
    Silent(usize),
    /// By this one, which is higher.
    Accused(usize, usize),
    Failed(u64),
    Unreached(usize),
    Opened(u64),
    Refused(u64),
}

/// The notices of these departures, and whether each rank moved.
fn departures(ranks: impl IntoIterator<Item = (usize, bool)>) -> Vec<Notice> {
    let (moved, left): (Vec<_>, Vec<_>) = ranks.into_iter().partition(|(_, moved)| *moved);
    let notices = |ranks: Vec<(usize, bool)>, moved: bool| {
        let ranks: Vec<usize> = ranks.into_iter().map(|(rank, _)| rank).collect();
        ranks.chunks(RANKS_LIMIT).map(|ranks| Notice::Left { ranks: ranks.to_vec(), moved }).collect::<Vec<_>>()
    };
    [notices(left, false), notices(moved, true)].concat()
}

/// See the module.
#[derive(Clone, Debug)]
pub(in super::super) struct Overlay {
    me: usize,
    size: usize,
    /// The largest world in which every two ranks are connected.
    full: usize,
    /// By rank.
    presence: Vec<Presence>,
    /// The ranks with an open connection, also those that are gone.
    links: BTreeSet<usize>,
    seen: HashSet<Key>,
    /// What was passed on, in order, but for departures.
    notices: VecDeque<Notice>,
    /// This rank has left; whether it moved.
    has_left: Option<bool>,
    /// By rank: a higher one that reports its silence.
    accused: BTreeMap<usize, usize>,
    /// Ranks that another reported as lost, although that does not count here.
    doubted: BTreeSet<usize>,
    held: VecDeque<Routed>,
    /// Ranks that have left, which this one has not passed on, and whether they moved.
    departures: BTreeMap<usize, bool>,
    /// The ranks that no other could connect to before the deadline.
    unreached: BTreeSet<usize>,
    /// A rank that goes on without this one.
    excluded_by: Option<usize>,
    /// A message of the agreement on a view has come by.
    view_is_agreed_on: bool,
}

impl Overlay {
    /// Rank `me` of `size`, connected to no other.
    pub(in super::super) fn new(me: usize, size: usize, full: usize) -> Overlay {
        Overlay {
            me,
            size,
            full,
            presence: vec![Presence::Present; size],
            links: BTreeSet::new(),
            seen: HashSet::new(),
            notices: VecDeque::new(),
            has_left: None,
            accused: BTreeMap::new(),
            doubted: BTreeSet::new(),
            held: VecDeque::new(),
            departures: BTreeMap::new(),
            unreached: BTreeSet::new(),
            excluded_by: None,
            view_is_agreed_on: false,
        }
    }

    /// What is known of a rank.
    pub(in super::super) fn presence(&self, rank: usize) -> Presence {
        self.presence[rank]
    }

    /// What is known of the ranks that are gone.
    pub(in super::super) fn gone(&self) -> impl Iterator<Item = (usize, Presence)> {
        let all = self.presence.iter().copied().enumerate();
        all.filter(|(_, presence)| *presence != Presence::Present)
    }

    /// A rank that goes on without this one.
    pub(in super::super) fn excluded_by(&self) -> Option<usize> {
        self.excluded_by
    }

    /// Whether ranks agree on the next view: this rank or one whose messages it has got or passed on.
    pub(in super::super) fn view_is_agreed_on(&self) -> bool {
        self.view_is_agreed_on
    }

    /// The ranks that no other could connect to before the deadline, as far as it was reported.
    pub(in super::super) fn unreached(&self) -> &BTreeSet<usize> {
        &self.unreached
    }

    /// The ranks with an open connection.
    pub(in super::super) fn links(&self) -> &BTreeSet<usize> {
        &self.links
    }

    /// The present ranks to which this one should be connected.
    pub(in super::super) fn neighbours(&self) -> BTreeSet<usize> {
        if self.size <= self.full {
            return (0..self.size).filter(|rank| *rank != self.me && self.is_present(*rank)).collect();
        }
        let distances = (0..usize::BITS).map_while(|bit| 1usize.checked_shl(bit)).take_while(|d| *d < self.size);
        distances.flat_map(|distance| self.nearest(distance)).collect()
    }

    /// The present ranks beside this one on the ring.
    pub(in super::super) fn beside(&self) -> impl Iterator<Item = usize> {
        self.nearest(1)
    }

    /// In both directions, the present rank that is nearest at this distance or beyond it.
    fn nearest(&self, distance: usize) -> impl Iterator<Item = usize> + use<> {
        // Beyond a gap only the ranks beside it are connected, or each of them would be to all that look over it. From the opposite
        // point of the ring on, the skips of the other direction are nearer.
        let end = match distance {
            1 => self.size,
            _ => (2 * distance).min(self.size / 2 + 1).max(distance + 1),
        };
        let find = |up: bool| {
            let at = |d: usize| if up { self.me + d } else { self.me + self.size - d } % self.size;
            (distance..end).map(at).find(|rank| self.is_present(*rank))
        };
        [find(true), find(false)].into_iter().flatten()
    }

    fn is_present(&self, rank: usize) -> bool {
        self.presence[rank] == Presence::Present
    }

    /// The neighbours to which there is no connection.
    pub(in super::super) fn not_connected(&self) -> BTreeSet<usize> {
        &self.neighbours() - &self.links
    }

    /// Opens missing connections: the higher rank of a pair connects, and is asked to. Called from time to time.
    pub(in super::super) fn connect(&mut self, missing: BTreeSet<usize>, out: &mut Vec<Action>) {
        let (lower, higher): (Vec<usize>, Vec<usize>) = missing.into_iter().partition(|rank| *rank < self.me);
        out.extend(lower.into_iter().map(Action::Dial));
        if !higher.is_empty() && !self.links.is_empty() {
            self.pass_on(Routed { from: self.me, to: higher, body: Body::Connect }, out);
        }
    }

    /// A connection is open. False if there is one already, or the rank is gone.
    pub(in super::super) fn link_up(&mut self, peer: usize, out: &mut Vec<Action>) -> bool {
        if peer >= self.size || peer == self.me || !self.is_present(peer) || !self.links.insert(peer) {
            return false;
        }
        let notices = self.notices.iter().cloned().chain(self.all_departures());
        out.extend(notices.map(|notice| Action::Send(vec![peer], Message::Notice(notice))));
        self.pass_held(out);
        true
    }

    /// All ranks that have left, in few notices.
    fn all_departures(&self) -> Vec<Notice> {
        let own = self.has_left.map(|moved| (self.me, moved));
        let others = self.gone().filter(|(_, presence)| !presence.is_lost());
        departures(others.map(|(rank, presence)| (rank, presence == Presence::Moved)).chain(own))
    }

    /// A connection has ended, for this reason: the peer is lost, unless it had left.
    pub(in super::super) fn link_down(&mut self, peer: usize, ended: bool, reason: &str, out: &mut Vec<Action>) {
        self.unlink(peer);
        self.lost(peer, ended, reason, out);
    }

    /// A connection has ended that was never ready at its other end.
    pub(in super::super) fn unlink(&mut self, peer: usize) {
        self.links.remove(&peer);
    }

    /// A peer is silent, or cannot be connected to, or has ended: this rank's own observation.
    pub(in super::super) fn lost(&mut self, peer: usize, ended: bool, reason: &str, out: &mut Vec<Action>) {
        let notice = Notice::Lost { rank: peer, by: self.me, ended, reason: reason.to_owned() };
        match (self.presence[peer], ended) {
            (Presence::Present, true) => self.presence[peer] = Presence::Ended,
            (Presence::Present, false) => self.presence[peer] = Presence::Silent,
            // A silent process has ended now.
            (Presence::Silent, true) => self.presence[peer] = Presence::Ended,
            _ => return,
        }
        out.push(Action::Notice(notice.clone()));
        self.flood(notice, None, out);
        self.pass_held(out);
    }

    /// Publishes a notice of this rank. It holds for this rank already.
    pub(in super::super) fn publish(&mut self, notice: Notice, out: &mut Vec<Action>) {
        self.flood(notice, None, out);
    }

    /// This rank leaves.
    pub(in super::super) fn leave(&mut self, moved: bool, out: &mut Vec<Action>) {
        self.has_left = Some(moved);
        self.departures.insert(self.me, moved);
        self.pass_departures(out);
    }

    /// Passes on which ranks have left since the last call.
    pub(in super::super) fn pass_departures(&mut self, out: &mut Vec<Action>) {
        for notice in departures(std::mem::take(&mut self.departures)) {
            self.send_to_all(notice, None, out);
        }
    }

    /// Sends a message to some ranks.
    pub(in super::super) fn send(&mut self, to: &[usize], body: Body, out: &mut Vec<Action>) {
        self.pass_on(Routed { from: self.me, to: to.to_vec(), body }, out);
    }

    /// A notice has come from a connected rank.
    pub(in super::super) fn received_notice(&mut self, via: usize, notice: Notice, out: &mut Vec<Action>) {
        // A notice of a rank that is lost, or in another view, does not concern the ranks that are left.
        if via >= self.size || matches!(self.presence[via], Presence::Silent | Presence::Moved) {
            return;
        }
        if let Notice::Left { ranks, moved } = notice {
            return self.departed(ranks, moved, out);
        }
        let Some(key) = self.key(&notice) else { return };
        if self.seen.contains(&key) {
            return;
        }
        self.flood(notice.clone(), Some(via), out);
        if self.holds(&notice, out) {
            out.push(Action::Notice(notice));
            self.pass_held(out);
        }
    }

    /// Whether a notice was passed on before: it has no effect any more.
    #[cfg(test)]
    pub(in super::super) fn knows(&self, notice: &Notice) -> bool {
        self.key(notice).is_some_and(|key| self.seen.contains(&key))
    }

    /// A routed message has come.
    pub(in super::super) fn received_routed(&mut self, routed: Routed, out: &mut Vec<Action>) {
        self.pass_on(routed, out);
    }

    /// Whether a notice holds for this rank; notes what it says.
    fn holds(&mut self, notice: &Notice, out: &mut Vec<Action>) -> bool {
        match *notice {
            Notice::Lost { rank, by, .. } if rank == self.me && by > rank => {
                // The line between the two is broken, or this rank was frozen. Of the two the higher goes.
                out.push(Action::Notice(notice.clone()));
                self.lost(by, false, "it has lost the connection to this rank", out);
                false
            }
            Notice::Lost { rank, by, .. } if rank == self.me => {
                self.excluded_by.get_or_insert(by);
                true
            }
            Notice::Lost { rank, by, ended, .. } => self.reported(rank, by, ended),
            Notice::Unreached { ref ranks, .. } => {
                self.unreached.extend(ranks.iter().filter(|rank| **rank < self.size));
                true
            }
            Notice::Left { .. } | Notice::Failed { .. } | Notice::View { .. } => true,
        }
    }

    /// Ranks have left.
    fn departed(&mut self, mut ranks: Vec<usize>, moved: bool, out: &mut Vec<Action>) {
        ranks.retain(|rank| *rank < self.size && *rank != self.me && self.is_present(*rank));
        if ranks.is_empty() {
            return;
        }
        for rank in &ranks {
            self.presence[*rank] = if moved { Presence::Moved } else { Presence::Left };
        }
        out.push(Action::Notice(Notice::Left { ranks: ranks.clone(), moved }));
        // In a small world the rank itself has sent it to all others.
        if self.size > self.full {
            if self.departures.is_empty() {
                out.push(Action::PassLater);
            }
            self.departures.extend(ranks.into_iter().map(|rank| (rank, moved)));
        }
        self.pass_held(out);
    }

    /// Another rank reports the loss of a third one; whether that is news. It may go on without the rank, and so this group has failed; that
    /// the rank is gone is another matter (invariant 2).
    fn reported(&mut self, rank: usize, by: usize, ended: bool) -> bool {
        if self.presence[rank] == Presence::Silent && ended {
            self.presence[rank] = Presence::Ended;
            return true;
        }
        if !self.is_present(rank) {
            return false;
        }
        let counts = by < rank
            || if ended { !self.links.contains(&rank) } else { *self.accused.entry(rank).or_insert(by) != by };
        if counts {
            self.presence[rank] = if ended { Presence::Ended } else { Presence::Silent };
        } else {
            self.doubted.insert(rank);
        }
        true
    }

    /// `None` for a notice that makes no sense.
    fn key(&self, notice: &Notice) -> Option<Key> {
        let known = |rank: usize| rank < self.size;
        Some(match *notice {
            Notice::Lost { rank, by, .. } if !known(rank) || !known(by) || rank == by => return None,
            Notice::Lost { rank, ended: true, .. } => Key::Ended(rank),
            Notice::Lost { rank, by, .. } if by < rank => Key::Silent(rank),
            Notice::Lost { rank, by, .. } => Key::Accused(rank, by),
            Notice::Unreached { by, .. } if known(by) => Key::Unreached(by),
            Notice::Left { .. } | Notice::Unreached { .. } => return None,
            Notice::Failed { group, .. } => Key::Failed(group),
            Notice::View { ref message, .. } => match *message {
                ViewMessage::Opened { view, .. } => Key::Opened(view),
                ViewMessage::Refused { view, .. } => Key::Refused(view),
                _ => return None,
            },
        })
    }

    /// Sends a notice to all connected ranks but one, unless that was done before.
    fn flood(&mut self, notice: Notice, except: Option<usize>, out: &mut Vec<Action>) {
        let Some(key) = self.key(&notice) else { return };
        if self.seen.insert(key) {
            self.pass_to_all(notice, except, out);
        }
    }

    /// Sends a notice to all connected ranks but one, and keeps it for those that connect later.
    fn pass_to_all(&mut self, notice: Notice, except: Option<usize>, out: &mut Vec<Action>) {
        if self.notices.len() == KEPT {
            self.notices.pop_front();
        }
        self.notices.push_back(notice.clone());
        self.send_to_all(notice, except, out);
    }

    fn send_to_all(&self, notice: Notice, except: Option<usize>, out: &mut Vec<Action>) {
        let to: Vec<usize> = self.links.iter().copied().filter(|link| Some(*link) != except).collect();
        if !to.is_empty() {
            out.push(Action::Send(to, Message::Notice(notice)));
        }
    }

    /// Delivers a routed message, and passes it on towards its other receivers.
    fn pass_on(&mut self, routed: Routed, out: &mut Vec<Action>) {
        let Routed { from, to, body } = routed;
        if matches!(body, Body::View(_)) && !std::mem::replace(&mut self.view_is_agreed_on, true) {
            // Invariant 3.
            self.pass_departures(out);
        }
        let (mut by_link, mut without) = (BTreeMap::<usize, Vec<usize>>::new(), Vec::new());
        let relays = self.relays();
        for receiver in to {
            if receiver == self.me {
                self.deliver(from, body.clone(), out);
            } else if let Some(link) = self.towards(receiver, &relays) {
                by_link.entry(link).or_default().push(receiver);
            } else if receiver < self.size && self.is_present(receiver) {
                without.push(receiver);
            }
        }
        for (link, to) in by_link {
            out.push(Action::Send(vec![link], Message::Routed(Routed { from, to, body: body.clone() })));
        }
        if !without.is_empty() {
            if self.held.len() == HELD {
                self.held.pop_front();
            }
            self.held.push_back(Routed { from, to: without, body });
        }
    }

    fn deliver(&mut self, from: usize, body: Body, out: &mut Vec<Action>) {
        match body {
            Body::Connect if from < self.me && !self.links.contains(&from) && self.is_present(from) => {
                out.push(Action::Dial(from));
            }
            Body::Connect => {}
            body => out.push(Action::Deliver(from, body)),
        }
    }

    /// The ranks that may pass messages on, ascending: the connected ones that are present, without and with those that are doubted. This
    /// rank's own connection to a doubted one may end soon, and what was sent on it would be lost.
    fn relays(&self) -> [Vec<usize>; 2] {
        let is_doubted = |rank: &usize| self.doubted.contains(rank);
        let (doubted, sound) = self.links.iter().copied().filter(|link| self.is_present(*link)).partition(is_doubted);
        [sound, doubted]
    }

    /// The connected rank to which a message for a rank is passed on: the rank itself, also if it is gone (it may only be frozen), or the
    /// relay that is nearest to it on the ring, if that is nearer than this rank.
    fn towards(&self, rank: usize, relays: &[Vec<usize>; 2]) -> Option<usize> {
        if self.links.contains(&rank) {
            return Some(rank);
        }
        if rank >= self.size || !self.is_present(rank) {
            return None;
        }
        let distance = |from: usize| {
            let up = (rank + self.size - from) % self.size;
            up.min(self.size - up)
        };
        let nearest = |among: &Vec<usize>| {
            let at = among.partition_point(|link| *link < rank);
            let beside = [among.get(at).or(among.first()), among[..at].last().or(among.last())];
            let nearest = beside.into_iter().flatten().copied().min_by_key(|link| distance(*link));
            nearest.filter(|link| distance(*link) < distance(self.me))
        };
        relays.iter().find_map(nearest)
    }

    /// Tries again what no connection led to.
    fn pass_held(&mut self, out: &mut Vec<Action>) {
        for routed in std::mem::take(&mut self.held) {
            self.pass_on(routed, out);
        }
    }
}

#[cfg(test)]
mod tests;
