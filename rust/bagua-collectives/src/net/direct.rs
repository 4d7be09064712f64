//! Direct reductions: each rank combines its shard, or the whole tensor, piece by piece while more pieces travel in
//! both directions.
//!
//! A message to a peer is either an input (a piece of the peer's shard) or a result (a piece that this rank has
//! combined). Results are sent first, while they are in the cache, and inputs fill the rest of the line. A rank
//! combines a piece as soon as it has arrived from all ranks. Meanwhile the kernel receives the next pieces, so the
//! line is idle only for the latency of the last piece.

use std::ops::Range;
use std::time::Instant;

use crate::OpContext;
use crate::reduce::combine;
use crate::transport::Plan;
use crate::types::{Fingerprint, ReduceOp};

/// Combines the values of all ranks in rank order. `None` stands for the values in `out`.
pub(super) fn fold(cx: &OpContext<'_>, op: ReduceOp, inputs: &[Option<&[u8]>], out: &mut [u8]) {
    let start = Instant::now();
    combine(cx.dtype(), op, inputs, out);
    cx.stats.add_reduce(start.elapsed());
}

/// The ranks that get a combined piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Results {
    All,
    /// Only the given rank.
    Root(usize),
    /// Only the rank that combined the piece.
    Kept,
}

pub(super) enum Buffers<'a> {
    Whole(&'a mut [u8]),
    /// Inputs and results in separate buffers, both for the whole tensor.
    Two(&'a [u8], &'a mut [u8]),
    /// Inputs of the whole tensor, and results of this rank's shard only.
    Share(&'a [u8], &'a mut [u8]),
}

impl Buffers<'_> {
    pub fn len(&self) -> usize {
        match self {
            Buffers::Whole(data) => data.len(),
            Buffers::Two(src, _) | Buffers::Share(src, _) => src.len(),
        }
    }
}

/// The partition of a tensor into one shard per rank, and of a shard into pieces.
pub(super) struct Partition {
    /// Byte range that each rank combines. Shards may overlap if no other rank gets the results.
    pub shards: Vec<Range<usize>>,
    /// Size of a piece in bytes, a whole number of elements. The last piece of a shard may be shorter.
    pub piece: usize,
}

impl Partition {
    /// Returns the number of pieces that a rank combines. At least one, so that headers are always compared.
    pub fn pieces(&self, owner: usize) -> usize {
        self.shards[owner].len().div_ceil(self.piece).max(1)
    }

    /// Returns the byte range in the tensor of piece `number` of a rank's shard.
    fn range(&self, owner: usize, number: usize) -> Range<usize> {
        let Range { start, end } = self.shards[owner];
        let at = (start + number * self.piece).min(end);
        at..(at + self.piece).min(end)
    }
}

/// The state of a direct reduction, as a [`Plan`] for the mesh.
pub(super) struct DirectReduce<'a, 'c> {
    pub cx: &'a OpContext<'c>,
    pub op: ReduceOp,
    pub rank: usize,
    pub results: Results,
    pub partition: Partition,
    pub buffers: Buffers<'a>,
    /// Groups of slots. A group has one slot, of one piece, for every rank.
    pub staging: &'a mut [u8],
    /// For each piece that may be in flight: the group of slots that holds it (`None` until a part of it arrives), and
    /// the number of peers that have sent it completely.
    pub window: Vec<(Option<usize>, usize)>,
    /// Free groups. The group freed last is used first, so that little memory is used, and that is in the cache.
    pub free: Vec<usize>,
    /// For each piece, the number of peers that this rank's values must still be sent to before the sum may replace
    /// them. Empty if shards do not overlap.
    pub unsent: Vec<usize>,
    /// Number of pieces of this rank's shard that are combined.
    pub folded: usize,
    /// Number of inputs received from each peer.
    pub came: Vec<usize>,
    /// Number of inputs and results to each peer that were started.
    pub begun: Vec<(usize, usize)>,
    pub total: u64,
}

impl DirectReduce<'_, '_> {
    fn ranks(&self) -> usize {
        self.partition.shards.len()
    }

    pub fn pieces(&self, owner: usize) -> usize {
        self.partition.pieces(owner)
    }

    pub fn gets(&self, rank: usize) -> bool {
        match self.results {
            Results::All => true,
            Results::Root(root) => root == rank,
            Results::Kept => false,
        }
    }

    /// Combines, in order, every piece that has arrived from all ranks.
    pub fn fold(&mut self) {
        let (rank, n, piece) = (self.rank, self.ranks(), self.partition.piece);
        let pieces = self.partition.pieces(rank);
        while self.folded < pieces {
            let range = self.partition.range(rank, self.folded);
            let places = self.window.len();
            let (group, present) = &mut self.window[self.folded % places];
            if *present < n - 1 || self.unsent.get(self.folded).is_some_and(|peers| *peers > 0) {
                return;
            }
            *present = 0;
            // A piece gets its group when bytes arrive. Nothing arrives for an empty piece or in a world of one rank.
            let group = group.take().unwrap_or_else(|| self.free.pop().expect("a group for every place"));
            self.free.push(group);
            let slots = &self.staging[group * n * piece..(group + 1) * n * piece];
            let start = self.partition.shards[rank].start;
            let (own, out) = match &mut self.buffers {
                Buffers::Whole(data) => (None, &mut data[range]),
                Buffers::Two(src, dst) => (Some(&src[range.clone()]), &mut dst[range]),
                Buffers::Share(src, dst) => {
                    (Some(&src[range.clone()]), &mut dst[range.start - start..range.end - start])
                }
            };
            let slots = slots.chunks_exact(piece).enumerate();
            let inputs: Vec<_> =
                slots.map(|(peer, slot)| if peer == rank { own } else { Some(&slot[..out.len()]) }).collect();
            fold(self.cx, self.op, &inputs, out);
            self.folded += 1;
        }
    }
}

impl Plan for DirectReduce<'_, '_> {
    fn counts(&self, peer: usize) -> (usize, usize) {
        let (mine, theirs) = (self.pieces(self.rank), self.pieces(peer));
        let to = theirs + if self.gets(peer) { mine } else { 0 };
        (to, mine + if self.gets(self.rank) { theirs } else { 0 })
    }

    fn longest(&self, peer: usize) -> usize {
        self.partition.range(peer, 0).len().max(self.partition.range(self.rank, 0).len())
    }

    fn next(&mut self, peer: usize) -> Option<usize> {
        let inputs = self.pieces(peer);
        let gets = self.gets(peer);
        let (input, result) = &mut self.begun[peer];
        if gets && *result < self.folded {
            *result += 1;
            Some(inputs + *result - 1)
        } else if *input < inputs {
            *input += 1;
            Some(*input - 1)
        } else {
            None
        }
    }

    fn outgoing(&self, peer: usize, number: usize) -> (Fingerprint, &[u8]) {
        let inputs = self.pieces(peer);
        let is_input = number < inputs;
        let range = if is_input {
            self.partition.range(peer, number)
        } else {
            self.partition.range(self.rank, number - inputs)
        };
        let bytes = match &self.buffers {
            Buffers::Whole(data) => &data[range],
            Buffers::Two(src, _) if is_input => &src[range],
            Buffers::Two(_, dst) => &dst[range],
            Buffers::Share(src, _) if is_input => &src[range],
            Buffers::Share(_, dst) => {
                let start = self.partition.shards[self.rank].start;
                &dst[range.start - start..range.end - start]
            }
        };
        (self.cx.fingerprint, bytes)
    }

    fn sent(&mut self, _peer: usize, number: usize) {
        if let Some(peers) = self.unsent.get_mut(number) {
            *peers -= 1;
            self.fold();
        }
    }

    fn expected(&self, peer: usize, number: usize) -> (Fingerprint, usize) {
        let inputs = self.pieces(self.rank);
        let range = if number < inputs {
            self.partition.range(self.rank, number)
        } else {
            self.partition.range(peer, number - inputs)
        };
        (self.cx.fingerprint, range.len())
    }

    fn admits(&self, _peer: usize, number: usize) -> bool {
        number >= self.pieces(self.rank) || number < self.folded + self.window.len()
    }

    fn incoming(&mut self, peer: usize, number: usize) -> &mut [u8] {
        let inputs = self.pieces(self.rank);
        if number < inputs {
            let len = self.partition.range(self.rank, number).len();
            let places = self.window.len();
            let group = &mut self.window[number % places].0;
            // The window never uses more groups of buffers than it has places, so one is free.
            let group = *group.get_or_insert_with(|| self.free.pop().expect("a group for every place"));
            let start = (group * self.ranks() + peer) * self.partition.piece;
            return &mut self.staging[start..start + len];
        }
        let range = self.partition.range(peer, number - inputs);
        match &mut self.buffers {
            Buffers::Whole(data) => &mut data[range],
            Buffers::Two(_, dst) => &mut dst[range],
            // Results are sent only to ranks that have a place for them.
            Buffers::Share(..) => &mut [],
        }
    }

    fn arrived(&mut self, peer: usize, number: usize) {
        if number < self.pieces(self.rank) {
            self.came[peer] += 1;
            let places = self.window.len();
            self.window[number % places].1 += 1;
            self.fold();
        }
    }

    fn owes(&self, peer: usize) -> bool {
        self.folded < self.pieces(self.rank) && self.came[peer] <= self.folded
    }

    fn part(&self, number: usize) -> u32 {
        number as u32
    }

    fn progress(&self) -> (u64, u64) {
        (0, self.total)
    }
}
