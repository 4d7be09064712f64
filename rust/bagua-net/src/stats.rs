//! Counters per kind of operation, cheap enough to be always on.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::types::Kind;
use crate::wait::lock;

/// Counters of one kind of operation. Bytes and nanoseconds are totals since the group was built.
#[derive(Debug, Default)]
pub struct OpStats {
    /// Operations started.
    pub calls: AtomicU64,
    /// Operations in which the ranks of a host read or wrote each other's tensors directly.
    pub zero_copy: AtomicU64,
    /// Those of them that combined inside hosts first.
    pub hierarchical: AtomicU64,
    /// Bytes of the user's tensors.
    pub payload_bytes: AtomicU64,
    /// Bytes written to sockets, headers included; bytes in shared memory are not counted.
    pub wire_bytes_sent: AtomicU64,
    /// Bytes read from sockets, headers included.
    pub wire_bytes_received: AtomicU64,
    /// Time blocked waiting for peers.
    pub wait_ns: AtomicU64,
    /// Time in reduce kernels.
    pub reduce_ns: AtomicU64,
    /// Time in codecs, both directions.
    pub encode_ns: AtomicU64,
    /// Records that this rank encoded as NaN, because what they say of is not finite.
    pub nonfinite_records: AtomicU64,
    /// More of them, counted elsewhere.
    more_nonfinite: Mutex<Vec<Arc<dyn Counter>>>,
}

/// A number that something else counts, such as a device.
pub trait Counter: Send + Sync + Debug {
    /// So far.
    fn value(&self) -> u64;
}

/// The values of an [`OpStats`] at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct OpSnapshot {
    pub calls: u64,
    pub zero_copy: u64,
    pub hierarchical: u64,
    pub payload_bytes: u64,
    pub wire_bytes_sent: u64,
    pub wire_bytes_received: u64,
    pub wait_s: f64,
    pub reduce_s: f64,
    pub encode_s: f64,
    pub nonfinite_records: u64,
}

impl OpStats {
    /// Adds to the time blocked waiting for peers.
    pub fn add_wait(&self, time: Duration) {
        self.wait_ns.fetch_add(nanos(time), Relaxed);
    }

    /// Adds to the time in reduce kernels.
    pub fn add_reduce(&self, time: Duration) {
        self.reduce_ns.fetch_add(nanos(time), Relaxed);
    }

    /// Adds to the time in codecs.
    pub fn add_encode(&self, time: Duration) {
        self.encode_ns.fetch_add(nanos(time), Relaxed);
    }

    /// Records that are not finite are from now on also those that `counter` counts.
    pub fn also_nonfinite(&self, counter: Arc<dyn Counter>) {
        lock(&self.more_nonfinite).push(counter);
    }

    /// The current values.
    pub fn snapshot(&self) -> OpSnapshot {
        let seconds = |counter: &AtomicU64| counter.load(Relaxed) as f64 * 1e-9;
        OpSnapshot {
            calls: self.calls.load(Relaxed),
            zero_copy: self.zero_copy.load(Relaxed),
            hierarchical: self.hierarchical.load(Relaxed),
            payload_bytes: self.payload_bytes.load(Relaxed),
            wire_bytes_sent: self.wire_bytes_sent.load(Relaxed),
            wire_bytes_received: self.wire_bytes_received.load(Relaxed),
            wait_s: seconds(&self.wait_ns),
            reduce_s: seconds(&self.reduce_ns),
            encode_s: seconds(&self.encode_ns),
            nonfinite_records: self.nonfinite_records.load(Relaxed)
                + lock(&self.more_nonfinite).iter().map(|counter| counter.value()).sum::<u64>(),
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The counters of one group, shared by all its lanes.
#[derive(Debug, Default)]
pub struct Stats {
    ops: [OpStats; Kind::ALL.len()],
    /// Connections to the listening port that failed the handshake.
    pub connections_refused: AtomicU64,
    /// Data connections that were opened, of lanes and of messages.
    pub data_opened: AtomicU64,
    /// Those of them that were closed.
    pub data_closed: AtomicU64,
    /// Messages that this rank sent to agree on this group, as a view of another; 0 for one that was joined.
    pub agreement_messages: AtomicU64,
    /// Bytes of these messages.
    pub agreement_bytes: AtomicU64,
}

impl Stats {
    /// The counters of one kind.
    pub fn of(&self, kind: Kind) -> &OpStats {
        &self.ops[kind as usize - 1]
    }

    /// The counters of every kind that was used at least once.
    pub fn snapshot(&self) -> Vec<(Kind, OpSnapshot)> {
        Kind::ALL.into_iter().map(|kind| (kind, self.of(kind).snapshot())).filter(|(_, op)| op.calls > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kinds_that_were_used_are_reported() {
        let stats = Stats::default();
        stats.of(Kind::Barrier).calls.fetch_add(2, Relaxed);
        stats.of(Kind::Barrier).add_wait(Duration::from_millis(500));
        let shown = stats.snapshot();
        assert_eq!(shown.len(), 1);
        assert_eq!((shown[0].0, shown[0].1.calls, shown[0].1.wait_s), (Kind::Barrier, 2, 0.5));
    }
}
