//! Asynchronous model averaging: a thread per model averages its weights with those of other ranks, beside the training.
//!
//! A round, made by all ranks that take part:
//!
//! 1. **Status.** All ranks of the group exchange who takes part and whose interval has passed (a 72-byte all_gather, at least every
//!    half second). The round goes on where it has passed for all that take part.
//! 2. **Snapshot.** Each copies its weights, under its weight lock.
//! 3. **Average.** All_reduce of the snapshots, without a lock: training goes on.
//! 4. **Agreement.** A barrier: every rank has the whole average. A failure before its end is a round that no rank writes.
//! 5. **Update.** Under the lock, `average - snapshot` is added to the weights, see [`crate::reduce::correct`].
//!
//! Invariants, quoted by the tests:
//!
//! 1. The lock is held to copy a snapshot or to write an update, and never while this rank waits for another; but for a round that
//!    `synchronize` makes.
//! 2. A round's update is written by all of its ranks or by none, so that a round keeps the sum of what its ranks hold.
//! 3. After `abort` has returned nothing writes to the weights.
//!
//! Weights on a device are copied there under the lock, and updated there; the copy is averaged on the host. The lock is then an order of the
//! device's work, and no thread that holds it waits for the device ([`crate::memory::DeviceWeights`]).
//!
//! In an elastic job ranks may be lost at any moment, and the others go on ([`Settings::elastic`]): the group of the averaging is replaced
//! by a smaller one (`Group::shrink`), or by one with a joining rank (`admission`), which gets the average of a round in which its own
//! weights did not count.
//!
//! After Gan et al., VLDB 2021 (arXiv:2107.01499), section 3.3; there ranks hold the lock while they communicate.

mod admission;
mod averager;
mod peers;
mod round;
mod thread_state;
mod weight_buffers;

pub use averager::{Averager, Synchronization};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::codec::Codec;
use crate::group::JoinServer;
use crate::memory::Weights;

/// How a model is averaged. Equal on all ranks.
pub struct Settings {
    /// Name of the model.
    pub name: String,
    /// From the end of one round to the beginning of the next.
    pub interval: Duration,
    /// Encodes the differences to the last average; `None` for full precision.
    pub codec: Option<Arc<dyn Codec>>,
    /// Whether this rank takes part from the first round on; else from [`Averager::resume`] on. One that joins does at any rate.
    pub takes_part: bool,
    /// In an elastic job, where ranks may be lost and come back; `None`: a loss ends the averaging.
    pub elastic: Option<Elastic>,
}

/// How ranks come back.
pub struct Elastic {
    /// This rank's.
    pub server: Arc<JoinServer>,
    /// Digest of what must be equal on all ranks: parameters, buffers, options.
    pub digest: [u8; 32],
}

/// The memory of a model.
pub struct Model {
    /// What is averaged: contiguous weights, one for each dtype.
    pub weights: Vec<Weights>,
    /// What a joining rank gets from a rank beside the average: buffers.
    pub buffers: Vec<Weights>,
}

/// Whether a rank takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AveragerState {
    /// In rounds.
    Running,
    /// Aborted, stopped or failed.
    Stopped,
}

/// Numbers of one rank.
#[derive(Clone, Debug)]
pub struct AveragerStats {
    /// Whether this rank takes part.
    pub state: AveragerState,
    /// Number of the membership: grows with each change of it.
    pub view: u64,
    /// Ranks in the job that took part in the last round, ascending.
    pub ranks: Vec<usize>,
    /// Rounds completed by this rank.
    pub rounds: u64,
    /// Duration of the last round.
    pub round: Duration,
    /// Optimizer steps between snapshot and update of the last round.
    pub staleness: u64,
    /// Optimizer steps of this rank that no round has averaged yet.
    pub unaveraged_steps: u64,
    /// Bytes of weights in all rounds.
    pub payload_bytes: u64,
    /// Bytes written to sockets.
    pub wire_bytes_sent: u64,
    /// Bytes read from sockets.
    pub wire_bytes_received: u64,
    /// Ranks in the job that are away without having left, and why; of a rank without which the others went on: all of them, until it is back.
    pub lost: BTreeMap<usize, String>,
    /// How often this rank was taken back.
    pub joined: u64,
}
