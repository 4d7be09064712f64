//! Asynchronous model averaging: one thread per model averages its weights with those of other ranks during training.
//!
//! All ranks that take part run a round together:
//!
//! 1. **Status.** All ranks of the group exchange who takes part and whose interval has passed (a 72-byte all_gather,
//!    at least every half second). The round continues once the interval has passed on all ranks that take part.
//! 2. **Snapshot.** Each rank copies its weights under its weight lock.
//! 3. **Average.** The ranks all_reduce the snapshots without a lock, while training continues.
//! 4. **Agreement.** After a barrier, every rank knows that all have the average. If a failure comes earlier, no rank
//!    writes it.
//! 5. **Update.** Each rank adds `average - snapshot` to its weights under the lock: see [`crate::reduce::correct`].
//!
//! Invariants, quoted by the tests:
//!
//! 1. A thread holds the lock only to copy a snapshot or to write an update, never while it waits for another rank. The
//!    exception is a round of `synchronize`.
//! 2. Either all ranks of a round write its update or none does, so a round preserves the sum of its ranks' weights.
//! 3. After `abort` has returned, nothing writes to the weights.
//!
//! Weights on a device are copied and updated there, and the copy is averaged on the host. The lock then orders the
//! work of the device, and no thread that holds it waits for the device ([`crate::memory::DeviceWeights`]).
//!
//! In an elastic job, ranks may be lost at any time, and the others continue ([`Settings::elastic`]). The group of the
//! averaging is replaced by a smaller one (`Group::shrink`), or by one with a joining rank (`join_running_job`). The
//! joining rank gets the average of a round in which its own weights did not count.
//!
//! Source: Gan et al., VLDB 2021 (arXiv:2107.01499), section 3.3. There, ranks hold the lock while they communicate.

mod averager;
mod averaging_group;
mod averaging_thread;
mod join_running_job;
mod shared_state;
mod weight_buffers;

pub use averager::{Averager, Synchronization};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::codec::Codec;
use crate::group::JoinServer;
use crate::memory::Weights;

/// The settings of an averaging. Equal on all ranks.
pub struct Settings {
    /// Name of the model.
    pub name: String,
    /// Time from the end of a round to the start of the next.
    pub interval: Duration,
    /// Encodes the differences to the last average. `None` for full precision.
    pub codec: Option<Arc<dyn Codec>>,
    /// True if this rank takes part from the start, as joining ranks do; false if only from [`Averager::resume`] on.
    pub takes_part: bool,
    /// Set in an elastic job, in which ranks may be lost and come back. With `None`, a loss ends the averaging.
    pub elastic: Option<Elastic>,
}

/// Settings that lost ranks need to rejoin the averaging of an elastic job.
pub struct Elastic {
    /// This rank's server.
    pub server: Arc<JoinServer>,
    /// Digest of everything that must be equal on all ranks: parameters, buffers, options.
    pub digest: [u8; 32],
}

/// The memory of a model.
pub struct Model {
    /// The weights to average: one contiguous piece per dtype.
    pub weights: Vec<Weights>,
    /// Buffers, which a joining rank gets from another rank in addition to the average.
    pub buffers: Vec<Weights>,
}

/// The state of a rank in the averaging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AveragerState {
    /// The rank takes part in rounds.
    Running,
    /// Aborted, stopped or failed.
    Stopped,
}

/// The statistics of one rank.
#[derive(Clone, Debug)]
pub struct AveragerStats {
    /// The state of this rank.
    pub state: AveragerState,
    /// Number of the membership. Increases with every change of it.
    pub view: u64,
    /// Job ranks that took part in the last round, ascending.
    pub ranks: Vec<usize>,
    /// Number of rounds that this rank has completed.
    pub rounds: u64,
    /// Duration of the last round.
    pub round: Duration,
    /// Number of optimizer steps between snapshot and update of the last round.
    pub staleness: u64,
    /// Number of this rank's optimizer steps that no round has averaged yet.
    pub unaveraged_steps: u64,
    /// Size of the weights of all rounds in bytes.
    pub payload_bytes: u64,
    /// Number of bytes written to sockets.
    pub wire_bytes_sent: u64,
    /// Number of bytes read from sockets.
    pub wire_bytes_received: u64,
    /// Lost job ranks, with reasons. All other ranks if they left this one behind.
    pub lost: BTreeMap<usize, String>,
    /// Number of times that this rank joined again.
    pub joined: u64,
}
