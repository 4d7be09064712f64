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
    peers: Peers,
    parts: Vec<Part>,
    settings: Settings,
    /// Ranks of the last round.
    set: Vec<usize>,
    /// Number of the membership.
    view: u64,
    /// Exchanges of statuses; equal on all ranks.
    exchanges: u64,
}

impl Rounds {
    pub(super) fn new(shared: Arc<Shared>, peers: Peers, weights: Vec<Weights>, settings: Settings) -> Result<Rounds> {
        let mut parts = Vec::with_capacity(weights.len());
        for weights in weights {
            let bytes = weights.len();
            let average = ArenaBuffer::new(peers.group.arena(bytes.max(1), &settings.name)?);
            let (snapshot, last, work) = (vec![0; bytes], Vec::new(), Workspace::default());
            parts.push(Part { weights, snapshot, average, last, work });
        }
        let set = (0..peers.group.size()).collect();
        Ok(Rounds { shared, peers, parts, settings, set, view: 1, exchanges: 0 })
    }

    /// Runs rounds until it has to end or something fails.
    pub(super) fn run(mut self) {
        let mut due = Instant::now() + self.settings.interval;
        let failure = loop {
            if !self.shared.sleep(due) {
                break Error::Aborted("the averaging of this model has ended".to_owned());
            }
            let outcome = self.round();
            due = Instant::now() + self.settings.interval;
            if let Err(error) = outcome {
                break error;
            }
        };
        let failure = self.peers.named(failure);
        let Rounds { shared, peers, parts, .. } = self;
        // Without lanes, arenas and weights before anybody is told that the thread has ended.
        drop((peers, parts));
        let mut control = shared.lock();
        control.in_round = false;
        control.failure = Some(failure);
        control.stats.state = State::Stopped;
        drop(control);
        shared.notify();
    }

    fn round(&mut self) -> Result<()> {
        let begin = Instant::now();
        let (own, calls) = {
            let mut control = self.shared.lock();
            control.in_round = control.takes_part;
            let own = Status {
                takes_part: control.takes_part,
                synchronizes: control.takes_part && !control.synchronizing.is_empty(),
                view: self.view,
                exchanges: self.exchanges,
            };
            (own, control.synchronize_calls)
        };
        let all = self.peers.exchange(own)?;
        let set: Vec<usize> = (0..all.len()).filter(|rank| all[*rank].takes_part).collect();
        self.view = all.iter().map(|status| status.view).max().unwrap_or(self.view);
        self.exchanges = 1 + all.iter().map(|status| status.exchanges).max().unwrap_or(self.exchanges);
        if set != self.set {
            self.view += 1;
            self.set.clone_from(&set);
            // A rank that comes in does not know it.
            self.parts.iter_mut().for_each(|part| part.last.clear());
        }
        let late: Vec<usize> = set.iter().copied().filter(|rank| !all[*rank].synchronizes).collect();
        let synchronizes = late.is_empty();
        {
            let mut control = self.shared.lock();
            control.stats.view = self.view;
            control.stats.ranks = self.peers.in_job(&set);
            control.not_synchronizing = self.peers.in_job(&late);
        }
        let mut staleness = 0;
        if set.len() > 1 {
            // Also on a rank outside of the set, so that all know the same sets.
            staleness = self.average(&set, synchronizes)?;
        }
        if own.takes_part {
            let mut control = self.shared.lock();
            control.in_round = false;
            if synchronizes {
                control.synchronized = calls;
                control.synchronizing.retain(|call| *call > calls);
            }
            let stats = &mut control.stats;
            stats.rounds += 1;
            stats.round = begin.elapsed();
            stats.staleness = staleness;
            if set.len() > 1 {
                stats.payload_bytes += self.parts.iter().map(|part| part.weights.len() as u64).sum::<u64>();
            }
            drop(control);
            self.shared.notify();
        }
        Ok(())
    }

    /// Averages the weights of a set; returns the optimizer's steps between snapshot and update.
    fn average(&mut self, set: &[usize], synchronizes: bool) -> Result<u64> {
        let Rounds { shared, peers, parts, settings, exchanges, .. } = self;
        let Some(lanes) = peers.lanes(set, &settings.name)? else { return Ok(0) };
        let mut held = hold(shared, parts)?;
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
        // Invariant 2: whoever passes this knows that all have the average.
        lanes.global.barrier(&options)?;
        if held.is_none() {
            held = hold(shared, parts)?;
        }
        let passed = shared.steps.load(Relaxed) - steps;
        if let Some(guard) = &held {
            for part in parts.iter_mut() {
                let average = &part.average.bytes()[..part.snapshot.len()];
                reduce::correct(part.weights.dtype(), part.weights.bytes(guard), average, &part.snapshot);
                if settings.codec.is_some() {
                    part.last.clear();
                    part.last.extend_from_slice(average);
                }
            }
        }
        Ok(passed)
    }
}

/// Takes the weight lock, which all parts share.
///
/// # Errors
/// `Aborted` when the thread has to end: whoever ended it may not have waited for a lock that somebody else held, and the weights may
/// be gone.
fn hold(shared: &Shared, parts: &[Part]) -> Result<Option<WeightGuard>> {
    let guard = parts.first().map(|part| WeightLock::lock(part.weights.lock(), AVERAGING));
    if shared.lock().stopping {
        return Err(Error::Aborted("the averaging of this model has ended".to_owned()));
    }
    Ok(guard)
}
