//! The progress of a messenger: opening streams, moving bytes, and ending calls.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::handle::Driver;
use super::posted::{Call, PeerStream, PostedMessages};
use super::streams::{Message, Opened, Streams};
use super::turns::{Round, Turns};
use crate::error::{Error, Result, Source};
use crate::health::{GroupHealth, LEFT};
use crate::recorder::LaneRecorder;
use crate::stats::Stats;
use crate::transport::{Broken, ByteCounts, Endpoint, PeerFault, Transport};
use crate::types::Kind;
use crate::wait::{SLICE, lock};

/// How long a messenger that ends waits for its peers to receive what it sent.
const LINGER: Duration = Duration::from_millis(200);

/// How long the last messages of a peer may still arrive after its departure.
const FAREWELL: Duration = Duration::from_millis(100);

pub(super) enum Event {
    /// A stream to this rank was opened, or could not be opened.
    Dialled(usize, Result<Opened>),
    Stop,
}

struct Link {
    endpoint: Endpoint,
    /// Lets a thread wait for the stream without locking it.
    descriptor: Arc<OwnedFd>,
}

impl Link {
    fn new(at: PeerStream, stream: Box<dyn Transport>, descriptor: OwnedFd) -> Link {
        Link { endpoint: Endpoint::new(at.index(), vec![stream]), descriptor: Arc::new(descriptor) }
    }

    fn wants_to_send(&self, at: PeerStream, posted: &PostedMessages) -> bool {
        self.endpoint.broken().is_none() && (self.endpoint.is_sending() || posted.has_frames(at))
    }

    /// Closes the stream in both directions, because the peer sends no more bytes.
    fn close(&mut self) {
        self.endpoint.close(LEFT);
        // The peer must see the end now, but dropping the link closes the descriptors later.
        let _ = rustix::net::shutdown(&self.descriptor, rustix::net::Shutdown::Both);
    }
}

/// The streams between this rank and a peer.
#[derive(Default)]
struct Peer {
    /// Opened by this rank. Carries its messages and the peer's answers.
    outbound: Option<Link>,
    /// True while this rank opens its stream.
    dialling: bool,
    /// Opened by the peer. Carries its messages and this rank's answers.
    inbound: Option<Link>,
    /// Time at which this rank learned that the peer has left.
    left: Option<Instant>,
}

struct MessageProgress {
    posted: PostedMessages,
    peers: Vec<Peer>,
    /// True once no further call is accepted.
    closed: bool,
    /// True while the thread waits without a time limit.
    idle: bool,
}

/// State that only the thread which makes progress uses.
pub(super) struct Turn {
    /// Streams that may have bytes to receive.
    ready: Vec<PeerStream>,
    checked: Instant,
    /// True when the messenger ends.
    stops: bool,
}

pub(super) struct MessengerShared {
    pub(super) streams: Box<dyn Streams>,
    pub(super) health: Arc<GroupHealth>,
    pub(super) stats: Arc<Stats>,
    recorder: Option<LaneRecorder>,
    events: Mutex<Vec<Event>>,
    turns: Turns<Turn>,
    /// Locked while bytes are handed to streams and taken from them, never across a wait.
    state: Mutex<MessageProgress>,
}

impl Peer {
    fn link(&mut self, inbound: bool) -> Option<&mut Link> {
        if inbound { self.inbound.as_mut() } else { self.outbound.as_mut() }
    }
}

fn links(peers: &mut [Peer]) -> impl Iterator<Item = (PeerStream, &mut Link)> {
    peers.iter_mut().enumerate().flat_map(|(peer, streams)| {
        let Peer { outbound, inbound, .. } = streams;
        let outbound = outbound.as_mut().map(|link| (PeerStream { peer, inbound: false }, link));
        outbound.into_iter().chain(inbound.as_mut().map(|link| (PeerStream { peer, inbound: true }, link)))
    })
}

impl MessageProgress {
    /// Sends on every stream what it has room for. Returns true if bytes moved.
    fn send(&mut self, counts: &mut ByteCounts) -> bool {
        let MessageProgress { posted, peers, .. } = self;
        links(peers).fold(false, |moved, (_, link)| link.endpoint.send(posted, counts) | moved)
    }

    fn wants_to_send(&mut self) -> bool {
        let MessageProgress { posted, peers, .. } = self;
        links(peers).any(|(at, link)| link.wants_to_send(at, posted))
    }

    /// Finds a lost rank that a call needs. Returns the rank, what happened, and the operating system's error.
    fn lost(&mut self, health: &GroupHealth) -> Option<(usize, String, Source)> {
        let ended = |peer: usize| self.posted.has_ended(PeerStream { peer, inbound: true });
        let is_over = |rank: usize, peer: &Peer| {
            peer.inbound.as_ref().is_none_or(|link| ended(rank) || link.endpoint.broken().is_some())
        };
        let over: Vec<bool> = self.peers.iter().enumerate().map(|(rank, peer)| is_over(rank, peer)).collect();
        let gone: Vec<bool> = over.iter().enumerate().map(|(rank, over)| health.has_departed(rank) && *over).collect();
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            if rank == health.rank() {
                continue;
            }
            let broken = |link: &Link| link.endpoint.broken().cloned();
            let outbound = peer.outbound.as_ref().and_then(broken);
            let inbound = peer.inbound.as_ref().filter(|_| !ended(rank)).and_then(broken);
            let broken = outbound
                .filter(|_| self.posted.sends_to(rank))
                .or_else(|| inbound.filter(|_| self.posted.receives_from(rank, |other| gone[other])));
            if let Some(Broken { how, source }) = broken {
                return Some((rank, how, source));
            }
            if !health.has_departed(rank) || peer.left.get_or_insert_with(Instant::now).elapsed() < FAREWELL {
                continue;
            }
            if self.posted.sends_to(rank) || over[rank] && self.posted.receives_from(rank, |other| gone[other]) {
                return Some((rank, LEFT.to_owned(), Source::default()));
            }
        }
        None
    }
}

impl MessengerShared {
    pub(super) fn new(
        streams: Box<dyn Streams>,
        health: &Arc<GroupHealth>,
        stats: &Arc<Stats>,
        recorder: Option<LaneRecorder>,
    ) -> Result<MessengerShared> {
        let posted = PostedMessages::new(health.rank(), health.world_ranks().to_vec());
        let peers = (0..health.size()).map(|_| Peer::default()).collect();
        Ok(MessengerShared {
            streams,
            health: Arc::clone(health),
            stats: Arc::clone(stats),
            recorder,
            events: Mutex::default(),
            turns: Turns::new(Turn { ready: Vec::new(), checked: Instant::now(), stops: false })?,
            state: Mutex::new(MessageProgress { posted, peers, closed: false, idle: false }),
        })
    }

    #[cfg(test)]
    pub(super) fn keeps_messages(&self) -> bool {
        lock(&self.state).posted.keeps_messages()
    }

    fn count(&self, counts: &ByteCounts) {
        let stats = self.stats.of(Kind::Send);
        stats.wire_bytes_sent.fetch_add(counts.wire_sent, Relaxed);
        stats.wire_bytes_received.fetch_add(counts.wire_received, Relaxed);
    }

    pub(super) fn wake(&self) {
        self.turns.waker().wake();
    }

    pub(super) fn send(&self, event: Event) {
        lock(&self.events).push(event);
        self.wake();
    }

    /// Adds the messages of a call, and moves what can move at once. Fails with `Aborted` after the shutdown, or with
    /// the group's first failure.
    pub(super) fn add(
        self: &Arc<MessengerShared>,
        call: Call,
        sends: Vec<Message>,
        receives: Vec<Message>,
    ) -> Result<()> {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        if state.closed {
            self.health.check()?;
            return Err(Error::Aborted("the group's messages were shut down".to_owned()));
        }
        let (mut dial, mut wrong) = (Vec::new(), None);
        let number = state.posted.begin_call(call);
        for (nth, Message { peer, tag, data }) in receives.into_iter().enumerate() {
            if let Err(how) = state.posted.receive(number, nth, peer, tag, data) {
                wrong.get_or_insert(how);
            }
        }
        for Message { peer, tag, data } in sends {
            let Some(to) = peer else { continue };
            state.posted.send(number, to, tag, data);
            let peer = &mut state.peers[to];
            if peer.outbound.is_none() && !std::mem::replace(&mut peer.dialling, true) {
                dial.push(to);
            }
        }
        let mut counts = ByteCounts::default();
        state.send(&mut counts);
        let ended = state.posted.take_ended();
        // A caller that makes progress may be waiting for one of these.
        let ends = self.turns.is_driven() && !ended.is_empty();
        let wake = state.idle || ends || state.wants_to_send();
        drop(guard);
        self.count(&counts);
        self.end(ended);
        if let Some(how) = wrong {
            return Err(self.health.fail(Error::Mismatch(how)));
        }
        for to in dial {
            let shared = Arc::downgrade(self);
            let done = move |opened| _ = shared.upgrade().inspect(|shared| shared.send(Event::Dialled(to, opened)));
            self.streams.dial(to, Box::new(done));
        }
        if wake {
            self.wake();
        }
        Ok(())
    }

    fn end(&self, ended: Vec<(Call, Result<()>)>) {
        for (Call { handle, running, keep, .. }, result) in ended {
            if let (Some(recorder), Some(running)) = (&self.recorder, running) {
                let own = self.health.world_rank(self.health.rank());
                recorder.end(running, result.as_ref().err().map(|error| (error, own)));
            }
            // Dropped before the waiter wakes, so that the memory is already returned to its owner.
            drop(keep);
            handle.finish(result);
        }
    }

    /// Makes progress until the messenger ends. This is the thread's main function.
    pub(super) fn work(&self) {
        self.turns.run(|turn| self.round(turn, None));
        self.finish();
    }

    /// Moves the bytes that can move now. If there are none, sleeps until there may be some, for at most `longest`.
    /// `None` stands for one slice while messages are pending, and no limit otherwise.
    fn round(&self, turn: &mut Turn, longest: Option<Duration>) -> Round {
        turn.stops |= self.heed_events(&mut turn.ready);
        if turn.stops {
            return Round::Over;
        }
        self.take_arrived(&mut turn.ready);
        let moved = self.step(&turn.ready).unwrap_or_else(|error| {
            _ = self.health.fail(error);
            false
        });
        let sleeps = !moved && longest.is_none_or(|longest| !longest.is_zero());
        if sleeps || turn.checked.elapsed() > SLICE {
            if self.health.check().is_err() {
                return Round::Over;
            }
            self.check();
            turn.checked = Instant::now();
        }
        if moved {
            return Round::Moved;
        }
        turn.ready = self.sleep(longest);
        Round::Idle
    }

    /// Adds the streams that this rank has opened. Returns true if the messenger ends.
    fn heed_events(&self, ready: &mut Vec<PeerStream>) -> bool {
        let events = std::mem::take(&mut *lock(&self.events));
        let mut stops = false;
        for event in events {
            match event {
                Event::Stop => stops = true,
                Event::Dialled(peer, Ok((stream, descriptor))) => {
                    let at = PeerStream { peer, inbound: false };
                    lock(&self.state).peers[peer].outbound = Some(Link::new(at, stream, descriptor));
                    ready.push(at);
                }
                Event::Dialled(peer, Err(error)) => {
                    let left = self.health.has_departed(peer);
                    let error = if left { self.health.attribute_disconnect(peer, LEFT) } else { error };
                    _ = self.health.fail(error);
                }
            }
        }
        stops
    }

    fn take_arrived(&self, ready: &mut Vec<PeerStream>) {
        for (peer, opened) in self.streams.arrived() {
            match opened {
                Ok((stream, descriptor)) => {
                    let at = PeerStream { peer, inbound: true };
                    lock(&self.state).peers[peer].inbound = Some(Link::new(at, stream, descriptor));
                    ready.push(at);
                }
                Err(error) => _ = self.health.fail(error),
            }
        }
    }

    /// Moves bytes: sends on all streams, and receives on those that are ready. Returns true if any moved. An error
    /// says what is wrong with a peer's frame.
    fn step(&self, ready: &[PeerStream]) -> Result<bool> {
        let mut guard = lock(&self.state);
        let mut counts = ByteCounts::default();
        let mut moved = guard.send(&mut counts);
        let mut wrong = None;
        let MessageProgress { posted, peers, .. } = &mut *guard;
        for at in ready {
            let Some(link) = peers[at.peer].link(at.inbound) else { continue };
            match link.endpoint.recv(posted, &mut counts) {
                Ok(any) => moved |= any,
                Err(PeerFault::Mismatch(how)) => drop(wrong.get_or_insert(Error::Mismatch(how))),
                Err(PeerFault::Unreadable(bad)) => {
                    let how = format!("rank {} sent an unreadable frame: {bad}", self.health.world_rank(at.peer));
                    wrong.get_or_insert(Error::Mismatch(how));
                }
                // If a message needs this stream, `check` reports the loss as soon as no bytes move.
                Err(PeerFault::Lost(_)) => {}
            }
            // The peer takes the end of its stream as the acknowledgement that everything has arrived.
            if at.inbound && posted.has_ended(*at) && !link.wants_to_send(*at, posted) {
                link.close();
            }
        }
        let ended = guard.posted.take_ended();
        drop(guard);
        self.count(&counts);
        self.end(ended);
        wrong.map_or(Ok(moved), Err)
    }

    /// Fails the group if a call needs a lost peer or its deadline has passed.
    fn check(&self) {
        let mut state = lock(&self.state);
        if !state.posted.is_busy() {
            return;
        }
        let lost = state.lost(&self.health);
        let progress = lost.as_ref().and_then(|(rank, ..)| state.posted.progress_with(*rank));
        let overdue = state.posted.overdue();
        drop(state);
        let error = if let Some((rank, how, source)) = lost {
            let error = self.health.attribute_broken_stream(rank, &how, &source);
            progress.into_iter().fold(error, Error::during)
        } else if let Some((limit, missing, progress)) = overdue {
            self.health.timed_out(limit, &missing, progress)
        } else {
            return;
        };
        _ = self.health.fail(error);
        self.wake();
    }

    /// Sleeps until a stream may move bytes or the thread is woken, for at most `longest`. Returns the streams that may
    /// have bytes to receive.
    fn sleep(&self, longest: Option<Duration>) -> Vec<PeerStream> {
        let mut open = Vec::new();
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        for (at, link) in links(&mut state.peers).filter(|(_, link)| link.endpoint.broken().is_none()) {
            open.push((at, Arc::clone(&link.descriptor), link.wants_to_send(at, &state.posted)));
        }
        state.idle = longest.is_none() && !state.posted.is_busy();
        let limit = (!state.idle).then(|| longest.unwrap_or(SLICE).min(SLICE));
        drop(guard);
        let mut wanted = vec![PollFd::from_borrowed_fd(self.turns.waker().as_fd(), PollFlags::IN)];
        wanted.extend(open.iter().map(|(_, descriptor, sends)| {
            let events = if *sends { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(descriptor.as_fd(), events)
        }));
        let limit = limit.map(|limit| Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() });
        // The caller checks the streams in any case: ready, timed out or interrupted.
        let _ = poll(&mut wanted, limit.as_ref());
        let has_news = |fd: &PollFd<'_>| !fd.revents().difference(PollFlags::OUT).is_empty();
        let ready = open.iter().zip(&wanted[1..]).filter(|(_, fd)| has_news(fd)).map(|((at, ..), _)| *at);
        let ready = ready.collect();
        if limit.is_none() {
            lock(&self.state).idle = false;
        }
        ready
    }

    /// Ends every call, tells the peers that no more messages follow, and waits a moment for them to receive all.
    fn finish(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let cause = self.health.cause();
        state.posted.fail(&cause.unwrap_or_else(|| Error::Aborted("the group's messages were shut down".to_owned())));
        let ended = state.posted.take_ended();
        let MessageProgress { posted, peers, .. } = &mut *state;
        for (peer, streams) in peers.iter_mut().enumerate() {
            let outbound = streams.outbound.take().map(|mut link| {
                if link.endpoint.drop_unsent() {
                    link.close();
                }
                posted.say_end(PeerStream { peer, inbound: false });
                link
            });
            *streams = Peer { outbound, ..Peer::default() };
        }
        drop(state);
        self.end(ended);
        let until = Instant::now() + LINGER;
        loop {
            let mut state = lock(&self.state);
            state.send(&mut ByteCounts::default());
            let MessageProgress { posted, peers, .. } = &mut *state;
            let mut open = Vec::new();
            for (at, link) in links(peers) {
                link.endpoint.discard();
                if link.endpoint.broken().is_none() {
                    open.push((Arc::clone(&link.descriptor), link.wants_to_send(at, posted)));
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if open.is_empty() || left.is_zero() {
                state.peers.iter_mut().for_each(|peer| *peer = Peer::default());
                return;
            }
            drop(state);
            let events = |sends: bool| if sends { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let mut wanted: Vec<_> = open
                .iter()
                .map(|(descriptor, sends)| PollFd::from_borrowed_fd(descriptor.as_fd(), events(*sends)))
                .collect();
            let limit = Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() };
            let _ = poll(&mut wanted, Some(&limit));
        }
    }
}

impl Driver for MessengerShared {
    fn drive(&self, done: &dyn Fn() -> bool, limit: Duration, sleep: &mut dyn FnMut()) {
        self.turns.drive(done, limit, sleep, |turn, longest| self.round(turn, Some(longest)));
    }
}
