//! The flight recorder: the last [`CAPACITY`] operations of a process. After a hang or a failure, it shows which rank
//! did not join which operation.
//!
//! Recording is always on. A blocking operation costs one atomic addition, one cache line, and two readings of the
//! processor's counter: about 20 ns. This is why each lane has its own ring, written only by the thread that uses the
//! lane; a reader puts the operations of all lanes in order. One ring for all lanes, behind a lock and timed with the
//! kernel's clock, costs 50 to 75 ns.
//!
//! A queued operation costs a thread switch anyway, so it is kept behind a lock until it begins. The module `lane`
//! writes the records; this file reads them.

mod lane;
mod operation;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use self::lane::{Begun, Ring};
pub use self::lane::{LaneRecorder, Running, Ticket};
pub use self::operation::{Announced, CAPACITY, Operation, OperationState, What};

use crate::sync::{Scale, TickClock};
use crate::types::Kind;
use crate::wait::lock;

/// The record of the last operations of a process.
pub struct FlightRecorder {
    clock: TickClock,
    next: AtomicU64,
    /// Operations that are not in a ring. No code that can panic or wait runs under this lock.
    queues: Mutex<Queues>,
    /// Lanes with recent operations, including lanes that were closed.
    lanes: Mutex<Vec<Arc<RecordedLane>>>,
}

/// Jobs that have not begun an operation on a lane.
#[derive(Default)]
struct Queues {
    /// Jobs that wait, or that run but have not begun an operation, by number.
    waiting: BTreeMap<u64, Job>,
    /// The last jobs that ended without an operation, oldest first.
    ended: VecDeque<Job>,
}

struct RecordedLane {
    group: Arc<str>,
    channel: u32,
    ring: Ring,
}

impl Default for FlightRecorder {
    fn default() -> FlightRecorder {
        FlightRecorder {
            clock: TickClock::start(),
            next: AtomicU64::new(0),
            queues: Mutex::default(),
            lanes: Mutex::default(),
        }
    }
}

impl FlightRecorder {
    /// Creates the recorder for a lane of this group.
    pub fn lane(&'static self, group: &str, channel: u32) -> LaneRecorder {
        let lane = Arc::new(RecordedLane { group: group.into(), channel, ring: Ring::new() });
        let mut lanes = lock(&self.lanes);
        // Closed lanes stay while they contain recent operations.
        let oldest = self.oldest();
        lanes.retain(|lane| Arc::strong_count(lane) > 1 || lane.ring.reaches(oldest));
        lanes.push(Arc::clone(&lane));
        LaneRecorder { recorder: self, lane }
    }

    /// Returns the last operations, oldest first, preceded by older operations that still run.
    pub fn operations(&self) -> Vec<Operation> {
        // An operation that is just beginning may have its number but not its slot yet, so retry if one is missing.
        for _ in 0..100 {
            let found = self.read();
            let last: Vec<u64> = found.iter().rev().map(|op| op.n).take(CAPACITY).collect();
            if last.windows(2).all(|pair| pair[0] == pair[1] + 1) {
                return found;
            }
            std::thread::yield_now();
        }
        self.read()
    }

    fn read(&self) -> Vec<Operation> {
        let oldest = self.oldest();
        let (mut found, scale) = (BTreeMap::new(), self.clock.scale());
        let queues = lock(&self.queues);
        let ended = queues.ended.iter().filter(|job| job.op.n >= oldest);
        let waiting =
            queues.waiting.values().filter(|job| job.op.n >= oldest || job.op.state == OperationState::Started);
        found.extend(ended.chain(waiting).map(|job| (job.op.n, job.shown(&scale))));
        drop(queues);
        for lane in &*lock(&self.lanes) {
            let mut begun = Vec::new();
            lane.ring.read(oldest, &mut begun);
            // Rings are read after the queues, because a job is written to a ring before it leaves its queue.
            found.extend(begun.into_iter().map(|op| (op.n, shown(lane, op, &scale))));
        }
        found.into_values().collect()
    }

    /// Returns the number of the oldest operation among the last [`CAPACITY`].
    fn oldest(&self) -> u64 {
        self.next.load(Relaxed).saturating_sub(CAPACITY as u64)
    }
}

fn shown(lane: &RecordedLane, op: Begun, scale: &Scale) -> Operation {
    let Begun { n, seq, count, bytes, begin, end, kind, op, dtype, root, state, label, missing } = op;
    Operation {
        n,
        group: Arc::clone(&lane.group),
        channel: lane.channel,
        seq: Some(seq),
        what: What::Kind(kind, op),
        label,
        dtype: (kind != Kind::Barrier).then_some(dtype),
        count,
        bytes,
        root,
        state,
        begin: Some(scale.since_epoch(begin)),
        end: end.map(|end| scale.since_epoch(end)),
        missing,
    }
}

struct Job {
    /// The operation, except for its times.
    op: Operation,
    begin: Option<u64>,
    end: Option<u64>,
}

impl Job {
    fn shown(&self, scale: &Scale) -> Operation {
        let time = |ticks: Option<u64>| ticks.map(|ticks| scale.since_epoch(ticks));
        Operation { begin: time(self.begin), end: time(self.end), ..self.op.clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::Error;
    use crate::types::{DType, Fingerprint, ReduceOp};

    fn recorder() -> &'static FlightRecorder {
        Box::leak(Box::default())
    }

    fn says(seq: u64) -> Fingerprint {
        Fingerprint { seq, op: Some(ReduceOp::Sum), ..Fingerprint::new(Kind::AllReduce, DType::F32, 4) }
    }

    fn begin(lane: &LaneRecorder, seq: u64) -> Running {
        lane.begin(None, &says(seq), 16, "")
    }

    #[test]
    fn the_last_thousand_operations_are_kept_with_numbers_that_count_by_one() {
        let recorder = recorder();
        let lanes = [recorder.lane("world", 0), recorder.lane("world", 1), recorder.lane("world/0,1", 0)];
        for n in 0..1200 {
            let lane = &lanes[n as usize % 3];
            lane.end(begin(lane, n / 3), None);
        }
        let shown = recorder.operations();
        assert_eq!(shown.iter().map(|op| op.n).collect::<Vec<_>>(), (200..1200).collect::<Vec<_>>());
        for op in shown {
            let place = [("world", 0), ("world", 1), ("world/0,1", 0)][op.n as usize % 3];
            assert_eq!(((&*op.group, op.channel), op.seq), (place, Some(op.n / 3)));
            assert_eq!((op.what.text().as_str(), op.count, op.bytes), ("all_reduce(sum)", 4, 16));
            assert!(op.state == OperationState::Done && op.begin.unwrap() <= op.end.unwrap());
        }
    }

    #[test]
    fn a_queued_operation_keeps_its_number_when_it_begins_on_another_lane() {
        let recorder = recorder();
        let lane = recorder.lane("world", 0);
        let op = Announced { label: "b0", dtype: Some(DType::F32), ..Announced::job("centralized") };
        let queued = lane.queue(&op);
        lane.end(begin(&lane, 0), None);
        let shown = &recorder.operations()[0];
        assert_eq!((shown.n, shown.what.text().as_str(), shown.state), (0, "centralized", OperationState::Queued));
        assert_eq!((shown.seq, shown.begin, shown.label.as_str()), (None, None, "b0"));
        lane.start(queued);
        let other = recorder.lane("world, host 0", 1);
        let ticket = other.begin(Some(queued), &says(7), 16, "b0");
        other.end(ticket, None);
        let shown = &recorder.operations()[0];
        assert_eq!((shown.n, shown.seq, shown.channel, shown.state), (0, Some(7), 1, OperationState::Done));
        assert_eq!((&*shown.group, recorder.operations().len()), ("world, host 0", 2));
    }

    #[test]
    fn an_operation_that_runs_is_shown_however_many_others_follow_and_only_while_it_runs() {
        let recorder = recorder();
        let (lane, other) = (recorder.lane("world", 0), recorder.lane("world", 1));
        let op = Announced::job("callback");
        let (long, job) = (begin(&lane, 0), other.queue(&op));
        other.start(job);
        for seq in 0..3 * CAPACITY as u64 {
            other.end(begin(&other, seq), None);
        }
        let shown = recorder.operations();
        assert_eq!((shown.len(), shown[0].n, shown[1].n), (CAPACITY + 2, 0, 1));
        assert!(shown[..2].iter().all(|op| op.state == OperationState::Started && op.end.is_none()));
        lane.end(long, Some((&Error::Mismatch(String::new()), 0)));
        other.finish(job, None);
        let numbers: Vec<_> = recorder.operations().iter().map(|op| op.n).collect();
        assert_eq!(numbers, shown[2..].iter().map(|op| op.n).collect::<Vec<_>>());
    }

    #[test]
    fn a_job_that_is_dropped_failed_without_having_begun() {
        let recorder = recorder();
        let lane = recorder.lane("world", 0);
        let job = lane.queue(&Announced::job("centralized"));
        let lost = Error::PeerRaised { rank: 2, host: String::new(), kind: String::new(), message: String::new() };
        lane.finish(job, Some((&lost, 0)));
        let shown = &recorder.operations()[0];
        assert_eq!((shown.state, shown.begin, shown.missing.len()), (OperationState::Failed, None, 0));
    }

    #[test]
    fn operations_of_a_closed_lane_stay_until_others_have_taken_their_place() {
        let recorder = recorder();
        for channel in 0..2000 {
            let lane = recorder.lane("world", channel);
            lane.end(begin(&lane, 0), None);
        }
        assert_eq!(recorder.operations().len(), CAPACITY);
        assert!(lock(&recorder.lanes).len() <= CAPACITY + 1);
    }

    #[test]
    fn a_reader_never_sees_half_an_operation_while_other_threads_write() {
        let recorder = recorder();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2)
                .map(|channel| {
                    scope.spawn(move || {
                        let lane = recorder.lane("world", channel);
                        for seq in 0..50_000u64 {
                            let says = Fingerprint { count: seq, ..says(seq) };
                            let running = lane.begin(None, &says, seq as usize, "");
                            lane.end(running, None);
                        }
                    })
                })
                .collect();
            while threads.iter().any(|thread| !thread.is_finished()) {
                for op in recorder.operations() {
                    assert_eq!((Some(op.count), Some(op.bytes)), (op.seq, op.seq));
                    assert_eq!(op.state == OperationState::Done, op.end.is_some());
                }
            }
        });
        let shown = recorder.operations();
        assert_eq!(shown.iter().map(|op| op.n).collect::<Vec<_>>(), (99_000..100_000).collect::<Vec<_>>());
    }

    #[test]
    fn a_failed_operation_names_the_other_ranks_that_had_not_come() {
        let recorder = recorder();
        let lane = recorder.lane("world", 0);
        let timeout = |missing| Error::Timeout { after: Duration::ZERO, missing, noticed_by: 0, progress: None };
        let raised =
            |rank| Error::PeerRaised { rank, host: String::new(), kind: String::new(), message: String::new() };
        let errors = [timeout(vec![1, 2]), timeout(vec![1]), raised(3), raised(1), Error::Mismatch(String::new())];
        for (seq, error) in (0..).zip(&errors) {
            lane.end(begin(&lane, seq), Some((error, 1)));
        }
        let shown: Vec<_> = recorder.operations().into_iter().map(|op| op.missing).collect();
        assert_eq!(shown, [vec![2], vec![], vec![3], vec![], vec![]]);
        (0..CAPACITY as u64).for_each(|seq| lane.end(begin(&lane, seq), None));
        assert!(recorder.operations().iter().all(|op| op.missing.is_empty()));
    }

    #[test]
    fn a_long_label_is_cut_between_two_characters_and_leaves_with_its_operation() {
        let recorder = recorder();
        let lane = recorder.lane("world", 0);
        let label = "é".repeat(40) + "x";
        let ticket = lane.begin(None, &says(0), 16, &label);
        lane.end(ticket, None);
        assert_eq!(recorder.operations()[0].label, "é".repeat(32));
        (0..CAPACITY as u64).for_each(|seq| lane.end(begin(&lane, seq), None));
        assert!(recorder.operations().iter().all(|op| op.label.is_empty()));
    }
}
