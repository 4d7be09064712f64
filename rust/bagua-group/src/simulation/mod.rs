//! Joining, losses and views of many ranks over a simulated network and clock: for benchmarks and tests, and no part of the API.
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
#[cfg(all(test, not(model)))]
mod tests;
mod views;

use std::fmt;

use network::SECOND;
use ranks::World;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
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
    /// All.
    pub const ALL: [Scenario; 10] = [
        Scenario::NoFault,
        Scenario::Kill,
        Scenario::KillPercent,
        Scenario::Slow,
        Scenario::Loss,
        Scenario::KillAgreeing,
        Scenario::KillRootJoining,
        Scenario::KillInnerJoining,
        Scenario::Freeze,
        Scenario::Cut,
    ];

    /// The largest world that is simulated in minutes: after a cut each rank gets the names of half of all ranks, and passes each on.
    pub fn most_ranks(self) -> usize {
        if self == Scenario::Cut { 1024 } else { super::views::RANKS_LIMIT }
    }

    fn is_joining(self) -> bool {
        matches!(self, Scenario::KillRootJoining | Scenario::KillInnerJoining)
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scenario::NoFault => "no fault",
            Scenario::Kill => "kill",
            Scenario::KillPercent => "kill 1 %",
            Scenario::Slow => "10 % slow, kill",
            Scenario::Loss => "1 % lost, kill",
            Scenario::KillAgreeing => "kill, then the leader",
            Scenario::KillRootJoining => "kill rank 0, joining",
            Scenario::KillInnerJoining => "kill rank 2, joining",
            Scenario::Freeze => "freeze",
            Scenario::Cut => "cut into halves",
        })
    }
}

/// What a rank had of something: the mean over the ranks, and the rank with most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PerRank {
    /// The mean.
    pub mean: f64,
    /// The most.
    pub worst: f64,
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

/// Messages that a rank has received, those for others that it passed on included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// How many.
    pub messages: PerRank,
    /// Their bytes, as frames.
    pub bytes: PerRank,
}

/// How a run went. Times are seconds of the simulated clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// What happened.
    pub scenario: Scenario,
    /// How many ranks there were.
    pub ranks: usize,
    /// Control connections, when all had joined; where a rank died before: at the end.
    pub connections: PerRank,
    /// Until all had joined; `None` where a rank died before.
    pub joined: Option<f64>,
    /// About joining: the rendezvous and the assembly.
    pub joining: Traffic,
    /// From the fault until each rank knew the right names.
    pub known: Option<f64>,
    /// About losses.
    pub losses: Traffic,
    /// From the fault until all that are left had the new view.
    pub view: Option<f64>,
    /// About the view.
    pub views: Traffic,
    /// From the fault until the new group's connections were asked for everywhere: the agreement alone.
    pub agreed: Option<f64>,
    /// Requests for connections that replace others.
    pub repair: Traffic,
    /// Names of ranks that were fine, over all ranks.
    pub wrong: usize,
    /// Names that were missing at the end, over all ranks.
    pub missing: usize,
    /// Ranks that gave up while joining because the rank died that would have sent them the list of addresses.
    pub gave_up: usize,
    /// Different views that ranks were in at the end.
    pub different: usize,
    /// Ranks that refused to go on, without a quorum.
    pub refused: usize,
    /// Ranks that had not finished when the limit of simulated time was over.
    pub unfinished: usize,
    /// Events that were simulated.
    pub events: u64,
}

/// Simulates.
///
/// # Panics
/// For a world of fewer than 8 ranks, or more than can agree on a view.
pub fn run(scenario: Scenario, ranks: usize, seed: u64) -> Report {
    assert!((8..=super::views::RANKS_LIMIT).contains(&ranks), "a world of {ranks} ranks");
    let mut world = World::new(scenario, ranks, seed);
    world.run();
    world.report()
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / SECOND as f64
}
