//! The weights of one dtype, and the memory that a round needs on the host. Weights on a device are copied and updated
//! there, while the host has copies of the snapshot and of the average.

use crate::error::Result;
use crate::memory::{ArenaBuffer, Locked, WeightGuard, WeightStep, Weights};
use crate::reduce;
use crate::request::Workspace;

/// Returns an error to end a wait for a device.
pub(super) type GoOn<'a> = &'a dyn Fn() -> Result<()>;

pub(super) struct WeightBuffers {
    pub(super) weights: Weights,
    /// The weights at the start of the round.
    pub(super) snapshot: Vec<u8>,
    pub(super) average: ArenaBuffer,
    /// The last average, which all ranks of the set have. Empty without a codec, or if there is none.
    pub(super) last: Vec<u8>,
    pub(super) work: Workspace,
}

impl WeightBuffers {
    pub(super) fn new(weights: Weights, average: ArenaBuffer) -> WeightBuffers {
        let (last, work) = (Vec::new(), Workspace::default());
        WeightBuffers { snapshot: vec![0; weights.len()], weights, average, last, work }
    }

    pub(super) fn average(&mut self) -> &mut [u8] {
        let bytes = self.snapshot.len();
        &mut self.average.bytes()[..bytes]
    }

    /// Copies the weights under their lock.
    pub(super) fn take_snapshot(&mut self, guard: &WeightGuard) -> Result<()> {
        take_snapshot(&mut self.weights, guard, &mut self.snapshot)
    }

    pub(super) fn read_snapshot(&mut self, go_on: GoOn<'_>) -> Result<()> {
        read_snapshot(&mut self.weights, go_on, &mut self.snapshot)
    }

    /// Copies the average to the weights' device. Done before the agreement, because it can fail.
    pub(super) fn hand_in_average(&mut self, go_on: GoOn<'_>) -> Result<()> {
        let bytes = self.snapshot.len();
        match self.weights.device() {
            Some(device) => device.write_average(&self.average.bytes()[..bytes], go_on),
            None => Ok(()),
        }
    }

    /// Adds `average - snapshot` to the weights under their lock.
    pub(super) fn correct(&mut self, guard: &WeightGuard) -> Result<()> {
        let (dtype, bytes) = (self.weights.dtype(), self.snapshot.len());
        match self.weights.locked(guard) {
            Locked::Device(device) => device.under_lock(WeightStep::Correct)?,
            Locked::Host(weights) => {
                reduce::correct(dtype, weights, &self.average.bytes()[..bytes], &self.snapshot);
            }
        }
        Ok(())
    }

    /// Replaces the weights by the average, under their lock. The average must have been handed in.
    pub(super) fn replace(&mut self, guard: &WeightGuard) -> Result<()> {
        let bytes = self.snapshot.len();
        replace(&mut self.weights, guard, &self.average.bytes()[..bytes])
    }
}

/// Copies weights to `snapshot`, or to a snapshot on their device.
pub(super) fn take_snapshot(weights: &mut Weights, guard: &WeightGuard, snapshot: &mut [u8]) -> Result<()> {
    match weights.locked(guard) {
        Locked::Device(device) => device.under_lock(WeightStep::Snapshot)?,
        Locked::Host(weights) => snapshot.copy_from_slice(weights),
    }
    Ok(())
}

pub(super) fn read_snapshot(weights: &mut Weights, go_on: GoOn<'_>, snapshot: &mut [u8]) -> Result<()> {
    match weights.device() {
        Some(device) => device.read_snapshot(snapshot, go_on),
        None => Ok(()),
    }
}

pub(super) fn hand_in(weights: &mut Weights, go_on: GoOn<'_>, values: &[u8]) -> Result<()> {
    match weights.device() {
        Some(device) => device.write_average(values, go_on),
        None => Ok(()),
    }
}

/// Replaces weights by `values`, which must have been handed in.
pub(super) fn replace(weights: &mut Weights, guard: &WeightGuard, values: &[u8]) -> Result<()> {
    match weights.locked(guard) {
        Locked::Device(device) => device.under_lock(WeightStep::Replace)?,
        Locked::Host(weights) => weights.copy_from_slice(values),
    }
    Ok(())
}
