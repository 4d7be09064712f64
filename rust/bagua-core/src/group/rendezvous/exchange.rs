//! What every exchange of addresses shares: checked arguments, a runtime, the pause between two attempts, and the timeout error.

use std::time::Duration;

use tokio::runtime::Runtime;

use super::super::wire::FRAME_LIMIT;
use crate::error::{Error, Progress, Result};

/// Between two attempts.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(20);

pub(super) fn check_rank(rank: usize, world_size: usize) -> Result<()> {
    if rank >= world_size || u32::try_from(world_size).is_err() {
        return Err(Error::InvalidArgument(format!("rank {rank} in a world of {world_size} ranks")));
    }
    Ok(())
}

/// As [`check_rank`], for an address too.
pub(super) fn check_arguments(rank: usize, world_size: usize, address: &[u8]) -> Result<()> {
    check_rank(rank, world_size)?;
    if address.len() > FRAME_LIMIT {
        return Err(Error::InvalidArgument(format!("an address of {} bytes", address.len())));
    }
    Ok(())
}

/// What drives a rendezvous on the thread that called it.
pub(super) fn runtime() -> Result<Runtime> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|e| Error::system("starting the rendezvous", e))
}

/// The error for a deadline that passed.
pub(super) fn timed_out(after: Duration, missing: Vec<usize>, noticed_by: usize, what: String) -> Error {
    let progress = Some(Box::new(Progress { what, ..Progress::default() }));
    Error::Timeout { after, missing, noticed_by, progress }
}
