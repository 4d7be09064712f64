//! One rank's part of the control plane: a task that owns the rank's links and all that it knows.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::super::wire::Encoding;
use super::link::{End, Link};
use super::log::{Key, Log, Presence};
use super::message::{Body, Message, Notice, Question, Routed};
use super::tree::Tree;
use crate::error::Error;
use crate::wait::lock;

/// How many heartbeats a rank sends within the heartbeat timeout.
const BEATS: u32 = 5;

/// The longest time between two heartbeats: with a long timeout, one a second costs nothing and finds stopped processes
/// sooner.
const LONGEST_BEAT: Duration = Duration::from_secs(1);

/// The longest that a rank waits until it may leave, in heartbeat timeouts. Its coordinator may be frozen: the ranks
/// find that in one, and the next coordinator lets this rank leave.
pub(in super::super) const LEAVING: u32 = 2;

/// How many heartbeats a rank waits for other reports before it decides that its parent lives and the rank that reports
/// it does not.
const DOUBT: u32 = 2;

/// Returns the time between two heartbeats, and between two looks for failures that heartbeats do not show.
pub(in super::super) fn beat(heartbeat_timeout: Duration) -> Duration {
    (heartbeat_timeout / BEATS).min(LONGEST_BEAT)
}

/// Why a lower rank cannot be connected to.
#[derive(Clone, Debug, PartialEq)]
pub(in super::super) struct Unreachable {
    /// The error for the user.
    pub(in super::super) error: Error,
    /// True if the rank's process is known to have ended.
    pub(in super::super) ended: bool,
}

/// The connections that the plane asks for.
pub(in super::super) trait Network: Send + Sync + 'static {
    /// An authenticated connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Connects to a lower rank. Retries until it succeeds or cannot; the caller limits the time.
    fn dial(&self, to: usize) -> impl Future<Output = Result<Self::Stream, Unreachable>> + Send;

    /// True if both ends of this connection to a rank look whether the other's process is stopped, instead of sending
    /// heartbeats: both are on one host, and each can see the other's process.
    fn is_watched(&self, _rank: usize, _stream: &Self::Stream) -> bool {
        false
    }

    /// True if the process of a watched rank is stopped.
    fn is_stopped(&self, _rank: usize) -> bool {
        false
    }

    /// True if this rank cannot use the Unix sockets of its host.
    fn is_apart(&self) -> impl Future<Output = bool> + Send {
        std::future::ready(false)
    }
}

/// A report of the plane to its owner.
#[derive(Debug, PartialEq)]
pub(in super::super) enum Event {
    /// All ranks are connected. The ranks that cannot use the Unix sockets of their host.
    Complete(Vec<usize>),
    /// A notice that all ranks have, or will have before they learn that this rank has ended.
    Notice(Notice),
    /// A message for this rank, and its sender.
    Deliver(usize, Body),
    /// A lower rank refuses the connection while the ranks join.
    Unreachable(usize, Error),
}

/// The coordinator's answer to [`Handle::ask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Answer {
    /// The rank is lost or has left. The event that says so came before.
    IsGone,
    /// The rank lives, and every notice that it sent before has arrived.
    Lives,
    /// This rank has left, or leaves, and gets no answer any more.
    Unknown,
}

/// The state that other threads may read at any time.
#[derive(Debug, Default)]
pub(in super::super) struct Status {
    /// By rank.
    pub(in super::super) presence: Vec<Presence>,
    /// The ranks with an open link.
    pub(in super::super) links: BTreeSet<usize>,
    /// The ranks that should have a link to this one, or be ready, and are not.
    pub(in super::super) awaited: BTreeSet<usize>,
    /// The ranks that cannot use the Unix sockets of their host, once all ranks are connected.
    pub(in super::super) complete: Option<Vec<usize>>,
    /// A rank that has excluded this one and continues without it.
    pub(in super::super) excluded_by: Option<usize>,
}

/// Function that gets the answer to a question, always once.
type Answered = Box<dyn FnOnce(Answer) + Send>;

/// A command to the task, or an event of one of its links.
enum Input<S> {
    Linked { rank: usize, stream: S },
    DialFailed { rank: usize, why: Unreachable },
    Apart(bool),
    Read { rank: usize, link: u64, message: Result<Message, End> },
    Lost { rank: usize, reason: String, ended: bool },
    Tell(Notice),
    Send { to: Vec<usize>, body: Body },
    Ask { about: usize, answered: Answered },
    Leave { moved: bool },
}

/// Commands to the task of a rank. No call blocks.
pub(in super::super) struct Handle<S> {
    inputs: mpsc::UnboundedSender<Input<S>>,
    status: Arc<Mutex<Status>>,
}

impl<S> Clone for Handle<S> {
    fn clone(&self) -> Handle<S> {
        Handle { inputs: self.inputs.clone(), status: Arc::clone(&self.status) }
    }
}

impl<S> Handle<S> {
    fn input(&self, input: Input<S>) {
        // The task ends when the rank has left; it takes no more commands then.
        let _ = self.inputs.send(input);
    }

    /// A higher rank has connected.
    pub(in super::super) fn accepted(&self, rank: usize, stream: S) {
        self.input(Input::Linked { rank, stream });
    }

    /// Reports that a rank to which this one is not connected is lost.
    pub(in super::super) fn lost(&self, rank: usize, reason: String, ended: bool) {
        self.input(Input::Lost { rank, reason, ended });
    }

    /// Tells all ranks.
    pub(in super::super) fn tell(&self, notice: Notice) {
        self.input(Input::Tell(notice));
    }

    /// Sends a message to some ranks.
    pub(in super::super) fn send(&self, to: Vec<usize>, body: Body) {
        self.input(Input::Send { to, body });
    }

    /// Asks the coordinator why the connection to a rank broke. `answered` is called within the heartbeat timeout of
    /// the ranks that are asked, by the task or by this function.
    pub(in super::super) fn ask(&self, about: usize, answered: impl FnOnce(Answer) + Send + 'static) {
        let input = Input::Ask { about, answered: Box::new(answered) };
        if let Err(mpsc::error::SendError(Input::Ask { answered, .. })) = self.inputs.send(input) {
            answered(Answer::Unknown);
        }
    }

    /// Leaves. `moved`: this rank does not use the group, and may live on in another view. [`Rank::run`] returns when
    /// all ranks know.
    pub(in super::super) fn leave(&self, moved: bool) {
        self.input(Input::Leave { moved });
    }

    /// Returns the state that is known now.
    pub(in super::super) fn status<T>(&self, look: impl FnOnce(&Status) -> T) -> T {
        look(&lock(&self.status))
    }
}

/// See the module.
pub(in super::super) struct Rank<N: Network> {
    me: usize,
    /// The number of each rank's host.
    hosts: Vec<usize>,
    /// A peer that is silent for so long is lost.
    timeout: Duration,
    network: Arc<N>,
    on_event: Box<dyn FnMut(Event) + Send>,
    handle: Handle<N::Stream>,
    inputs: mpsc::UnboundedReceiver<Input<N::Stream>>,
    tasks: JoinSet<()>,
    /// By rank.
    links: BTreeMap<usize, Link>,
    /// The ranks to which a connection is being opened.
    dialling: BTreeSet<usize>,
    /// Number of links opened so far.
    opened: u64,
    log: Log,
    /// Lower ranks that this rank cannot reach any more, until all ranks are told what became of them: what this rank
    /// tells the next parent.
    suspects: BTreeMap<usize, Notice>,
    /// Tree of the ranks that are present and not suspected.
    tree: Tree,
    /// The parent that has this rank's `Attach`.
    attached_to: Option<usize>,
    /// Notices that this rank passed to its parent and that have not come back from the coordinator.
    unsettled: Vec<Notice>,
    /// Reports that this rank's parent is lost: the reporting rank, the time, and the notice.
    doubts: Vec<(usize, Instant, Notice)>,
    /// Higher ranks that turned away from this one and told it that it is lost: the time and the notice, by rank.
    against: BTreeMap<usize, (Instant, Notice)>,
    /// Messages that wait for a link.
    held: Vec<Routed>,
    /// Known when [`Network::is_apart`] has been answered.
    apart: Option<bool>,
    is_ready: bool,
    complete: Option<Vec<usize>>,
    /// On the coordinator: number of the last notice. From 1 on, so that a rank without notices has something to
    /// confirm, too.
    number: u64,
    /// On other ranks: the coordinator and the number of the last notice.
    last: (usize, u64),
    /// By the rank that notices came from: the last `Seen` that was sent there.
    confirmed: BTreeMap<usize, (usize, u64)>,
    /// On the coordinator: the ranks that leave, each with the notice number that all others must have first.
    leavers: Vec<(usize, u64)>,
    /// Set when this rank leaves.
    leaving: Option<bool>,
    /// True if every other rank knows that this one leaves.
    is_acknowledged: bool,
    /// Questions of this rank and of ranks below it that are not answered yet.
    questions: Vec<Question>,
    /// This rank's own questions, by ticket: the rank in question, and the function that gets the answer.
    asked: BTreeMap<u64, (usize, Answered)>,
    /// Number of questions so far.
    tickets: u64,
    /// By child without a link: since when it has none.
    unlinked: BTreeMap<usize, Instant>,
    /// Higher ranks whose links ended while another rank was their parent: how, and true if their process ended.
    broken: BTreeMap<usize, (String, bool)>,
    /// True if something has happened since the last call of [`Rank::settle`].
    is_changed: bool,
    /// When this task last looked for silent peers.
    looked: Instant,
}

impl<N: Network> Rank<N> {
    /// Rank `me` of the world of `hosts.len()` ranks. `on_event` is called by the task.
    pub(in super::super) fn new(
        me: usize,
        hosts: Vec<usize>,
        timeout: Duration,
        network: Arc<N>,
        on_event: impl FnMut(Event) + Send + 'static,
    ) -> (Rank<N>, Handle<N::Stream>) {
        let (inputs, receiver) = mpsc::unbounded_channel();
        let log = Log::new(hosts.len());
        let status = Status { presence: log.presence().to_vec(), ..Status::default() };
        let handle = Handle { inputs, status: Arc::new(Mutex::new(status)) };
        let rank = Rank {
            me,
            timeout,
            network,
            on_event: Box::new(on_event),
            handle: handle.clone(),
            inputs: receiver,
            tasks: JoinSet::new(),
            links: BTreeMap::new(),
            dialling: BTreeSet::new(),
            opened: 0,
            log,
            suspects: BTreeMap::new(),
            tree: Tree::default(),
            attached_to: None,
            unsettled: Vec::new(),
            doubts: Vec::new(),
            against: BTreeMap::new(),
            held: Vec::new(),
            apart: None,
            is_ready: false,
            complete: None,
            number: 1,
            last: (0, 0),
            confirmed: BTreeMap::new(),
            leavers: Vec::new(),
            leaving: None,
            is_acknowledged: false,
            questions: Vec::new(),
            asked: BTreeMap::new(),
            tickets: 0,
            unlinked: BTreeMap::new(),
            broken: BTreeMap::new(),
            is_changed: true,
            looked: Instant::now(),
            hosts,
        };
        (rank, handle)
    }

    /// Runs until this rank has left. Returns true if all other ranks know that.
    pub(in super::super) async fn run(mut self) -> bool {
        let (network, handle) = (Arc::clone(&self.network), self.handle.clone());
        self.tasks.spawn(async move { handle.input(Input::Apart(network.is_apart().await)) });
        self.tree = self.tree_now();
        self.rewire();
        self.looked = Instant::now();
        let mut limit: Option<Instant> = None;
        loop {
            let next = self.looked + self.beat();
            tokio::select! {
                input = self.inputs.recv() => {
                    input.into_iter().for_each(|input| self.handle(input));
                    while let Ok(input) = self.inputs.try_recv() {
                        self.handle(input);
                    }
                }
                () = sleep_until(next) => self.look(),
                Some(_) = self.tasks.join_next() => continue,
            }
            self.settle();
            if self.leaving.is_some() {
                let limit = *limit.get_or_insert_with(|| Instant::now() + self.timeout * LEAVING);
                // If the others go on without this rank, they wait for nothing from it.
                if self.is_acknowledged || self.is_excluded() || Instant::now() >= limit {
                    self.close(limit).await;
                    return self.is_acknowledged;
                }
            }
        }
    }

    /// Closes all links when the peers have read what this rank has sent.
    async fn close(&mut self, limit: Instant) {
        for link in std::mem::take(&mut self.links).into_values() {
            link.send(&Message::Farewell { moved: self.leaving.unwrap_or_default() });
            link.finish();
        }
        std::mem::take(&mut self.asked).into_values().for_each(|(_, answered)| answered(Answer::Unknown));
        let _ = timeout_at(limit, async { while self.tasks.join_next().await.is_some() {} }).await;
    }

    fn beat(&self) -> Duration {
        beat(self.timeout)
    }

    fn is_coordinator(&self) -> bool {
        self.parent().is_none()
    }

    fn parent(&self) -> Option<usize> {
        self.tree.parents(self.me)[0]
    }

    fn tree_now(&self) -> Tree {
        let is_present = |rank: usize| self.log.is_present(rank) && !self.suspects.contains_key(&rank);
        Tree::of(&self.hosts, |rank| rank == self.me || is_present(rank))
    }

    fn handle(&mut self, input: Input<N::Stream>) {
        self.is_changed |= !matches!(input, Input::Read { message: Ok(Message::Heartbeat), .. });
        match input {
            Input::Linked { rank, stream } => self.linked(rank, stream),
            Input::DialFailed { rank, why: Unreachable { error, ended } } => {
                self.dialling.remove(&rank);
                if ended || self.complete.is_some() {
                    self.suspect(rank, error.to_string(), ended);
                } else {
                    (self.on_event)(Event::Unreachable(rank, error));
                }
            }
            Input::Lost { rank, reason, ended } => {
                if self.links.contains_key(&rank) {
                    // The rank has connected since the loss was reported.
                } else if rank < self.me {
                    self.suspect(rank, reason, ended);
                } else if self.log.is_present(rank) {
                    self.lose(rank, reason, ended);
                }
            }
            Input::Apart(apart) => self.apart = Some(apart),
            Input::Read { rank, link, message } => {
                let Some(known) = self.links.get_mut(&rank).filter(|known| known.id == link) else { return };
                known.heard = Instant::now();
                match message {
                    Ok(message) => self.read(rank, message),
                    Err(end) => self.ended(rank, &end),
                }
            }
            Input::Tell(notice) => self.tell(self.me, notice),
            Input::Send { to, body } => self.route(Routed { from: self.me, to, body, is_down: false }),
            Input::Ask { about, answered } => self.ask(about, answered),
            Input::Leave { moved } => {
                self.leaving = Some(moved);
                self.tell(self.me, Notice::Left { rank: self.me, moved });
            }
        }
    }

    fn linked(&mut self, rank: usize, stream: N::Stream) {
        self.dialling.remove(&rank);
        self.opened += 1;
        let (id, inputs) = (self.opened, self.handle.inputs.clone());
        let is_watched = self.network.is_watched(rank, &stream);
        let link = Link::open(id, is_watched, stream, &mut self.tasks, move |message| {
            let _ = inputs.send(Input::Read { rank, link: id, message });
        });
        if matches!(self.log.presence()[rank], Presence::Ended | Presence::Silent) {
            // The rank does not know yet that the others have excluded it.
            return self.refuse(rank, &link);
        }
        link.send(&Message::Heartbeat);
        self.links.insert(rank, link);
        self.unlinked.remove(&rank);
        self.broken.remove(&rank);
        if self.parent() == Some(rank) {
            self.attach();
        }
        self.route_held();
    }

    /// Tells the rank at the other end of `link` that it counts as lost. The link is closed afterwards.
    fn refuse(&self, rank: usize, link: &Link) {
        let is_its_loss = |notice: &&Notice| matches!(notice, Notice::Lost { rank: lost, .. } if *lost == rank);
        if let Some(notice) = self.log.notices().iter().find(is_its_loss) {
            link.send(&Message::Notices { of: self.me, number: 0, notices: vec![notice.clone()] });
        }
    }

    fn ended(&mut self, rank: usize, end: &End) {
        let farewell = self.links.remove(&rank).and_then(|link| link.farewell);
        self.leavers.retain(|(leaver, _)| *leaver != rank);
        if !self.log.is_present(rank) {
            return;
        }
        if let Some(moved) = farewell.filter(|_| !self.against.contains_key(&rank)) {
            // The rank left in order, and the notice of that has not arrived here yet.
            let notice = Notice::Left { rank, moved };
            if rank > self.me {
                self.tell(self.me, notice);
            } else if !self.is_known_as_gone(rank) {
                self.suspects.insert(rank, notice);
                self.rewire();
            }
            return;
        }
        // If the others have excluded this rank, they closed their links, but their processes may live.
        let ended = end.is_broken && !self.is_excluded();
        if rank < self.me {
            self.suspect(rank, end.reason.clone(), ended);
        } else if self.against.contains_key(&rank) {
            // The higher rank counts this one as lost and has closed the link.
        } else if self.tree.parents(rank)[0] == Some(self.me) {
            self.lose(rank, end.reason.clone(), ended);
        } else {
            // The rank's parent notices the end, too. If that parent dies first, this rank may become the parent.
            self.broken.insert(rank, (end.reason.clone(), ended));
        }
    }

    /// Records that this rank cannot reach a lower one any more.
    fn suspect(&mut self, rank: usize, reason: String, ended: bool) {
        let notice = Notice::Lost { rank, by: self.me, ended, reason };
        if self.is_known_as_gone(rank) {
            return;
        }
        if let Some(link) = self.links.get(&rank) {
            // If the lower rank lives, it learns that this rank counts it as lost.
            link.send(&Message::Notices { of: self.me, number: 0, notices: vec![notice.clone()] });
        }
        self.suspects.insert(rank, notice);
        self.rewire();
    }

    /// True if `rank` is gone or suspected, or if the others have excluded this rank.
    fn is_known_as_gone(&self, rank: usize) -> bool {
        !self.log.is_present(rank) || self.suspects.contains_key(&rank) || self.is_excluded()
    }

    /// Tells all ranks that a child of this rank is lost.
    fn lose(&mut self, rank: usize, reason: String, ended: bool) {
        // If all know that this rank leaves, or is lost, the others have another parent.
        if self.log.is_present(self.me) {
            self.tell(self.me, Notice::Lost { rank, by: self.me, ended, reason });
        }
    }

    /// True if the other ranks have excluded this one and continue without it.
    fn is_excluded(&self) -> bool {
        matches!(self.log.presence()[self.me], Presence::Ended | Presence::Silent)
    }

    /// Computes the tree again, opens the links that it needs, and turns to another parent if there is another one.
    fn rewire(&mut self) {
        let before = self.parent();
        self.tree = self.tree_now();
        for rank in self.tree.parents(self.me).into_iter().flatten() {
            if !self.links.contains_key(&rank) && self.dialling.insert(rank) {
                let (network, handle, limit) = (Arc::clone(&self.network), self.handle.clone(), self.timeout);
                let is_limited = self.complete.is_some();
                self.tasks.spawn(async move {
                    let dial = network.dial(rank);
                    let made = if is_limited {
                        timeout(limit, dial).await.unwrap_or_else(|_| {
                            let error = Error::other(format!("no connection to it for {:.1} s", limit.as_secs_f64()));
                            Err(Unreachable { error, ended: false })
                        })
                    } else {
                        dial.await
                    };
                    handle.input(match made {
                        Ok(stream) => Input::Linked { rank, stream },
                        Err(why) => Input::DialFailed { rank, why },
                    });
                });
            }
        }
        if self.parent() != before || self.attached_to != self.parent() {
            self.attach();
        }
        self.route_held();
        self.lose_broken();
    }

    /// Reports the ranks whose links ended before this rank became their parent.
    fn lose_broken(&mut self) {
        self.broken.retain(|rank, _| self.log.is_present(*rank));
        let is_child = |rank: usize| self.tree.parents(rank)[0] == Some(self.me);
        let (children, others) = std::mem::take(&mut self.broken).into_iter().partition(|(rank, _)| is_child(*rank));
        self.broken = others;
        let children: BTreeMap<usize, (String, bool)> = children;
        for (rank, (reason, ended)) in children {
            self.lose(rank, reason, ended);
        }
    }

    /// Turns to the parent, or becomes the coordinator.
    fn attach(&mut self) {
        let own =
            self.suspects.values().cloned().chain(self.leaving.map(|moved| Notice::Left { rank: self.me, moved }));
        let mut told: Vec<Notice> = own.collect();
        told.append(&mut self.unsettled);
        told.extend(std::mem::take(&mut self.doubts).into_iter().map(|(_, _, notice)| notice));
        let mut keys = HashSet::new();
        told.retain(|notice| keys.insert(Key::from(notice)));
        let Some(parent) = self.parent() else {
            self.attached_to = None;
            // With no lower rank left, this rank's word counts.
            told.into_iter().for_each(|notice| self.tell(self.me, notice));
            self.ask_again();
            self.tell_leavers();
            return;
        };
        if !self.links.contains_key(&parent) {
            self.unsettled = told;
            return;
        }
        self.attached_to = Some(parent);
        self.is_ready = false;
        self.send(parent, &Message::Attach { digest: self.log.digest() });
        told.into_iter().for_each(|notice| self.tell(self.me, notice));
        self.ask_again();
        self.tell_leavers();
    }

    /// Says again which ranks with a link to this one leave: the parent before may not have let them.
    fn tell_leavers(&mut self) {
        let has_left = |rank: &usize| matches!(self.log.presence()[*rank], Presence::Left | Presence::Moved);
        let leavers: Vec<usize> = self.links.range(self.me + 1..).map(|(rank, _)| *rank).filter(has_left).collect();
        for rank in leavers {
            let moved = self.log.presence()[rank] == Presence::Moved;
            self.tell(self.me, Notice::Left { rank, moved });
        }
    }

    fn send(&self, rank: usize, message: &Message) {
        if let Some(link) = self.links.get(&rank) {
            link.send(message);
        }
    }

    /// Sends a message to all ranks that take their notices from this one. A child that has not sent `Attach` yet may
    /// lack notices of its parent before, and gets all of them when it does.
    fn send_down(&self, message: &Message) {
        let frame = message.frame();
        let attached = self.links.range(self.me + 1..).filter(|(_, link)| link.is_attached);
        attached.for_each(|(_, link)| link.send_frame(frame.clone()));
    }

    fn read(&mut self, from: usize, message: Message) {
        match message {
            Message::Heartbeat => {}
            Message::Attach { digest } => self.attached(from, digest),
            Message::Resend => {
                for notice in self.log.notices() {
                    self.send(from, &Message::Tell(notice.clone()));
                }
            }
            Message::Ready { apart } => {
                if let Some(link) = self.links.get_mut(&from) {
                    link.ready = Some(apart);
                }
            }
            Message::Complete { apart } => self.completed(apart),
            Message::Tell(notice) => {
                if self.is_in_world(&notice) {
                    self.tell(from, notice);
                }
            }
            Message::Notices { of, number, notices } => self.noticed(from, of, number, notices),
            Message::Seen { of, number } => {
                if let Some(link) = self.links.get_mut(&from) {
                    link.seen = link.seen.max((of, number));
                }
            }
            Message::Routed(routed) => self.route(routed),
            Message::Ask(question) => self.asked_by_child(question),
            Message::Farewell { moved } => {
                if let Some(link) = self.links.get_mut(&from) {
                    link.farewell = Some(moved);
                }
            }
        }
    }

    /// True if the ranks of a notice exist.
    fn is_in_world(&self, notice: &Notice) -> bool {
        match notice {
            Notice::Lost { rank, by, .. } => *rank.max(by) < self.hosts.len(),
            Notice::Left { rank, .. } => *rank < self.hosts.len(),
            Notice::Unreached { by: rank, .. } | Notice::View { from: rank, .. } => *rank < self.hosts.len(),
            Notice::Failed { .. } => true,
        }
    }

    fn attached(&mut self, from: usize, digest: u64) {
        let (of, number) = if self.is_coordinator() { (self.me, self.number) } else { self.last };
        let differs = digest != self.log.digest();
        let Some(link) = self.links.get_mut(&from) else { return };
        link.is_attached = true;
        if differs {
            link.send(&Message::Resend);
        }
        let notices = if differs { self.log.notices() } else { &[] };
        Message::notices(of, number, notices).iter().for_each(|message| link.send(message));
        if let Some(apart) = &self.complete {
            link.send(&Message::Complete { apart: apart.clone() });
        }
        self.route_held();
    }

    /// Passes on what all ranks must be told, by this rank or one below it.
    fn tell(&mut self, from: usize, notice: Notice) {
        if self.log.has(Key::from(&notice)) {
            // A rank that leaves tells the next coordinator, too, if the one before has not acknowledged that.
            match (notice, self.parent()) {
                (Notice::Left { rank, .. }, None) if self.leavers.iter().all(|(leaver, _)| *leaver != rank) => {
                    self.leavers.push((rank, self.number));
                }
                (notice @ Notice::Left { .. }, Some(parent)) => self.send(parent, &Message::Tell(notice)),
                _ => {}
            }
            return;
        }
        // A rank that reports itself as lost is always believed.
        if let Notice::Lost { rank, by, .. } = notice
            && from != self.me
            && rank != by
        {
            if Some(rank) == self.parent() {
                return self.doubts.push((from, Instant::now(), notice));
            }
            // This rank would notice itself if its link to the child ended.
            let is_own_child = self.tree.parents(rank)[0] == Some(self.me) && self.links.contains_key(&rank);
            if rank == self.me || is_own_child {
                return;
            }
        }
        match self.parent() {
            None => self.announce(notice),
            Some(parent) => {
                if self.attached_to == Some(parent) {
                    self.send(parent, &Message::Tell(notice.clone()));
                }
                if self.unsettled.iter().all(|known| Key::from(known) != Key::from(&notice)) {
                    self.unsettled.push(notice);
                }
            }
        }
    }

    /// Tells all ranks, as the coordinator.
    fn announce(&mut self, notice: Notice) {
        if !self.log.add(&notice) {
            return;
        }
        self.number += 1;
        if let Notice::Left { rank, .. } = notice {
            self.leavers.push((rank, self.number));
        }
        Message::notices(self.me, self.number, std::slice::from_ref(&notice)).iter().for_each(|m| self.send_down(m));
        self.learned(notice);
    }

    /// Handles notices that the coordinator sends to all ranks, and that the parent passes on.
    fn noticed(&mut self, from: usize, of: usize, number: u64, notices: Vec<Notice>) {
        if !notices.iter().all(|notice| self.is_in_world(notice)) {
            return;
        }
        if from > self.me {
            // The higher rank counts this one as lost. `decide_whether_excluded` finds out which of the two is.
            let is_own_loss = |notice: &Notice| matches!(notice, Notice::Lost { rank, .. } if *rank == self.me);
            if let Some(notice) = notices.into_iter().find(is_own_loss) {
                self.against.entry(from).or_insert((Instant::now(), notice));
            }
            return;
        }
        // Before this rank's own waits end, after which it may leave.
        Message::notices(of, number, &notices).iter().for_each(|message| self.send_down(message));
        for notice in notices {
            if self.log.add(&notice) {
                self.learned(notice);
            }
        }
        self.last = self.last.max((of, number));
        self.confirmed.entry(from).or_insert((0, 0));
    }

    /// Does what follows from a notice that is new on this rank.
    fn learned(&mut self, notice: Notice) {
        let key = Key::from(&notice);
        self.unsettled.retain(|known| Key::from(known) != key);
        let mut gone = None;
        match &notice {
            Notice::Lost { rank, by, .. } => {
                if *rank == self.me {
                    lock(&self.handle.status).excluded_by = Some(*by);
                } else if let Some(link) = self.links.remove(rank) {
                    self.refuse(*rank, &link);
                }
                self.leavers.retain(|(leaver, _)| leaver != rank);
                gone = Some(*rank);
            }
            Notice::Left { rank, .. } => gone = Some(*rank),
            Notice::Failed { .. } | Notice::Unreached { .. } | Notice::View { .. } => {}
        }
        if gone.is_some() {
            lock(&self.handle.status).presence = self.log.presence().to_vec();
        }
        (self.on_event)(Event::Notice(notice));
        let Some(gone) = gone else { return };
        self.suspects.remove(&gone);
        self.unlinked.remove(&gone);
        self.questions.retain(|question| question.about != gone && question.from != gone);
        let (answered, asked) = std::mem::take(&mut self.asked).into_iter().partition(|(_, (about, _))| *about == gone);
        self.asked = asked;
        let answered: BTreeMap<u64, (usize, Answered)> = answered;
        answered.into_values().for_each(|(_, answered)| answered(Answer::IsGone));
        if !self.tree.remove_leaf(gone) {
            self.rewire();
        }
    }

    fn completed(&mut self, apart: Vec<usize>) {
        if self.complete.is_none() {
            self.send_down(&Message::Complete { apart: apart.clone() });
            self.complete = Some(apart.clone());
            lock(&self.handle.status).complete = Some(apart.clone());
            (self.on_event)(Event::Complete(apart));
        }
    }

    /// Delivers a message, or passes it on. On the way up it goes to the coordinator, also if its receiver is below
    /// this rank. So it does not overtake what its sender has told all before.
    fn route(&mut self, routed: Routed) {
        let Routed { from, to, body, is_down } = routed;
        if let Some(parent) = self.parent().filter(|_| !is_down) {
            let routed = Routed { from, to, body, is_down };
            if self.attached_to == Some(parent) {
                self.send(parent, &Message::Routed(routed));
            } else {
                self.held.push(routed);
            }
            return;
        }
        if let Body::Lives(question) = &body {
            self.questions.retain(|known| known != question);
        }
        let (mut hops, mut waiting): (BTreeMap<usize, Vec<usize>>, Vec<usize>) = (BTreeMap::new(), Vec::new());
        for rank in to {
            if rank >= self.hosts.len() {
                continue;
            }
            if rank == self.me {
                self.deliver(from, &body);
            } else if let Some(hop) = self.hop(rank) {
                hops.entry(hop).or_default().push(rank);
            } else if self.log.is_present(rank) {
                waiting.push(rank);
            }
        }
        for (hop, to) in hops {
            self.send(hop, &Message::Routed(Routed { from, to, body: body.clone(), is_down: true }));
        }
        if !waiting.is_empty() {
            // If these ranks have another parent by now, the coordinator knows the way.
            let is_down = waiting.iter().any(|rank| self.tree.parents(*rank)[0] == Some(self.me));
            self.held.push(Routed { from, to: waiting, body, is_down });
        }
    }

    /// The linked rank below this one to which messages for a rank go. An idle link does not count.
    fn hop(&self, to: usize) -> Option<usize> {
        let is_attached = |rank: &usize| *rank > self.me && self.links.get(rank).is_some_and(|link| link.is_attached);
        let below = || {
            // A rank that leaves is not in the tree, but its link to the lowest rank of its host is still there.
            let head = (0..self.hosts.len()).find(|r| self.hosts[*r] == self.hosts[to] && self.log.is_present(*r));
            let of_tree = self.tree.parents(to)[0].or(head).filter(is_attached);
            of_tree.filter(|child| self.tree.parents(*child)[0] == Some(self.me))
        };
        Some(to).filter(is_attached).or_else(below)
    }

    fn route_held(&mut self) {
        for routed in std::mem::take(&mut self.held) {
            self.route(routed);
        }
    }

    fn deliver(&mut self, from: usize, body: &Body) {
        match body {
            Body::LeftGroup { .. } | Body::View(_) => (self.on_event)(Event::Deliver(from, body.clone())),
            Body::Ack => self.is_acknowledged |= self.leaving.is_some(),
            Body::Ping(question) => {
                self.route(Routed { from: self.me, to: vec![from], body: Body::Pong(*question), is_down: false });
            }
            Body::Pong(question) => {
                let before = self.questions.len();
                self.questions.retain(|known| known != question);
                if self.questions.len() < before {
                    self.answer_that_it_lives(*question);
                }
            }
            Body::Lives(question) => {
                if let Some((_, answered)) = self.asked.remove(&question.ticket) {
                    answered(Answer::Lives);
                }
            }
        }
    }

    fn ask(&mut self, about: usize, answered: Answered) {
        if !self.log.is_present(about) {
            return answered(Answer::IsGone);
        }
        self.tickets += 1;
        self.asked.insert(self.tickets, (about, answered));
        let question = Question { about, from: self.me, ticket: self.tickets };
        self.asked_by_child(question);
    }

    /// Asks the new coordinator what the one before has not answered.
    fn ask_again(&mut self) {
        let asked = std::mem::take(&mut self.questions);
        asked.into_iter().for_each(|question| self.asked_by_child(question));
    }

    fn asked_by_child(&mut self, question: Question) {
        match self.parent() {
            Some(parent) => {
                self.questions.push(question);
                self.send(parent, &Message::Ask(question));
            }
            // The notice that it is gone is on its way to the rank that asks.
            None if question.about >= self.hosts.len() || !self.log.is_present(question.about) => {}
            None if question.about == self.me => self.answer_that_it_lives(question),
            None => {
                self.questions.push(question);
                self.route(Routed {
                    from: self.me,
                    to: vec![question.about],
                    body: Body::Ping(question),
                    is_down: false,
                });
            }
        }
    }

    fn answer_that_it_lives(&mut self, question: Question) {
        self.route(Routed { from: self.me, to: vec![question.from], body: Body::Lives(question), is_down: false });
    }

    /// Reports readiness, and acknowledges and confirms notices, after a batch of inputs.
    fn settle(&mut self) {
        if !std::mem::take(&mut self.is_changed) {
            return;
        }
        let mut children: Vec<usize> = self.tree.children(self.me).collect();
        if self.complete.is_none() {
            self.become_ready(&children);
        }
        self.note_status(&children);
        if !self.log.is_present(self.me) && self.complete.is_some() {
            // The others have excluded this rank: its children have another parent, and may be gone already.
            children.retain(|rank| self.links.contains_key(rank));
        }
        if self.is_coordinator() {
            let number = self.seen_by(&children, self.me, self.number);
            self.acknowledge(number);
        }
        self.confirm(&children);
    }

    /// Tells every rank that sent notices which of them this rank and the ranks below have. A sender may wait for that
    /// before it leaves.
    fn confirm(&mut self, children: &[usize]) {
        let (of, own) = self.last;
        let number = if self.is_coordinator() { own } else { self.seen_by(children, of, own) };
        if number == 0 {
            return;
        }
        self.confirmed.retain(|rank, _| self.links.contains_key(rank));
        for (from, confirmed) in &mut self.confirmed {
            if (of, number) > *confirmed {
                *confirmed = (of, number);
                self.links[from].send(&Message::Seen { of, number });
            }
        }
    }

    /// The number up to which this rank and these children have the notices of a coordinator.
    fn seen_by(&self, children: &[usize], of: usize, own: u64) -> u64 {
        let seen = |child: &usize| match self.links.get(child) {
            Some(link) if link.seen.0 == of => link.seen.1,
            // The child has turned to a later coordinator, so it knows that this one leaves.
            Some(link) if link.seen.0 > of => own,
            _ => 0,
        };
        children.iter().map(seen).chain([own]).min().unwrap_or(own)
    }

    fn note_status(&self, children: &[usize]) {
        let mut status = lock(&self.handle.status);
        status.links = self.links.keys().copied().collect();
        if self.complete.is_none() {
            let parents =
                self.tree.parents(self.me).into_iter().flatten().filter(|rank| !self.links.contains_key(rank));
            let is_ready = |rank: &&usize| self.links.get(rank).is_some_and(|link| link.ready.is_some());
            status.awaited = parents.chain(children.iter().filter(|rank| !is_ready(rank)).copied()).collect();
        } else {
            status.awaited.clear();
        }
    }

    /// Says that this rank and those below are connected, or that all are.
    fn become_ready(&mut self, children: &[usize]) {
        let Some(own) = self.apart.filter(|_| self.complete.is_none() && !self.is_ready) else { return };
        if self.log.presence().iter().any(|presence| *presence != Presence::Present) {
            // A world that loses a rank while it joins is never used.
            return;
        }
        let has_parents = self.tree.parents(self.me).iter().flatten().all(|rank| self.links.contains_key(rank));
        let ready: Option<Vec<&Vec<usize>>> =
            children.iter().map(|child| self.links.get(child).and_then(|link| link.ready.as_ref())).collect();
        let Some(ready) = ready.filter(|_| has_parents) else { return };
        let mut apart: Vec<usize> = ready.into_iter().flatten().copied().chain(own.then_some(self.me)).collect();
        apart.sort_unstable();
        match self.parent() {
            None => self.completed(apart),
            Some(parent) if self.attached_to == Some(parent) => {
                self.is_ready = true;
                self.send(parent, &Message::Ready { apart });
            }
            Some(_) => {}
        }
    }

    /// Lets ranks leave, as the coordinator, whose departure all others know: they have all notices up to this number.
    fn acknowledge(&mut self, number: u64) {
        for (rank, of) in std::mem::take(&mut self.leavers) {
            if of > number {
                self.leavers.push((rank, of));
            } else if rank != self.me && self.hop(rank).is_some() {
                // A rank without a link reports again that it leaves as soon as it has a link.
                self.route(Routed { from: self.me, to: vec![rank], body: Body::Ack, is_down: false });
            }
        }
        // The coordinator leaves last, because other ranks that leave need its acknowledgement.
        self.is_acknowledged |= self.leaving.is_some() && self.leavers.is_empty();
    }

    /// Sends heartbeats, and looks for peers that are silent or missing.
    fn look(&mut self) {
        self.is_changed = true;
        let (now, timeout) = (Instant::now(), self.timeout);
        // `late` is the time for which this process did not run. It has not yet read what its peers sent meanwhile.
        let late = now.saturating_duration_since(self.looked).saturating_sub(self.beat());
        self.looked = now;
        let mut silent = Vec::new();
        for (rank, link) in &mut self.links {
            if link.is_watched && !self.network.is_stopped(*rank) {
                link.heard = now;
            } else {
                link.heard = (link.heard + late).min(now);
            }
            if !link.is_watched {
                link.send(&Message::Heartbeat);
            }
            if now - link.heard > timeout {
                silent.push(*rank);
            }
        }
        let reason = no_heartbeat(timeout);
        for rank in silent {
            if rank < self.me {
                self.suspect(rank, reason.clone(), false);
            } else if self.tree.parents(rank)[0] == Some(self.me) {
                self.lose(rank, reason.clone(), false);
            }
        }
        self.find_missing(now, late);
        self.decide_doubts(now);
        self.decide_whether_excluded(now);
    }

    /// If higher ranks count this one as lost, believes them if they are more than half of the others.
    fn decide_whether_excluded(&mut self, now: Instant) {
        self.against.retain(|rank, _| self.log.is_present(*rank));
        let others = (0..self.hosts.len()).filter(|rank| *rank != self.me && self.log.is_present(*rank)).count();
        if 2 * self.against.len() > others {
            let (_, (_, notice)) = self.against.pop_first().expect("there is more than none");
            if self.log.add(&notice) {
                self.learned(notice);
            }
            return;
        }
        let wait = self.beat() * DOUBT;
        let due: Vec<usize> =
            self.against.iter().filter(|(_, (since, _))| now - *since >= wait).map(|(rank, _)| *rank).collect();
        for rank in due {
            self.lose(rank, format!("it has no connection to rank {}, which lives", self.me), false);
        }
    }

    /// Takes children for lost that have not connected to this rank for the heartbeat timeout since they should.
    fn find_missing(&mut self, now: Instant, late: Duration) {
        if self.complete.is_none() {
            return;
        }
        let children: Vec<usize> = self.tree.children(self.me).filter(|rank| !self.links.contains_key(rank)).collect();
        for rank in children {
            let since = self.unlinked.entry(rank).or_insert(now);
            *since = (*since + late).min(now);
            if now - *since > self.timeout {
                // The ranks below it have not connected either.
                let below: Vec<usize> = (0..self.hosts.len()).filter(|r| self.tree.is_below(*r, rank)).collect();
                for lost in below {
                    let reason = format!("no connection to it for {:.1} s", self.timeout.as_secs_f64());
                    self.lose(lost, reason, false);
                }
            }
        }
    }

    /// Decides who is lost if other ranks say that they cannot reach this rank's parent.
    fn decide_doubts(&mut self, now: Instant) {
        let Some(parent) = self.parent() else { return };
        let wait = self.beat() * DOUBT;
        let heard = self.links.get(&parent).map(|link| link.heard);
        let is_due = |since: Instant| now - since >= wait && heard.is_some_and(|heard| heard > since);
        if !self.doubts.iter().any(|(_, since, _)| is_due(*since)) {
            return;
        }
        let doubters: BTreeSet<usize> = self.doubts.iter().map(|(from, ..)| *from).collect();
        let present = (0..self.hosts.len()).filter(|rank| self.log.is_present(*rank)).count();
        if 2 * doubters.len() > present {
            return self.suspect(parent, "most ranks cannot reach it".to_owned(), false);
        }
        let (due, doubts) = std::mem::take(&mut self.doubts).into_iter().partition(|(_, since, _)| is_due(*since));
        self.doubts = doubts;
        let due: Vec<(usize, Instant, Notice)> = due;
        for (from, ..) in due {
            self.lose(from, format!("it has no connection to rank {parent}, which lives"), false);
        }
    }
}

/// The reason of `PeerLost` for a peer that is silent.
pub(in super::super) fn no_heartbeat(timeout: Duration) -> String {
    format!("no heartbeat for {:.1} s", timeout.as_secs_f64())
}
