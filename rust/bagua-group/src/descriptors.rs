//! File descriptors: how many a rank needs, and the limit of its process on them (`RLIMIT_NOFILE`).
//!
//! A group needs descriptors for its control connections, and in each lane for the TCP streams to each peer. A
//! process without a free descriptor can neither open nor accept a connection, and its peers cannot distinguish that from a slow network.
//! A rank therefore raises the soft limit of its process before it connects, and fails where the hard limit forbids that. It never
//! lowers the limit.

use std::sync::Mutex;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::address::Address;
use super::config::Config;
use super::control::Overlay;
use super::fork::PerProcess;
use crate::error::{Error, Result};
use crate::wait::lock;

/// Descriptors of a rank beside its connections: the listening sockets, the event loops of the control thread and of the rendezvous, and
/// the shared memory of a lane.
const OWN: usize = 10;

/// Lanes for which the limit is raised ahead: the first one, and those of engines and sub-groups.
const EXPECTED_LANES: usize = 4;

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
    /// Of a rank that knows its own configuration only: the control connections and the first lane. Which peers share memory is not
    /// known yet: `least` assumes that all do where that is possible, `wanted` that none does.
    pub(super) fn of_world(config: &Config) -> Need {
        let peers = config.world_size - 1;
        let streams = peers.saturating_mul(config.streams_per_peer);
        let least = if config.transport.shares_memory() { 0 } else { streams };
        let lanes = streams.saturating_mul(EXPECTED_LANES);
        let control = control_connections(config);
        Need { least: OWN + control + least, wanted: OWN + control.saturating_add(lanes) + SPARE }
    }

    /// Of a rank that knows all addresses: as [`Need::of_world`], but with the streams that the ranks agree on. Every rank counts the
    /// streams between the hosts' first ranks, so that ranks with equal limits fail together.
    pub(super) fn of_addresses(config: &Config, addresses: &[Address]) -> Need {
        let own = &addresses[config.rank];
        let shares_memory = config.transport.shares_memory();
        let is_remote = |other: &&Address| {
            let apart = other.host_id != own.host_id || other.unix.is_empty() || own.unix.is_empty();
            if shares_memory { apart } else { other.rank != own.rank }
        };
        let agreed = |other: &Address| usize::from(own.streams.min(other.streams).max(1));
        let flat: usize = addresses.iter().filter(is_remote).map(agreed).sum();
        let leaders: usize = if shares_memory {
            let mut firsts: Vec<&Address> = addresses.iter().filter(is_remote).collect();
            let ranks = firsts.len();
            firsts.sort_by_key(|address| &address.host_id);
            firsts.dedup_by_key(|address| &address.host_id);
            // Without shared memory anywhere, the first ranks of hosts have no streams of their own.
            if ranks + 1 == addresses.len() && firsts.len() == ranks { 0 } else { firsts.into_iter().map(agreed).sum() }
        } else {
            0
        };
        let (control, lane) = (control_connections(config), flat + leaders);
        Need { least: control + lane, wanted: control + lane.saturating_mul(EXPECTED_LANES) + SPARE }
    }

    /// Of a lane with this many streams. Up to `arrived` of them, counted after the open descriptors, may be open already.
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
    match std::fs::read_dir("/proc/self/fd") {
        // One of them is that of the directory.
        Ok(entries) => (entries.count() as u64).saturating_sub(1),
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
            getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
        }
        // Without /proc: the standard streams.
        Err(_) => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::TransportChoice;
    use super::*;

    fn config(world_size: usize, transport: TransportChoice) -> Config {
        Config { transport, full_mesh: 100, ..Config::new(0, world_size) }
    }

    fn addresses(hosts: &[&str], streams: u8) -> Vec<Address> {
        let address = |(rank, host): (usize, &&str)| Address {
            rank,
            world_size: hosts.len(),
            pid: 1,
            pid_namespace: 1,
            tcp: None,
            unix: vec![1],
            host_id: (*host).to_owned(),
            host_name: (*host).to_owned(),
            streams,
            algorithm: 0,
            tls: 0,
            nonce: [0; 16],
        };
        hosts.iter().enumerate().map(address).collect()
    }

    #[test]
    fn a_rank_needs_descriptors_for_each_peer_and_each_stream() {
        let tcp = Need::of_world(&config(24, TransportChoice::Tcp));
        assert_eq!(tcp.least, OWN + 23 + 2 * 23);
        let auto = Need::of_world(&config(24, TransportChoice::Auto));
        assert_eq!(auto.least, OWN + 23);
        assert_eq!(auto.wanted, tcp.wanted);
    }

    #[test]
    fn no_streams_are_counted_between_ranks_that_share_memory() {
        let least = |hosts: &[&str], transport| {
            Need::of_addresses(&config(hosts.len(), transport), &addresses(hosts, 2)).least - (hosts.len() - 1)
        };
        assert_eq!(least(&["a", "a", "a", "a"], TransportChoice::Auto), 0);
        assert_eq!(least(&["a", "b", "c", "d"], TransportChoice::Auto), 6);
        // Streams to both ranks of the other host, and those between the hosts' first ranks.
        assert_eq!(least(&["a", "a", "b", "b"], TransportChoice::Auto), 4 + 2);
        assert_eq!(least(&["a", "b", "b"], TransportChoice::Auto), 4 + 2);
        assert_eq!(least(&["a", "a", "b", "b"], TransportChoice::Tcp), 6);
    }

    #[test]
    fn two_ranks_need_the_smaller_of_their_numbers_of_streams() {
        let mut all = addresses(&["a", "b"], 64);
        all[1].streams = 3;
        assert_eq!(Need::of_addresses(&config(2, TransportChoice::Auto), &all).least, 1 + 3);
    }
}
