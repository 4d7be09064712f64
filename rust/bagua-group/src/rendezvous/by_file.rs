//! The exchange through files next to a path on a shared file system.
//!
//! `path.0` and `path.all` remain, because rank 0 does not know which ranks have read them.

use std::path::Path;

use super::super::store::FileStore;
use super::exchange::Exchange;
use super::{Limits, check_arguments};
use crate::error::Result;
use crate::wait::Deadline;

/// Exchanges addresses through files next to `path`, on a file system that all ranks share.
///
/// # Errors
/// `Timeout` naming the missing ranks, `Mismatch` when world sizes differ or two processes have the same rank,
/// `InvalidArgument` for an invalid rank or address, `System` when the files cannot be read or written.
pub fn rendezvous_file(
    path: &Path,
    rank: usize,
    world_size: usize,
    address: &[u8],
    limits: impl Into<Limits>,
) -> Result<Vec<Vec<u8>>> {
    check_arguments(rank, world_size, address)?;
    let limits = &limits.into();
    let exchange = Exchange {
        store: &FileStore::next_to(path),
        is_kept: true,
        rank,
        world_size,
        address,
        deadline: Deadline::after(limits.timeout),
        limits,
        place: path.display().to_string(),
        from: String::new(),
        other: Default::default(),
        ended: Default::default(),
    };
    exchange.run()
}
