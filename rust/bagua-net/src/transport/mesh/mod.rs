//! The mesh: the streams of one rank to the other ranks of a group. Moves many messages at the same time, in both
//! directions, without copies.
//!
//! Bodies are sent from and received into the caller's memory. The mesh has no thread of its own: [`Mesh::exchange`]
//! drives all transfers on the calling thread, and sleeps while none can make progress.
//! | file | what it is |
//! |---|---|
//! | `endpoint` | the streams to one peer, which move the bytes of frames |
//! | `frame_handler` | the interface through which an endpoint gets and delivers frames |
//! | `chunk_lengths` | the length of a frame if there are several streams to a peer |
//! | `open_on_demand` | opens the streams to a peer in the first run that needs them |
//! | `message_plan` | the messages of one operation |
//! | `plan_progress` | turns a plan into frames |

mod chunk_lengths;
mod endpoint;
mod frame_handler;
mod message_plan;
mod open_on_demand;
mod plan_progress;

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Broken, Incoming, OpContext, Outgoing, Readiness, Transport};
use crate::error::{Error, Result};
use crate::wait::{Doorbell, SLICE, blocking_wait};
pub use endpoint::{ByteCounts, Endpoint, PeerFault};
pub use frame_handler::Frames;
pub use message_plan::Plan;
pub use message_plan::Step;
use message_plan::{Listed, Lists};
pub use open_on_demand::{Batch, OpenStreams, Opened};
use plan_progress::{PeerMessages, Run};

/// Time that an idle rank polls its streams before it sleeps. Longer than a round trip on one host, and short enough
/// not to slow down a thread that computes on the same core.
pub const SPIN: Duration = Duration::from_micros(30);

/// Shortest and longest sleep if no single wait covers all streams: some notify through a descriptor and others through
/// a doorbell, or one has no notification at all.
const POLL_PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));

/// While streams are opening, a rank sleeps for one eighth of the time for which no bytes have moved. This adds little
/// to a short wait, and costs little in a long one.
const OPENING_SHARE: u32 = 8;

/// Panic text: a mesh without an opener has all its streams from the start.
const COMPLETE: &str = "an opener where streams are missing";

/// After this number of busy rounds over all peers, the mesh checks the group's health and the deadline.
const BUSY_ROUNDS: u32 = 64;

/// Time that a rank waits without receiving a byte for the last messages of a member that has left. A member that
/// leaves ends its streams, so the limit matters only if its host or the network fails.
const LAST_BYTES: Duration = Duration::from_secs(5);

/// The streams of one rank to the other members of a group.
pub struct Mesh {
    rank: usize,
    /// Group rank of each member. A member's index in the mesh is its place in this list.
    members: Vec<usize>,
    /// The streams to each peer, by index. A peer may have no stream until the first run with messages for it.
    endpoints: Vec<Endpoint>,
    messages: Vec<PeerMessages>,
    /// Opener of missing streams. `None` if every peer had its streams from the start.
    opener: Option<Box<dyn OpenStreams>>,
    /// Indices of the active peers whose streams are being opened. Empty at the end of a run without an error.
    opening: Vec<usize>,
    /// True if some peer has several streams.
    bundled: bool,
    /// Doorbell that peers ring if their streams wait by [`Readiness::Doorbell`].
    bell: Option<Doorbell>,
    /// Indices of peers with unfinished transfers. The order starts after this rank's index, so that not all ranks
    /// start with rank 0.
    active: Vec<usize>,
    /// Group ranks that the exchange waits for. Kept between calls to reuse the memory.
    missing: Vec<usize>,
    /// The lists of [`Listed`]. Kept between calls to reuse the memory.
    lists: (Lists, Vec<usize>),
}

impl Mesh {
    /// Creates the mesh of the process with index `rank`. `members[i]` is the group rank of index i, and `links[i]` the
    /// stream to it (`None` for this rank). Streams that wait by [`Readiness::Doorbell`] need `bell`. Panics if the
    /// arguments are inconsistent.
    pub fn new(
        rank: usize,
        members: Vec<usize>,
        links: Vec<Option<Box<dyn Transport>>>,
        bell: Option<Doorbell>,
    ) -> Mesh {
        Mesh::bundled(rank, members, links.into_iter().map(|link| link.into_iter().collect()).collect(), bell)
    }

    /// Builds a mesh like [`Mesh::new`], with any number of streams to each index (none to this rank). A message is
    /// divided into chunks, and each chunk goes to the first stream with room. Both ends must have the same number of
    /// streams in the same order. Panics if the arguments are inconsistent.
    pub fn bundled(
        rank: usize,
        members: Vec<usize>,
        bundles: Vec<Vec<Box<dyn Transport>>>,
        bell: Option<Doorbell>,
    ) -> Mesh {
        let complete = bundles.iter().enumerate().all(|(index, bundle)| bundle.is_empty() == (index == rank));
        assert!(complete, "a stream to every member except this rank");
        Mesh::build(rank, members, bundles, bell, None)
    }

    /// Builds a mesh like [`Mesh::bundled`], but the first run with messages for a member opens the streams of an empty
    /// bundle. Both ends of a pair run the same operation, so both open the streams in it. Panics if the arguments are
    /// inconsistent.
    pub fn on_demand(
        rank: usize,
        members: Vec<usize>,
        bundles: Vec<Vec<Box<dyn Transport>>>,
        bell: Option<Doorbell>,
        opener: Box<dyn OpenStreams>,
    ) -> Mesh {
        Mesh::build(rank, members, bundles, bell, Some(opener))
    }

    fn build(
        rank: usize,
        members: Vec<usize>,
        bundles: Vec<Vec<Box<dyn Transport>>>,
        bell: Option<Doorbell>,
        opener: Option<Box<dyn OpenStreams>>,
    ) -> Mesh {
        assert!(rank < members.len() && members.len() == bundles.len(), "one bundle per member");
        for bundle in &bundles {
            let rings = bundle.iter().any(|link| matches!(link.readiness(), Readiness::Doorbell));
            assert!(bell.is_some() || !rings, "a stream with a doorbell needs the mesh's doorbell");
        }
        let bundled = bundles.iter().any(|bundle| bundle.len() > 1);
        let messages = members.iter().map(|_| PeerMessages::default()).collect();
        let endpoints = bundles.into_iter().enumerate().map(|(peer, bundle)| Endpoint::new(peer, bundle)).collect();
        let lists = (members.iter().map(|_| (Vec::new(), Vec::new())).collect(), vec![0; members.len()]);
        Mesh {
            rank,
            members,
            endpoints,
            messages,
            opener,
            opening: Vec::new(),
            bundled,
            bell,
            active: Vec::new(),
            missing: Vec::new(),
            lists,
        }
    }

    /// Returns this rank's index.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of members, including this rank.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns the name of the transport to each index, even if it is not open yet, and "self" for this rank.
    pub fn names(&self) -> Vec<&'static str> {
        let unopened = self.opener.as_ref().map_or("self", |opener| opener.name());
        let name = |(index, endpoint): (usize, &Endpoint)| match endpoint.name() {
            Some(name) => name,
            None if index == self.rank => "self",
            None => unopened,
        };
        self.endpoints.iter().enumerate().map(name).collect()
    }

    /// Sends and receives all messages. Peers are indices of the mesh. Messages between two ranks are matched in the
    /// order given. The header of a message is compared with the expected one before any byte of the body is used.
    ///
    /// # Errors
    /// The first cause of the group, `Timeout`, `PeerLost`, or `Mismatch`. The streams are unusable afterwards.
    /// `InvalidArgument` for a message to or from this rank itself, and `UnsupportedType` for a message in device
    /// memory, leave the streams unchanged.
    pub fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        self.exchange_step(cx, Step::default(), sends, recvs)
    }

    /// Exchanges messages like [`Mesh::exchange`]. While no bytes arrive, also calls `elsewhere(peer)`, which returns
    /// the text of the peer's operation, for example from shared memory, if it differs. Returns the errors of
    /// [`Mesh::exchange`].
    pub fn exchange_unless(
        &mut self,
        cx: &OpContext<'_>,
        sends: &[Outgoing<'_>],
        recvs: &mut [Incoming<'_>],
        elsewhere: &dyn Fn(usize) -> Option<String>,
    ) -> Result<()> {
        self.run_listed(cx, Step::default(), sends, recvs, elsewhere)
    }

    /// Exchanges messages like [`Mesh::exchange`], as one of several exchanges in an operation. Returns the errors of
    /// [`Mesh::exchange`].
    pub fn exchange_step(
        &mut self,
        cx: &OpContext<'_>,
        step: Step,
        sends: &[Outgoing<'_>],
        recvs: &mut [Incoming<'_>],
    ) -> Result<()> {
        self.run_listed(cx, step, sends, recvs, &|_| None)
    }

    fn run_listed(
        &mut self,
        cx: &OpContext<'_>,
        step: Step,
        sends: &[Outgoing<'_>],
        recvs: &mut [Incoming<'_>],
        elsewhere: &dyn Fn(usize) -> Option<String>,
    ) -> Result<()> {
        let peers = sends.iter().map(|m| m.peer).chain(recvs.iter().map(|m| m.peer));
        if let Some(bad) = peers.into_iter().find(|peer| *peer == self.rank || *peer >= self.size()) {
            return Err(Error::InvalidArgument(format!(
                "rank {} of {} cannot exchange messages with rank {bad}",
                self.rank,
                self.size()
            )));
        }
        sends.iter().try_for_each(|message| message.data.as_host().map(drop))?;
        recvs.iter().try_for_each(|message| message.data.as_buffer().as_host().map(drop))?;
        let (mut lists, mut begun) = std::mem::take(&mut self.lists);
        for (to, from) in &mut lists {
            to.clear();
            from.clear();
        }
        begun.fill(0);
        sends.iter().enumerate().for_each(|(index, message)| lists[message.peer].0.push(index));
        recvs.iter().enumerate().for_each(|(index, message)| lists[message.peer].1.push(index));
        let here: u64 = if recvs.is_empty() {
            sends.iter().map(|m| m.data.len() as u64).sum()
        } else {
            recvs.iter().map(|m| m.data.len() as u64).sum()
        };
        let step = Step { total: step.total.max(step.before + here), ..step };
        let mut plan = Listed { sends, recvs, lists, begun, step, elsewhere };
        let outcome = self.run(cx, &mut plan);
        self.lists = (plan.lists, plan.begun);
        outcome
    }

    /// Sends and receives all messages of a plan. Returns the errors of [`Mesh::exchange`].
    pub fn run(&mut self, cx: &OpContext<'_>, plan: &mut dyn Plan) -> Result<()> {
        let mut messages = std::mem::take(&mut self.messages);
        let outcome = self.run_with(cx, plan, &mut messages);
        self.messages = messages;
        outcome
    }

    fn run_with(&mut self, cx: &OpContext<'_>, plan: &mut dyn Plan, messages: &mut [PeerMessages]) -> Result<()> {
        self.active.clear();
        self.opening.clear();
        let (n, mut missing) = (self.size(), Vec::new());
        for peer in (1..n).map(|distance| (self.rank + distance) % n) {
            let endpoint = &mut self.endpoints[peer];
            endpoint.begin();
            messages[peer].begin(plan.counts(peer));
            if !messages[peer].is_done() {
                self.active.push(peer);
                let before = missing.len();
                missing.extend(endpoint.ask_for(|| wanted(plan, peer, n)).iter().map(|batch| (peer, *batch)));
                if missing.len() > before {
                    self.opening.push(peer);
                }
            }
        }
        if !missing.is_empty() {
            self.opener.as_mut().expect(COMPLETE).begin(cx, &missing)?;
        }
        let counts_sends = self.active.iter().all(|peer| plan.counts(*peer).1 == 0);
        let (before, total) = plan.progress();
        let mut transfer =
            Transfer { cx, before, total, counts: ByteCounts::default(), counts_sends, idle: None, pauses: 0 };
        let overtaken = self.bundled || !self.opening.is_empty();
        let mut run = Run { plan, peers: messages, overtaken };
        let outcome = self.transfer(&mut transfer, &mut run);
        messages.iter_mut().for_each(PeerMessages::end);
        transfer.end_wait();
        cx.stats.wire_bytes_sent.fetch_add(transfer.counts.wire_sent, Relaxed);
        cx.stats.wire_bytes_received.fetch_add(transfer.counts.wire_received, Relaxed);
        outcome
    }

    fn transfer(&mut self, transfer: &mut Transfer<'_, '_>, run: &mut Run<'_>) -> Result<()> {
        let cx = transfer.cx;
        let mut busy = 0u32;
        loop {
            // Read before the streams are polled, so that a ring in between is not missed.
            let rings = self.bell.as_ref().map_or(0, Doorbell::rings);
            let moved = self.progress(transfer, run)?;
            // When a run ends, both ends of a pair have the same streams.
            if self.active.is_empty() && self.opening.is_empty() {
                return Ok(());
            }
            if moved {
                transfer.end_wait();
                busy = busy.wrapping_add(1);
                if busy.is_multiple_of(BUSY_ROUNDS) && (cx.health.check().is_err() || cx.deadline.passed()) {
                    self.check(transfer, run)?;
                }
            } else if transfer.idle_for() < SPIN {
                std::hint::spin_loop();
            } else if let Err(error) = self.check(transfer, run) {
                // After the streams were polled, a peer may have sent its messages and left, or started its next
                // operation. Poll once more before reporting it.
                let ended = cx.health.check().is_err() || cx.deadline.passed();
                if ended || !self.progress(transfer, run)? {
                    return Err(error);
                }
                transfer.end_wait();
            } else {
                self.sleep(transfer, run, rings);
            }
        }
    }

    /// Returns true if streams have been opened.
    fn take_opened(&mut self, run: &mut Run<'_>) -> Result<bool> {
        let Mesh { endpoints, opening, opener, bundled, .. } = self;
        let opener = opener.as_mut().expect(COMPLETE);
        let (mut any, mut at) = (false, 0);
        while let Some(&peer) = opening.get(at) {
            let endpoint = &mut endpoints[peer];
            let opened = opener.opened(peer)?;
            any |= !opened.streams.is_empty();
            if opened.all {
                opening.swap_remove(at);
            } else {
                at += 1;
            }
            endpoint.add(opened);
            *bundled |= endpoint.count() > 1;
        }
        run.overtaken = *bundled || !opening.is_empty();
        Ok(any)
    }

    /// Makes progress with every peer. Returns true if bytes moved or streams were opened. Serves all peers before it
    /// returns an error of one, so that each peer gets this rank's header before this rank fails.
    fn progress(&mut self, transfer: &mut Transfer<'_, '_>, run: &mut Run<'_>) -> Result<bool> {
        let mut any = !self.opening.is_empty() && self.take_opened(run)?;
        let mut lost: Option<(usize, Broken)> = None;
        let mut mismatch: Option<(usize, String)> = None;
        for &peer in &self.active {
            match self.endpoints[peer].step(run, &mut transfer.counts) {
                Ok(moved) => any |= moved,
                Err(PeerFault::Lost(broken)) => drop(lost.get_or_insert((peer, broken))),
                Err(PeerFault::Mismatch(theirs)) => drop(mismatch.get_or_insert((peer, theirs))),
                Err(PeerFault::Unreadable(bad)) => drop(mismatch.get_or_insert((peer, bad.to_string()))),
            }
        }
        if let Some((peer, theirs)) = mismatch {
            return Err(transfer.cx.mismatch(self.members[peer], &theirs));
        }
        if let Some((peer, Broken { how, source })) = lost {
            let error = transfer.cx.health.attribute_broken_stream(self.members[peer], &how, &source);
            return Err(error.during(transfer.cx.progress(transfer.done(), transfer.total)));
        }
        if any {
            self.active.retain(|peer| !run.peers[*peer].is_done() || self.endpoints[*peer].is_sending());
        }
        Ok(any)
    }

    /// Checks the group's health, the deadline, and the operations of peers. The error names the ranks that owe a
    /// message. If there are none, it names those with messages to send, and otherwise those with messages to receive.
    /// The ranks whose streams are not open are named too.
    fn check(&mut self, transfer: &mut Transfer<'_, '_>, run: &Run<'_>) -> Result<()> {
        let plan = &*run.plan;
        let senders = || self.active.iter().filter(|peer| run.expects(**peer));
        self.missing.clear();
        self.missing.extend(senders().filter(|peer| plan.owes(**peer)).map(|peer| self.members[*peer]));
        if self.missing.is_empty() {
            self.missing.extend(senders().map(|peer| self.members[*peer]));
        }
        if self.missing.is_empty() {
            self.missing.extend(self.active.iter().map(|peer| self.members[*peer]));
        }
        self.missing.extend(self.opening.iter().map(|peer| self.members[*peer]));
        self.missing.sort_unstable();
        self.missing.dedup();
        let waits = transfer.idle_for() < LAST_BYTES;
        let is_in_flight = |rank: usize| {
            let from =
                |peer: &usize| self.members[*peer] == rank && run.expects(*peer) && self.endpoints[*peer].is_wire();
            waits && self.active.iter().any(from)
        };
        transfer.cx.check_unless(is_in_flight, &self.missing, transfer.done(), transfer.total)?;
        match self.active.iter().find_map(|peer| Some((*peer, plan.elsewhere(*peer)?))) {
            Some((peer, theirs)) => Err(transfer.cx.mismatch(self.members[peer], &theirs)),
            None => Ok(()),
        }
    }

    /// Sleeps for at most [`SLICE`], until a stream may move bytes. `rings` was read before the last poll.
    fn sleep(&self, transfer: &mut Transfer<'_, '_>, run: &Run<'_>, rings: u32) {
        let mut descriptors = Vec::with_capacity(self.active.len());
        let (mut by_bell, mut by_polling) = (false, false);
        for &peer in &self.active {
            for (readiness, recv, send) in self.endpoints[peer].waits(run) {
                match readiness {
                    Readiness::Doorbell => by_bell = true,
                    Readiness::Poll => by_polling = true,
                    Readiness::Descriptor(fd) => {
                        let mut wanted = PollFlags::empty();
                        wanted.set(PollFlags::IN, recv);
                        wanted.set(PollFlags::OUT, send);
                        descriptors.push(PollFd::from_borrowed_fd(fd, wanted));
                    }
                }
            }
        }
        let mixed = by_bell && (by_polling || !descriptors.is_empty());
        let mut longest = if mixed || by_polling { transfer.next_pause() } else { SLICE };
        if !self.opening.is_empty() {
            longest = longest.min(transfer.idle_for() / OPENING_SHARE).max(POLL_PAUSES.0);
        }
        let timeout = longest.min(transfer.cx.deadline.left());
        match &self.bell {
            // If some streams use the doorbell and others do not, every second pause waits for the doorbell.
            Some(bell) if by_bell && (!mixed || transfer.pauses.is_multiple_of(2)) => bell.wait(rings, timeout),
            _ => {
                let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
                // Whatever the outcome, the caller polls the streams again.
                blocking_wait(|| _ = poll(&mut descriptors, Some(&timeout)));
            }
        }
    }
}

/// Returns the streams to a peer that a run of this number of ranks needs.
fn wanted(plan: &dyn Plan, peer: usize, ranks: usize) -> Batch {
    if chunk_lengths::wants_several(plan.longest(peer), ranks) { Batch::Others } else { Batch::First }
}

struct Transfer<'a, 'c> {
    cx: &'a OpContext<'c>,
    /// Bytes of the operation that arrived in earlier exchanges.
    before: u64,
    total: u64,
    counts: ByteCounts,
    /// True if the exchange receives nothing, so that sent bytes measure its progress.
    counts_sends: bool,
    /// Start of the current wait: no bytes have moved since.
    idle: Option<Instant>,
    pauses: u32,
}

impl Transfer<'_, '_> {
    fn done(&self) -> u64 {
        self.before + if self.counts_sends { self.counts.sent } else { self.counts.received }
    }

    fn idle_for(&mut self) -> Duration {
        self.idle.get_or_insert_with(Instant::now).elapsed()
    }

    fn end_wait(&mut self) {
        self.pauses = 0;
        if let Some(since) = self.idle.take() {
            self.cx.stats.add_wait(since.elapsed());
        }
    }

    /// Returns the length of the next pause, which doubles from the shortest to the longest.
    fn next_pause(&mut self) -> Duration {
        self.pauses += 1;
        POLL_PAUSES.1.min(POLL_PAUSES.0 * (1 << self.pauses.min(8)))
    }
}
