//! What accompanies an operation through the rooms, and the messages that it is made of.
//!
//! It stands here and not in `collective`, which shows it again, because the mesh below needs it to end its waits.

use crate::error::{Error, Progress, Result};
use crate::health::GroupHealth;
use crate::stats::OpStats;
use crate::types::{DType, Fingerprint};
use crate::wait::Deadline;

/// What accompanies one operation.
#[derive(Clone, Copy)]
pub struct OpContext<'a> {
    /// What the operation says of itself to the others. Headers carry it as it is; the methods' own arguments say what to do
    /// (a stage of `hier` runs a reduce under the fingerprint of the all_reduce that it is part of).
    pub fingerprint: Fingerprint,
    /// When it must be done.
    pub deadline: Deadline,
    /// What ends its waits.
    pub health: &'a GroupHealth,
    /// Where it counts.
    pub stats: &'a OpStats,
    /// Bucket or other label for error texts; may be empty.
    pub label: &'a str,
}

impl OpContext<'_> {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.fingerprint.dtype
    }

    /// Looks at the health and the deadline: the error to return, if the wait must end. `missing` are the group ranks that the
    /// caller still waits for; one of them having left the group is an error too. Call it after looking once more for what is
    /// waited for, so that a peer that did its part and left is not blamed.
    pub fn check(&self, missing: &[usize], done: u64, total: u64) -> Result<()> {
        self.health.check().map_err(|e| e.during(self.progress(done, total)))?;
        if let Some(gone) = missing.iter().find(|rank| self.health.has_departed(**rank)) {
            return Err(self
                .health
                .attribute_disconnect(*gone, "it left the group")
                .during(self.progress(done, total)));
        }
        if self.deadline.passed() {
            return Err(self.health.timed_out(self.deadline.limit(), missing, self.progress(done, total)));
        }
        Ok(())
    }

    /// How far this operation has come.
    pub fn progress(&self, done: u64, total: u64) -> Progress {
        Progress { what: self.fingerprint.to_string(), label: self.label.to_owned(), done, total }
    }

    /// The error for a peer (a group rank) that does something else.
    pub fn mismatch(&self, peer: usize, theirs: &dyn std::fmt::Display) -> Error {
        let label = if self.label.is_empty() { String::new() } else { format!(" in {}", self.label) };
        Error::Mismatch(format!(
            "rank {} does {}{label}, rank {} does {theirs}",
            self.health.world_rank(self.health.rank()),
            self.fingerprint,
            self.health.world_rank(peer),
        ))
    }
}

/// A message of a grouped exchange to a group rank.
#[derive(Clone, Copy)]
pub struct Outgoing<'a> {
    /// Group rank of the receiver; never this rank.
    pub peer: usize,
    /// What the message says of itself.
    pub fingerprint: Fingerprint,
    /// The bytes.
    pub data: &'a [u8],
}

/// A message of a grouped exchange from a group rank.
pub struct Incoming<'a> {
    /// Group rank of the sender; never this rank.
    pub peer: usize,
    /// What the message must say of itself.
    pub fingerprint: Fingerprint,
    /// Where the bytes go; the message must have exactly this length.
    pub data: &'a mut [u8],
}
