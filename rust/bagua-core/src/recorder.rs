//! The flight recorder: the last [`CAPACITY`] operations of a process, to find out afterwards which rank did not come to which operation.
//!
//! Recording is always on. An operation costs one uncontended lock and some 100 bytes written when it begins, and one lock and one look
//! at the clock when it ends; a label allocates at its slot's first use only. One lock for all lanes, because lanes have few
//! threads, which hold it for some 10 ns each, and because numbers and slots then are in one order.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::Error;
use crate::sync::Instant;
use crate::types::{DType, Fingerprint, Kind, ReduceOp};
use crate::wait::lock;

/// How many operations are kept.
pub const CAPACITY: usize = 1000;

/// The most bytes of a label that are kept.
const LABEL_LEN: usize = 64;

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It waits for the communication thread.
    Queued,
    /// It was begun.
    Started,
    /// It ended well.
    Done,
    /// It ended with an error, or its group failed before it was begun.
    Failed,
}

impl State {
    /// Lower-case name, as the Python API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            State::Queued => "queued",
            State::Started => "started",
            State::Done => "done",
            State::Failed => "failed",
        }
    }
}

/// What an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A kind, with its reduce operation where it has one.
    Kind(Kind, Option<ReduceOp>),
    /// What a queued job says of itself, until its first operation begins.
    Job(&'static str),
}

impl What {
    /// The kind's name with the reduce operation, for example "all_reduce(sum)".
    pub fn text(self) -> String {
        match self {
            What::Kind(kind, Some(op)) => format!("{}({})", kind.name(), op.name()),
            What::Kind(kind, None) => kind.name().to_owned(),
            What::Job(name) => name.to_owned(),
        }
    }
}

/// What is known of an operation when it is queued.
#[derive(Clone, Copy, Debug)]
pub struct Announced<'a> {
    /// What it is.
    pub what: What,
    /// Element type; `None` for a barrier and where it is not known yet.
    pub dtype: Option<DType>,
    /// Elements, as [`Fingerprint::count`] counts them.
    pub count: usize,
    /// Bytes of the user's tensor.
    pub bytes: usize,
    /// Rank of the group that sends or receives everything, where the kind has one.
    pub root: Option<usize>,
    /// Bucket or other label; may be empty.
    pub label: &'a str,
}

impl Announced<'static> {
    /// A job of which nothing is known but what it calls itself.
    pub const fn job(name: &'static str) -> Announced<'static> {
        Announced { what: What::Job(name), dtype: None, count: 0, bytes: 0, root: None, label: "" }
    }
}

/// One operation, as it is read out.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Its number in this process.
    pub n: u64,
    /// Name of the group.
    pub group: String,
    /// Number of the lane in the group.
    pub channel: u32,
    /// Its number in the lane, as fingerprints have it; `None` until it begins.
    pub seq: Option<u64>,
    /// What it is.
    pub what: What,
    /// Bucket or other label; its first 64 bytes.
    pub label: String,
    /// Element type; `None` for a barrier.
    pub dtype: Option<DType>,
    /// Elements.
    pub count: u64,
    /// Bytes of the user's tensor.
    pub bytes: u64,
    /// Rank of the group that sends or receives everything.
    pub root: Option<u32>,
    /// How far it has come.
    pub state: State,
    /// When it began, since the epoch.
    pub begin: Option<Duration>,
    /// When it ended, since the epoch.
    pub end: Option<Duration>,
    /// World ranks that had not come when it failed.
    pub missing: Vec<usize>,
}

/// A recorded operation, for its next change. The operation may have left the ring by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation that is never ended is shown as hanging"]
pub struct Ticket(u64);

/// The last operations of a process.
pub struct FlightRecorder {
    /// The same moment by the two clocks: one orders, the other is understood by people and other hosts.
    base: (Instant, Duration),
    /// False: operations that begin now are not recorded. For benchmarks.
    on: AtomicBool,
    /// The operations. No code that can panic or wait runs under this lock.
    ring: Mutex<Ring>,
}

/// What the lock protects.
#[derive(Default)]
struct Ring {
    /// Number of the next operation.
    next: u64,
    /// Operation n is at n % CAPACITY.
    entries: Vec<Entry>,
    /// Names of the groups, each once.
    groups: Vec<Arc<str>>,
}

/// An operation in the ring.
struct Entry {
    /// Its number: another one when the slot is in use for a later operation.
    n: u64,
    /// See [`Operation::seq`].
    seq: Option<u64>,
    /// See [`Operation::count`].
    count: u64,
    /// See [`Operation::bytes`].
    bytes: u64,
    /// See [`Operation::begin`].
    begin: Option<Instant>,
    /// See [`Operation::end`].
    end: Option<Instant>,
    /// See [`Operation::label`]; its memory is used again by later operations.
    label: String,
    /// See [`Operation::missing`]; allocated by failures only.
    missing: Vec<usize>,
    /// Index in [`Ring::groups`].
    group: u32,
    /// See [`Operation::channel`].
    channel: u32,
    /// See [`Operation::root`].
    root: Option<u32>,
    /// See [`Operation::what`].
    what: What,
    /// See [`Operation::dtype`].
    dtype: Option<DType>,
    /// See [`Operation::state`].
    state: State,
}

impl Default for FlightRecorder {
    fn default() -> FlightRecorder {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let ring = Ring { entries: Vec::with_capacity(CAPACITY), ..Ring::default() };
        FlightRecorder { base: (Instant::now(), epoch), on: AtomicBool::new(true), ring: Mutex::new(ring) }
    }
}

impl FlightRecorder {
    /// What a lane of this group records with.
    pub fn lane(&'static self, group: &str, channel: u32) -> LaneRecorder {
        let groups = &mut lock(&self.ring).groups;
        let index = groups.iter().position(|name| &**name == group).unwrap_or_else(|| {
            groups.push(group.into());
            groups.len() - 1
        });
        LaneRecorder { recorder: self, group: u32::try_from(index).unwrap_or(u32::MAX), channel }
    }

    /// Whether operations that begin from now on are recorded.
    pub fn set_recording(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    /// The last operations, oldest first.
    pub fn operations(&self) -> Vec<Operation> {
        let ring = lock(&self.ring);
        let oldest = ring.next - ring.entries.len() as u64;
        (oldest..ring.next)
            .map(|n| {
                let Entry {
                    seq,
                    count,
                    bytes,
                    begin,
                    end,
                    label,
                    missing,
                    group,
                    channel,
                    root,
                    what,
                    dtype,
                    state,
                    ..
                } = &ring.entries[slot(n)];
                let since_epoch = |time: &Option<Instant>| {
                    time.as_ref().map(|time| self.base.1 + time.saturating_duration_since(self.base.0))
                };
                Operation {
                    n,
                    group: ring.groups.get(*group as usize).map_or_else(String::new, |name| (**name).to_owned()),
                    channel: *channel,
                    seq: *seq,
                    what: *what,
                    label: label.clone(),
                    dtype: *dtype,
                    count: *count,
                    bytes: *bytes,
                    root: *root,
                    state: *state,
                    begin: since_epoch(begin),
                    end: since_epoch(end),
                    missing: missing.clone(),
                }
            })
            .collect()
    }

    /// Changes an operation, unless a later one has its slot.
    fn change(&self, ticket: Ticket, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = lock(&self.ring).entries.get_mut(slot(ticket.0))
            && entry.n == ticket.0
        {
            change(entry);
        }
    }
}

impl Ring {
    /// A slot for the next operation. What it held is still there, except for label and missing ranks.
    fn push(&mut self) -> &mut Entry {
        let n = self.next;
        self.next += 1;
        if self.entries.len() < CAPACITY {
            self.entries.push(Entry {
                n,
                seq: None,
                count: 0,
                bytes: 0,
                begin: None,
                end: None,
                label: String::new(),
                missing: Vec::new(),
                group: 0,
                channel: 0,
                root: None,
                what: What::Job(""),
                dtype: None,
                state: State::Queued,
            });
        }
        let entry = &mut self.entries[slot(n)];
        entry.n = n;
        if !entry.label.is_empty() {
            entry.label.clear();
        }
        if !entry.missing.is_empty() {
            entry.missing = Vec::new();
        }
        entry
    }
}

impl Entry {
    /// The operation is this one, and begins.
    #[inline]
    fn begin(&mut self, says: &Fingerprint, payload: usize, label: &str, at: Instant) {
        self.seq = Some(says.seq);
        self.what = What::Kind(says.kind, says.op);
        self.dtype = (says.kind != Kind::Barrier).then_some(says.dtype);
        // Of an all_to_all_v a fingerprint has no count, because ranks may differ.
        self.count = if says.kind == Kind::AllToAllV { (payload / says.dtype.size()) as u64 } else { says.count };
        self.bytes = payload as u64;
        self.root = says.root;
        self.begin = Some(at);
        self.end = None;
        self.state = State::Started;
        if !label.is_empty() {
            self.set_label(label);
        }
    }

    fn set_label(&mut self, label: &str) {
        self.label.clear();
        let end = (0..=LABEL_LEN.min(label.len())).rev().find(|at| label.is_char_boundary(*at));
        self.label.push_str(&label[..end.unwrap_or(0)]);
    }
}

/// What one lane records with.
#[derive(Clone, Copy)]
pub struct LaneRecorder {
    /// The process's.
    recorder: &'static FlightRecorder,
    /// Index of the group's name.
    group: u32,
    /// Number of the lane.
    channel: u32,
}

impl LaneRecorder {
    /// An operation waits in a queue from now on. `None` while nothing is recorded.
    pub fn queue(&self, op: &Announced<'_>) -> Option<Ticket> {
        if !self.recorder.on.load(Ordering::Relaxed) {
            return None;
        }
        let mut ring = lock(&self.recorder.ring);
        let entry = ring.push();
        let LaneRecorder { group, channel, .. } = *self;
        entry.seq = None;
        entry.what = op.what;
        entry.dtype = op.dtype;
        entry.count = op.count as u64;
        entry.bytes = op.bytes as u64;
        entry.root = op.root.and_then(|root| u32::try_from(root).ok());
        entry.begin = None;
        entry.end = None;
        entry.state = State::Queued;
        (entry.group, entry.channel) = (group, channel);
        entry.set_label(op.label);
        Some(Ticket(entry.n))
    }

    /// The communication thread takes a queued job; its first operation has the same ticket.
    pub fn start(&self, ticket: Ticket) {
        let now = Instant::now();
        self.recorder.change(ticket, |entry| {
            entry.begin = Some(now);
            entry.state = State::Started;
        });
    }

    /// An operation begins at `at`: the one that was queued, or a new one. `None` while nothing is recorded.
    #[inline]
    pub(crate) fn begin(
        &self,
        queued: Option<Ticket>,
        says: &Fingerprint,
        payload: usize,
        label: &str,
        at: Instant,
    ) -> Option<Ticket> {
        let LaneRecorder { recorder, group, channel } = *self;
        if queued.is_some() {
            queued.iter().for_each(|ticket| {
                recorder.change(*ticket, |entry| {
                    entry.begin(says, payload, label, at);
                    (entry.group, entry.channel) = (group, channel);
                });
            });
            return queued;
        }
        if !recorder.on.load(Ordering::Relaxed) {
            return None;
        }
        let mut ring = lock(&recorder.ring);
        let entry = ring.push();
        entry.begin(says, payload, label, at);
        (entry.group, entry.channel) = (group, channel);
        Some(Ticket(entry.n))
    }

    /// An operation ended well.
    #[inline]
    pub fn done(&self, ticket: Ticket) {
        let now = Instant::now();
        self.recorder.change(ticket, |entry| {
            entry.end = Some(now);
            entry.state = State::Done;
        });
    }

    /// An operation failed. `own` is this process's rank in the world, which is never missing to itself.
    pub fn failed(&self, ticket: Ticket, error: &Error, own: usize) {
        let now = Instant::now();
        let missing = missing(error, own);
        self.recorder.change(ticket, |entry| {
            entry.end = Some(now);
            entry.state = State::Failed;
            entry.missing = missing;
        });
    }

    /// A queued job was dropped: it failed without having begun.
    pub fn dropped(&self, ticket: Ticket) {
        let now = Instant::now();
        self.recorder.change(ticket, |entry| {
            entry.end = Some(now);
            entry.state = State::Failed;
        });
    }
}

/// The world ranks but `own` that had not come, as far as the error says.
fn missing(error: &Error, own: usize) -> Vec<usize> {
    let mut ranks = match error {
        Error::Timeout { missing, .. } => missing.clone(),
        Error::PeerLost { rank, .. } | Error::PeerRaised { rank, .. } => vec![*rank],
        Error::Mismatch(_)
        | Error::Aborted(_)
        | Error::InvalidArgument(_)
        | Error::UnsupportedType(_)
        | Error::NotImplemented(_)
        | Error::System { .. } => Vec::new(),
    };
    ranks.retain(|rank| *rank != own);
    ranks
}

fn slot(n: u64) -> usize {
    (n % CAPACITY as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder() -> &'static FlightRecorder {
        Box::leak(Box::default())
    }

    fn says(seq: u64) -> Fingerprint {
        Fingerprint { seq, op: Some(ReduceOp::Sum), ..Fingerprint::new(Kind::AllReduce, DType::F32, 4) }
    }

    fn begin(lane: &LaneRecorder, seq: u64) -> Ticket {
        lane.begin(None, &says(seq), 16, "", Instant::now()).unwrap()
    }

    #[test]
    fn the_last_thousand_operations_are_kept_with_numbers_that_count_by_one() {
        let recorder = recorder();
        let lanes = [recorder.lane("world", 0), recorder.lane("world", 1), recorder.lane("world/0,1", 0)];
        for n in 0..1200 {
            let lane = &lanes[n as usize % 3];
            lane.done(begin(lane, n / 3));
        }
        let shown = recorder.operations();
        assert_eq!(shown.iter().map(|op| op.n).collect::<Vec<_>>(), (200..1200).collect::<Vec<_>>());
        for op in shown {
            let place = [("world", 0), ("world", 1), ("world/0,1", 0)][op.n as usize % 3];
            assert_eq!(((op.group.as_str(), op.channel), op.seq), (place, Some(op.n / 3)));
            assert_eq!((op.what.text().as_str(), op.count, op.bytes), ("all_reduce(sum)", 4, 16));
            assert!(op.state == State::Done && op.begin.unwrap() <= op.end.unwrap());
        }
    }

    #[test]
    fn a_queued_operation_keeps_its_number_when_it_begins_on_another_lane() {
        let recorder = recorder();
        let lane = recorder.lane("world", 0);
        let op = Announced { label: "b0", dtype: Some(DType::F32), ..Announced::job("centralized") };
        let queued = lane.queue(&op).unwrap();
        lane.done(begin(&lane, 0));
        let shown = &recorder.operations()[0];
        assert_eq!((shown.n, shown.what.text().as_str(), shown.state), (0, "centralized", State::Queued));
        assert_eq!((shown.seq, shown.begin, shown.label.as_str()), (None, None, "b0"));
        lane.start(queued);
        let other = recorder.lane("world, host 0", 1);
        let ticket = other.begin(Some(queued), &says(7), 16, "b0", Instant::now()).unwrap();
        other.done(ticket);
        let shown = &recorder.operations()[0];
        assert_eq!((shown.n, shown.seq, shown.channel, shown.state), (0, Some(7), 1, State::Done));
        assert_eq!((shown.group.as_str(), recorder.operations().len()), ("world, host 0", 2));
    }

    #[test]
    fn an_operation_that_left_the_ring_changes_nothing_when_it_ends() {
        let recorder = recorder();
        let lane = recorder.lane("world", 0);
        let long = begin(&lane, 0);
        for seq in 1..=CAPACITY as u64 {
            lane.done(begin(&lane, seq));
        }
        let before = recorder.operations();
        lane.failed(long, &Error::Mismatch(String::new()), 0);
        assert_eq!(recorder.operations(), before);
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
            lane.failed(begin(&lane, seq), error, 1);
        }
        let shown: Vec<_> = recorder.operations().into_iter().map(|op| op.missing).collect();
        assert_eq!(shown, [vec![2], vec![], vec![3], vec![], vec![]]);
        (0..CAPACITY as u64).for_each(|seq| lane.done(begin(&lane, seq)));
        assert!(recorder.operations().iter().all(|op| op.missing.is_empty()));
    }

    #[test]
    fn a_long_label_is_cut_between_two_characters_and_leaves_with_its_operation() {
        let recorder = recorder();
        let lane = recorder.lane("world", 0);
        let label = "é".repeat(40) + "x";
        let ticket = lane.begin(None, &says(0), 16, &label, Instant::now()).unwrap();
        lane.done(ticket);
        assert_eq!(recorder.operations()[0].label, "é".repeat(32));
        (0..CAPACITY as u64).for_each(|seq| lane.done(begin(&lane, seq)));
        assert!(recorder.operations().iter().all(|op| op.label.is_empty()));
    }

    #[test]
    fn nothing_is_recorded_while_recording_is_off() {
        let recorder = recorder();
        let lane = recorder.lane("world", 0);
        recorder.set_recording(false);
        assert_eq!(lane.queue(&Announced::job("callback")), None);
        assert_eq!(lane.begin(None, &says(0), 16, "", Instant::now()), None);
        assert_eq!(recorder.operations(), []);
        recorder.set_recording(true);
        lane.done(begin(&lane, 1));
        assert_eq!(recorder.operations().len(), 1);
    }
}
