//! The averaging thread, which runs a round after every interval.

mod recovery;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::averaging_group::{Peers, Status};
use super::join_running_job::Joiner;
use super::shared_state::{Control, SharedControl};
use super::weight_buffers::{self, WeightBuffers};
use super::{AveragerState, Elastic, Model, Settings};
use crate::error::{Error, Result};
use crate::group::{Group, Options};
use crate::memory::{ArenaBuffer, Owner, WeightGuard, WeightLock, Weights};
use crate::reduce;
use crate::request::{Compression, Extra, Io, Operands, Verb};
use crate::types::{DType, ReduceOp};

/// The longest time between two exchanges of statuses. However long the interval is, ranks notice within this time that
/// a rank synchronizes, aborts, resumes, leaves or joins.
const TICK: Duration = Duration::from_millis(500);

/// Identifies the averaging thread as an owner of a weight lock. Callers' threads use other numbers.
pub const AVERAGING: Owner = Owner::MAX;

pub(super) struct Rounds {
    shared: Arc<SharedControl>,
    /// `None` only while it is being replaced.
    peers: Option<Peers>,
    parts: Vec<WeightBuffers>,
    /// Buffers, which a joining rank gets in addition to the average.
    buffers: Vec<Weights>,
    settings: Settings,
    due: Instant,
    /// Time at which this rank last looked for a part of the job that it was cut off from.
    looked: Instant,
    /// Number of times in a row that this rank looked without finding another part of the job.
    looks: u32,
    /// Job ranks of the last round.
    set: Vec<usize>,
    view: u64,
    /// Number of exchanges of statuses. Equal on all ranks.
    exchanges: u64,
    /// A round whose average this rank has, without knowing if all ranks have it.
    open: Option<Open>,
    /// See [`Status::agreed`].
    agreed: u64,
    /// Number of `synchronize` calls that the other ranks know of.
    announced: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// After an interval.
    Later,
    /// Now, because the membership has changed.
    AtOnce,
    /// At the time planned before, because this exchange was not a round.
    NotYet,
}

/// A round that its ranks have not agreed on yet.
struct Open {
    /// Number of the round: the number of exchanges up to it.
    round: u64,
    /// Number of optimizer steps at the snapshot.
    steps: u64,
}

impl Rounds {
    /// Creates the thread's state. `arena_buffers` must come from the function [`allocate_arena_buffers`].
    pub(super) fn new(
        shared: Arc<SharedControl>,
        peers: Peers,
        arena_buffers: Vec<ArenaBuffer>,
        model: Model,
        settings: Settings,
    ) -> Rounds {
        let Model { weights, buffers } = model;
        let parts =
            weights.into_iter().zip(arena_buffers).map(|(weights, average)| WeightBuffers::new(weights, average));
        let (parts, set) = (parts.collect(), peers.world_ranks.clone());
        if let Some(Elastic { server, digest }) = &settings.elastic {
            server.accept_joins(&settings.name, *digest);
        }
        let (looked, due) = (Instant::now(), Instant::now() + settings.interval);
        let (peers, view, exchanges) = (Some(peers), 1, 0);
        let (open, looks, agreed, announced) = (None, 0, 0, 0);
        Rounds {
            shared,
            peers,
            parts,
            buffers,
            settings,
            due,
            looked,
            looks,
            set,
            view,
            exchanges,
            open,
            agreed,
            announced,
        }
    }

    /// Runs rounds until the averaging ends or fails. This is the thread's main function.
    pub(super) fn run(mut self) {
        if self.shared.lock().is_new {
            self.due = Instant::now();
        }
        let failure = loop {
            if !self.shared.sleep(self.due.min(Instant::now() + TICK)) {
                break Error::Aborted("the averaging of this model has ended".to_owned());
            }
            let outcome = self.round().and_then(|next| self.meet().map(|()| next));
            self.due = match outcome {
                Ok(Next::Later) => Instant::now() + self.settings.interval,
                Ok(Next::AtOnce) => Instant::now(),
                Ok(Next::NotYet) => self.due,
                // The statuses of the next round, which starts at once, tell if all ranks had the average.
                Err(error) => match self.recover(error) {
                    Ok(()) => Instant::now(),
                    Err(error) => break error,
                },
            };
        };
        if let Some(Elastic { server, .. }) = &self.settings.elastic {
            server.refuse_joins(&self.settings.name);
        }
        let Rounds { shared, peers, parts, buffers, .. } = self;
        let failure = peers.as_ref().map_or(failure.clone(), |peers| peers.named(failure));
        // Lanes, arenas and weights are dropped before another thread can see that this one has ended.
        drop((peers, parts, buffers));
        let mut control = shared.lock();
        control.in_round = false;
        control.failure = Some(failure);
        control.stats.state = AveragerState::Stopped;
        drop(control);
        shared.notify();
    }

    fn peers(&mut self) -> Result<&mut Peers> {
        self.peers.as_mut().ok_or_else(|| Error::other("the averaging has no group"))
    }

    /// Admits the first joining rank whose connection any rank holds. Returns false if no rank joined.
    fn admit(&mut self, all: &[Status]) -> Result<bool> {
        let Rounds { settings, peers: Some(peers), view, .. } = self else { return Ok(false) };
        let (Some(Elastic { server, .. }), Some(host)) =
            (&settings.elastic, all.iter().position(|status| status.joiner.is_some()))
        else {
            return Ok(false);
        };
        let Some(joiner) = all[host].joiner else { return Ok(false) };
        let mut held = None;
        if host == peers.group.rank()
            && let Some((rank, request, conn)) = server.take_joiner(&settings.name)
        {
            let found = Joiner { request, conn };
            if rank == joiner {
                server.note_server(rank, found.request.server);
                held = Some(found);
            } else {
                found.refuse(false, "another rank came first".to_owned());
            }
        }
        match peers.admit(joiner, held, *view + 1, server)? {
            Some(peers) => self.enter(peers).map(|()| true),
            None => Ok(false),
        }
    }

    /// Gives joining ranks the weights, buffers and count of forward passes. They come from the first of `ranks`, or
    /// else from the first rank that has them. `averaged` is true if the ranks have an average of several.
    fn hand_over(&mut self, ranks: &[usize], all: &[Status], averaged: bool) -> Result<()> {
        let Rounds { shared, peers: Some(peers), parts, buffers, settings, .. } = self else { return Ok(()) };
        let known = ranks.first().copied().or_else(|| all.iter().position(|status| !status.is_new));
        let Some(root) = known else { return Err(Error::other("no rank has the weights of the job")) };
        let (gives, takes) = (peers.group.rank() == root, all[peers.group.rank()].is_new);
        let group = peers.group.clone();
        let go_on = || goes_on(shared, &group);
        let mut copies: Vec<Vec<u8>> = buffers.iter().map(|buffer| vec![0; buffer.len()]).collect();
        let mut forwards = shared.forwards.load(Relaxed).to_le_bytes();
        if gives && let Some(guard) = hold(shared, parts)? {
            for part in parts.iter_mut().filter(|_| !averaged) {
                part.take_snapshot(&guard)?;
            }
            for (copy, buffer) in copies.iter_mut().zip(buffers.iter_mut()) {
                weight_buffers::take_snapshot(buffer, &guard, copy)?;
            }
            drop(guard);
            for part in parts.iter_mut().filter(|_| !averaged) {
                part.read_snapshot(&go_on)?;
                let bytes = part.snapshot.len();
                part.average.bytes()[..bytes].copy_from_slice(&part.snapshot);
            }
            for (copy, buffer) in copies.iter_mut().zip(buffers.iter_mut()) {
                weight_buffers::read_snapshot(buffer, &go_on, copy)?;
            }
        }
        let options = Options { label: &settings.name, ..Options::DEFAULT };
        let averages = parts.iter_mut().map(WeightBuffers::average);
        for bytes in averages.chain(copies.iter_mut().map(Vec::as_mut_slice)).chain([forwards.as_mut_slice()]) {
            peers.lane().run(&options, DType::U8, Verb::Broadcast { root }, Io::in_place(bytes))?;
        }
        if takes {
            for part in parts.iter_mut() {
                part.hand_in_average(&go_on)?;
            }
            for (copy, buffer) in copies.iter().zip(buffers.iter_mut()) {
                weight_buffers::hand_in(buffer, &go_on, copy)?;
            }
        }
        if takes && let Some(guard) = hold(shared, parts)? {
            for part in parts.iter_mut() {
                part.replace(&guard)?;
            }
            for (copy, buffer) in copies.iter().zip(buffers.iter_mut()) {
                weight_buffers::replace(buffer, &guard, copy)?;
            }
            shared.forwards.store(u64::from_le_bytes(forwards), Relaxed);
            let mut control = shared.lock();
            control.is_new = false;
            control.stats.joined += 1;
            drop(control);
            shared.notify();
        }
        Ok(())
    }

    fn round(&mut self) -> Result<Next> {
        let begin = Instant::now();
        let (own, calls) = {
            let mut control = self.shared.lock();
            control.in_round = control.takes_part || self.open.is_some();
            let joiner =
                self.settings.elastic.as_ref().and_then(|elastic| elastic.server.first_joiner(&self.settings.name));
            let own = Status {
                takes_part: control.takes_part && !control.is_new,
                synchronizes: control.takes_part && !control.synchronizing.is_empty(),
                announced: control.takes_part
                    && control.synchronizing.first().is_some_and(|call| *call <= self.announced),
                is_due: Instant::now() >= self.due,
                is_new: control.is_new,
                joiner,
                view: self.view,
                exchanges: self.exchanges,
                agreed: self.agreed,
            };
            (own, control.synchronize_calls)
        };
        let all = self.peers()?.exchange(own)?;
        let announced = std::mem::replace(&mut self.announced, calls);
        let latest = |number: fn(&Status) -> u64| all.iter().map(number).max().unwrap_or_default();
        // Invariant 2: if any rank wrote the update of a round that was cut off, all have the average.
        if let Some(Open { round, steps }) = self.open.take()
            && all.iter().any(|status| status.agreed == round)
        {
            self.agreed = round;
            self.update(steps, None)?;
        }
        self.exchanges = latest(|status| status.exchanges) + 1;
        self.view = latest(|status| status.view);
        if self.admit(&all)? {
            return Ok(Next::AtOnce);
        }
        let ranks: Vec<usize> = (0..all.len()).filter(|rank| all[*rank].takes_part).collect();
        let late: Vec<usize> = ranks.iter().copied().filter(|rank| !all[*rank].synchronizes).collect();
        let (set, late) = (self.peers()?.in_job(&ranks), self.peers()?.in_job(&late));
        // A rank that resumed before another one called `synchronize` may have sent its status before the call.
        let synchronizes = ranks.iter().all(|rank| all[*rank].announced);
        if set != self.set {
            self.view += 1;
            self.set.clone_from(&set);
            // A joining rank does not have the last average.
            self.parts.iter_mut().for_each(|part| part.last.clear());
        }
        {
            let mut control = self.shared.lock();
            control.in_round = own.takes_part;
            control.stats.view = self.view;
            control.synchronized_too.extend(set.iter().filter(|rank| !late.contains(rank)));
            control.stats.ranks = set;
            control.not_synchronizing = late;
            let Control { not_synchronizing, synchronized_too, .. } = &mut *control;
            not_synchronizing.retain(|rank| !synchronized_too.contains(rank));
        }
        let has_new = all.iter().any(|status| status.is_new);
        if !(synchronizes || has_new || ranks.iter().all(|rank| all[*rank].is_due)) {
            self.shared.lock().in_round = false;
            self.shared.notify();
            return Ok(Next::NotYet);
        }
        let mut staleness = 0;
        if ranks.len() > 1 {
            // Ranks that are not members of the set call it too, so that every rank has the same list of sets.
            staleness = self.average(&ranks, synchronizes)?;
        }
        if has_new {
            self.hand_over(&ranks, &all, ranks.len() > 1)?;
        }
        let wire = self.peers()?.wire_bytes();
        let mut control = self.shared.lock();
        (control.stats.wire_bytes_sent, control.stats.wire_bytes_received) = (wire.sent, wire.received);
        control.in_round = false;
        if own.takes_part {
            if synchronizes {
                control.synchronized = announced;
                control.synchronizing.retain(|call| *call > announced);
            }
            let stats = &mut control.stats;
            stats.rounds += 1;
            stats.round = begin.elapsed();
            stats.staleness = staleness;
            if ranks.len() > 1 {
                stats.payload_bytes += self.parts.iter().map(|part| part.weights.len() as u64).sum::<u64>();
            }
        }
        drop(control);
        self.shared.notify();
        Ok(if own.is_new { Next::AtOnce } else { Next::Later })
    }

    /// Averages the weights of a set of ranks. Returns the number of optimizer steps between snapshot and update.
    fn average(&mut self, set: &[usize], synchronizes: bool) -> Result<u64> {
        let Rounds { shared, peers, parts, settings, exchanges, open, .. } = self;
        let group = shared.group().clone();
        let go_on = || goes_on(shared, &group);
        let Some(lanes) = peers.as_mut().map(|peers| peers.lanes(set, &settings.name)).transpose()?.flatten() else {
            return Ok(0);
        };
        let mut held = hold(shared, parts)?;
        let steps = shared.steps.load(Relaxed);
        if let Some(guard) = &held {
            for part in parts.iter_mut() {
                part.take_snapshot(guard)?;
            }
        }
        if !synchronizes {
            // Invariant 1.
            held = None;
        }
        for part in parts.iter_mut() {
            part.read_snapshot(&go_on)?;
        }
        let options = Options { label: &settings.name, ..Options::DEFAULT };
        for (number, part) in parts.iter_mut().enumerate() {
            let dtype = part.weights.dtype();
            let average = &mut part.average.bytes()[..part.snapshot.len()];
            let base = settings.codec.as_ref().filter(|_| !part.last.is_empty());
            match base {
                None => {
                    average.copy_from_slice(&part.snapshot);
                    lanes.global.run(&options, dtype, Verb::AllReduce(ReduceOp::Avg), Io::in_place(average))?;
                }
                Some(codec) => {
                    reduce::subtract(dtype, average, &part.snapshot, &part.last);
                    let draw = *exchanges << 16 | number as u64;
                    let (divisor, elements) = (lanes.global.size(), part.weights.count());
                    let verb =
                        Verb::CompressedAllReduce(Compression { codec: &**codec, divisor, draw, elements, exact: 0 });
                    let extra = Extra { work: Some(&mut part.work), ..Extra::default() };
                    lanes.global.run(&options, dtype, verb, Operands { io: Io::in_place(average), extra })?;
                    reduce::combine(dtype, ReduceOp::Sum, &[Some(&part.last), None], average);
                }
            }
        }
        // This can fail, so it comes before the agreement.
        for part in parts.iter_mut() {
            part.hand_in_average(&go_on)?;
        }
        *open = Some(Open { round: *exchanges, steps });
        // Invariant 2: a rank that passes the barrier knows that all have the average.
        lanes.global.barrier(&options)?;
        *open = None;
        self.agreed = self.exchanges;
        self.update(steps, held)
    }

    /// Writes the update of a round. Returns the number of optimizer steps since the snapshot.
    fn update(&mut self, steps: u64, held: Option<WeightGuard>) -> Result<u64> {
        let held = if held.is_none() { hold(&self.shared, &self.parts)? } else { held };
        let passed = self.shared.steps.load(Relaxed) - steps;
        if let Some(guard) = &held {
            for part in &mut self.parts {
                part.correct(guard)?;
                if self.settings.codec.is_some() {
                    part.last.clear();
                    part.last.extend_from_slice(&part.average.bytes()[..part.snapshot.len()]);
                }
            }
            self.shared.averaged_steps.store(steps, Relaxed);
        }
        Ok(passed)
    }
}

pub(super) fn allocate_arena_buffers<'a>(
    peers: &Peers,
    weights: impl IntoIterator<Item = &'a Weights>,
    settings: &Settings,
) -> Result<Vec<ArenaBuffer>> {
    let room = |weights: &Weights| peers.group.arena(weights.len().max(1), &settings.name).map(ArenaBuffer::new);
    weights.into_iter().map(room).collect()
}

/// Takes the weight lock, which all parts share. Fails with `Aborted` if the thread has to end. The thread that ended
/// it may not have waited, so the weights may be gone.
fn hold(shared: &SharedControl, parts: &[WeightBuffers]) -> Result<Option<WeightGuard>> {
    let guard = parts.first().map(|part| WeightLock::lock(part.weights.lock(), AVERAGING));
    check_stopping(shared)?;
    Ok(guard)
}

fn check_stopping(shared: &SharedControl) -> Result<()> {
    if shared.lock().stopping {
        return Err(Error::Aborted("the averaging of this model has ended".to_owned()));
    }
    Ok(())
}

/// Returns the error that ends a wait for a device: `Aborted` if this rank leaves, or the group's first failure.
fn goes_on(shared: &SharedControl, group: &Group) -> Result<()> {
    check_stopping(shared)?;
    group.health().check()
}
