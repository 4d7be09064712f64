//! The common parts of the exchanges of addresses: argument checks, time limits, the runtime, the pause between attempts, and the timeout
//! error.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::super::wire::{FRAME_LIMIT, WORLD_LIMIT};
use crate::error::{Error, Progress, Result};
use crate::wait::lock;

/// Pause between two attempts.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// The ranks that a joining rank waits for at this moment. Another thread may ask meanwhile.
#[derive(Clone, Default)]
pub struct Awaited(Arc<Mutex<Option<FindRanks>>>);

type FindRanks = Box<dyn Fn() -> Vec<usize> + Send>;

impl Awaited {
    /// Ascending. Empty if only other ranks know: rank 0 counts those that have come.
    pub fn ranks(&self) -> Vec<usize> {
        lock(&self.0).as_ref().map_or_else(Vec::new, |find| find())
    }

    /// Sets how they are found from now on.
    pub(in super::super) fn found_by(&self, find: impl Fn() -> Vec<usize> + Send + 'static) {
        *lock(&self.0) = Some(Box::new(find));
    }
}

impl std::fmt::Debug for Awaited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Awaited").field(&self.ranks()).finish()
    }
}

/// How long an exchange of addresses waits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// For all ranks to come.
    pub timeout: Duration,
    /// For another process to take the rank of one that had registered and whose connection ended.
    pub lost_after: Duration,
    /// The exchange reports there whom it waits for.
    pub awaited: Awaited,
}

impl From<Duration> for Limits {
    /// With the default heartbeat timeout.
    fn from(timeout: Duration) -> Limits {
        Limits { timeout, lost_after: Duration::from_secs(5), awaited: Awaited::default() }
    }
}

/// Lets this rank go on while tasks still send the list to slow ranks, until `deadline`.
pub(super) fn finish_sending(runtime: Runtime, mut sending: JoinSet<()>, deadline: Instant) {
    if sending.is_empty() {
        // A name lookup that is still running must not delay the return.
        runtime.shutdown_background();
        return;
    }
    let rest = move || {
        let all_sent = async { while sending.join_next().await.is_some() {} };
        // A rank that has not taken the list by then reports a timeout itself.
        let _ = runtime.block_on(async { timeout_at(deadline, all_sent).await });
        runtime.shutdown_background();
    };
    // Without a thread, those ranks report that this one no longer serves the list.
    let _ = std::thread::Builder::new().name("bagua-addresses".to_owned()).spawn(rest);
}

/// Checks the arguments of every exchange.
pub(super) fn check_arguments(rank: usize, world_size: usize, address: &[u8]) -> Result<()> {
    if rank >= world_size {
        return Err(Error::InvalidArgument(format!("rank {rank} is not in a world of {world_size} ranks")));
    }
    if world_size > WORLD_LIMIT {
        return Err(Error::InvalidArgument(format!("a world of {world_size} ranks: the limit is {WORLD_LIMIT}")));
    }
    if address.len() > FRAME_LIMIT {
        let len = address.len();
        return Err(Error::InvalidArgument(format!("an address of {len} bytes: the limit is {FRAME_LIMIT}")));
    }
    Ok(())
}

/// A runtime that runs an exchange on the calling thread.
pub(in super::super) fn runtime() -> Result<Runtime> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|e| Error::system("starting the rendezvous", e))
}

/// The error for a deadline that passed.
pub(super) fn timed_out(after: Duration, missing: Vec<usize>, noticed_by: usize, what: String) -> Error {
    let progress = Some(Box::new(Progress { what, ..Progress::default() }));
    Error::Timeout { after, missing, noticed_by, progress }
}
