//! The recorder of one lane, and the ring that holds the lane's last operations. One thread at a time writes, because a
//! lane runs one operation at a time. Any thread may read.
//!
//! The ring is a sequence lock, so the writer needs no read-modify-write instruction. It sets the version of a slot to
//! [`WRITING`], writes the words, and then sets the version of the new content. A reader that finds the same version
//! before and after reading the words has read consistent content. Source: Boehm, "Can Seqlocks Get Along With
//! Programming Language Memory Models?", MSPC 2012.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};
use std::sync::{Arc, Mutex, OnceLock};

use super::operation::{Announced, CAPACITY, Operation, OperationState};
use super::{FlightRecorder, Job, RecordedLane};
use crate::error::Error;
use crate::types::{DType, Fingerprint, Kind, ReduceOp};
use crate::wait::lock;

/// Slots that are allocated together, so that a lane with few operations needs little memory.
const CHUNK: usize = 64;

/// Chunks of a ring. Enough for [`CAPACITY`] operations.
const CHUNKS: usize = CAPACITY.div_ceil(CHUNK);

const SLOTS: u64 = (CHUNK * CHUNKS) as u64;

/// Version of a slot that is being written or was never used.
const WRITING: u64 = 0;

/// Value of a slot's `end` while the operation runs.
const NONE: u64 = u64::MAX;

/// Maximum number of bytes kept of a label.
const LABEL_LEN: usize = 64;

/// A handle to a queued operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation that is never ended is shown as hanging"]
pub struct Ticket(u64);

/// A handle to an operation that has begun, needed to end it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation that is never ended is shown as hanging"]
pub struct Running {
    n: u64,
    /// Position in the ring of the lane.
    place: u64,
}

/// The writing side of the flight recorder for one lane, which runs one operation at a time.
#[derive(Clone)]
pub struct LaneRecorder {
    pub(super) recorder: &'static FlightRecorder,
    pub(super) lane: Arc<RecordedLane>,
}

impl LaneRecorder {
    /// Records that an operation was queued.
    pub fn queue(&self, op: &Announced<'_>) -> Ticket {
        let LaneRecorder { recorder, lane } = self;
        let mut queues = lock(&recorder.queues);
        let n = recorder.next.fetch_add(1, Relaxed);
        let op = Operation {
            n,
            group: Arc::clone(&lane.group),
            channel: lane.channel,
            seq: None,
            what: op.what,
            label: cut(op.label).to_owned(),
            dtype: op.dtype,
            count: op.count as u64,
            bytes: op.bytes as u64,
            root: op.root.and_then(|root| u32::try_from(root).ok()),
            state: OperationState::Queued,
            begin: None,
            end: None,
            missing: Vec::new(),
        };
        queues.waiting.insert(n, Job { op, begin: None, end: None });
        Ticket(n)
    }

    /// Records that the communication thread took a queued job. Its first operation then begins with the same ticket.
    pub fn start(&self, ticket: Ticket) {
        let now = self.recorder.clock.now();
        if let Some(job) = lock(&self.recorder.queues).waiting.get_mut(&ticket.0) {
            job.begin = Some(now);
            job.op.state = OperationState::Started;
        }
    }

    /// Records that a job ended without an operation of its own, or was dropped before it began. `failure` is the error
    /// and this process's world rank.
    pub fn finish(&self, ticket: Ticket, failure: Option<(&Error, usize)>) {
        let now = self.recorder.clock.now();
        let mut queues = lock(&self.recorder.queues);
        let Some(mut job) = queues.waiting.remove(&ticket.0) else { return };
        job.end = Some(now);
        job.op.state = if failure.is_none() { OperationState::Done } else { OperationState::Failed };
        if let Some((error, own)) = failure
            && job.begin.is_some()
        {
            job.op.missing = missing(error, own);
        }
        if queues.ended.len() == CAPACITY {
            queues.ended.pop_front();
        }
        queues.ended.push_back(job);
    }

    /// Records that an operation begins: the queued one, or a new one.
    #[inline]
    pub fn begin(&self, queued: Option<Ticket>, says: &Fingerprint, payload: usize, label: &str) -> Running {
        let LaneRecorder { recorder, lane } = self;
        let n = queued.map_or_else(|| recorder.next.fetch_add(1, Relaxed), |ticket| ticket.0);
        // The fingerprint of an all_to_all_v has no count, because ranks may differ.
        let count = if says.kind == Kind::AllToAllV { (payload / says.dtype.size()) as u64 } else { says.count };
        let place = lane.ring.begin(n, says, count, payload as u64, recorder.clock.now());
        if !label.is_empty() {
            lane.ring.label(n, cut(label));
        }
        if queued.is_some() {
            lock(&recorder.queues).waiting.remove(&n);
        }
        Running { n, place }
    }

    /// Records that an operation ended. `failure` is the error and this process's world rank, which is never missing.
    #[inline]
    pub fn end(&self, Running { n, place }: Running, failure: Option<(&Error, usize)>) {
        let LaneRecorder { recorder, lane } = self;
        if let Some((error, own)) = failure {
            let missing = missing(error, own);
            if !missing.is_empty() {
                lane.ring.missing(n, missing);
            }
        }
        lane.ring.end(n, place, recorder.clock.now(), failure.is_some());
    }
}

fn cut(label: &str) -> &str {
    let end = (0..=LABEL_LEN.min(label.len())).rev().find(|at| label.is_char_boundary(*at));
    &label[..end.unwrap_or(0)]
}

/// Returns the world ranks that the error says had not joined, except `own`.
fn missing(error: &Error, own: usize) -> Vec<usize> {
    let mut ranks = match error {
        Error::Timeout { missing, .. } => missing.clone(),
        Error::PeerLost { rank, .. } | Error::PeerRaised { rank, .. } => vec![*rank],
        Error::Mismatch(_)
        | Error::Aborted(_)
        | Error::InvalidArgument(_)
        | Error::UnsupportedType(_)
        | Error::NotImplemented(_)
        | Error::Unavailable(_)
        | Error::Device(_)
        | Error::System { .. } => Vec::new(),
    };
    ranks.retain(|rank| *rank != own);
    ranks
}

/// The last operations of one lane, in the order in which they began. Their numbers may be in a different order,
/// because a queued operation gets its number when it is queued.
pub(super) struct Ring {
    /// Number of operations written so far. Only the writer changes it.
    written: AtomicU64,
    chunks: [OnceLock<Box<[Slot; CHUNK]>>; CHUNKS],
    /// Labels and missing ranks, which few operations have, in the order in which they were written.
    notes: Mutex<Vec<Note>>,
}

/// One operation, in one cache line.
#[repr(align(64))]
struct Slot {
    /// [`WRITING`], or 2n + 2 if operation n has begun, or 2n + 3 if it has ended.
    version: AtomicU64,
    seq: AtomicU64,
    count: AtomicU64,
    bytes: AtomicU64,
    begin: AtomicU64,
    /// End in ticks, or [`NONE`].
    end: AtomicU64,
    /// From the lowest byte: kind, reduce operation (255 for none), element type, 1 if the operation failed. Upper
    /// half: root + 1.
    codes: AtomicU64,
}

impl Slot {
    fn new() -> Slot {
        let word = || AtomicU64::new(0);
        Slot {
            version: AtomicU64::new(WRITING),
            seq: word(),
            count: word(),
            bytes: word(),
            begin: word(),
            end: word(),
            codes: word(),
        }
    }
}

/// The variable-length data of an operation.
struct Note {
    n: u64,
    label: String,
    missing: Vec<usize>,
}

/// An operation read from the ring. Times are in ticks.
pub(super) struct Begun {
    /// Number of the operation in the process.
    pub n: u64,
    /// Number of the operation in the lane.
    pub seq: u64,
    pub count: u64,
    pub bytes: u64,
    pub begin: u64,
    pub end: Option<u64>,
    pub kind: Kind,
    pub op: Option<ReduceOp>,
    pub dtype: DType,
    pub root: Option<u32>,
    pub state: OperationState,
    pub label: String,
    pub missing: Vec<usize>,
}

impl Ring {
    pub fn new() -> Ring {
        Ring { written: AtomicU64::new(0), chunks: [const { OnceLock::new() }; CHUNKS], notes: Mutex::default() }
    }

    fn slot(&self, place: u64) -> &Slot {
        let index = (place % SLOTS) as usize;
        let chunk = &self.chunks[index / CHUNK];
        &chunk.get_or_init(|| Box::new(std::array::from_fn(|_| Slot::new())))[index % CHUNK]
    }

    /// Writes operation `n`, which begins now, and returns its position.
    #[inline]
    pub fn begin(&self, n: u64, says: &Fingerprint, count: u64, bytes: u64, at: u64) -> u64 {
        let place = self.written.load(Relaxed);
        self.written.store(place + 1, Relaxed);
        let slot = self.slot(place);
        slot.version.store(WRITING, Relaxed);
        fence(Release);
        let op = says.op.map_or(0xff, |op| op as u64);
        let root = says.root.map_or(0, |root| u64::from(root) + 1);
        slot.seq.store(says.seq, Relaxed);
        slot.count.store(count, Relaxed);
        slot.bytes.store(bytes, Relaxed);
        slot.begin.store(at, Relaxed);
        slot.end.store(NONE, Relaxed);
        slot.codes.store(says.kind as u64 | op << 8 | (says.dtype as u64) << 16 | root << 32, Relaxed);
        slot.version.store(2 * n + 2, Release);
        place
    }

    #[inline]
    pub fn end(&self, n: u64, place: u64, at: u64, failed: bool) {
        let slot = self.slot(place);
        slot.version.store(WRITING, Relaxed);
        fence(Release);
        slot.end.store(at, Relaxed);
        if failed {
            slot.codes.store(slot.codes.load(Relaxed) | 1 << 24, Relaxed);
        }
        slot.version.store(2 * n + 3, Release);
    }

    pub fn label(&self, n: u64, label: &str) {
        push(&mut lock(&self.notes), Note { n, label: label.to_owned(), missing: Vec::new() });
    }

    /// Stores the ranks that had not joined operation `n`.
    pub fn missing(&self, n: u64, missing: Vec<usize>) {
        let mut notes = lock(&self.notes);
        match notes.iter_mut().rev().find(|note| note.n == n) {
            Some(note) => note.missing = missing,
            None => push(&mut notes, Note { n, label: String::new(), missing }),
        }
    }

    /// Appends the operations numbered `oldest` or above, and older ones that still run, to `found` in any order.
    pub fn read(&self, oldest: u64, found: &mut Vec<Begun>) {
        let start = found.len();
        for chunk in self.chunks.iter().filter_map(OnceLock::get) {
            for slot in &**chunk {
                found.extend(slot.read().filter(|op| op.n >= oldest || op.state == OperationState::Started));
            }
        }
        for note in lock(&self.notes).iter() {
            if let Some(op) = found[start..].iter_mut().find(|op| op.n == note.n) {
                op.label.clone_from(&note.label);
                op.missing.clone_from(&note.missing);
            }
        }
    }

    /// True if the ring contains an operation numbered `oldest` or above.
    pub fn reaches(&self, oldest: u64) -> bool {
        let last = self.written.load(Relaxed);
        last > 0 && self.slot(last - 1).read().is_some_and(|op| op.n >= oldest)
    }
}

/// Adds a note. A full list drops its older half at once, so that moving the rest costs little per note.
fn push(notes: &mut Vec<Note>, note: Note) {
    if notes.len() >= 2 * CAPACITY {
        notes.drain(..CAPACITY);
    }
    notes.push(note);
}

impl Slot {
    /// Returns the content, or `None` if the slot was never used or is being written.
    fn read(&self) -> Option<Begun> {
        (0..100).find_map(|_| {
            let version = self.version.load(Acquire);
            if version == WRITING {
                return None;
            }
            let words = [&self.seq, &self.count, &self.bytes, &self.begin, &self.end, &self.codes];
            let [seq, count, bytes, begin, end, codes] = words.map(|word| word.load(Relaxed));
            fence(Acquire);
            if self.version.load(Relaxed) != version {
                return None;
            }
            let byte = |at: u32| (codes >> (8 * at)) as u8;
            let state = match (version & 1, byte(3)) {
                (0, _) => OperationState::Started,
                (_, 0) => OperationState::Done,
                _ => OperationState::Failed,
            };
            Some(Begun {
                n: version / 2 - 1,
                seq,
                count,
                bytes,
                begin,
                end: (end != NONE).then_some(end),
                kind: Kind::from_code(byte(0))?,
                op: ReduceOp::from_code(byte(1)),
                dtype: DType::from_code(byte(2))?,
                root: (codes >> 32).checked_sub(1).and_then(|root| u32::try_from(root).ok()),
                state,
                label: String::new(),
                missing: Vec::new(),
            })
        })
    }
}
