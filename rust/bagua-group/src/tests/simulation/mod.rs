//! Joining, losses and views of many ranks over a simulated network and clock.
//!
//! Each rank is the state machines that a process runs: `Overlay` (connections, notices, who is gone),
//! `Assembly` (joining) and `Agreement` (views). This module is their driver instead of
//! sockets, threads and clocks. A run is determined by its scenario, number of ranks and seed.
//!
//! | file | what it is |
//! |---|---|
//! | `network` | the clock and the queue of events: when what is sent arrives |
//! | `ranks` | the ranks: their state machines, and what events do to them |
//! | `joining` | the rendezvous, opening connections, probes and repair |
//! | `views` | the agreement on a view, and its barrier |
//! | `tests` | what must hold in each scenario |
//!
//! The model, beside the constants of `network`: a rank handles and sends one message after another, each for `network::COST` and its bytes at
//! `network::BYTES_PER_MICROSECOND`; messages between two ranks arrive in order. Opening a connection takes two round trips. A killed
//! rank's connections end one latency later. Heartbeats are no messages here: each neighbour of a frozen or cut-off rank notices after its own
//! time between 1 and 1.2 heartbeat timeouts. The ranks agree on a view as soon as they know of a loss. A new group's connections take as long
//! as those of the start took in the same run; its barrier is simulated, as a dissemination barrier (Hensgen, Finkel and Manber, 1988).
//!
//! Left out: processor time but for the cost of a message, so that of keys and handshakes; shared processors and links; leaving the group;
//! lanes and their streams; TLS.

mod joining;
mod network;
mod ranks;
mod tests;
mod views;

use network::SECOND;
use ranks::World;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scenario {
    /// All join, and nothing happens.
    NoFault,
    /// One rank is killed after all have joined, as in all scenarios that do not say otherwise.
    Kill,
    /// One in a hundred ranks is killed, all at once.
    KillPercent,
    /// One in ten ranks is slow: ten times the latency and cost. One rank is killed.
    Slow,
    /// One in a hundred messages is lost and sent again. One rank is killed.
    Loss,
    /// Two ranks are killed one after the other, while the others agree on the view after a kill: rank 0, which leads that, and one that
    /// passes on what it sends to a quarter of the others.
    KillAgreeing,
    /// Rank 0 is killed while the others connect.
    KillRootJoining,
    /// Rank 2, which has children in the tree of the rendezvous and in that of the assembly, is killed while it serves and connects.
    KillInnerJoining,
    /// One rank is frozen.
    Freeze,
    /// Nothing arrives any more between the lower and the higher half of the ranks.
    Cut,
}

impl Scenario {
    fn is_joining(self) -> bool {
        matches!(self, Scenario::KillRootJoining | Scenario::KillInnerJoining)
    }
}

/// What a rank had of something: the mean over the ranks, and the rank with most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct PerRank {
    /// The mean.
    mean: f64,
    /// The most.
    worst: f64,
}

impl PerRank {
    fn of(values: impl Iterator<Item = u64>) -> PerRank {
        let (mut count, mut sum, mut worst) = (0u64, 0u64, 0u64);
        for value in values {
            (count, sum, worst) = (count + 1, sum + value, worst.max(value));
        }
        PerRank { mean: sum as f64 / count.max(1) as f64, worst: worst as f64 }
    }
}

/// How a run went. Times are seconds of the simulated clock.
#[derive(Clone, Debug, PartialEq)]
struct Report {
    /// Control connections, when all had joined; where a rank died before: at the end.
    connections: PerRank,
    /// Until all had joined; `None` where a rank died before.
    joined: Option<f64>,
    /// Messages received about joining: the rendezvous and the assembly. Those for others that the rank passed on count too.
    joining: PerRank,
    /// From the fault until each rank knew the right names.
    known: Option<f64>,
    /// Messages received about losses.
    losses: PerRank,
    /// From the fault until all that are left had the new view.
    view: Option<f64>,
    /// Messages received about the view.
    views: PerRank,
    /// Names of ranks that were fine, over all ranks.
    wrong: usize,
    /// Names that were missing at the end, over all ranks.
    missing: usize,
    /// Different views that ranks were in at the end.
    different: usize,
    /// Ranks that refused to go on, without a quorum.
    refused: usize,
    /// Ranks that had not finished when the limit of simulated time was over.
    unfinished: usize,
}

/// Simulates.
fn run(scenario: Scenario, ranks: usize, seed: u64) -> Report {
    let mut world = World::new(scenario, ranks, seed);
    world.run();
    world.report()
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / SECOND as f64
}
