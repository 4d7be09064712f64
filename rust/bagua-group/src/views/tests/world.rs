//! Ranks that agree on a view: agreements over the real control plane of each rank, in memory and on a paused clock.
//! The groups that they build are only counted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::super::super::plane::tests::World as Links;
use super::super::super::plane::tests::net::{Random, Stream, Told};
use super::super::super::plane::{Body, Event, Handle, Notice, Presence};
use super::super::action::{Action, Outcome};
use super::super::agreement::{Agreement, Gone, Quorum};
use super::super::message::Endpoint;
use crate::wait::lock;

/// The time after which an agreement reminds the leader.
const REMINDER: Duration = Duration::from_secs(1);

/// The deadline of an agreement.
const DEADLINE: Duration = Duration::from_secs(60);

/// How long a rank whose deadline has passed waits for the leader's word.
const WORD: Duration = Duration::from_millis(500);

/// The ports at which the members of a view listen. Every rank listens at a new port for each view, so two views with
/// one number differ in this.
type Ports = Vec<u16>;

/// A group that is being built.
#[derive(Default)]
struct Build {
    members: BTreeSet<usize>,
    began: BTreeSet<usize>,
    /// The members that have entered the barrier.
    inside: BTreeSet<usize>,
    gave_up: BTreeSet<usize>,
}

/// State that the ranks share besides their control connections.
struct Board {
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

struct State {
    builds: BTreeMap<Ports, Build>,
    /// The port at which a rank has begun to listen last.
    port: u16,
    dead: BTreeSet<usize>,
    /// Pairs of ranks without a line between them, in both orders.
    cut: BTreeSet<(usize, usize)>,
    random: Random,
}

impl Board {
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut lock(&self.state));
        self.changed.send_replace(());
        result
    }
}

/// A rank's agreement, and its connection to the others.
struct Member {
    rank: usize,
    agreement: Agreement,
    handle: Handle<Stream>,
    told: Told,
    news: Arc<tokio::sync::Notify>,
    board: Arc<Board>,
    /// While this is set, the rank does nothing.
    frozen: Arc<AtomicBool>,
    /// Number of events that the agreement knows.
    known: usize,
}

impl Member {
    /// Passes on to the agreement what the control plane knows, in the order of `Driver::learn`.
    fn learn(&mut self, out: &mut Vec<Action>) {
        let gone = |presence: &Presence| match presence {
            Presence::Present => None,
            Presence::Left | Presence::Ended => Some(Gone::Ended),
            Presence::Silent => Some(Gone::Silent),
            Presence::Moved => Some(Gone::Moved),
        };
        let (me, excluded_by) = (self.rank, self.handle.status(|status| status.excluded_by));
        let losses: Vec<(usize, Gone)> = self.handle.status(|status| {
            let others = status.presence.iter().enumerate().filter(|(rank, _)| *rank != me);
            others.filter_map(|(rank, presence)| Some((rank, gone(presence)?))).collect()
        });
        let told = lock(&self.told);
        for (_, event) in &told[self.known..] {
            if let Event::Deliver(from, Body::View(message)) | Event::Notice(Notice::View { from, message }) = event {
                self.agreement.received(*from, message.clone(), out);
            }
        }
        self.known = told.len();
        drop(told);
        self.agreement.lost(losses, out);
        if let Some(by) = excluded_by {
            self.agreement.exclude(by, out);
        }
    }

    /// Makes one call, and returns how it ends.
    async fn agree(&mut self, quorum: Quorum) -> Outcome {
        let board = Arc::clone(&self.board);
        let mut changed = board.changed.subscribe();
        let (mut out, mut says_at, mut build) = (Vec::new(), None::<Instant>, None::<(Ports, bool, bool)>);
        let (begun, mut reminded) = (Instant::now(), Instant::now());
        self.learn(&mut out);
        self.agreement.call(quorum, &mut out);
        loop {
            while self.frozen.load(Ordering::Relaxed) {
                self.news.notified().await;
            }
            self.learn(&mut out);
            if says_at.take_if(|at| *at <= Instant::now()).is_some() {
                let listen = |_| Ok(Endpoint { port: board.change(|state| next_port(&mut state.port)), unix: true });
                self.agreement.say(listen, &mut out);
            }
            if reminded.elapsed() > REMINDER {
                reminded = Instant::now();
                self.agreement.remind(&mut out);
            }
            if begun.elapsed() >= DEADLINE {
                self.agreement.expire(begun.elapsed() > DEADLINE + WORD, &mut out);
            }
            self.advance(&mut build, &mut out);
            while !out.is_empty() {
                for action in std::mem::take(&mut out) {
                    match action {
                        Action::Send(to, message) => self.handle.send(to, Body::View(message)),
                        Action::Publish(message) => self.handle.tell(Notice::View { from: self.rank, message }),
                        Action::SayLater => {
                            let wait = board.change(|state| state.random.below(300));
                            says_at = Some(Instant::now() + Duration::from_micros(wait));
                        }
                        Action::Abandon => {}
                        Action::Build { endpoints, members, .. } => {
                            let ports: Ports = endpoints.iter().map(|endpoint| endpoint.port).collect();
                            board.change(|state| {
                                let entry = state.builds.entry(ports.clone()).or_default();
                                let members: BTreeSet<usize> = members.into_iter().collect();
                                assert!(entry.members.is_empty() || entry.members == members, "two lists of members");
                                entry.members = members;
                                entry.began.insert(self.rank);
                            });
                            build = Some((ports, false, false));
                        }
                        Action::Cancel(_) => {
                            if let Some((_, _, is_cancelled)) = &mut build {
                                *is_cancelled = true;
                            }
                        }
                        Action::Finish(outcome) => return outcome,
                    }
                }
                self.advance(&mut build, &mut out);
            }
            let next = [says_at.unwrap_or(reminded + REMINDER), reminded + REMINDER + Duration::from_micros(1)];
            tokio::select! {
                () = self.news.notified() => {}
                _ = changed.changed() => {}
                () = sleep_until(next.into_iter().min().unwrap_or(reminded)) => {}
                () = sleep_until(begun + DEADLINE), if begun.elapsed() < DEADLINE => {}
            }
            let step = board.change_random();
            sleep(Duration::from_micros(step)).await;
        }
    }

    /// Continues the connection of this simulated rank to the members of a new view.
    fn advance(&mut self, build: &mut Option<(Ports, bool, bool)>, out: &mut Vec<Action>) {
        let Some((ports, is_inside, is_cancelled)) = build else { return };
        let (me, board) = (self.rank, Arc::clone(&self.board));
        let state = lock(&board.state);
        let entry = &state.builds[ports];
        let is_unreachable = |other: &usize| state.dead.contains(other) || state.cut.contains(&(me, *other));
        let fails = *is_cancelled || !entry.gave_up.is_empty() || entry.members.iter().any(is_unreachable);
        let (all_began, all_inside) = (entry.began == entry.members, entry.inside == entry.members);
        drop(state);
        if *is_inside && all_inside {
            *build = None;
            self.agreement.passed(out);
        } else if fails {
            let (ports, was_inside) = (ports.clone(), *is_inside);
            *build = None;
            board.change(|state| state.builds.entry(ports).or_default().gave_up.insert(me));
            self.agreement.failed(was_inside, "it failed", out);
        } else if !*is_inside && all_began {
            *is_inside = true;
            let ports = ports.clone();
            board.change(|state| state.builds.entry(ports).or_default().inside.insert(me));
        }
    }
}

fn next_port(port: &mut u16) -> u16 {
    *port += 1;
    *port
}

impl Board {
    fn change_random(&self) -> u64 {
        lock(&self.state).random.below(200)
    }
}

/// The ranks of a test.
pub(super) struct World {
    links: Links,
    board: Arc<Board>,
    members: Vec<Option<Member>>,
    frozen: Vec<Arc<AtomicBool>>,
    calls: BTreeMap<usize, JoinHandle<(Member, Outcome)>>,
    /// How the last call of each rank ended.
    pub(super) outcomes: BTreeMap<usize, Outcome>,
    quorum: Quorum,
}

impl World {
    /// Starts ranks and waits until all are connected.
    pub(super) async fn new(size: usize, seed: u64, quorum: Quorum) -> World {
        let links = Links::joined(size, seed).await;
        let state = State {
            builds: BTreeMap::new(),
            port: 0,
            dead: BTreeSet::new(),
            cut: BTreeSet::new(),
            random: Random(seed ^ 0xa9e),
        };
        let board = Arc::new(Board { state: Mutex::new(state), changed: watch::Sender::new(()) });
        let frozen: Vec<Arc<AtomicBool>> = (0..size).map(|_| Arc::default()).collect();
        let member = |rank: usize| Member {
            rank,
            agreement: Agreement::new(rank, size, 1),
            handle: links.ranks[rank].handle.clone(),
            told: Arc::clone(&links.ranks[rank].told),
            news: Arc::clone(&links.ranks[rank].news),
            board: Arc::clone(&board),
            frozen: Arc::clone(&frozen[rank]),
            known: 0,
        };
        let members = (0..size).map(|rank| Some(member(rank))).collect();
        World { links, board, members, frozen, calls: BTreeMap::new(), outcomes: BTreeMap::new(), quorum }
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    fn is_dead(&self, rank: usize) -> bool {
        lock(&self.board.state).dead.contains(&rank)
    }

    /// Makes these ranks ask for the next view.
    pub(super) fn call(&mut self, ranks: impl IntoIterator<Item = usize>) {
        let quorum = self.quorum;
        for rank in ranks {
            if let Some(mut member) = self.members[rank].take() {
                let begin = Duration::from_micros(lock(&self.board.state).random.below(500));
                let call = async move {
                    sleep(begin).await;
                    let outcome = member.agree(quorum).await;
                    if matches!(outcome, Outcome::Opened(..)) {
                        member.handle.leave(false);
                    }
                    (member, outcome)
                };
                self.calls.insert(rank, tokio::spawn(call));
            }
        }
    }

    /// Waits until every call of a rank that lives and runs has ended.
    pub(super) async fn finish(&mut self) {
        for (rank, call) in std::mem::take(&mut self.calls) {
            if self.is_dead(rank) {
                continue;
            }
            if self.frozen[rank].load(Ordering::Relaxed) {
                self.calls.insert(rank, call);
                continue;
            }
            let ended = tokio::time::timeout(3 * DEADLINE, call).await;
            let (member, outcome) = ended.unwrap_or_else(|_| panic!("rank {rank} hangs")).expect("it does not panic");
            self.outcomes.insert(rank, outcome);
            self.members[rank] = Some(member);
        }
    }

    /// All ranks call, and `fault` happens after a time.
    pub(super) async fn run(&mut self, faults: impl IntoIterator<Item = (Duration, Fault)>) {
        self.call(0..self.size());
        let begun = Instant::now();
        for (after, fault) in faults {
            sleep_until(begun + after).await;
            self.inflict(fault);
        }
        self.finish().await;
    }

    pub(super) fn inflict(&mut self, fault: Fault) {
        match fault {
            Fault::Kill(rank) => {
                self.links.ranks[rank].kill();
                self.calls.get(&rank).inspect(|call| call.abort());
                self.board.change(|state| state.dead.insert(rank));
            }
            Fault::Freeze(rank, is_frozen) => {
                self.links.ranks[rank].freeze(is_frozen);
                self.frozen[rank].store(is_frozen, Ordering::Relaxed);
                self.links.ranks[rank].news.notify_one();
            }
            Fault::Cut(a, b) => {
                self.links.cut_both(a, b);
                self.board.change(|state| state.cut.extend([(a, b), (b, a)]));
            }
        }
    }

    /// Waits until no rank of these has one of `gone` as present.
    pub(super) async fn until_gone(&self, of: &[usize], gone: &[usize]) {
        let knows = |rank: &usize| {
            let presence = self.links.ranks[*rank].handle.status(|status| status.presence.clone());
            gone.iter().all(|gone| presence[*gone] != Presence::Present)
        };
        self.links.until("they are gone", Duration::from_secs(30), |_| of.iter().all(knows)).await;
    }

    /// Checks that all ranks that live are in the same view, and in its members.
    #[track_caller]
    pub(super) fn check_together(&self, case: &str) {
        let living: Vec<usize> = (0..self.size()).filter(|rank| !self.is_dead(*rank)).collect();
        let mut views = BTreeSet::new();
        for rank in &living {
            match self.outcomes.get(rank) {
                Some(Outcome::Opened(view, members)) => _ = views.insert((*view, members.clone())),
                other => panic!("{case}: rank {rank} ended with {other:?}"),
            }
        }
        assert!(views.len() <= 1, "{case}: the ranks are in different views: {views:?}");
        for (_, members) in views {
            assert!(living.iter().all(|rank| members.contains(rank)), "{case}: {members:?} lacks a rank that lives");
        }
    }
}

/// A fault of a rank or a line.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    Kill(usize),
    /// True: the rank stops; false: it continues.
    Freeze(usize, bool),
    Cut(usize, usize),
}
