//! The streams of one rank to all others of a group: many messages at once, in both directions, without copies.
//!
//! Bodies go from and into the caller's memory. Nothing here has a thread: [`Mesh::exchange`] drives every transfer itself, on
//! the thread that called it, and sleeps when none can move.

mod chunk;
mod flow;
mod plan;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Broken, Call, Incoming, Outgoing, Readiness, Transport};
use crate::error::{Error, Result};
use crate::sync::{Doorbell, SLICE};
use flow::{Flow, Tally, Trouble};
pub(crate) use plan::Plan;
use plan::{Listed, Lists};
use std::sync::atomic::Ordering::Relaxed;

/// How long a rank that has nothing to do looks again and again before it sleeps: longer than a round trip on one host, shorter
/// than what a computing thread on the same core would notice.
const SPIN: Duration = Duration::from_micros(30);

/// First and longest nap when some links wake by descriptor and others by doorbell, and nothing wakes for both, or when a link
/// has nothing that wakes.
const NAPS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));

/// Sweeps that may move bytes before the watch and the deadline are looked at, although nothing had to be waited for.
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
    flows: Vec<Flow>,
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
        let flows = bundles.into_iter().enumerate().map(|(peer, bundle)| Flow::new(peer, bundle)).collect();
        Mesh { rank, members, flows, bell, active: Vec::new(), missing: Vec::new(), lists }
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
        self.flows.iter().map(|flow| flow.name().unwrap_or("self")).collect()
    }

    /// Sends and receives all messages; peers are indices of the mesh. Those to one peer are matched in the order given. A header
    /// is checked against what the message must be before a byte of its body is used.
    ///
    /// # Errors
    /// The first cause of the watch; `Timeout`; `PeerLost`; `Mismatch`. The streams are unusable afterwards. `Value`, with the streams
    /// intact, for a message to or from this rank itself.
    pub fn exchange(&mut self, call: &Call<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        self.exchange_step(call, Step::default(), sends, recvs)
    }

    /// [`Mesh::exchange`] with peers that may be seen to do something else: `elsewhere` is asked for what, when nothing moves.
    ///
    /// # Errors
    /// As [`Mesh::exchange`].
    pub fn exchange_unless(
        &mut self,
        call: &Call<'_>,
        sends: &[Outgoing<'_>],
        recvs: &mut [Incoming<'_>],
        elsewhere: &dyn Fn(usize) -> Option<String>,
    ) -> Result<()> {
        self.run_listed(call, Step::default(), sends, recvs, elsewhere)
    }

    /// [`Mesh::exchange`] as one step of an operation that takes several.
    ///
    /// # Errors
    /// As [`Mesh::exchange`].
    pub fn exchange_step(
        &mut self,
        call: &Call<'_>,
        step: Step,
        sends: &[Outgoing<'_>],
        recvs: &mut [Incoming<'_>],
    ) -> Result<()> {
        self.run_listed(call, step, sends, recvs, &|_| None)
    }

    fn run_listed(
        &mut self,
        call: &Call<'_>,
        step: Step,
        sends: &[Outgoing<'_>],
        recvs: &mut [Incoming<'_>],
        elsewhere: &dyn Fn(usize) -> Option<String>,
    ) -> Result<()> {
        let peers = sends.iter().map(|m| m.peer).chain(recvs.iter().map(|m| m.peer));
        if let Some(bad) = peers.into_iter().find(|peer| *peer == self.rank || *peer >= self.size()) {
            return Err(Error::Value(format!("rank {} of {} cannot exchange with {bad}", self.rank, self.size())));
        }
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
        let outcome = self.run(call, &mut plan);
        self.lists = (plan.lists, plan.begun);
        outcome
    }

    /// Moves everything that a plan has.
    ///
    /// # Errors
    /// As [`Mesh::exchange`].
    pub(crate) fn run(&mut self, call: &Call<'_>, plan: &mut dyn Plan) -> Result<()> {
        self.active.clear();
        let n = self.size();
        for peer in (1..n).map(|distance| (self.rank + distance) % n) {
            self.flows[peer].begin(plan);
            if !self.flows[peer].is_done() {
                self.active.push(peer);
            }
        }
        let counts_sends = self.active.iter().all(|peer| plan.counts(*peer).1 == 0);
        let (before, total) = plan.progress();
        let mut drive = Drive { call, before, total, tally: Tally::default(), counts_sends, idle: None, naps: 0 };
        let outcome = self.drive(&mut drive, plan);
        for peer in (0..n).filter(|peer| *peer != self.rank) {
            self.flows[peer].end(plan);
        }
        drive.moved();
        call.stats.wire_bytes_sent.fetch_add(drive.tally.wire_sent, Relaxed);
        call.stats.wire_bytes_received.fetch_add(drive.tally.wire_received, Relaxed);
        outcome
    }

    fn drive(&mut self, drive: &mut Drive<'_, '_>, plan: &mut dyn Plan) -> Result<()> {
        let call = drive.call;
        let mut busy = 0u32;
        loop {
            // Before the look, so that a ring in between is not missed.
            let rings = self.bell.as_ref().map_or(0, Doorbell::rings);
            let moved = self.sweep(drive, plan)? | plan.work()?;
            if self.active.is_empty() && plan.is_done() {
                return Ok(());
            }
            if moved {
                drive.moved();
                busy = busy.wrapping_add(1);
                if busy.is_multiple_of(BUSY_SWEEPS) && (call.watch.check().is_err() || call.deadline.passed()) {
                    self.check(drive, plan)?;
                }
            } else if drive.idle_for() < SPIN {
                std::hint::spin_loop();
            } else if let Err(error) = self.check(drive, plan) {
                // A peer may have sent its part and left, or gone on, between the look and the check: look once more before blaming
                // it.
                let ended = call.watch.check().is_err() || call.deadline.passed();
                if ended || !self.sweep(drive, plan)? {
                    return Err(error);
                }
                drive.moved();
            } else {
                self.sleep(drive, rings);
            }
        }
    }

    /// Moves what can be moved with every peer; true when anything did. Goes to all of them before it reports trouble with
    /// one, so that each has this rank's header when this rank gives up.
    fn sweep(&mut self, drive: &mut Drive<'_, '_>, plan: &mut dyn Plan) -> Result<bool> {
        let mut any = false;
        let mut lost: Option<(usize, Broken)> = None;
        let mut mismatch: Option<(usize, String)> = None;
        for &peer in &self.active {
            match self.flows[peer].step(plan, &mut drive.tally) {
                Ok(moved) => any |= moved,
                Err(Trouble::Lost(broken)) => drop(lost.get_or_insert((peer, broken))),
                Err(Trouble::Mismatch(theirs)) => drop(mismatch.get_or_insert((peer, theirs))),
            }
        }
        if let Some((peer, theirs)) = mismatch {
            return Err(drive.call.mismatch(self.members[peer], &theirs));
        }
        if let Some((peer, Broken(how))) = lost {
            let error = drive.call.watch.stream_lost(self.members[peer], &how);
            return Err(error.during(drive.call.progress(drive.done(), drive.total)));
        }
        if any {
            self.active.retain(|peer| !self.flows[*peer].is_done());
        }
        Ok(any)
    }

    /// Looks at the watch, the deadline, and whether a peer does something else. Missing are those who owe something, or have something to send, or, if nobody has, to
    /// receive.
    fn check(&mut self, drive: &Drive<'_, '_>, plan: &dyn Plan) -> Result<()> {
        let senders = || self.active.iter().filter(|peer| self.flows[**peer].wants_to_recv());
        self.missing.clear();
        self.missing.extend(senders().filter(|peer| plan.owes(**peer)).map(|peer| self.members[*peer]));
        if self.missing.is_empty() {
            self.missing.extend(senders().map(|peer| self.members[*peer]));
        }
        if self.missing.is_empty() {
            self.missing.extend(self.active.iter().map(|peer| self.members[*peer]));
        }
        self.missing.sort_unstable();
        drive.call.check(&self.missing, drive.done(), drive.total)?;
        match self.active.iter().find_map(|peer| Some((*peer, plan.elsewhere(*peer)?))) {
            Some((peer, theirs)) => Err(drive.call.mismatch(self.members[peer], &theirs)),
            None => Ok(()),
        }
    }

    /// Sleeps until a link may move bytes again, or it is time to look at the watch. `rings` was read before the last look.
    fn sleep(&self, drive: &mut Drive<'_, '_>, rings: u32) {
        let mut descriptors = Vec::with_capacity(self.active.len());
        let (mut rung, mut napping) = (false, false);
        for &peer in &self.active {
            for (readiness, recv, send) in self.flows[peer].waits() {
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
        let longest = if mixed || napping { drive.nap() } else { SLICE };
        let timeout = longest.min(drive.call.deadline.left());
        match &self.bell {
            // In a mixed mesh one nap in two is for the bell.
            Some(bell) if rung && (!mixed || drive.naps.is_multiple_of(2)) => bell.wait(rings, timeout),
            _ => {
                let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
                // Ready, timed out or interrupted: the caller looks again in any case.
                let _ = poll(&mut descriptors, Some(&timeout));
            }
        }
    }
}

/// One exchange under way.
struct Drive<'a, 'c> {
    call: &'a Call<'c>,
    /// Bytes that arrived in earlier runs of the operation, and that arrive in all.
    before: u64,
    total: u64,
    tally: Tally,
    /// Nothing is received, so progress is what was sent.
    counts_sends: bool,
    /// Since when nothing has moved.
    idle: Option<Instant>,
    /// Naps taken since then.
    naps: u32,
}

impl Drive<'_, '_> {
    fn done(&self) -> u64 {
        self.before + if self.counts_sends { self.tally.sent } else { self.tally.received }
    }

    fn idle_for(&mut self) -> Duration {
        self.idle.get_or_insert_with(Instant::now).elapsed()
    }

    /// Ends a wait and counts it.
    fn moved(&mut self) {
        self.naps = 0;
        if let Some(since) = self.idle.take() {
            self.call.stats.add_wait(since.elapsed());
        }
    }

    /// Length of the next nap in a mixed mesh: doubles from the shortest to the longest.
    fn nap(&mut self) -> Duration {
        self.naps += 1;
        NAPS.1.min(NAPS.0 * (1 << self.naps.min(8)))
    }
}
