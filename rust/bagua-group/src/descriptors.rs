//! File descriptors: how many a rank needs, and the limit of its process on them (`RLIMIT_NOFILE`).
//!
//! A group needs descriptors for its control connections, and in each lane for the TCP streams to those ranks with which it has exchanged
//! messages. A process without a free descriptor can neither open nor accept a connection, and its peers cannot
//! distinguish that from a slow network. A rank therefore raises the soft limit of its process before it connects, and before it opens
//! streams. Where the hard limit forbids that, streams that are idle are closed ([`super::idle`]), and without any the rank fails. It never
//! lowers the limit.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::config::Config;
use super::control::Overlay;
use super::fork::PerProcess;
use crate::error::Error;
use crate::platform::open_descriptors;
use crate::wait::lock;

/// Descriptors of a rank beside its connections: the listening sockets, the event loops of the control thread and of the rendezvous, and
/// the shared memory of a lane.
const OWN: usize = 10;

/// Descriptors left to the application, to the rendezvous and to connections that are not authenticated yet.
const SPARE: usize = 64;

/// This process was short of descriptors once: from then on they are counted whenever a connection arrives.
static WAS_SHORT: AtomicBool = AtomicBool::new(false);

/// Serialises the ranks that are threads of one process: of two that raise the limit at the same time, the later one must not lower it.
static RAISING: PerProcess<Mutex<()>> = PerProcess::new();

/// A number of descriptors that a rank is going to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    /// Without these the rank cannot do its work: an error where the hard limit forbids them.
    least: usize,
    /// With a margin: the limit is raised for as many of these as the hard limit allows. Not below `least`.
    wanted: usize,
}

impl Need {
    /// Of a rank before it connects: the control connections. No lane has a stream before its first operation, but peers may open theirs
    /// before this rank opens its own: `wanted` has room for the streams of one lane.
    pub(super) fn of_world(config: &Config) -> Need {
        let peers = config.world_size - 1;
        let lane = peers.saturating_mul(config.streams_per_peer);
        let control = control_connections(config);
        Need { least: OWN + control, wanted: OWN + control.saturating_add(lane) + SPARE }
    }

    /// Of this many streams. Up to `arrived` of them, counted after the open descriptors, may be open already.
    pub(super) fn of_streams(streams: usize, arrived: usize) -> Need {
        Need { least: streams.saturating_sub(arrived), wanted: streams + SPARE }
    }
}

/// The control connections of a rank.
fn control_connections(config: &Config) -> usize {
    Overlay::new(config.rank, config.world_size, config.full_mesh).neighbours().len()
}

/// What a process lacks that may not open as many descriptors as it needs.
#[derive(Debug)]
pub(super) struct Shortage {
    needed: u64,
    open: u64,
    allowed: u64,
    /// Whether the limit could be raised as far as the hard limit.
    raised: rustix::io::Result<()>,
}

impl Shortage {
    /// How many of the open descriptors have to be closed.
    pub(super) fn missing(&self) -> usize {
        usize::try_from(self.needed - self.allowed).unwrap_or(usize::MAX)
    }

    /// The error; `what` says who needs them.
    pub(super) fn error(&self, what: &str) -> Error {
        let Shortage { needed, open, allowed, raised } = self;
        let text = format!(
            "{what} needs {needed} file descriptors, {open} of them open already, and this process may have {allowed}"
        );
        match raised {
            Ok(()) => Error::other(format!("{text}: raise its hard limit (ulimit -Hn), or start fewer ranks")),
            Err(why) => Error::system(&format!("{text}; raise its limit (ulimit -n): setrlimit failed"), *why),
        }
    }
}

/// Raises the soft limit of this process to the `open` descriptors and those that `need` adds, at most to the hard limit.
///
/// # Errors
/// When the limit stays below what is open and `need.least`.
pub(super) fn provide(open: u64, need: Need) -> std::result::Result<(), Shortage> {
    let _raising = lock(RAISING.get());
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let (soft, hard) = (current.unwrap_or(u64::MAX), maximum.unwrap_or(u64::MAX));
    let with_open = |more: usize| open.saturating_add(more as u64);
    let target = with_open(need.wanted).min(hard);
    let mut raised = Ok(());
    if target > soft {
        raised = setrlimit(Resource::Nofile, Rlimit { current: Some(target), maximum });
    }
    let allowed = if raised.is_ok() { target.max(soft) } else { soft };
    let needed = with_open(need.least);
    if allowed >= needed {
        return Ok(());
    }
    WAS_SHORT.store(true, Ordering::Relaxed);
    Err(Shortage { needed, open, allowed, raised })
}

/// Whether fewer than `spare` descriptors are free, with the limit raised as far as it may be. `newest` was just opened: the lowest number
/// that was free, so that low numbers need no count before the first shortage.
pub(super) fn is_short(newest: BorrowedFd<'_>, spare: usize) -> bool {
    let soft = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let number = u64::try_from(newest.as_raw_fd()).unwrap_or(0);
    let may_be = WAS_SHORT.load(Ordering::Relaxed) || number.saturating_add(spare as u64) >= soft;
    may_be && provide(open(), Need { least: spare, wanted: spare + SPARE }).is_err()
}

/// Whether a system call failed because this process, or the system, has no free descriptor.
pub(super) fn ran_out(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The number of open descriptors of this process.
pub(super) fn open() -> u64 {
    match open_descriptors() {
        Ok(open) => open as u64,
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
            getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
        }
        // Where they cannot be counted: the standard streams.
        Err(_) => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_needs_descriptors_for_its_control_connections_before_it_connects_and_for_streams_when_they_open() {
        let world = Need::of_world(&Config::new(0, 16));
        assert_eq!(world, Need { least: OWN + 15, wanted: OWN + 15 + 2 * 15 + SPARE });
        // Distances 1, 2, 4 and 8 in both directions, of which 8 is 16 in the other.
        assert_eq!(Need::of_world(&Config::new(0, 24)).least, OWN + 8);
        assert_eq!(Need::of_streams(46, 6), Need { least: 40, wanted: 46 + SPARE });
        assert_eq!(Need::of_streams(4, 6).least, 0);
    }
}
