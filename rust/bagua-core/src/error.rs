//! What can go wrong, as a caller would tell it apart.

use std::time::Duration;

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// How far an operation had come when it failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// What was being done: the text of its fingerprint, or what is known of it.
    pub what: String,
    /// Bucket or other label, empty when there is none.
    pub label: String,
    /// Bytes received and used so far.
    pub done: u64,
    /// Bytes that the operation needs in all.
    pub total: u64,
}

/// An error of the core. Ranks are ranks of the world (the group that was built by `connect`), so that a text
/// means the same to a reader of any sub-group's log.
///
/// It is `Clone` because one cause reaches many waiters, on this rank and, by the control connections, on all others.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A peer died, froze, left, or was cut off.
    #[error("lost rank {rank} on {host}: {reason} (noticed by rank {noticed_by}{})", during(.progress))]
    PeerLost {
        /// World rank that is gone.
        rank: usize,
        /// Name of its host.
        host: String,
        /// How that was noticed, e.g. "no heartbeat for 5.0 s".
        reason: String,
        /// World rank that noticed first.
        noticed_by: usize,
        /// What the rank that raises this was doing, when it was doing something.
        progress: Option<Box<Progress>>,
    },
    /// An operation's own deadline passed.
    #[error("timed out after {:.1} s waiting for {} (noticed by rank {noticed_by}{})", .after.as_secs_f64(), ranks(.missing), during(.progress))]
    Timeout {
        /// The deadline that was set.
        after: Duration,
        /// World ranks that had not done their part.
        missing: Vec<usize>,
        /// World rank whose deadline passed.
        noticed_by: usize,
        /// What it was doing.
        progress: Option<Box<Progress>>,
    },
    /// Another rank reported an exception.
    #[error("rank {rank} on {host} raised {kind}: {message}")]
    PeerRaised {
        /// World rank that raised.
        rank: usize,
        /// Name of its host.
        host: String,
        /// Class of the exception, e.g. "ValueError".
        kind: String,
        /// Its text.
        message: String,
    },
    /// Ranks disagree on what to do, in which order, on which data.
    #[error("ranks disagree: {0}")]
    Mismatch(String),
    /// The user or the engine gave up on the group.
    #[error("aborted: {0}")]
    Aborted(String),
    /// An argument's value cannot be used. Raised before any communication.
    #[error("{0}")]
    InvalidArgument(String),
    /// An argument's type cannot be used. Raised before any communication.
    #[error("{0}")]
    UnsupportedType(String),
    /// A feature that does not exist yet. Raised before any communication.
    #[error("not implemented: {0}")]
    NotImplemented(String),
    /// The group could not be built, or the system refused something.
    #[error("{0}")]
    System(String),
}

impl Error {
    /// Adds what this rank was doing, where the error has room for it and nobody filled it in.
    #[must_use]
    pub fn during(mut self, now: Progress) -> Error {
        if let Error::PeerLost { progress, .. } | Error::Timeout { progress, .. } = &mut self {
            progress.get_or_insert_with(|| Box::new(now));
        }
        self
    }

    /// An error of the system, with what was being tried.
    pub fn system(what: &str, source: impl std::fmt::Display) -> Error {
        Error::System(format!("{what}: {source}"))
    }

    /// True for errors that were found before anything was sent, and so do not poison a group.
    pub fn is_argument(&self) -> bool {
        matches!(self, Error::InvalidArgument(_) | Error::UnsupportedType(_) | Error::NotImplemented(_))
    }
}

fn during(progress: &Option<Box<Progress>>) -> String {
    match progress.as_deref() {
        None => String::new(),
        Some(Progress { what, label, done, total }) => {
            let label = if label.is_empty() { String::new() } else { format!(" in {label}") };
            // What moves no bytes, a barrier or a rendezvous, has none to count.
            let bytes = if *total == 0 { String::new() } else { format!(", {done} of {total} bytes done") };
            format!(", during {what}{label}{bytes}")
        }
    }
}

fn ranks(missing: &[usize]) -> String {
    match missing {
        [] => "the communication thread".to_owned(),
        [one] => format!("rank {one}"),
        many => format!("ranks {}", many.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}
