//! The addresses of an operation's shards on the device, for every verb.

use bagua_core::collective::{Io, Verb};
use bagua_core::request::{Layout, Uses};

pub(crate) struct Parts {
    /// Size of a shard in bytes. Without shards, size of the tensor.
    pub(crate) shard: usize,
    /// Addresses of the shards that this rank contributes.
    pub(crate) from: Vec<usize>,
    /// Addresses of the shards that this rank receives.
    pub(crate) to: Vec<usize>,
    /// Maximum number of shards that any rank has in one piece.
    pub(crate) most: usize,
}

impl Parts {
    pub(crate) fn new(verb: Verb<'_>, io: &Io<'_>, rank: usize, ranks: usize) -> Parts {
        let layout = verb.layout();
        let most = if layout == Layout::Equal { 1 } else { ranks };
        let uses = match verb {
            Verb::Broadcast { root } if root == rank => Uses::SourceOnly,
            Verb::Broadcast { .. } => Uses::DestinationOnly,
            other => other.uses(rank),
        };
        let (given, taken) = layout.shards(ranks);
        let (given, taken) = match uses {
            Uses::Both => (given, taken),
            Uses::SourceOnly => (given, 0),
            Uses::DestinationOnly => (0, taken),
        };
        let list = |first: usize, count: usize, shard: usize| (0..count).map(|at| first + at * shard).collect();
        match io {
            Io::InPlace(data) => {
                let shard = data.len() / most;
                let first = data.as_buffer().address();
                // If a buffer holds several shards, the rank's own shard is at the rank's position.
                let own = |count: usize| if most > 1 && count == 1 { first + rank * shard } else { first };
                Parts { shard, from: list(own(given), given, shard), to: list(own(taken), taken, shard), most }
            }
            Io::Split { src, dst } => {
                let shard = src.len().checked_div(given).unwrap_or_else(|| dst.len() / taken.max(1));
                Parts {
                    shard,
                    from: list(src.address(), given, shard),
                    to: list(dst.as_buffer().address(), taken, shard),
                    most,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_place_a_rank_gives_and_gets_the_shard_at_its_place() {
        let mut data = vec![0u8; 24];
        let first = data.as_ptr() as usize;
        let parts = Parts::new(Verb::AllGather, &Io::in_place(&mut data), 2, 3);
        assert_eq!((parts.shard, parts.from, parts.to), (8, vec![first + 16], vec![first, first + 8, first + 16]));
        let parts = Parts::new(Verb::Scatter { root: 0 }, &Io::in_place(&mut data), 1, 3);
        assert_eq!((parts.shard, parts.from, parts.to), (8, vec![], vec![first + 8]));
    }
}
