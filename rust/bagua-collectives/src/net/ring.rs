//! all_reduce along a ring (Patarasuk and Yuan, 2009), and its two halves: every rank sends to the next and receives from the one before.
//!
//! The tensor is cut into a shard per rank. In n - 1 rounds each shard goes once round, and every rank adds its own values; in
//! n - 1 more the sums go round. Shards travel in pieces, and a piece is sent on as soon as it has arrived, so that the rounds
//! of different pieces overlap.

use std::ops::Range;
use std::time::Instant;

use super::grown;
use super::reduce::{longest, piece, window};
use super::rounds::Rounds;
use crate::OpContext;
use crate::error::Result;
use crate::reduce::{combine, divide};
use crate::transport::Plan;
use crate::types::{DType, Fingerprint, ReduceOp};

/// Which rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Values go round, then sums.
    Both,
    /// Values only: the sum of a rank's shard ends on the rank before it.
    Reduce,
    /// Sums only: each rank begins with that of the shard after its own.
    Gather,
}

/// The rounds of one operation of two ranks or more.
struct Ring<'a, 'c> {
    /// What the operation says of itself.
    cx: &'a OpContext<'c>,
    /// Type of the elements, and how they are combined.
    how: (DType, ReduceOp),
    phase: Phase,
    /// This rank.
    rank: usize,
    /// By rank: the bytes of its shard.
    shards: Vec<Range<usize>>,
    /// Bytes of a piece: whole elements.
    piece: usize,
    /// Pieces of a shard, the same number for all.
    pieces: usize,
    /// This rank's values, then sums.
    data: &'a mut [u8],
    /// Slots of a piece.
    staging: &'a mut [u8],
    /// By place in the window of messages that may be in flight at once: the slot, if something has arrived.
    window: Vec<Option<usize>>,
    /// Slots that are free.
    free: Vec<usize>,
    /// By message from the rank before: it is there, and combined if it carries values.
    arrived: Vec<bool>,
    /// Messages up to here have all arrived.
    first: usize,
    /// Messages to the next rank that were begun.
    begun: usize,
    /// See [`Plan::progress`].
    progress: (u64, u64),
}

impl Ring<'_, '_> {
    /// Messages each way.
    fn messages(&self) -> usize {
        let halves = if self.phase == Phase::Both { 2 } else { 1 };
        halves * (self.shards.len() - 1) * self.pieces
    }

    /// Rounds that are left out before the first.
    fn skipped(&self) -> usize {
        if self.phase == Phase::Gather { self.shards.len() - 1 } else { 0 }
    }

    /// The bytes of message `number`, `behind` ranks behind its sender's buffers: 0 for what this rank sends, 1 for what it gets.
    fn range(&self, number: usize, behind: usize) -> Range<usize> {
        let n = self.shards.len();
        let round = self.skipped() + number / self.pieces;
        let Range { start, end } = self.shards[(self.rank + 2 * n - behind - round) % n];
        let at = (start + number % self.pieces * self.piece).min(end);
        at..(at + self.piece).min(end)
    }

    /// True for messages that carry values, not sums.
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
        // The first round sends own values; later ones send on what came a round before.
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
            // An empty piece takes no slot.
            if let Some(slot) = self.window[number % places].take() {
                let sum = &self.staging[slot * self.piece..slot * self.piece + range.len()];
                // An average is divided once, by the rank that adds the last values.
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

/// The shards of which rank r has the sum between the two halves: its own.
fn one_back(shards: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut shards = shards.to_vec();
    shards.rotate_right(1);
    shards
}

impl Rounds<'_, '_> {
    /// Both halves: every rank gets the combination of all ranks' `data`.
    pub(super) fn all_reduce_by_ring(
        &mut self,
        staging: &mut Vec<u8>,
        how: (DType, ReduceOp),
        data: &mut [u8],
        shards: Vec<Range<usize>>,
    ) -> Result<()> {
        self.run_ring(Phase::Both, staging, how, data, shards)
    }

    /// The first half: each rank's shard of `data` becomes the combination of all ranks'. The others' hold partial results afterwards.
    pub(super) fn reduce_shards_by_ring(
        &mut self,
        staging: &mut Vec<u8>,
        how: (DType, ReduceOp),
        data: &mut [u8],
        shards: &[Range<usize>],
    ) -> Result<()> {
        self.run_ring(Phase::Reduce, staging, how, data, one_back(shards))
    }

    /// The second half: every rank gets all shards of `data`, of which it has its own.
    pub(super) fn gather_shards_by_ring(&mut self, data: &mut [u8], shards: &[Range<usize>]) -> Result<()> {
        let unused = (self.cx.dtype(), ReduceOp::Sum);
        self.run_ring(Phase::Gather, &mut Vec::new(), unused, data, one_back(shards))
    }

    /// `data` are this rank's values, and the sums that it has.
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
