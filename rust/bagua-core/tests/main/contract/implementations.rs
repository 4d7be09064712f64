//! The collectives that the contract tests, and the numbers of ranks.

use super::collectives::*;
use super::toy::{toy_hier, toy_local, toy_shm};
use super::world::{
    Ranks, bundled, direct, doubling, halving, hier, local, mixed, on_demand, ring, shm, solo, tcp, tls,
};

contract!(net_local, local, [1, 2, 3, 4, 5, 8, 9, 16, 33]);
contract!(net_many, local, [17, 24, 64]);
contract!(net_beyond, local, [67]);
contract!(net_tcp, tcp, [1, 2, 3, 4, 9]);
contract!(net_tls, tls, [2, 3, 5]);
contract!(net_mixed, mixed, [3, 4, 5]);
contract!(net_on_demand, on_demand, [2, 3, 5, 9]);
contract!(net_bundled, bundled, [2, 3, 5]);
contract!(net_direct, direct, [20]);
contract!(net_ring, ring, [2, 3, 7]);
contract!(net_doubling, doubling, [2, 3, 5, 9]);
contract!(net_halving, halving, [2, 3, 5, 9]);
contract!(solo, solo, [1]);
contract!(hier, hier, [1, 2, 3, 4, 5, 8]);
contract!(toy_local, toy_local, [1, 2, 3, 4]);
contract!(toy_shm, toy_shm, [1, 2, 3, 4]);
contract!(toy_hier, toy_hier, [1, 2, 3, 4]);
contract!(shm, shm, [1, 2, 3, 4, 5, 8]);

/// Returns true if the implementation combines every element in rank order. It does not if it may combine inside hosts
/// first, in a ring, or by doubling or halving in worlds of this size.
pub fn in_rank_order(ranks: Ranks, size: usize) -> bool {
    let is = |other: Ranks| std::ptr::fn_addr_eq(ranks, other);
    size <= 2 || !is(hier) && !is(toy_hier) && !is(ring) && !is(doubling) && !is(halving) && (size <= 16 || is(direct))
}
