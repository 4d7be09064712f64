//! all_reduce along a ring (Patarasuk and Yuan, 2009), and its two halves. Every rank sends to the next rank and
//! receives from the previous one.
//!
//! The tensor is cut into one shard per rank. In the first n - 1 rounds each shard goes around the ring, and every rank
//! adds its own values. In the other n - 1 rounds the sums go around. Shards are sent in pieces, and a piece is sent on
//! as soon as it has arrived, so that the rounds of different pieces overlap.

use std::ops::Range;
use std::time::Instant;

use super::exchange_rounds::Rounds;
use super::grown;
use super::reduce::{longest, piece, window};
use crate::OpContext;
use crate::error::Result;
use crate::reduce::{combine, divide};
use crate::transport::Plan;
use crate::types::{DType, Fingerprint, ReduceOp};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// First the ranks' values go around the ring and are added up, then the sums go around.
    Both,
    /// Only values go around. The sum of a rank's shard ends up on the previous rank.
    Reduce,
    /// Only sums go around. Each rank begins with the sum of the next rank's shard.
    Gather,
}

/// The state of a ring of two or more ranks.
struct Ring<'a, 'c> {
    cx: &'a OpContext<'c>,
    how: (DType, ReduceOp),
    phase: Phase,
    rank: usize,
    shards: Vec<Range<usize>>,
    /// Size of a piece in bytes, a whole number of elements.
    piece: usize,
    /// Number of pieces in a shard, the same for all shards.
    pieces: usize,
    /// Values of this rank, which sums replace.
    data: &'a mut [u8],
    staging: &'a mut [u8],
    /// For each message that may be in flight: its slot, once bytes have arrived.
    window: Vec<Option<usize>>,
    free: Vec<usize>,
    /// For each message from the previous rank: true once it has arrived and, if it carries values, is combined.
    arrived: Vec<bool>,
    /// Number of the first message that has not arrived.
    first: usize,
    /// Number of messages to the next rank that were started.
    begun: usize,
    progress: (u64, u64),
}

impl Ring<'_, '_> {
    fn messages(&self) -> usize {
        let halves = if self.phase == Phase::Both { 2 } else { 1 };
        halves * (self.shards.len() - 1) * self.pieces
    }

    /// Returns the number of rounds that this phase leaves out at the start.
    fn skipped(&self) -> usize {
        if self.phase == Phase::Gather { self.shards.len() - 1 } else { 0 }
    }

    /// Returns the bytes of message `number`. `behind` is 0 for a message that this rank sends, and 1 for one that it
    /// receives from the previous rank.
    fn range(&self, number: usize, behind: usize) -> Range<usize> {
        let n = self.shards.len();
        let round = self.skipped() + number / self.pieces;
        let Range { start, end } = self.shards[(self.rank + 2 * n - behind - round) % n];
        let at = (start + number % self.pieces * self.piece).min(end);
        at..(at + self.piece).min(end)
    }

    /// True for messages that carry values instead of sums.
    fn adds(&self, number: usize) -> bool {
        self.phase != Phase::Gather && number < (self.shards.len() - 1) * self.pieces
    }
}

impl Plan for Ring<'_, '_> {
    fn counts(&self, peer: usize) -> (usize, usize) {
        let n = self.shards.len();
        let next = (self.rank + 1) % n == peer;
        let before = (peer + 1) % n == self.rank;
        (if next { self.messages() } else { 0 }, if before { self.messages() } else { 0 })
    }

    fn longest(&self, _peer: usize) -> usize {
        self.piece
    }

    fn next(&mut self, _peer: usize) -> Option<usize> {
        let number = self.begun;
        // The first round sends this rank's values. Later rounds send on what arrived one round before.
        let ready = number < self.messages() && (number < self.pieces || self.arrived[number - self.pieces]);
        self.begun += usize::from(ready);
        ready.then_some(number)
    }

    fn outgoing(&self, _peer: usize, number: usize) -> (Fingerprint, &[u8]) {
        (self.cx.fingerprint, &self.data[self.range(number, 0)])
    }

    fn expected(&self, _peer: usize, number: usize) -> (Fingerprint, usize) {
        (self.cx.fingerprint, self.range(number, 1).len())
    }

    fn admits(&self, _peer: usize, number: usize) -> bool {
        !self.adds(number) || number < self.first + self.window.len()
    }

    fn incoming(&mut self, _peer: usize, number: usize) -> &mut [u8] {
        let range = self.range(number, 1);
        if !self.adds(number) {
            return &mut self.data[range];
        }
        let places = self.window.len();
        let slot = &mut self.window[number % places];
        let slot = *slot.get_or_insert_with(|| self.free.pop().expect("a slot for every place"));
        &mut self.staging[slot * self.piece..slot * self.piece + range.len()]
    }

    fn arrived(&mut self, _peer: usize, number: usize) {
        if self.adds(number) {
            let start = Instant::now();
            let places = self.window.len();
            let range = self.range(number, 1);
            // An empty piece has no slot.
            if let Some(slot) = self.window[number % places].take() {
                let sum = &self.staging[slot * self.piece..slot * self.piece + range.len()];
                // The rank that adds the last values divides an average.
                let last = !self.adds(number + self.pieces);
                let (dtype, op) = self.how;
                combine(dtype, op.undivided(), &[Some(sum), None], &mut self.data[range.clone()]);
                if last && op == ReduceOp::Avg {
                    divide(dtype, &mut self.data[range], self.shards.len());
                }
                self.free.push(slot);
            }
            self.cx.stats.add_reduce(start.elapsed());
        }
        self.arrived[number] = true;
        while self.arrived.get(self.first).copied().unwrap_or(false) {
            self.first += 1;
        }
    }

    fn part(&self, number: usize) -> u32 {
        number as u32
    }

    fn progress(&self) -> (u64, u64) {
        self.progress
    }
}

/// Shifts the shards by one rank, so that after the first half rank r has the sum of its own shard.
fn one_back(shards: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut shards = shards.to_vec();
    shards.rotate_right(1);
    shards
}

impl Rounds<'_, '_> {
    /// Runs both halves: every rank gets the combination of all ranks' `data`.
    pub(super) fn all_reduce_by_ring(
        &mut self,
        staging: &mut Vec<u8>,
        how: (DType, ReduceOp),
        data: &mut [u8],
        shards: Vec<Range<usize>>,
    ) -> Result<()> {
        self.run_ring(Phase::Both, staging, how, data, shards)
    }

    /// Runs the first half: each rank's shard of `data` becomes the combination of that shard on all ranks. The other
    /// shards hold partial results afterwards.
    pub(super) fn reduce_shards_by_ring(
        &mut self,
        staging: &mut Vec<u8>,
        how: (DType, ReduceOp),
        data: &mut [u8],
        shards: &[Range<usize>],
    ) -> Result<()> {
        self.run_ring(Phase::Reduce, staging, how, data, one_back(shards))
    }

    /// Runs the second half: every rank has its own shard of `data` and gets the others.
    pub(super) fn gather_shards_by_ring(&mut self, data: &mut [u8], shards: &[Range<usize>]) -> Result<()> {
        let unused = (self.cx.dtype(), ReduceOp::Sum);
        self.run_ring(Phase::Gather, &mut Vec::new(), unused, data, one_back(shards))
    }

    /// Runs a phase. `data` holds this rank's values, or the sums that it already has.
    fn run_ring(
        &mut self,
        phase: Phase,
        staging: &mut Vec<u8>,
        how: (DType, ReduceOp),
        data: &mut [u8],
        shards: Vec<Range<usize>>,
    ) -> Result<()> {
        let (rank, n) = (self.rank(), self.ranks());
        let longest = longest(&shards);
        let piece = piece(longest);
        let pieces = longest.div_ceil(piece).max(1);
        let window = window(piece, (n - 1) * pieces);
        let others = data.len() - shards[rank].len();
        let mut ring = Ring {
            cx: self.cx,
            how,
            phase,
            rank,
            shards,
            piece,
            pieces,
            data,
            staging: grown(staging, if phase == Phase::Gather { 0 } else { window * piece }),
            window: vec![None; window],
            free: (0..window).rev().collect(),
            arrived: Vec::new(),
            first: 0,
            begun: 0,
            progress: self.continues(if phase == Phase::Both { 2 * others } else { others }),
        };
        ring.arrived = vec![false; ring.messages()];
        self.mesh.run(self.cx, &mut ring)
    }
}
