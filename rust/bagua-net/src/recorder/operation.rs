//! An operation as it is announced to the flight recorder, and as it is read back.

use std::sync::Arc;
use std::time::Duration;

use crate::types::{DType, Kind, ReduceOp};

/// Number of operations that the recorder keeps.
pub const CAPACITY: usize = 1000;

/// The progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationState {
    /// The operation waits for the communication thread.
    Queued,
    /// The operation has begun.
    Started,
    /// The operation ended without an error.
    Done,
    /// The operation ended with an error, or its group failed before it began.
    Failed,
}

impl OperationState {
    /// Returns the lower-case name that the Python API uses.
    pub const fn name(self) -> &'static str {
        match self {
            OperationState::Queued => "queued",
            OperationState::Started => "started",
            OperationState::Done => "done",
            OperationState::Failed => "failed",
        }
    }
}

/// The name of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A kind, and its reduce operation if it has one.
    Kind(Kind, Option<ReduceOp>),
    /// The name of a queued job, until its first operation begins.
    Job(&'static str),
}

impl What {
    /// Returns the kind's name with the reduce operation, for example "all_reduce(sum)".
    pub fn text(self) -> String {
        match self {
            What::Kind(kind, Some(op)) => format!("{}({})", kind.name(), op.name()),
            What::Kind(kind, None) => kind.name().to_owned(),
            What::Job(name) => name.to_owned(),
        }
    }
}

/// The facts known about an operation when it is queued.
#[derive(Clone, Copy, Debug)]
pub struct Announced<'a> {
    /// Kind of operation, or name of the job.
    pub what: What,
    /// Element type. `None` for a barrier, or if it is not known yet.
    pub dtype: Option<DType>,
    /// Number of elements, counted as in [`Fingerprint::count`](crate::types::Fingerprint::count).
    pub count: usize,
    /// Bytes of the user's tensor.
    pub bytes: usize,
    /// Group rank of the root, if the kind has one.
    pub root: Option<usize>,
    /// Bucket or other label; may be empty.
    pub label: &'a str,
}

impl Announced<'static> {
    /// Announces a job that has only a name: no element type, no size, no root.
    pub const fn job(name: &'static str) -> Announced<'static> {
        Announced { what: What::Job(name), dtype: None, count: 0, bytes: 0, root: None, label: "" }
    }
}

/// One operation, as it is read back.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Number of the operation in this process.
    pub n: u64,
    /// Name of the group.
    pub group: Arc<str>,
    /// Number of the lane within the group.
    pub channel: u32,
    /// Number of the operation within the lane, as in fingerprints. `None` until it begins.
    pub seq: Option<u64>,
    /// Kind of operation, or name of the job.
    pub what: What,
    /// First 64 bytes of the bucket's name or another label.
    pub label: String,
    /// Element type; `None` for a barrier.
    pub dtype: Option<DType>,
    /// Number of elements.
    pub count: u64,
    /// Bytes of the user's tensor.
    pub bytes: u64,
    /// Group rank of the root, if the kind has one.
    pub root: Option<u32>,
    /// Progress when the record was read.
    pub state: OperationState,
    /// Time of the begin since the epoch.
    pub begin: Option<Duration>,
    /// Time of the end since the epoch.
    pub end: Option<Duration>,
    /// World ranks that had not joined the operation when it failed.
    pub missing: Vec<usize>,
}
