//! Counters per kind of operation, which are cheap enough to be always on.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::types::Kind;
use crate::wait::lock;

/// Counters of one kind of operation. Bytes and nanoseconds are totals since the group was created.
#[derive(Debug, Default)]
pub struct OpStats {
    /// Number of operations started.
    pub calls: AtomicU64,
    /// Number of operations in which ranks of one host accessed each other's tensors directly.
    pub zero_copy: AtomicU64,
    /// Number of operations that combined inside each host first.
    pub hierarchical: AtomicU64,
    /// Bytes of the user's tensors.
    pub payload_bytes: AtomicU64,
    /// Bytes written to sockets, including headers. Bytes in shared memory do not count.
    pub wire_bytes_sent: AtomicU64,
    /// Bytes read from sockets, including headers.
    pub wire_bytes_received: AtomicU64,
    /// Time that this rank was blocked, waiting for peers.
    pub wait_ns: AtomicU64,
    /// Time in reduce kernels.
    pub reduce_ns: AtomicU64,
    /// Time in codecs, encoding and decoding.
    pub encode_ns: AtomicU64,
    /// Number of records that this rank encoded as NaN because their values were not finite.
    pub nonfinite_records: AtomicU64,
    /// Counters of such records on devices. A snapshot adds them to `nonfinite_records`.
    more_nonfinite: Mutex<Vec<Arc<dyn Counter>>>,
}

/// A count of records that were encoded as NaN, kept outside of [`OpStats`], for example in the memory of a device.
pub trait Counter: Send + Sync + Debug {
    /// Returns the current value.
    fn value(&self) -> u64;
}

/// The values of an [`OpStats`] at one moment.
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
    /// Adds time that this rank was blocked, waiting for peers.
    pub fn add_wait(&self, time: Duration) {
        self.wait_ns.fetch_add(nanos(time), Relaxed);
    }

    /// Adds time in reduce kernels.
    pub fn add_reduce(&self, time: Duration) {
        self.reduce_ns.fetch_add(nanos(time), Relaxed);
    }

    /// Adds time in codecs.
    pub fn add_encode(&self, time: Duration) {
        self.encode_ns.fetch_add(nanos(time), Relaxed);
    }

    /// Includes the value of `counter` in the number of records that are not finite.
    pub fn also_nonfinite(&self, counter: Arc<dyn Counter>) {
        lock(&self.more_nonfinite).push(counter);
    }

    /// Returns the current values.
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
    /// Number of connections to the listening port that failed the handshake.
    pub connections_refused: AtomicU64,
    /// Number of data connections opened, for lanes and for messages.
    pub data_opened: AtomicU64,
    /// Number of data connections closed.
    pub data_closed: AtomicU64,
    /// Number of messages that this rank sent to agree on this group, if the group is a view of another one. 0 for a
    /// group that was joined.
    pub agreement_messages: AtomicU64,
    /// Bytes of the agreement messages.
    pub agreement_bytes: AtomicU64,
}

impl Stats {
    /// Returns the counters of one kind.
    pub fn of(&self, kind: Kind) -> &OpStats {
        &self.ops[kind as usize - 1]
    }

    /// Returns the counters of every kind that was used at least once.
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
