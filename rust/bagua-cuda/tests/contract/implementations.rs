//! The collectives of which the contract is asked, and the numbers of ranks.

use crate::collectives::*;
use crate::cuda::{cuda_hier, cuda_local, cuda_shm};
use crate::world::Ranks;

contract!(cuda_local, cuda_local, [1, 2, 3, 4]);
contract!(cuda_shm, cuda_shm, [1, 2, 3, 4]);
contract!(cuda_hier, cuda_hier, [1, 2, 3, 4]);

/// True where every element is combined in rank order: not inside hosts first.
pub fn in_rank_order(ranks: Ranks, size: usize) -> bool {
    size <= 2 || !std::ptr::fn_addr_eq(ranks, cuda_hier as Ranks)
}
