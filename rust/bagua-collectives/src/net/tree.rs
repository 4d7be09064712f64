//! Binomial trees, rooted at any rank: the verbs with a root in ceil(log2 n) rounds.
//!
//! Ranks are numbered from root on. The parent of a number is that number without its lowest set bit, for example with
//! 8 ranks:
//!
//! ```text
//! 0 --+-- 1
//!     +-- 2 --- 3
//!     +-- 4 --+-- 5
//!             +-- 6 --- 7
//! ```
//!
//! So the numbers of a subtree are consecutive, and the shards of a subtree form one message, or two if they wrap
//! around after the last rank. Gather and scatter stage the shards of a subtree, in pieces of [`super::Limits::chunk`]
//! bytes over all ranks. Root and the leaves stage nothing, and other ranks up to half of that. A byte moves once for
//! every set bit in its rank's number: at most ceil(log2 n) times, and half of that on average.

use std::ops::Range;
use std::time::Instant;

use super::element_partition::Pieces;
use super::exchange_rounds::{Rounds, circular, disjoint};
use super::{Net, chunks, gathered, grown, slots};
use crate::error::Result;
use crate::reduce::{combine, divide};
use crate::transport::Step;
use crate::types::{DType, ReduceOp};
use crate::{Collective, HostIo, Incoming, OpContext, Outgoing};

#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    number: usize,
    root: usize,
    n: usize,
}

impl Tree {
    /// Creates the tree of `n` ranks under `root`, seen from `rank`.
    pub fn new(rank: usize, n: usize, root: usize) -> Tree {
        Tree { number: (rank + n - root) % n, root, n }
    }

    fn rank(&self, number: usize) -> usize {
        (number + self.root) % self.n
    }

    fn number(&self, rank: usize) -> usize {
        (rank + self.n - self.root) % self.n
    }

    /// Returns the number of ranks in the subtree of a number.
    fn span(&self, number: usize) -> usize {
        let whole = number.checked_sub(1).map_or(self.n, |_| 1 << number.trailing_zeros());
        whole.min(self.n - number)
    }

    /// Returns the parent of this rank, or `None` on root.
    pub fn parent(&self) -> Option<usize> {
        (self.number > 0).then(|| self.rank(self.number & (self.number - 1)))
    }

    /// Returns the children of this rank, those with the largest subtrees first.
    pub fn children(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let (tree, span) = (*self, self.span(self.number));
        let bits = span.next_power_of_two().trailing_zeros();
        (0..bits).rev().map(move |bit| tree.rank(tree.number + (1 << bit)))
    }

    /// Returns the ranks of a rank's subtree as runs of neighbours, whose shards form one message. At most two runs if
    /// shards are `whole`, and otherwise one run per rank.
    fn runs(&self, rank: usize, whole: bool) -> Vec<Range<usize>> {
        let runs = circular(rank, self.span(self.number(rank)), self.n);
        if whole { runs.collect() } else { runs.flatten().map(|rank| rank..rank + 1).collect() }
    }

    /// Returns the byte ranges of the messages with the shards of a rank's subtree.
    fn messages(&self, rank: usize, whole: bool, place: Place<'_>) -> impl Iterator<Item = Range<usize>> {
        self.runs(rank, whole).into_iter().map(|run| place(run.start).start..place(run.end - 1).end)
    }

    /// Returns the messages of all ranks below this one, each with the child that it passes through.
    fn below(&self, whole: bool, place: Place<'_>) -> Vec<(usize, Range<usize>)> {
        let of = |child| self.messages(child, whole, place).map(move |range| (child, range));
        self.children().flat_map(of).collect()
    }

    /// Returns the position of a rank's shard if only this rank's subtree is staged, in pieces of `len` bytes.
    fn staged(&self, rank: usize, len: usize) -> Range<usize> {
        let at = self.number(rank) - self.number;
        at * len..(at + 1) * len
    }
}

/// A function from a rank to its shard's position in a buffer. Shards in the same message must be adjacent.
type Place<'a> = &'a dyn Fn(usize) -> Range<usize>;

/// Gathers the shards of all ranks on root. Each rank has its own shard in place in `data`, which has room for every
/// rank of its subtree.
pub(super) fn gather_up(
    rounds: &mut Rounds<'_, '_>,
    tree: Tree,
    data: &mut [u8],
    whole: bool,
    place: Place<'_>,
) -> Result<()> {
    let (peers, ranges): (Vec<_>, Vec<_>) = tree.below(whole, place).into_iter().unzip();
    if !peers.is_empty() {
        rounds.exchange([], peers.into_iter().zip(disjoint(data, &ranges)))?;
    }
    let Some(parent) = tree.parent() else { return Ok(()) };
    let data = &*data;
    rounds.exchange(tree.messages(rounds.rank(), whole, place).map(|range| (parent, &data[range])), [])
}

impl Net {
    /// Sends root's bytes to every rank. Pieces overlap.
    pub(super) fn broadcast_tree(&mut self, cx: &OpContext<'_>, data: &mut [u8], root: usize) -> Result<()> {
        let fingerprint = cx.fingerprint;
        let tree = Tree::new(self.rank(), self.size(), root);
        let pieces = self.pieces(data.len(), 1);
        for step in 0..=pieces.steps {
            let range = pieces.range(step, data.len());
            let (before, rest) = data.split_at_mut(range.start);
            let arriving = &mut rest[..range.len()];
            let arrived = &before[step.saturating_sub(1).saturating_mul(pieces.each).min(before.len())..];
            let sends: Vec<_> =
                tree.children().filter(|_| step > 0).map(|peer| Outgoing::new(peer, fingerprint, arrived)).collect();
            let mut recvs: Vec<_> = tree
                .parent()
                .filter(|_| step < pieces.steps)
                .map(|peer| Incoming::new(peer, fingerprint, arriving))
                .into_iter()
                .collect();
            let at = Step { part: 0, before: before.len() as u64, total: 0 };
            self.mesh.exchange_step(cx, at, &sends, &mut recvs)?;
        }
        Ok(())
    }

    /// Combines `data` of all ranks on root. On other ranks, it holds partial results afterwards.
    pub(super) fn reduce_tree(
        &mut self,
        cx: &OpContext<'_>,
        (dtype, op): (DType, ReduceOp),
        data: &mut [u8],
        root: usize,
    ) -> Result<()> {
        let n = self.size();
        let tree = Tree::new(self.rank(), n, root);
        // The nearest rank comes first.
        let children: Vec<usize> = tree.children().rev().collect();
        let mut rounds = Rounds::new(&mut self.mesh, cx, children.len() * data.len());
        if !children.is_empty() {
            let mut landing = slots(&mut self.staging, children.len(), data.len());
            rounds.exchange([], children.into_iter().zip(landing.iter_mut().map(|slot| &mut **slot)))?;
            let start = Instant::now();
            let inputs: Vec<_> = std::iter::once(None).chain(landing.iter().map(|slot| Some(&**slot))).collect();
            combine(dtype, op.undivided(), &inputs, data);
            cx.stats.add_reduce(start.elapsed());
        }
        match tree.parent() {
            Some(parent) => rounds.exchange([(parent, &*data)], [])?,
            None if op == ReduceOp::Avg => divide(dtype, data, n),
            None => {}
        }
        Ok(())
    }

    /// Gathers the shards of all ranks on root.
    pub(super) fn gather_tree(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, root: usize) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let tree = Tree::new(rank, n, root);
        if rank == root {
            let data = gathered(io, rank, n);
            let each = data.len() / n;
            let pieces = columns(each, n, self.limits.chunk);
            let mut rounds = Rounds::new(&mut self.mesh, cx, data.len() - each);
            for range in (0..pieces.steps).map(|step| pieces.range(step, each)) {
                let place = |rank| rank * each + range.start..rank * each + range.end;
                gather_up(&mut rounds, tree, data, pieces.steps == 1, &place)?;
            }
            return Ok(());
        }
        let own = match &io {
            HostIo::InPlace(data) => &data[chunks(data, n)(rank)],
            HostIo::Split { src, .. } => src,
        };
        let span = tree.span(tree.number);
        let pieces = columns(own.len(), n, self.limits.chunk);
        let mut rounds = Rounds::new(&mut self.mesh, cx, (span - 1) * own.len());
        for range in (0..pieces.steps).map(|step| pieces.range(step, own.len())) {
            let parent = tree.parent().expect("this rank is not root");
            if span == 1 {
                rounds.exchange([(parent, &own[range])], [])?;
                continue;
            }
            let place = |rank| tree.staged(rank, range.len());
            let staged = grown(&mut self.staging, span * range.len());
            staged[..range.len()].copy_from_slice(&own[range.clone()]);
            gather_up(&mut rounds, tree, staged, pieces.steps == 1, &place)?;
        }
        Ok(())
    }

    /// Sends each rank its shard of root's data.
    pub(super) fn scatter_tree(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, root: usize) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let tree = Tree::new(rank, n, root);
        if rank == root {
            let all = match io {
                HostIo::InPlace(data) => &*data,
                HostIo::Split { src, dst } => {
                    dst.copy_from_slice(&src[chunks(src, n)(rank)]);
                    src
                }
            };
            let each = all.len() / n;
            let pieces = columns(each, n, self.limits.chunk);
            let mut rounds = Rounds::new(&mut self.mesh, cx, 0);
            for range in (0..pieces.steps).map(|step| pieces.range(step, each)) {
                let place = |rank| rank * each + range.start..rank * each + range.end;
                let sends = tree.below(pieces.steps == 1, &place);
                rounds.exchange(sends.into_iter().map(|(child, range)| (child, &all[range])), [])?;
            }
            return Ok(());
        }
        let own = match io {
            HostIo::InPlace(data) => {
                let own = chunks(data, n)(rank);
                &mut data[own]
            }
            HostIo::Split { dst, .. } => dst,
        };
        let span = tree.span(tree.number);
        let pieces = columns(own.len(), n, self.limits.chunk);
        let each = own.len();
        let mut rounds = Rounds::new(&mut self.mesh, cx, span * each);
        for range in (0..pieces.steps).map(|step| pieces.range(step, each)) {
            let parent = tree.parent().expect("this rank is not root");
            if span == 1 {
                rounds.exchange([], [(parent, &mut own[range])])?;
                continue;
            }
            let place = |rank| tree.staged(rank, range.len());
            let whole = pieces.steps == 1;
            let staged = grown(&mut self.staging, span * range.len());
            let ranges: Vec<_> = tree.messages(rank, whole, &place).collect();
            rounds.exchange([], disjoint(staged, &ranges).into_iter().map(|part| (parent, part)))?;
            own[range.clone()].copy_from_slice(&staged[..range.len()]);
            let (staged, sends) = (&*staged, tree.below(whole, &place));
            rounds.exchange(sends.into_iter().map(|(child, range)| (child, &staged[range])), [])?;
        }
        Ok(())
    }
}

/// Returns the pieces of a shard of `each` bytes. A piece of all ranks together has at most `chunk` bytes.
fn columns(each: usize, n: usize, chunk: usize) -> Pieces {
    Pieces::new(each, chunk / n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_but_root_is_the_child_of_its_parent_and_in_the_subtree_of_every_rank_above() {
        for n in 1..40 {
            for root in [0, n / 2, n - 1] {
                let trees: Vec<Tree> = (0..n).map(|rank| Tree::new(rank, n, root)).collect();
                let mut children: Vec<usize> = trees.iter().flat_map(Tree::children).collect();
                children.sort_unstable();
                assert_eq!(children, (0..n).filter(|rank| *rank != root).collect::<Vec<_>>());
                for (rank, tree) in trees.iter().enumerate() {
                    assert!(tree.children().all(|child| trees[child].parent() == Some(rank)));
                    let below: usize = tree.children().map(|child| trees[child].span(trees[child].number)).sum();
                    assert_eq!(tree.span(tree.number), 1 + below);
                    assert!(tree.children().count() <= n.next_power_of_two().trailing_zeros() as usize);
                    assert!(tree.runs(rank, true).len() <= 2);
                    assert_eq!(tree.runs(rank, false).len(), 1 + below);
                }
            }
        }
    }
}
