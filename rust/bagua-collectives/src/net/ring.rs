//! all_reduce along a ring (Patarasuk and Yuan, 2009): every rank sends to the next and receives from the one before.
//!
//! The tensor is cut into a shard per rank. In n - 1 rounds each shard goes once round, and every rank adds its own values; in
//! n - 1 more the sums go round. DirectReduce travel in pieces, and a piece is sent on as soon as it has arrived, so that the rounds
//! of different pieces overlap.

use std::ops::Range;
use std::time::Instant;

use crate::OpContext;
use crate::reduce::{combine, divide};
use crate::transport::Plan;
use crate::types::{Fingerprint, ReduceOp};

/// One all_reduce, of two ranks or more.
pub(super) struct Ring<'a, 'c> {
    /// What the operation says of itself.
    pub cx: &'a OpContext<'c>,
    /// How elements are combined.
    pub op: ReduceOp,
    /// This rank.
    pub rank: usize,
    /// By rank: the bytes of its shard.
    pub shards: Vec<Range<usize>>,
    /// Bytes of a piece: whole elements.
    pub piece: usize,
    /// Pieces of a shard, the same number for all.
    pub pieces: usize,
    /// This rank's values, then sums.
    pub data: &'a mut [u8],
    /// Slots of a piece.
    pub staging: &'a mut [u8],
    /// By place in the window of messages that may be in flight at once: the slot, if something has arrived.
    pub window: Vec<Option<usize>>,
    /// Slots that are free.
    pub free: Vec<usize>,
    /// By message from the rank before: it is there, and combined if it carries values.
    pub arrived: Vec<bool>,
    /// Messages up to here have all arrived.
    pub first: usize,
    /// Messages to the next rank that were begun.
    pub begun: usize,
}

impl Ring<'_, '_> {
    /// Messages each way.
    pub fn messages(&self) -> usize {
        2 * (self.shards.len() - 1) * self.pieces
    }

    /// The bytes of message `number`, `behind` ranks behind its sender's buffers: 0 for what this rank sends, 1 for what it gets.
    fn range(&self, number: usize, behind: usize) -> Range<usize> {
        let n = self.shards.len();
        let round = number / self.pieces;
        let Range { start, end } = self.shards[(self.rank + 2 * n - behind - round) % n];
        let at = (start + number % self.pieces * self.piece).min(end);
        at..(at + self.piece).min(end)
    }

    /// True for messages that carry values, not sums.
    fn adds(&self, number: usize) -> bool {
        number < (self.shards.len() - 1) * self.pieces
    }
}

impl Plan for Ring<'_, '_> {
    fn counts(&self, peer: usize) -> (usize, usize) {
        let n = self.shards.len();
        let next = (self.rank + 1) % n == peer;
        let before = (peer + 1) % n == self.rank;
        (if next { self.messages() } else { 0 }, if before { self.messages() } else { 0 })
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
                let op = self.op.undivided();
                combine(self.cx.dtype(), op, &[Some(sum), None], &mut self.data[range.clone()]);
                if last && self.op == ReduceOp::Avg {
                    divide(self.cx.dtype(), &mut self.data[range], self.shards.len());
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
        let own = self.shards[self.rank].len() as u64;
        (0, 2 * (self.data.len() as u64 - own))
    }
}
