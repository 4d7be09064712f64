//! The choice of the algorithm for an all_reduce: a cost model, and the table that follows from it.
//!
//! The model is Hockney's, with an overhead per message as in LogP. A message of b bytes costs its sender and its
//! receiver o each, is in transit for a, and its bytes leave and enter a rank at one byte per t. N is the size of the
//! tensor in bytes, and n the number of ranks.
//!
//! | algorithm | time | buys |
//! |---|---|---|
//! | one-shot: every rank sends everything to every rank | a + 2 (n - 1) o + (n - 1) N t | one latency |
//! | doubling: distances 1, 2, 4, … | log2(n) (a + 2 o + N t) | few messages at little latency |
//! | direct (two-shot): all pairs at once | 2 a + 4 (n - 1) o + 2 (n - 1) / n N t | fewest bytes, two latencies |
//! | ring: along a ring | 2 (n - 1) (a + 2 o) + 2 (n - 1) / n N t | fewest bytes, over two streams per rank |
//! | halving: distances …, 4, 2, 1 and back | 2 log2(n) (a + 2 o) + 2 (n - 1) / n N t | fewest bytes, few messages |
//!
//! Direct, ring and halving are a reduce-scatter followed by an all-gather. log2 is rounded up. If n is not a power of
//! two, doubling costs 2 (a + 2 o + N t) more, because n - 2^floor(log2 n) ranks hand their values to another rank
//! first and get the result from it at the end.
//!
//! One-shot wins while (n - 1) N t is below a latency, that is, for a few ranks and a few KiB. Between two ranks it
//! always wins: it moves the same N bytes as direct, but does not wait for sums. (Every rank adds N elements instead of
//! N / 2, which is still many times faster than any network.)
//!
//! Direct moves the same number of bytes as a ring with fewer latencies, so by the model it always beats the ring. The
//! model leaves out that n - 1 senders meet at one port, whose switch drops what its buffers cannot hold, and that a
//! rank must open and poll n - 1 streams. Groups of more than 16 ranks therefore use only these three, with 2 to 2
//! log2(n) streams per rank:
//!
//! - doubling for small tensors, because it has half the rounds of halving, while N t is below a latency
//! - the ring if each shard is long enough to hide 2 (n - 1) latencies. Its bytes pass only links between neighbours,
//!   and go piece by piece, so that a rank combines some pieces while others arrive
//! - halving in between
//!
//! | ranks | bytes N | float32 and others | float16, bfloat16 |
//! |---|---|---|---|
//! | 2 | any | one-shot | one-shot |
//! | 3 to 8 | at most [`SMALL`] | one-shot | one-shot |
//! | 3 to 16 | otherwise | direct | direct |
//! | 17 to 64 | at most [`SMALL`] | doubling | direct |
//! | | N / n at least [`RING_SHARD`] | ring | direct |
//! | | otherwise | halving | direct |
//! | 65 and more | as for 17 to 64 | the same | the same, in float32 |
//!
//! One-shot and direct combine in rank order. The other algorithms do not: the ring starts each shard at a different
//! rank, doubling combines neighbours first, and halving combines distant ranks first. So their sums differ in the last
//! bits, and f16 and bf16 would be rounded at every hop. For this reason these types use direct up to 64 ranks. With
//! more ranks, partial sums of f16 and bf16 are sent as float32, and each result is rounded once before it is sent to
//! all ranks. All ranks get the same bits, at the price of 1.5 times the bytes. The choice depends only on bytes, ranks
//! and dtype, which are equal on all ranks.

use bagua_kernels::coded;

use crate::types::DType;

coded! {
    /// The algorithm for an all_reduce between hosts.
    #[derive(Default)]
    Algorithm {
        /// The best algorithm for the tensor and the group, from the table.
        #[default]
        Auto = 0, "auto";
        /// Every pair of ranks exchanges its data directly, combined in rank order.
        Direct = 1, "direct";
        /// Along a ring of ranks.
        Ring = 2, "ring";
        /// Recursive doubling, between ranks at distances 1, 2, 4, ….
        Doubling = 3, "doubling";
        /// Shards are combined between ranks at distances …, 4, 2, 1, and then gathered at distances 1, 2, 4, ….
        Halving = 4, "halving";
    }
}

/// Size in bytes up to which the number of rounds costs more than the bytes.
pub(super) const SMALL: usize = 16 << 10;

/// Number of ranks up to which a small tensor is reduced one-shot.
pub(super) const FEW: usize = 8;

/// Number of ranks up to which every verb sends messages between all pairs and combines in rank order.
pub(super) const DIRECT: usize = 16;

/// Number of ranks up to which float16 and bfloat16 are sent between all pairs and combined in rank order.
const DIRECT_HALF: usize = 64;

/// Smallest shard, in bytes, for which sending takes so long that the latency of a ring's steps does not matter.
pub(super) const RING_SHARD: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chosen {
    OneShot,
    Direct,
    Ring,
    Doubling,
    Halving,
}

/// True for the types that lose much precision in every rounding.
pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// True if a reducing verb combines in rank order, with messages between all pairs.
pub(super) fn in_rank_order(forced: Algorithm, dtype: DType, ranks: usize) -> bool {
    forced == Algorithm::Direct || ranks <= if is_half(dtype) { DIRECT_HALF } else { DIRECT }
}

pub(super) fn choose(forced: Algorithm, dtype: DType, bytes: usize, ranks: usize) -> Chosen {
    let small = bytes <= SMALL;
    match forced {
        Algorithm::Ring => Chosen::Ring,
        Algorithm::Doubling => Chosen::Doubling,
        Algorithm::Halving => Chosen::Halving,
        _ if small && ranks <= FEW || ranks <= 2 => Chosen::OneShot,
        _ if in_rank_order(forced, dtype, ranks) => Chosen::Direct,
        _ if small => Chosen::Doubling,
        _ if bytes / ranks >= RING_SHARD => Chosen::Ring,
        _ => Chosen::Halving,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worlds_of_up_to_sixteen_ranks_combine_in_rank_order() {
        for ranks in 1..=16 {
            for bytes in [0, 1, SMALL, SMALL + 1, 1 << 30] {
                let chosen = choose(Algorithm::Auto, DType::F32, bytes, ranks);
                assert!(
                    matches!(chosen, Chosen::OneShot | Chosen::Direct),
                    "{chosen:?} for {bytes} bytes of {ranks} ranks"
                );
                assert!(ranks > 2 || chosen == Chosen::OneShot);
            }
        }
    }

    #[test]
    fn large_worlds_double_small_tensors_and_send_large_ones_round_unless_each_hop_would_round() {
        let chosen = |dtype, bytes| choose(Algorithm::Auto, dtype, bytes, 64);
        assert_eq!(chosen(DType::F32, 1000), Chosen::Doubling);
        assert_eq!(chosen(DType::F32, 1 << 20), Chosen::Halving);
        assert_eq!(chosen(DType::F32, 64 << 20), Chosen::Ring);
        assert_eq!((chosen(DType::F16, 1000), chosen(DType::BF16, 64 << 20)), (Chosen::Direct, Chosen::Direct));
    }

    #[test]
    fn a_forced_algorithm_is_used() {
        for (forced, chosen) in [(Algorithm::Ring, Chosen::Ring), (Algorithm::Doubling, Chosen::Doubling)] {
            assert_eq!(choose(forced, DType::F16, 8, 2), chosen);
        }
        assert_eq!(choose(Algorithm::Direct, DType::F32, 64 << 20, 64), Chosen::Direct);
    }
}
