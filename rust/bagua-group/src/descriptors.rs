//! File descriptors: how many a rank needs, and the limit of its process on them (`RLIMIT_NOFILE`).
//!
//! A group needs descriptors for its control connections, and in each lane for the TCP streams to those ranks with which it has exchanged
//! messages. A process without a free descriptor can neither open nor accept a connection, and its peers cannot
//! distinguish that from a slow network. A rank therefore raises the soft limit of its process before it connects, and before it opens
//! streams, and fails where the hard limit forbids that. It never lowers the limit.

use std::sync::Mutex;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::config::Config;
use super::control::Overlay;
use super::fork::PerProcess;
use crate::error::{Error, Result};
use crate::platform::open_descriptors;
use crate::wait::lock;

/// Descriptors of a rank beside its connections: the listening sockets, the event loops of the control thread and of the rendezvous, and
/// the shared memory of a lane.
const OWN: usize = 10;

/// Descriptors left to the application, to the rendezvous and to connections that are not authenticated yet.
const SPARE: usize = 64;

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

/// Raises the soft limit of this process to the `open` descriptors and those that `need` adds, at most to the hard limit. `what` says who
/// needs them, for the error text.
///
/// # Errors
/// `System` when the limit stays below what is open and `need.least`.
pub(super) fn provide(open: u64, need: Need, what: impl FnOnce() -> String) -> Result<()> {
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
    let text = format!(
        "{} needs {needed} file descriptors, {open} of them open already, and this process may have {allowed}",
        what()
    );
    match raised {
        Ok(()) => Err(Error::other(format!("{text}: raise its hard limit (ulimit -Hn), or start fewer ranks"))),
        Err(why) => Err(Error::system(&format!("{text}; raise its limit (ulimit -n): setrlimit failed"), why)),
    }
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
