//! The streams of one rank to all others of a group: many messages at once, in both directions, without copies.
//!
//! Bodies go from and into the caller's memory. Nothing here has a thread: [`Mesh::exchange`] drives every transfer itself, on
//! the thread that called it, and sleeps when none can move.

mod chunk;
mod endpoint;
mod plan;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Broken, Incoming, OpContext, Outgoing, Readiness, Transport};
use crate::error::{Error, Result};
use crate::wait::{Doorbell, SLICE};
use endpoint::{ByteCounts, Endpoint, PeerFault};
pub(crate) use plan::Plan;
use plan::{Listed, Lists};
use std::sync::atomic::Ordering::Relaxed;

/// How long a rank that has nothing to do looks again and again before it sleeps: longer than a round trip on one host, shorter
/// than what a computing thread on the same core would notice.
const SPIN: Duration = Duration::from_micros(30);

/// First and longest nap when some links wake by descriptor and others by doorbell, and nothing wakes for both, or when a link
/// has nothing that wakes.
const NAPS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));

/// Sweeps that may move bytes before the health and the deadline are looked at, although nothing had to be waited for.
const BUSY_SWEEPS: u32 = 64;

/// Where an exchange stands in an operation that takes several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// Number of the exchange; both sides must agree.
    pub part: u32,
    /// Bytes of the operation that arrived in earlier exchanges.
    pub before: u64,
    /// Bytes that arrive in the whole operation; at least those of this exchange.
    pub total: u64,
}

/// See the module.
pub struct Mesh {
    /// Own index.
    rank: usize,
    /// Group rank of every index.
    members: Vec<usize>,
    /// The streams to every index, and what is under way on them.
    endpoints: Vec<Endpoint>,
    /// Rung by peers whose links say [`Readiness::Doorbell`].
    bell: Option<Doorbell>,
    /// Indices with something under way, beginning after the own one so that ranks do not all start with rank 0.
    active: Vec<usize>,
    /// Group ranks that are waited for. Kept for its memory.
    missing: Vec<usize>,
    /// Kept for their memory.
    lists: (Lists, Vec<usize>),
}

impl Mesh {
    /// A mesh of which this process is index `rank`. `members[i]` is the group rank of index i, `links[i]` the stream to it (`None`
    /// for the own index), `bell` what peers ring whose links say [`Readiness::Doorbell`].
    ///
    /// # Panics
    /// When these do not fit together.
    pub fn new(
        rank: usize,
        members: Vec<usize>,
        links: Vec<Option<Box<dyn Transport>>>,
        bell: Option<Doorbell>,
    ) -> Mesh {
        Mesh::bundled(rank, members, links.into_iter().map(|link| link.into_iter().collect()).collect(), bell)
    }

    /// As [`Mesh::new`], with any number of streams to an index (none to the own one): a message is cut into chunks, and whichever
    /// stream has room takes the next one. Both ends must have the same number of streams, in the same order.
    ///
    /// # Panics
    /// When these do not fit together.
    pub fn bundled(
        rank: usize,
        members: Vec<usize>,
        bundles: Vec<Vec<Box<dyn Transport>>>,
        bell: Option<Doorbell>,
    ) -> Mesh {
        assert!(rank < members.len() && members.len() == bundles.len(), "one bundle per member");
        for (index, bundle) in bundles.iter().enumerate() {
            assert_eq!(bundle.is_empty(), index == rank, "a link to every member but oneself");
            let rings = bundle.iter().any(|link| matches!(link.readiness(), Readiness::Doorbell));
            assert!(bell.is_some() || !rings, "a link that rings needs a bell");
        }
        let lists = (members.iter().map(|_| (Vec::new(), Vec::new())).collect(), vec![0; members.len()]);
        let endpoints = bundles.into_iter().enumerate().map(|(peer, bundle)| Endpoint::new(peer, bundle)).collect();
        Mesh { rank, members, endpoints, bell, active: Vec::new(), missing: Vec::new(), lists }
    }

    /// Own index.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks it joins, this one included.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Name of the transport to every index; "self" for the own one.
    pub fn names(&self) -> Vec<&'static str> {
        self.endpoints.iter().map(|endpoint| endpoint.name().unwrap_or("self")).collect()
    }

    /// Sends and receives all messages; peers are indices of the mesh. Those to one peer are matched in the order given. A header
    /// is checked against what the message must be before a byte of its body is used.
    ///
    /// # Errors
    /// The first cause of the health; `Timeout`; `PeerLost`; `Mismatch`. The streams are unusable afterwards. With the streams
    /// intact: `InvalidArgument` for a message to or from this rank itself, `UnsupportedType` for one in device memory.
    pub fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        self.exchange_step(cx, Step::default(), sends, recvs)
    }

    /// [`Mesh::exchange`] with peers that may be seen to do something else: `elsewhere` is asked for what, when nothing moves.
    ///
    /// # Errors
    /// As [`Mesh::exchange`].
    pub fn exchange_unless(
        &mut self,
        cx: &OpContext<'_>,
        sends: &[Outgoing<'_>],
        recvs: &mut [Incoming<'_>],
        elsewhere: &dyn Fn(usize) -> Option<String>,
    ) -> Result<()> {
        self.run_listed(cx, Step::default(), sends, recvs, elsewhere)
    }

    /// [`Mesh::exchange`] as one step of an operation that takes several.
    ///
    /// # Errors
    /// As [`Mesh::exchange`].
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
                "rank {} of {} cannot exchange with {bad}",
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

    /// Moves everything that a plan has.
    ///
    /// # Errors
    /// As [`Mesh::exchange`].
    pub(crate) fn run(&mut self, cx: &OpContext<'_>, plan: &mut dyn Plan) -> Result<()> {
        self.active.clear();
        let n = self.size();
        for peer in (1..n).map(|distance| (self.rank + distance) % n) {
            self.endpoints[peer].begin(plan);
            if !self.endpoints[peer].is_done() {
                self.active.push(peer);
            }
        }
        let counts_sends = self.active.iter().all(|peer| plan.counts(*peer).1 == 0);
        let (before, total) = plan.progress();
        let mut transfer =
            Transfer { cx, before, total, counts: ByteCounts::default(), counts_sends, idle: None, naps: 0 };
        let outcome = self.transfer(&mut transfer, plan);
        for peer in (0..n).filter(|peer| *peer != self.rank) {
            self.endpoints[peer].end(plan);
        }
        transfer.moved();
        cx.stats.wire_bytes_sent.fetch_add(transfer.counts.wire_sent, Relaxed);
        cx.stats.wire_bytes_received.fetch_add(transfer.counts.wire_received, Relaxed);
        outcome
    }

    fn transfer(&mut self, transfer: &mut Transfer<'_, '_>, plan: &mut dyn Plan) -> Result<()> {
        let cx = transfer.cx;
        let mut busy = 0u32;
        loop {
            // Before the look, so that a ring in between is not missed.
            let rings = self.bell.as_ref().map_or(0, Doorbell::rings);
            let moved = self.progress(transfer, plan)?;
            if self.active.is_empty() {
                return Ok(());
            }
            if moved {
                transfer.moved();
                busy = busy.wrapping_add(1);
                if busy.is_multiple_of(BUSY_SWEEPS) && (cx.health.check().is_err() || cx.deadline.passed()) {
                    self.check(transfer, plan)?;
                }
            } else if transfer.idle_for() < SPIN {
                std::hint::spin_loop();
            } else if let Err(error) = self.check(transfer, plan) {
                // A peer may have sent its part and left, or gone on, between the look and the check: look once more before blaming
                // it.
                let ended = cx.health.check().is_err() || cx.deadline.passed();
                if ended || !self.progress(transfer, plan)? {
                    return Err(error);
                }
                transfer.moved();
            } else {
                self.sleep(transfer, rings);
            }
        }
    }

    /// Moves what can be moved with every peer; true when anything did. Goes to all of them before it reports fault with
    /// one, so that each has this rank's header when this rank gives up.
    fn progress(&mut self, transfer: &mut Transfer<'_, '_>, plan: &mut dyn Plan) -> Result<bool> {
        let mut any = false;
        let mut lost: Option<(usize, Broken)> = None;
        let mut mismatch: Option<(usize, String)> = None;
        for &peer in &self.active {
            match self.endpoints[peer].step(plan, &mut transfer.counts) {
                Ok(moved) => any |= moved,
                Err(PeerFault::Lost(broken)) => drop(lost.get_or_insert((peer, broken))),
                Err(PeerFault::Mismatch(theirs)) => drop(mismatch.get_or_insert((peer, theirs))),
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
            self.active.retain(|peer| !self.endpoints[*peer].is_done());
        }
        Ok(any)
    }

    /// Looks at the health, the deadline, and whether a peer does something else. Missing are those who owe something, or have something to send, or, if nobody has, to
    /// receive.
    fn check(&mut self, transfer: &Transfer<'_, '_>, plan: &dyn Plan) -> Result<()> {
        let senders = || self.active.iter().filter(|peer| self.endpoints[**peer].wants_to_recv());
        self.missing.clear();
        self.missing.extend(senders().filter(|peer| plan.owes(**peer)).map(|peer| self.members[*peer]));
        if self.missing.is_empty() {
            self.missing.extend(senders().map(|peer| self.members[*peer]));
        }
        if self.missing.is_empty() {
            self.missing.extend(self.active.iter().map(|peer| self.members[*peer]));
        }
        self.missing.sort_unstable();
        transfer.cx.check(&self.missing, transfer.done(), transfer.total)?;
        match self.active.iter().find_map(|peer| Some((*peer, plan.elsewhere(*peer)?))) {
            Some((peer, theirs)) => Err(transfer.cx.mismatch(self.members[peer], &theirs)),
            None => Ok(()),
        }
    }

    /// Sleeps until a link may move bytes again, or it is time to look at the health. `rings` was read before the last look.
    fn sleep(&self, transfer: &mut Transfer<'_, '_>, rings: u32) {
        let mut descriptors = Vec::with_capacity(self.active.len());
        let (mut rung, mut napping) = (false, false);
        for &peer in &self.active {
            for (readiness, recv, send) in self.endpoints[peer].waits() {
                match readiness {
                    Readiness::Doorbell => rung = true,
                    Readiness::Nap => napping = true,
                    Readiness::Descriptor(fd) => {
                        let mut wanted = PollFlags::empty();
                        wanted.set(PollFlags::IN, recv);
                        wanted.set(PollFlags::OUT, send);
                        descriptors.push(PollFd::from_borrowed_fd(fd, wanted));
                    }
                }
            }
        }
        let mixed = rung && (napping || !descriptors.is_empty());
        let longest = if mixed || napping { transfer.nap() } else { SLICE };
        let timeout = longest.min(transfer.cx.deadline.left());
        match &self.bell {
            // In a mixed mesh one nap in two is for the bell.
            Some(bell) if rung && (!mixed || transfer.naps.is_multiple_of(2)) => bell.wait(rings, timeout),
            _ => {
                let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
                // Ready, timed out or interrupted: the caller looks again in any case.
                let _ = poll(&mut descriptors, Some(&timeout));
            }
        }
    }
}

/// One exchange under way.
struct Transfer<'a, 'c> {
    cx: &'a OpContext<'c>,
    /// Bytes that arrived in earlier runs of the operation, and that arrive in all.
    before: u64,
    total: u64,
    counts: ByteCounts,
    /// Nothing is received, so progress is what was sent.
    counts_sends: bool,
    /// Since when nothing has moved.
    idle: Option<Instant>,
    /// Naps taken since then.
    naps: u32,
}

impl Transfer<'_, '_> {
    fn done(&self) -> u64 {
        self.before + if self.counts_sends { self.counts.sent } else { self.counts.received }
    }

    fn idle_for(&mut self) -> Duration {
        self.idle.get_or_insert_with(Instant::now).elapsed()
    }

    /// Ends a wait and counts it.
    fn moved(&mut self) {
        self.naps = 0;
        if let Some(since) = self.idle.take() {
            self.cx.stats.add_wait(since.elapsed());
        }
    }

    /// Length of the next nap in a mixed mesh: doubles from the shortest to the longest.
    fn nap(&mut self) -> Duration {
        self.naps += 1;
        NAPS.1.min(NAPS.0 * (1 << self.naps.min(8)))
    }
}
