//! The reducing verbs of [`Net`]: who combines what, and the buffers for it.

use std::ops::Range;

use super::direct::{Cut, Place, Results, Shares, fold};
use super::partition::share;
use super::ring::Ring;
use super::{Net, slots};
use crate::collective::{Collective, HostIo, Incoming, OpContext, Outgoing};
use crate::error::Result;
use crate::transport::Mesh;
use crate::types::ReduceOp;

/// Bytes of all pieces that may be under way at once.
const STAGING: usize = 16 << 20;

/// The shortest and the longest piece. A piece is combined while it is in the second-level cache, and a share has several, so
/// that the first result is on its way while inputs still arrive.
const PIECE: (usize, usize) = (64 << 10, 256 << 10);

/// Pieces that a share is cut into where that makes them neither too short nor too long.
const CUTS: usize = 4;

/// The fewest and the most pieces that may be under way at once.
const WINDOW: (usize, usize) = (2, 16);

/// Bytes of a piece of shares of which the longest has `longest` bytes; a multiple of every element's size.
fn piece(longest: usize) -> usize {
    longest.div_ceil(CUTS).clamp(PIECE.0, PIECE.1).min(longest.max(1)).next_multiple_of(64)
}

/// Bytes of the longest share.
fn longest(shares: &[Range<usize>]) -> usize {
    shares.iter().map(Range::len).max().unwrap_or(0)
}

/// At least so many bytes.
fn grown(staging: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if staging.len() < len {
        staging.resize(len, 0);
    }
    &mut staging[..len]
}

impl Net {
    /// Root, or every rank where there is none, gets all tensors whole and combines them.
    pub(super) fn reduce_whole(
        &mut self,
        cx: &OpContext<'_>,
        io: HostIo<'_>,
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = cx.fingerprint;
        let combines = root.is_none_or(|root| root == rank);
        let (src, dst) = match io {
            HostIo::InPlace(data) if combines => (None, data),
            HostIo::InPlace(data) => (Some(&*data), &mut [][..]),
            HostIo::Split { src, dst } => (Some(src), dst),
        };
        let own = src.unwrap_or(&*dst);
        let targets = self.peers().filter(|peer| root.is_none_or(|root| root == *peer));
        let sends: Vec<_> = targets.map(|peer| Outgoing::new(peer, fingerprint, own)).collect();
        let mut landing = slots(&mut self.staging, n, if combines { own.len() } else { 0 });
        let mut recvs: Vec<_> = Vec::new();
        if combines {
            let others = landing.iter_mut().enumerate().filter(|(peer, _)| *peer != rank);
            recvs.extend(others.map(|(peer, data)| Incoming::new(peer, fingerprint, &mut **data)));
        }
        self.mesh.exchange(cx, &sends, &mut recvs)?;
        drop(recvs);
        if combines {
            let inputs: Vec<_> =
                landing.iter().enumerate().map(|(peer, slot)| if peer == rank { src } else { Some(&**slot) }).collect();
            fold(cx, op, &inputs, dst);
        }
        Ok(())
    }

    /// Everybody's share of a tensor, in bytes.
    fn shares(&self, len: usize, size: usize) -> Vec<Range<usize>> {
        let n = self.size();
        let share = |rank| share(len / size, n, rank);
        (0..n).map(share).map(|share| share.start * size..share.end * size).collect()
    }

    /// Every rank combines everything.
    pub(super) fn reduce_everywhere(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let place = match io {
            HostIo::InPlace(data) => Place::Whole(data),
            HostIo::Split { src, dst } => Place::Two(src, dst),
        };
        let shares = vec![0..place.len(); self.size()];
        self.run_shares(cx, op, place, shares, Results::Kept)
    }

    /// Each rank combines its share of the elements and sends the result to all.
    pub(super) fn reduce_shares(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let place = match io {
            HostIo::InPlace(data) => Place::Whole(data),
            HostIo::Split { src, dst } => Place::Two(src, dst),
        };
        let shares = self.shares(place.len(), cx.dtype().size());
        self.run_shares(cx, op, place, shares, Results::All)
    }

    /// Each rank combines its share of the elements and sends the result to root; of two ranks root combines everything.
    pub(super) fn reduce_to(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp, root: usize) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let len = io.input().len();
        let shares = if n == 2 {
            (0..n).map(|owner| 0..if owner == root { len } else { 0 }).collect()
        } else {
            self.shares(len, cx.dtype().size())
        };
        // A rank that gets nothing has no other place for what it combines.
        let mut kept = vec![0; if rank == root { 0 } else { shares[rank].len() }];
        let place = match io {
            HostIo::InPlace(data) if rank == root => Place::Whole(data),
            HostIo::Split { src, dst } if rank == root => Place::Two(src, dst),
            HostIo::InPlace(data) => Place::Share(data, &mut kept),
            HostIo::Split { src, .. } => Place::Share(src, &mut kept),
        };
        self.run_shares(cx, op, place, shares, Results::Root(root))
    }

    /// Each rank combines its own chunk of all tensors.
    pub(super) fn reduce_chunks(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let place = match io {
            HostIo::InPlace(data) => Place::Whole(data),
            HostIo::Split { src, dst } => Place::Share(src, dst),
        };
        let shares = self.shares(place.len(), cx.dtype().size());
        self.run_shares(cx, op, place, shares, Results::Kept)
    }

    fn run_shares(
        &mut self,
        cx: &OpContext<'_>,
        op: ReduceOp,
        place: Place<'_>,
        shares: Vec<Range<usize>>,
        results: Results,
    ) -> Result<()> {
        let piece = piece(longest(&shares));
        let cut = Cut { shares, piece };
        let (mesh, mut plan) = self.prepare(cx, op, place, cut, results);
        // For a rank that is alone.
        plan.fold();
        mesh.run(cx, &mut plan)
    }

    /// What travels, and what carries it.
    fn prepare<'a, 'c>(
        &'a mut self,
        cx: &'a OpContext<'c>,
        op: ReduceOp,
        place: Place<'a>,
        cut: Cut,
        results: Results,
    ) -> (&'a mut Mesh, Shares<'a, 'c>) {
        let (rank, n) = (self.rank(), self.size());
        let most = (0..n).map(|owner| cut.pieces(owner)).max().unwrap_or(1);
        let window = window(n * cut.piece, most);
        let own = cut.shares[rank].len();
        let gets = results == Results::All || results == Results::Root(rank);
        let total = (own * (n - 1) + if gets { place.len() - own } else { 0 }) as u64;
        let overlap = n > 1 && own > 0 && cut.shares.iter().all(|share| *share == cut.shares[rank]);
        let waits_for_sending = overlap && matches!(place, Place::Whole(_));
        let pieces = cut.pieces(rank);
        let shares = Shares {
            cx,
            op,
            rank,
            results,
            place,
            staging: grown(&mut self.staging, window * n * cut.piece),
            cut,
            window: vec![(None, 0); window],
            free: (0..window).rev().collect(),
            unsent: if waits_for_sending { vec![n - 1; pieces] } else { Vec::new() },
            folded: 0,
            came: vec![0; n],
            begun: vec![(0, 0); n],
            total,
        };
        (&mut self.mesh, shares)
    }

    /// Sums go round a ring. `data` are this rank's values.
    pub(super) fn reduce_ring(&mut self, cx: &OpContext<'_>, data: &mut [u8], op: ReduceOp) -> Result<()> {
        let n = self.size();
        let shares = self.shares(data.len(), cx.dtype().size());
        let longest = longest(&shares);
        let piece = piece(longest);
        let pieces = longest.div_ceil(piece).max(1);
        let window = window(piece, (n - 1) * pieces);
        let mut plan = Ring {
            cx,
            op,
            rank: self.mesh.rank(),
            shares,
            piece,
            pieces,
            data,
            staging: grown(&mut self.staging, window * piece),
            window: vec![None; window],
            free: (0..window).rev().collect(),
            arrived: Vec::new(),
            first: 0,
            begun: 0,
        };
        plan.arrived = vec![false; plan.messages()];
        self.mesh.run(cx, &mut plan)
    }
}

/// How many pieces may be under way at once, of `each` bytes of staging and `pieces` in all.
fn window(each: usize, pieces: usize) -> usize {
    (STAGING / each).clamp(WINDOW.0, WINDOW.1).min(pieces.max(1))
}
