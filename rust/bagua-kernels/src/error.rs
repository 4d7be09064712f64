//! The errors of the core, one variant for each way in which a caller may react.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The progress of an operation at the time of its failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The operation: the text of its fingerprint, or a description if it has no fingerprint.
    pub what: String,
    /// Name of the bucket or another label; empty without one.
    pub label: String,
    /// Bytes received and used so far.
    pub done: u64,
    /// Total number of bytes that the operation needs.
    pub total: u64,
}

/// An exception of the user's code on this rank, as the source of an [`Error::System`]. The other ranks get
/// [`Error::PeerRaised`].
#[derive(Debug)]
pub struct Exception {
    /// Class of the exception, e.g. "ValueError".
    pub kind: String,
    /// Text that the other ranks get about the exception.
    pub message: String,
    /// The exception itself, for the language binding that created this value.
    pub original: Box<dyn Any + Send + Sync>,
}

impl fmt::Display for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Exception {}

/// The cause of an [`Error`], if there is one: an error of the operating system, or the user's [`Exception`]. Sources
/// are not sent, so an error that another rank reported has none. Two sources always compare equal, because the text of
/// the error contains their text.
#[derive(Clone, Debug, Default)]
pub struct Source(Option<Arc<io::Error>>);

impl Source {
    /// Returns the operating system's error, or `None` if the error has another cause.
    pub fn get(&self) -> Option<&io::Error> {
        self.0.as_deref()
    }
}

impl From<io::Error> for Source {
    fn from(error: io::Error) -> Source {
        Source(Some(Arc::new(error)))
    }
}

impl PartialEq for Source {
    fn eq(&self, _: &Source) -> bool {
        true
    }
}

impl Eq for Source {}

/// A failed call of a device's driver, or of a library that uses the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFailure {
    /// Message that says what failed, and why.
    pub message: String,
    /// Name of the function, for example "cuMemAlloc". Empty if no function of the library failed.
    pub api: String,
    /// Code that the function returned.
    pub code: i32,
    /// Name of the code.
    pub name: String,
    /// Number of the device in this process.
    pub device: i32,
    /// True if nothing of the operation had begun, so that the same call may succeed later. The group stays usable.
    pub harmless: bool,
}

/// An error of the core. Its ranks are world ranks (ranks of the group that `connect` built), so that an error text
/// means the same in the logs of all sub-groups.
///
/// Errors can be cloned, because one cause ends many waits: those on this rank, and through the control connections
/// those on all other ranks.
#[derive(Clone, Debug, PartialEq)]
pub enum Error {
    /// A peer's process died or froze, the peer left the group, or the network to it failed.
    PeerLost {
        /// World rank of the lost peer.
        rank: usize,
        /// Name of its host.
        host: String,
        /// Evidence of the loss, for example "no heartbeat for 5.0 s".
        reason: String,
        /// World rank that detected the loss first.
        noticed_by: usize,
        /// The operation that ended with this error on this rank, if one did.
        progress: Option<Box<Progress>>,
        /// The operating system's error on the connection to the peer.
        source: Source,
    },
    /// An operation's own deadline passed.
    Timeout {
        /// The time limit of the operation.
        after: Duration,
        /// World ranks that had not done their part.
        missing: Vec<usize>,
        /// World rank whose deadline passed.
        noticed_by: usize,
        /// The operation that timed out.
        progress: Option<Box<Progress>>,
    },
    /// Another rank reported an exception.
    PeerRaised {
        /// World rank that raised the exception.
        rank: usize,
        /// Name of its host.
        host: String,
        /// Class of the exception, e.g. "ValueError".
        kind: String,
        /// Text of the exception.
        message: String,
    },
    /// Ranks disagree on an operation, on its data, or on the order of operations.
    Mismatch(String),
    /// The user or the engine aborted the group.
    Aborted(String),
    /// An argument has a value that cannot be used. Raised before any communication.
    InvalidArgument(String),
    /// An argument has a type that cannot be used. Raised before any communication.
    UnsupportedType(String),
    /// The requested feature does not exist yet. Raised before any communication.
    NotImplemented(String),
    /// All ranks found out together that they cannot serve the request. No rank has sent anything for the operation,
    /// and the group stays usable.
    Unavailable(String),
    /// A call of a device's driver, or of a library over it, failed.
    Device(Box<DeviceFailure>),
    /// The group could not be built or used, or a system call failed.
    System {
        /// Message that says what failed, and why.
        message: String,
        /// The error of the system call, or the user's exception.
        source: Source,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::PeerLost { rank, host, reason, noticed_by, progress, .. } => {
                write!(f, "lost rank {rank} on {host}: {reason} (noticed by rank {noticed_by}{})", during(progress))
            }
            Error::Timeout { after, missing, noticed_by, progress } => {
                let (after, missing, during) = (after.as_secs_f64(), ranks(missing), during(progress));
                write!(f, "timed out after {after:.1} s waiting for {missing} (noticed by rank {noticed_by}{during})")
            }
            Error::PeerRaised { rank, host, kind, message } => {
                write!(f, "rank {rank} on {host} raised {kind}: {message}")
            }
            Error::Mismatch(text) => write!(f, "ranks disagree: {text}"),
            Error::Aborted(text) => write!(f, "aborted: {text}"),
            Error::NotImplemented(text) => write!(f, "not implemented: {text}"),
            Error::InvalidArgument(text)
            | Error::UnsupportedType(text)
            | Error::Unavailable(text)
            | Error::System { message: text, .. } => f.write_str(text),
            Error::Device(failure) => f.write_str(&failure.message),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.os_error().map(|error| error as _)
    }
}

impl Error {
    /// Adds the progress of this rank's operation, if the variant has that field and it is empty.
    #[must_use]
    pub fn during(mut self, now: Progress) -> Error {
        if let Error::PeerLost { progress, .. } | Error::Timeout { progress, .. } = &mut self {
            progress.get_or_insert_with(|| Box::new(now));
        }
        self
    }

    /// Returns a `System` error for a failed system call. `what` says what the call was for.
    pub fn system(what: &str, source: impl Into<io::Error>) -> Error {
        let source = source.into();
        Error::System { message: format!("{what}: {source}"), source: source.into() }
    }

    /// Returns a `System` error without an error of a system call.
    pub fn other(message: impl Into<String>) -> Error {
        Error::System { message: message.into(), source: Source::default() }
    }

    /// Returns a `System` error caused by an exception of the user's code.
    pub fn raised(message: impl Into<String>, exception: Exception) -> Error {
        Error::System { message: message.into(), source: io::Error::other(exception).into() }
    }

    /// Returns the exception of the user's code on this rank that led to this error, or `None`.
    pub fn exception(&self) -> Option<&Exception> {
        self.os_error()?.get_ref()?.downcast_ref()
    }

    /// Adds the operating system's error, if the variant has that field and it is empty.
    #[must_use]
    pub fn caused_by(mut self, cause: &Source) -> Error {
        if let Error::PeerLost { source, .. } | Error::System { source, .. } = &mut self
            && source.0.is_none()
        {
            source.clone_from(cause);
        }
        self
    }

    /// Returns the operating system's error that led to this error, or `None`.
    pub fn os_error(&self) -> Option<&io::Error> {
        match self {
            Error::PeerLost { source, .. } | Error::System { source, .. } => source.get(),
            Error::Timeout { .. }
            | Error::PeerRaised { .. }
            | Error::Mismatch(_)
            | Error::Aborted(_)
            | Error::InvalidArgument(_)
            | Error::UnsupportedType(_)
            | Error::NotImplemented(_)
            | Error::Unavailable(_)
            | Error::Device(_) => None,
        }
    }

    /// True for errors that are raised before any communication and therefore do not poison the group.
    pub fn is_argument(&self) -> bool {
        match self {
            Error::InvalidArgument(_)
            | Error::UnsupportedType(_)
            | Error::NotImplemented(_)
            | Error::Unavailable(_) => true,
            Error::Device(failure) => failure.harmless,
            Error::PeerLost { .. }
            | Error::Timeout { .. }
            | Error::PeerRaised { .. }
            | Error::Mismatch(_)
            | Error::Aborted(_)
            | Error::System { .. } => false,
        }
    }
}

fn during(progress: &Option<Box<Progress>>) -> String {
    match progress.as_deref() {
        None => String::new(),
        Some(Progress { what, label, done, total }) => {
            let label = in_bucket(label);
            // A barrier or a rendezvous moves no bytes of tensors.
            let bytes = if *total == 0 { String::new() } else { format!(", {done} of {total} bytes done") };
            format!(", during {what}{label}{bytes}")
        }
    }
}

/// Returns the part of an error's text that names the operation's label: " in NAME", or " in bucket 3" if the name is a
/// number, which buckets without a name of their own have. Empty without a label.
pub fn in_bucket(label: &str) -> String {
    match label {
        "" => String::new(),
        number if number.bytes().all(|byte| byte.is_ascii_digit()) => format!(" in bucket {number}"),
        name => format!(" in {name}"),
    }
}

fn ranks(missing: &[usize]) -> String {
    match missing {
        [] => "the communication thread or the device".to_owned(),
        [one] => format!("rank {one}"),
        many => format!("ranks {}", many.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    fn refused() -> io::Error {
        io::Error::from_raw_os_error(libc::ECONNREFUSED)
    }

    fn errno(error: &Error) -> Option<i32> {
        error.source()?.downcast_ref::<io::Error>()?.raw_os_error()
    }

    #[test]
    fn a_system_error_keeps_its_source_in_every_clone() {
        let error = Error::system("connecting", refused());
        assert_eq!(error.to_string(), format!("connecting: {}", refused()));
        assert_eq!(errno(&error.clone()), Some(libc::ECONNREFUSED));
        assert_eq!(errno(&Error::system("connecting", rustix::io::Errno::CONNREFUSED)), Some(libc::ECONNREFUSED));
        assert_eq!(errno(&Error::other("no such rank")), None);
    }

    #[test]
    fn errors_compare_by_their_text_and_not_by_their_sources() {
        let error = Error::system("connecting", refused());
        assert_eq!(error, Error::other(error.to_string()));
        assert_ne!(error, Error::other("connecting"));
    }

    #[test]
    fn an_operation_is_in_the_bucket_of_that_number_or_name() {
        let text = |label: &str| {
            let during = Progress { what: "all_reduce".to_owned(), label: label.to_owned(), done: 0, total: 0 };
            let error = Error::Timeout { after: Duration::ZERO, missing: vec![1], noticed_by: 0, progress: None };
            error.during(during).to_string()
        };
        for (label, place) in [("", ""), ("12", " in bucket 12"), ("head.12", " in head.12")] {
            assert!(text(label).ends_with(&format!("during all_reduce{place})")), "{}", text(label));
        }
    }

    #[test]
    fn a_source_is_added_to_variants_that_have_one_and_is_never_replaced() {
        let reset = Source::from(io::Error::from_raw_os_error(libc::ECONNRESET));
        let lost = Error::PeerLost {
            rank: 1,
            host: "b".to_owned(),
            reason: "connection reset".to_owned(),
            noticed_by: 0,
            progress: None,
            source: Source::default(),
        };
        assert_eq!(errno(&lost), None);
        assert_eq!(errno(&lost.clone().caused_by(&reset)), Some(libc::ECONNRESET));
        assert_eq!(errno(&lost.caused_by(&reset).caused_by(&refused().into())), Some(libc::ECONNRESET));
        assert_eq!(errno(&Error::Mismatch("dtype".to_owned()).caused_by(&reset)), None);
    }
}
