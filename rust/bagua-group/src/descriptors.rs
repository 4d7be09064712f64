//! The limit on file descriptors of the process (`RLIMIT_NOFILE`), and the number of descriptors that a rank needs.
//!
//! A group needs descriptors for its control connections, and in each lane for the TCP streams to the ranks with which
//! it has exchanged messages. A process without a free descriptor can neither open nor accept a connection, and its
//! peers cannot distinguish that from a slow network. Therefore a rank raises the soft limit of its process to the hard
//! limit. It compares its need with that limit before it connects and before it opens streams.

use std::fmt::Display;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::config::Config;
use crate::error::{Error, Result};
use crate::platform::open_descriptors;

/// Number of descriptors of a rank in addition to its connections: the listening sockets, the event loops of the
/// control thread and of the rendezvous, and the shared memory of a lane.
const OWN: usize = 10;

/// The most control connections that a rank is sure to need before it knows how many ranks each host has.
const LINKS: usize = 256;

/// Returns the number of descriptors that a rank may open before it has a lane. Every rank may become the coordinator,
/// which has a connection to each rank of a small world, and to each rank of its host and each host of a large one.
pub(super) fn of_world(config: &Config) -> usize {
    OWN + (config.world_size - 1).min(LINKS)
}

/// Raises the soft limit of this process to the hard limit. `more` returns the number of descriptors that `who` is
/// going to open. It is called after the open descriptors were counted. Fails with `System` if the hard limit is too
/// low for the open descriptors and the new ones.
pub(super) fn provide(more: impl FnOnce() -> usize, who: impl Display) -> Result<()> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = current == maximum || setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let allowed = if raised { maximum } else { current }.unwrap_or(u64::MAX);
    // If the process cannot open the list of its descriptors, all allowed descriptors are in use.
    let open = open_descriptors().map_or(allowed, |open| open as u64);
    let needed = open.saturating_add(more() as u64);
    if needed <= allowed {
        return Ok(());
    }
    Err(Error::other(format!(
        "{who} needs {needed} file descriptors, {open} of them open already, and this process may have {allowed}: raise its hard limit \
         (ulimit -Hn), or start fewer ranks"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_needs_descriptors_for_its_control_connections_before_it_connects() {
        assert_eq!(of_world(&Config::new(3, 16)), OWN + 15);
        assert_eq!(of_world(&Config::new(0, 1024)), OWN + LINKS);
    }
}
