//! The averaging thread: rounds, one interval apart.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::peers::{Peers, Status};
use super::shared::Shared;
use super::{Settings, State};
use crate::collective::compressed::Workspace;
use crate::error::{Error, Result};
use crate::group::{CompressedAllReduce, Options};
use crate::health::LEFT;
use crate::memory::{ArenaBuffer, Owner, WeightGuard, WeightLock, Weights};
use crate::reduce;
use crate::request::{Io, Verb};
use crate::types::ReduceOp;

/// The averaging thread among the owners of weight locks; threads of callers have other numbers.
pub const AVERAGING: Owner = Owner::MAX;

/// The weights of one dtype, and what a round needs beside them.
struct Part {
    weights: Weights,
    /// What the weights were when the round began.
    snapshot: Vec<u8>,
    /// Their average over the ranks.
    average: ArenaBuffer,
    /// The last average, which all ranks of the set know; empty without a codec or when there is none.
    last: Vec<u8>,
    work: Workspace,
}

/// The thread.
pub(super) struct Rounds {
    shared: Arc<Shared>,
    /// `None` only while it is replaced.
    peers: Option<Peers>,
    parts: Vec<Part>,
    settings: Settings,
    /// Ranks in the job of the last round.
    set: Vec<usize>,
    /// Number of the membership.
    view: u64,
    /// Exchanges of statuses; equal on all ranks.
    exchanges: u64,
    /// The round of which this rank has the average, and does not know whether all have.
    open: Option<Open>,
    /// See [`Status::agreed`].
    agreed: u64,
}

/// A round before its agreement.
struct Open {
    /// Its number: the exchanges up to it.
    round: u64,
    /// Steps of the optimizer when the snapshot was made.
    steps: u64,
}

impl Rounds {
    pub(super) fn new(shared: Arc<Shared>, peers: Peers, weights: Vec<Weights>, settings: Settings) -> Result<Rounds> {
        let parts = weights.into_iter().map(|weights| {
            let average = room(&peers, weights.len(), &settings)?;
            Ok(Part {
                snapshot: vec![0; weights.len()],
                weights,
                average,
                last: Vec::new(),
                work: Workspace::default(),
            })
        });
        let (parts, set) = (parts.collect::<Result<_>>()?, peers.world_ranks.clone());
        Ok(Rounds { shared, peers: Some(peers), parts, settings, set, view: 1, exchanges: 0, open: None, agreed: 0 })
    }

    /// Runs rounds until it has to end or something fails.
    pub(super) fn run(mut self) {
        let mut due = Instant::now() + self.settings.interval;
        let failure = loop {
            if !self.shared.sleep(due) {
                break Error::Aborted("the averaging of this model has ended".to_owned());
            }
            match self.round() {
                Ok(()) => due = Instant::now() + self.settings.interval,
                // The next round begins at once: it tells what became of the last one.
                Err(error) => match self.recover(error) {
                    Ok(()) => due = Instant::now(),
                    Err(error) => break error,
                },
            }
        };
        let Rounds { shared, peers, parts, .. } = self;
        let failure = peers.as_ref().map_or(failure.clone(), |peers| peers.named(failure));
        // Without lanes, arenas and weights before anybody is told that the thread has ended.
        drop((peers, parts));
        let mut control = shared.lock();
        control.in_round = false;
        control.failure = Some(failure);
        control.stats.state = State::Stopped;
        drop(control);
        shared.notify();
    }

    fn peers(&mut self) -> Result<&mut Peers> {
        self.peers.as_mut().ok_or_else(|| Error::other("the group of the averaging is gone"))
    }

    /// Goes on in a smaller group after a rank has left; any other failure ends the averaging.
    fn recover(&mut self, error: Error) -> Result<()> {
        let mut error = error;
        loop {
            let left = matches!(&error, Error::PeerLost { reason, .. } if reason == LEFT);
            if !left || self.shared.lock().stopping {
                return Err(error);
            }
            let Some(peers) = self.peers.take() else { return Err(error) };
            let named = peers.named(error);
            let peers = match peers.shrink() {
                Ok(peers) => peers,
                Err(Error::Aborted(_)) => return Err(named),
                Err(error) => return Err(error),
            };
            let replaced = self.shared.replace_group(peers.group.clone());
            let rooms = self.parts.iter().map(|part| room(&peers, part.weights.len(), &self.settings));
            let rooms: Result<Vec<ArenaBuffer>> = if replaced { rooms.collect() } else { Err(named) };
            self.peers = Some(peers);
            match rooms {
                Ok(rooms) => {
                    for (part, room) in self.parts.iter_mut().zip(rooms) {
                        let bytes = part.snapshot.len();
                        let mut former = std::mem::replace(&mut part.average, room);
                        // An open round may still be written.
                        part.average.bytes()[..bytes].copy_from_slice(&former.bytes()[..bytes]);
                    }
                    return Ok(());
                }
                Err(next) => error = next,
            }
        }
    }

    fn round(&mut self) -> Result<()> {
        let begin = Instant::now();
        let own = {
            let mut control = self.shared.lock();
            control.in_round = control.takes_part || self.open.is_some();
            Status {
                takes_part: control.takes_part,
                synchronizes: control.takes_part && control.synchronizing > 0,
                view: self.view,
                exchanges: self.exchanges,
                agreed: self.agreed,
            }
        };
        let all = self.peers()?.exchange(own)?;
        let latest = |number: fn(&Status) -> u64| all.iter().map(number).max().unwrap_or_default();
        // Invariant 2: of a round that was cut off, a rank wrote the update only if all have the average.
        if let Some(Open { round, steps }) = self.open.take()
            && all.iter().any(|status| status.agreed == round)
        {
            self.agreed = round;
            self.update(steps, None);
        }
        self.exchanges = latest(|status| status.exchanges) + 1;
        self.view = latest(|status| status.view);
        let ranks: Vec<usize> = (0..all.len()).filter(|rank| all[*rank].takes_part).collect();
        let late: Vec<usize> = ranks.iter().copied().filter(|rank| !all[*rank].synchronizes).collect();
        let (set, late) = (self.peers()?.in_job(&ranks), self.peers()?.in_job(&late));
        let synchronizes = late.is_empty();
        if set != self.set {
            self.view += 1;
            self.set.clone_from(&set);
            // A rank that comes in does not know it.
            self.parts.iter_mut().for_each(|part| part.last.clear());
        }
        {
            let mut control = self.shared.lock();
            control.in_round = own.takes_part;
            control.stats.view = self.view;
            control.stats.ranks = set;
            control.not_synchronizing = late;
        }
        let mut staleness = 0;
        if ranks.len() > 1 {
            // Also on a rank outside of the set, so that all know the same sets.
            staleness = self.average(&ranks, synchronizes)?;
        }
        let wire = self.peers()?.wire_bytes();
        let mut control = self.shared.lock();
        (control.stats.wire_bytes_sent, control.stats.wire_bytes_received) = (wire.sent, wire.received);
        control.in_round = false;
        if own.takes_part {
            control.synchronized += u64::from(synchronizes);
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
        Ok(())
    }

    /// Averages the weights of a set; returns the optimizer's steps between snapshot and update.
    fn average(&mut self, set: &[usize], synchronizes: bool) -> Result<u64> {
        let Rounds { shared, peers, parts, settings, exchanges, open, .. } = self;
        let Some(lanes) = peers.as_mut().map(|peers| peers.lanes(set, &settings.name)).transpose()?.flatten() else {
            return Ok(0);
        };
        let mut held = hold(parts);
        let steps = shared.steps.load(Relaxed);
        if let Some(guard) = &held {
            for part in parts.iter_mut() {
                part.snapshot.copy_from_slice(part.weights.bytes(guard));
            }
        }
        if !synchronizes {
            // Invariant 1.
            held = None;
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
                    let how = CompressedAllReduce {
                        codec: &**codec,
                        average: true,
                        hierarchical: false,
                        draw,
                        elements: part.weights.count(),
                        error: None,
                    };
                    lanes.compressed_all_reduce(&options, dtype, average, how, &mut part.work)?;
                    reduce::combine(dtype, ReduceOp::Sum, &[Some(&part.last), None], average);
                }
            }
        }
        *open = Some(Open { round: *exchanges, steps });
        // Invariant 2: whoever passes this knows that all have the average.
        lanes.global.barrier(&options)?;
        *open = None;
        self.agreed = self.exchanges;
        Ok(self.update(steps, held))
    }

    /// Writes the update of a round; returns the optimizer's steps since the snapshot.
    fn update(&mut self, steps: u64, held: Option<WeightGuard>) -> u64 {
        let held = held.or_else(|| hold(&self.parts));
        let passed = self.shared.steps.load(Relaxed) - steps;
        if let Some(guard) = &held {
            for part in &mut self.parts {
                let average = &part.average.bytes()[..part.snapshot.len()];
                reduce::correct(part.weights.dtype(), part.weights.bytes(guard), average, &part.snapshot);
                if self.settings.codec.is_some() {
                    part.last.clear();
                    part.last.extend_from_slice(average);
                }
            }
        }
        passed
    }
}

/// Room for the average of weights of so many bytes. Collective.
fn room(peers: &Peers, bytes: usize, settings: &Settings) -> Result<ArenaBuffer> {
    Ok(ArenaBuffer::new(peers.group.arena(bytes.max(1), &settings.name)?))
}

/// Takes the weight lock, which all parts share.
fn hold(parts: &[Part]) -> Option<WeightGuard> {
    parts.first().map(|part| WeightLock::lock(part.weights.lock(), AVERAGING))
}
