//! [`Group::shrink`]: runs the agreement on the control plane of a group, and builds the next view.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::super::bootstrap::{NextView, connect_view, listen_for_view};
use super::super::collecting::Collecting;
use super::super::config::Config;
use super::super::control::{Listeners, Loss, Plane};
use super::super::group::Group;
use super::super::plane::{Body, Notice};
use super::super::wire::Encoding;
use super::action::{Action, Outcome};
use super::agreement::{Agreement, Gone, Quorum};
use super::message::{Endpoint, RANKS_LIMIT};
use crate::error::{Error, Progress, Result};
use crate::health::{BROKEN_LINE, GroupHealth};
use crate::wait::{Deadline, SLICE, lock, slice_among, wait_on_for};

/// Time after which a rank repeats a message that may have been lost with a rank that passed it on.
const REMINDER: Duration = Duration::from_secs(1);

/// Time per rank of the group that a rank waits for further losses before it says that it is ready. The leader handles
/// at least one message of each rank. The wait is longer while more ranks are lost.
const TOGETHER: Duration = Duration::from_micros(1);

/// Maximum time that a rank waits for further losses.
const LONGEST: Duration = Duration::from_millis(100);

/// Time that a rank whose deadline has passed waits for the leader to name the missing ranks.
const WORD: Duration = Duration::from_millis(500);

/// A view that all its members have opened.
pub struct View<T> {
    /// The group. A member may have been lost since it was opened.
    pub group: Group,
    /// The value that the caller's `open` returned.
    pub opened: T,
    /// Rank in the former group of each rank of this one.
    pub ranks: Vec<usize>,
    /// Ranks of the former group that are not in this one, ascending.
    pub lost: Vec<usize>,
    /// Number of messages that this rank sent for the agreement.
    pub messages: u64,
    /// Number of bytes of these messages.
    pub bytes: u64,
}

impl Group {
    /// Agrees with the remaining ranks on a smaller group without the ranks that are lost or have left, and leaves this
    /// group. The control thread may still be announcing that when this returns. Collective: blocks until every
    /// remaining rank has called. The group may have failed, but need not have. The new group keeps the order of the
    /// ranks.
    ///
    /// `open` opens what the caller needs in the new group, at least a lane. `barrier` runs a barrier there. Both are
    /// called on another thread, and again for another group if a rank is lost meanwhile. After an error, the call may
    /// be repeated.
    ///
    /// # Errors
    /// `Timeout` names the ranks that are alive and have not called within `timeout` (`None` means the group's).
    /// `System` if there is no quorum, or if a rank cannot build the new group. `PeerLost` names this rank itself if
    /// the other ranks continue without it. `InvalidArgument` for a sub-group, and for a group of more than 12,288
    /// ranks.
    pub fn shrink<T: Send>(
        &self,
        timeout: Option<Duration>,
        quorum: Quorum,
        open: impl Fn(&Group) -> Result<T> + Sync,
        barrier: impl Fn(&mut T) -> Result<()> + Sync,
    ) -> Result<View<T>> {
        let Some(plane) = self.plane() else {
            return Err(Error::InvalidArgument(format!(
                "{:?} is a sub-group: shrink the group of all ranks",
                self.name()
            )));
        };
        plane.owner.check()?;
        check_size(plane.config.world_size)?;
        match self.health().cause() {
            Some(Error::Aborted(why)) if plane.has_left() => return Err(Error::Aborted(why)),
            Some(cause @ Error::PeerLost { .. }) if plane.excluded_by().is_some() => return Err(cause),
            _ => {}
        }
        let _call = Call::begin(plane)?;
        let deadline = Deadline::after(timeout.unwrap_or(plane.config.timeout));
        let agreement = lock_agreement(plane);
        let view = std::thread::scope(|scope| {
            let build = |next: NextView, cancel: Arc<Cancel>| {
                let (sender, receiver) = mpsc::channel();
                let (open, barrier) = (&open, &barrier);
                let thread = std::thread::Builder::new().name("bagua-view".to_owned()).spawn_scoped(scope, move || {
                    let built = build(plane, next, &cancel, open, barrier);
                    // The receiver exists until this thread has ended.
                    let _ = sender.send(built);
                    plane.views.notify();
                });
                thread.map(|_| receiver).map_err(|e| Error::system("starting a thread", e))
            };
            let mut driver = Driver {
                group: self,
                plane,
                deadline,
                agreement,
                listeners: None,
                building: None,
                built: None,
                losses: collecting(plane.config.world_size),
                says_at: None,
                sent: (0, 0),
                build,
            };
            let outcome = driver.run(quorum);
            plane.views.lock().agreement = Some(driver.agreement);
            outcome
        })?;
        self.leave_for(&view.group);
        Ok(view)
    }
}

/// Checks that every message about a view of this number of ranks fits into a frame. A peer ends the connection after a
/// longer one.
fn check_size(world_size: usize) -> Result<()> {
    if world_size > RANKS_LIMIT {
        return Err(Error::InvalidArgument(format!(
            "a group of {world_size} ranks to shrink: the limit is {RANKS_LIMIT}"
        )));
    }
    Ok(())
}

/// How long a rank of a group of so many waits for further losses.
fn collecting(world_size: usize) -> Collecting {
    Collecting::new((TOGETHER * world_size as u32).min(LONGEST), LONGEST)
}

/// Takes the agreement of earlier calls, or creates a new one.
fn lock_agreement(plane: &Plane) -> Agreement {
    let Config { rank, world_size, view, .. } = plane.config;
    plane.views.lock().agreement.take().unwrap_or_else(|| Agreement::new(rank, world_size, view))
}

/// Marks a plane as in use by a call, until it is dropped.
struct Call<'a>(&'a Plane);

impl<'a> Call<'a> {
    fn begin(plane: &'a Plane) -> Result<Call<'a>> {
        let mut state = plane.views.lock();
        if state.busy {
            return Err(Error::InvalidArgument("another thread shrinks this group already".to_owned()));
        }
        state.busy = true;
        Ok(Call(plane))
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.views.lock().busy = false;
    }
}

/// Cancels a build from another thread.
#[derive(Default)]
struct Cancel {
    /// True once connecting must end.
    flag: AtomicBool,
    /// The error, once the build is cancelled, and the health of the group, once it is connected.
    state: Mutex<(Option<Error>, Option<Arc<GroupHealth>>)>,
}

impl Cancel {
    /// Ends the build. Waits in the new group end with this error.
    fn cancel(&self, error: Error) {
        self.flag.store(true, Ordering::Release);
        let mut state = lock(&self.state);
        if let Some(health) = &state.1 {
            health.fail_from_peer(error.clone());
        }
        state.0 = Some(error);
    }

    /// Lets `cancel` end the waits of the connected group from now on.
    fn connected(&self, health: &Arc<GroupHealth>) {
        let mut state = lock(&self.state);
        if let Some(error) = &state.0 {
            health.fail_from_peer(error.clone());
        }
        state.1 = Some(Arc::clone(health));
    }
}

/// The outcome of a build. `entered` has the group and the value of `open` if the barrier was entered; `error` is
/// `None` if the barrier was passed.
struct Built<T> {
    entered: Option<(Group, T)>,
    error: Option<Error>,
}

/// Connects to the members of a view, opens their lanes and runs a barrier.
fn build<T>(
    former: &Plane,
    next: NextView,
    cancel: &Cancel,
    open: &(impl Fn(&Group) -> Result<T> + Sync),
    barrier: &(impl Fn(&mut T) -> Result<()> + Sync),
) -> Built<T> {
    let opened = connect_view(former, next, &cancel.flag).and_then(|group| {
        cancel.connected(group.health());
        open(&group).map(|opened| (group, opened))
    });
    match opened {
        Ok((group, mut opened)) => {
            let error = barrier(&mut opened).err();
            Built { entered: Some((group, opened)), error }
        }
        Err(error) => Built { entered: None, error: Some(error) },
    }
}

struct Building<T> {
    members: Vec<usize>,
    cancel: Arc<Cancel>,
    outcome: Receiver<Built<T>>,
}

/// Runs an agreement and performs its actions.
struct Driver<'a, T, B> {
    group: &'a Group,
    plane: &'a Arc<Plane>,
    deadline: Deadline,
    agreement: Agreement,
    /// The listeners for the view that this rank is ready for.
    listeners: Option<Listeners>,
    building: Option<Building<T>>,
    /// The group whose barrier was entered last.
    built: Option<(Group, T)>,
    /// The waits for further losses before this rank says that it is ready.
    losses: Collecting,
    /// Time at which this rank says that it is ready.
    says_at: Option<Instant>,
    /// Number of messages sent to other ranks, and of their bytes.
    sent: (u64, u64),
    /// Starts the thread of a build.
    build: B,
}

impl<T, B> Driver<'_, T, B>
where
    B: Fn(NextView, Arc<Cancel>) -> Result<Receiver<Built<T>>>,
{
    fn run(&mut self, quorum: Quorum) -> Result<View<T>> {
        let mut out = Vec::new();
        // The agreement must know the kept messages before this rank says anything.
        self.learn(&mut out);
        self.agreement.call(quorum, &mut out);
        let mut last_error = None;
        let mut passed: Option<Instant> = None;
        let mut reminded = Instant::now();
        // Everything that this loop waits for wakes it, so a slice may be long.
        let slice = slice_among(self.plane.config.world_size);
        loop {
            if self.plane.has_left() {
                let left = Error::Aborted("this rank left the group".to_owned());
                if let Some(Building { cancel, .. }) = &self.building {
                    cancel.cancel(left.clone());
                }
                return Err(left);
            }
            let seen = self.plane.views.lock().changes;
            self.learn(&mut out);
            self.collect(&mut out, &mut last_error);
            if self.says_at.take_if(|at| *at <= Instant::now()).is_some() {
                self.say(&mut out);
            }
            if reminded.elapsed() > REMINDER {
                reminded = Instant::now();
                self.agreement.remind(&mut out);
            }
            if self.deadline.passed() {
                let late = passed.get_or_insert_with(Instant::now).elapsed() > WORD;
                self.agreement.expire(late, &mut out);
            }
            while !out.is_empty() {
                for action in std::mem::take(&mut out) {
                    if let Some(outcome) = self.perform(action, &mut out) {
                        return self.finish(outcome, last_error);
                    }
                }
            }
            let state = self.plane.views.lock();
            if state.changes == seen {
                let longest = if self.deadline.passed() { SLICE } else { slice.min(self.deadline.left()) };
                let until = self.says_at.map(|at| at.saturating_duration_since(Instant::now()));
                let longest = until.map_or(longest, |until| until.min(longest));
                drop(wait_on_for(self.plane.views.changed(), state, longest));
            }
        }
    }

    /// Passes the control plane's news to the agreement. Reads the losses before the messages, so that a message that
    /// arrived before a connection ended is handled before that end (invariant 4).
    fn learn(&mut self, out: &mut Vec<Action>) {
        let (losses, excluded_by) = (self.plane.losses(), self.plane.excluded_by());
        for (from, message) in self.plane.views.take() {
            self.agreement.received(from, message, out);
        }
        let gone = |loss| match loss {
            Loss::Ended => Gone::Ended,
            Loss::Silent => Gone::Silent,
            Loss::Moved => Gone::Moved,
        };
        self.agreement.lost(losses.into_iter().map(|(rank, loss)| (rank, gone(loss))), out);
        if let Some(by) = excluded_by {
            self.agreement.exclude(by, out);
        }
    }

    /// Listens for the members of a view, and says that this rank is ready.
    fn say(&mut self, out: &mut Vec<Action>) {
        let Driver { plane, agreement, listeners, .. } = self;
        let mut listen = |view| -> Result<Endpoint> {
            let (opened, endpoint) = listen_for_view(plane, view)?;
            *listeners = Some(opened);
            Ok(endpoint)
        };
        agreement.say(|view| listen(view).map_err(|error| error.to_string()), out);
    }

    /// Takes the result of the thread that builds the group of a view, if that thread has ended.
    fn collect(&mut self, out: &mut Vec<Action>, last_error: &mut Option<Error>) {
        let Some(building) = &self.building else { return };
        let Built { entered, error } = match building.outcome.try_recv() {
            Ok(built) => built,
            Err(mpsc::TryRecvError::Empty) => return,
            Err(mpsc::TryRecvError::Disconnected) => {
                Built { entered: None, error: Some(Error::other("the thread that builds a view panicked")) }
            }
        };
        if let Some(error) = &error {
            self.give_way(error, &building.members);
        }
        self.building = None;
        let was_entered = entered.is_some();
        self.built = entered;
        match error {
            None => self.agreement.passed(out),
            Some(error) => {
                self.agreement.failed(was_entered, &error.to_string(), out);
                *last_error = Some(error);
            }
        }
    }

    /// Reports this rank as lost if the view could not be built because the connection between this rank and a lower
    /// one broke. The control plane cannot know which of the two has to go, because it reaches both.
    fn give_way(&self, error: &Error, members: &[usize]) {
        let own = self.plane.config.rank;
        if let Error::PeerLost { rank, noticed_by, reason, .. } = error
            && reason.starts_with(BROKEN_LINE)
            && members.get(*rank.max(noticed_by)) == Some(&own)
        {
            self.plane.publish(Notice::Lost { rank: own, by: own, ended: false, reason: reason.clone() });
        }
    }

    /// Performs an action. Returns the outcome if the agreement has ended.
    fn perform(&mut self, action: Action, out: &mut Vec<Action>) -> Option<Outcome> {
        match action {
            Action::Send(to, message) => {
                let (messages, bytes) = &mut self.sent;
                *messages += to.len() as u64;
                *bytes += (to.len() * message.encode().len()) as u64;
                self.plane.send(&to, Body::View(message));
            }
            Action::SayLater => {
                let now = Instant::now();
                self.says_at = Some(now + self.losses.wait(now));
            }
            Action::Publish(message) => {
                let (messages, bytes) = &mut self.sent;
                let to = self.plane.control_connections();
                *messages += to as u64;
                *bytes += (to * message.encode().len()) as u64;
                self.plane.publish(Notice::View { from: self.plane.config.rank, message });
            }
            Action::Build { view, endpoints, members } => {
                let cancel = Arc::new(Cancel::default());
                let started = match self.listeners.take() {
                    Some(listeners) => {
                        let next = NextView { view, members: members.clone(), endpoints, listeners };
                        (self.build)(next, Arc::clone(&cancel))
                    }
                    None => Err(Error::other("a view is built before this rank listens for its members")),
                };
                match started {
                    Ok(outcome) => self.building = Some(Building { members, cancel, outcome }),
                    Err(error) => self.agreement.failed(false, &error.to_string(), out),
                }
            }
            Action::Cancel(because_of) => {
                if let Some(Building { members, cancel, .. }) = &self.building {
                    cancel.cancel(self.why_cancelled(members, because_of));
                }
            }
            Action::Abandon => self.abandon(),
            Action::Finish(outcome) => return Some(outcome),
        }
        None
    }

    /// Returns the error that ends the waits in a group that is not needed any more, because a member is lost or has
    /// given this view up. The error has ranks of the new group.
    fn why_cancelled(&self, members: &[usize], because_of: Option<usize>) -> Error {
        let position = |rank: usize| members.iter().position(|member| *member == rank);
        let Some((old, new)) = because_of.and_then(|rank| Some((rank, position(rank)?))) else {
            return Error::Aborted("the time to shrink the group has passed".to_owned());
        };
        Error::PeerLost {
            rank: new,
            host: self.group.health().host(old).to_owned(),
            reason: "it was lost, or lost another rank, while the group was being built".to_owned(),
            noticed_by: position(self.plane.config.rank).unwrap_or_default(),
            progress: None,
            source: Default::default(),
        }
    }

    /// Drops the group whose barrier was entered.
    fn abandon(&mut self) {
        let Some((group, opened)) = self.built.take() else { return };
        if let Some(plane) = group.plane() {
            plane.abandon();
        }
        drop(opened);
        group.leave();
    }

    fn finish(&mut self, outcome: Outcome, last_error: Option<Error>) -> Result<View<T>> {
        match outcome {
            Outcome::Opened(_, ranks) => {
                let (group, opened) =
                    self.built.take().ok_or_else(|| Error::other("the view is open, but its group was never built"))?;
                // The ranks are ascending.
                let is_lost = |rank: &usize| ranks.binary_search(rank).is_err();
                let lost = (0..self.plane.config.world_size).filter(is_lost).collect();
                let (messages, bytes) = self.sent;
                group.stats().agreement_messages.store(messages, Ordering::Relaxed);
                group.stats().agreement_bytes.store(bytes, Ordering::Relaxed);
                Ok(View { group, opened, ranks, lost, messages, bytes })
            }
            Outcome::Excluded(by) => {
                let (own, health) = (self.plane.config.rank, self.group.health());
                let mut lost = health.peer_lost(own, "the other ranks went on without it");
                if let Error::PeerLost { noticed_by, .. } = &mut lost {
                    *noticed_by = by;
                }
                Err(lost)
            }
            Outcome::Refused(text) => {
                let source = last_error.as_ref().filter(|error| text.ends_with(&error.to_string()));
                let error = Error::other(text);
                Err(match source {
                    Some(Error::System { source, .. } | Error::PeerLost { source, .. }) => error.caused_by(source),
                    _ => error,
                })
            }
            Outcome::TimedOut(missing) => {
                let after = self.deadline.limit();
                let what = "shrink".to_owned();
                let progress = Some(Box::new(Progress { what, ..Progress::default() }));
                Err(Error::Timeout { after, missing, noticed_by: self.plane.config.rank, progress })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::plane::{Message, Routed};
    use super::super::super::wire::FRAME_LIMIT;
    use super::super::message::{GoneRank, ViewMessage};
    use super::*;

    #[test]
    fn every_message_of_the_largest_group_fits_into_a_frame_and_a_larger_group_is_refused() {
        assert_eq!(check_size(RANKS_LIMIT), Ok(()));
        assert!(matches!(check_size(RANKS_LIMIT + 1), Err(Error::InvalidArgument(_))));
        let all = || (0..RANKS_LIMIT).collect::<Vec<_>>();
        let gone = all().into_iter().map(|rank| GoneRank { rank, ended: true }).collect();
        let view = super::super::super::wire::VIEWS_LIMIT;
        let endpoint = Endpoint { port: u16::MAX, unix: true };
        let routed =
            |body| Message::Routed(Routed { from: RANKS_LIMIT, to: all(), body: Body::View(body), is_down: true });
        let notice = |message| {
            let notice = Notice::View { from: RANKS_LIMIT, message };
            Message::notices(RANKS_LIMIT, u64::MAX, &[notice]).remove(0)
        };
        let messages = [
            routed(ViewMessage::Ready { view, any: true, gone, endpoint }),
            routed(ViewMessage::Withdrawn { missing: all() }),
            routed(ViewMessage::Propose { view, gone: Vec::new(), endpoints: vec![endpoint; RANKS_LIMIT] }),
            routed(ViewMessage::Propose { view, gone: all(), endpoints: Vec::new() }),
            notice(ViewMessage::Opened { view, gone: all() }),
            notice(ViewMessage::Refused { view, text: "é".repeat(FRAME_LIMIT) }),
        ];
        for message in messages {
            let body = message.encode();
            assert!(body.len() <= FRAME_LIMIT, "{} bytes", body.len());
            assert!(Message::parse(&body).is_ok());
        }
    }
}
