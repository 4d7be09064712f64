//! The common parts of the exchanges of addresses: argument checks, the runtime, the pause between attempts, and the timeout error.

use std::time::Duration;

use tokio::runtime::Runtime;

use super::super::wire::FRAME_LIMIT;
use crate::error::{Error, Progress, Result};

/// Pause between two attempts.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Checks the arguments of every exchange.
pub(super) fn check_arguments(rank: usize, world_size: usize, address: &[u8]) -> Result<()> {
    if rank >= world_size || u32::try_from(world_size).is_err() {
        return Err(Error::InvalidArgument(format!("rank {rank} is not in a world of {world_size} ranks")));
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
