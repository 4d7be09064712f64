//! An operation, as it is announced and as it is read out.

use std::sync::Arc;
use std::time::Duration;

use crate::types::{DType, Kind, ReduceOp};

/// How many operations are kept.
pub const CAPACITY: usize = 1000;

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationState {
    /// It waits for the communication thread.
    Queued,
    /// It was begun.
    Started,
    /// It ended well.
    Done,
    /// It ended with an error, or its group failed before it was begun.
    Failed,
}

impl OperationState {
    /// Lower-case name, as the Python API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            OperationState::Queued => "queued",
            OperationState::Started => "started",
            OperationState::Done => "done",
            OperationState::Failed => "failed",
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
    /// Elements, as [`Fingerprint::count`](crate::types::Fingerprint::count) counts them.
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
    pub group: Arc<str>,
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
    pub state: OperationState,
    /// When it began, since the epoch.
    pub begin: Option<Duration>,
    /// When it ended, since the epoch.
    pub end: Option<Duration>,
    /// World ranks that had not come when it failed.
    pub missing: Vec<usize>,
}
