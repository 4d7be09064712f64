//! Collectives over any mesh of streams, in pieces of bounded size.
//!
//! Groups of up to [`DIRECT`] ranks use direct algorithms, in rank order:
//!
//! | verb | when | how |
//! |---|---|---|
//! | all_reduce | as [`algorithm`] chooses | one-shot or direct (two-shot) |
//! | reduce | at most [`SMALL`] bytes, or 2 ranks | root gets all tensors |
//! | | otherwise | each rank combines its shard and sends the result to root; pieces overlap |
//! | broadcast | at most [`STAR`] ranks | root sends to all |
//! | | otherwise | binomial tree; pieces overlap |
//! | reduce_scatter | always | each rank combines its shard; pieces overlap |
//! | all_gather, gather, scatter, all_to_all | always | direct |
//! | barrier | always | an empty message between every pair |
//!
//! In larger groups, with N the bytes of all shards together, and p the number of peers of a rank:
//!
//! | verb | when | how | rounds | p |
//! |---|---|---|---|---|
//! | all_reduce | as [`algorithm`] chooses | doubling | log2 n | log2 n + 3 |
//! | | | halving | 2 log2 n | 2 log2 n |
//! | | | ring | 2 (n - 1) | 2 |
//! | reduce | at most [`SMALL`] bytes | binomial tree | log2 n | log2 n |
//! | | otherwise | reduce_scatter, and shards to root by a binomial tree | 2 log2 n, or n + log2 n | 2 log2 n |
//! | broadcast | always | binomial tree; pieces overlap | log2 n | log2 n |
//! | reduce_scatter | N / n at least [`RING_SHARD`], n at most 128 | ring, on a copy | n - 1 | 2 |
//! | | otherwise | halving, on a copy | log2 n | 2 log2 n |
//! | all_gather | N / n at least [`RING_SHARD`] | ring | n - 1 | 2 |
//! | | otherwise | dissemination, as Bruck's | log2 n | 2 log2 n |
//! | gather, scatter | always | binomial tree, staged on the ranks between | log2 n | log2 n |
//! | barrier | always | dissemination | log2 n | 2 log2 n |
//! | all_to_all, all_to_all_v, compressed all_reduce | always | direct: each has a message for every pair | 1 | n - 1 |
//! | all_reduce, reduce, reduce_scatter of f16 and bf16 | at most 64 ranks | as up to 16 ranks | 1 or 2 | n - 1 |
//!
//! log2 is rounded up. The peers of the ring, dissemination, halving and the trees are the ranks at distances 1, 2, 4,
//! … on both sides, whatever the verb and its root. All of these together have 2 log2 n peers. If n is a power of two,
//! the peers of doubling are among them.
//!
//! **Up to 16 ranks**, and for f16 and bf16 up to 64, an element is combined from the values of all ranks in rank
//! order, on one rank or identically on all. So the choice of the algorithm never shows in the result. In the verbs
//! without a root, every pair of ranks exchanges at least a header, so both sides of a disagreement notice it.
//!
//! **With more ranks**, values are combined in a different order, which is the same on every rank and in every run, and
//! f16 and bf16 are combined in float32 with one rounding. Some pairs of ranks exchange no message. If such a pair
//! disagrees, a neighbour notices, and the other ranks get the mismatch as the group's first failure. For this, each of
//! these verbs without a root begins with a message to the next rank. Ranks of a tree compare headers only with the
//! ranks above and below them, so if one rank runs a verb with a root and the others a different verb, possibly only
//! the deadline ends the operation.

mod algorithm;
mod direct;
mod dissemination;
mod doubling;
mod element_partition;
mod exchange_rounds;
mod reduce;
mod ring;
#[cfg(test)]
mod tests;
mod tree;
mod two_phase_reduce;

pub use algorithm::Algorithm;

use super::{Collective, HostIo, Incoming, Io, OpContext, Outgoing, Verb, over_exchange};
use crate::error::Result;
use crate::transport::{Mesh, Step};
use crate::types::ReduceOp;
use algorithm::{Chosen, DIRECT, RING_SHARD, SMALL, choose, in_rank_order, is_half};
use element_partition::Pieces;
use exchange_rounds::Rounds;

/// Number of ranks up to which the root of a broadcast sends to all ranks directly.
const STAR: usize = 4;

/// Bytes staged for all peers together, and minimum and maximum size of one piece of one peer.
const STAGING: usize = 16 << 20;
const PIECE: (usize, usize) = (64 << 10, 1 << 20);

/// Collectives over a [`Mesh`] of streams.
pub struct Net {
    mesh: Mesh,
    /// Received data that is not combined yet: one slot per rank. Kept between calls.
    staging: Vec<u8>,
    /// Copy of a tensor that must keep its values, or that is combined as a different type. Kept between calls.
    working: Vec<u8>,
    algorithm: Algorithm,
    limits: Limits,
}

/// Sizes that the verbs of more than [`DIRECT`] ranks use. Equal on all ranks. Tests use small sizes.
#[derive(Clone, Copy)]
struct Limits {
    /// Number of bytes, over all ranks, that go through all rounds together if they are copied or staged.
    chunk: usize,
    /// Minimum size of a shard in bytes for sending the shards along a ring.
    ring_shard: usize,
}

const LIMITS: Limits = Limits { chunk: 8 << 20, ring_shard: RING_SHARD };

impl Net {
    /// Creates the collectives of the mesh's ranks.
    pub fn new(mesh: Mesh) -> Net {
        Net { mesh, staging: Vec::new(), working: Vec::new(), algorithm: Algorithm::Auto, limits: LIMITS }
    }

    /// Sets the algorithm for all_reduce, on which all ranks must agree.
    #[must_use]
    pub fn with(self, algorithm: Algorithm) -> Net {
        Net { algorithm, ..self }
    }

    /// Returns how to cut ranges of elements into pieces. The longest range has `longest` elements of `size` bytes.
    fn pieces(&self, longest: usize, size: usize) -> Pieces {
        let bytes = (STAGING / self.size()).clamp(PIECE.0, PIECE.1);
        Pieces::new(longest, bytes / size)
    }

    /// Returns the peers in the order in which messages to them are started.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank(), self.size());
        (1..size).map(move |distance| (rank + distance) % size)
    }
}

/// Returns the first `len` bytes of the staging memory, which grows if necessary.
fn grown(staging: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if staging.len() < len {
        staging.resize(len, 0);
    }
    &mut staging[..len]
}

fn slots(staging: &mut Vec<u8>, ranks: usize, slot: usize) -> Vec<&mut [u8]> {
    let needed = ranks.checked_mul(slot).expect("slots are bounded by PIECE and SMALL");
    let mut rest = grown(staging, needed);
    (0..ranks).map(|_| rest.split_off_mut(..slot).expect("there is a slot for every rank")).collect()
}

/// Returns the position of every rank's shard in a buffer of `ranks` equal shards.
fn chunks(data: &[u8], ranks: usize) -> impl Fn(usize) -> std::ops::Range<usize> + use<> {
    let each = data.len() / ranks;
    move |rank| rank * each..(rank + 1) * each
}

/// Copies this rank's values to the output of an all_reduce, and returns the output.
fn in_output(io: HostIo<'_>) -> &mut [u8] {
    match io {
        HostIo::InPlace(data) => data,
        HostIo::Split { src, dst } => {
            dst.copy_from_slice(src);
            dst
        }
    }
}

/// Returns the buffer in which a rank gathers all shards, with its own shard in place.
fn gathered(io: HostIo<'_>, rank: usize, ranks: usize) -> &mut [u8] {
    match io {
        HostIo::InPlace(data) => data,
        HostIo::Split { src, dst } => {
            let own = chunks(dst, ranks)(rank);
            dst[own].copy_from_slice(src);
            dst
        }
    }
}

fn split(data: &mut [u8], ranks: usize) -> Vec<&mut [u8]> {
    let each = data.len() / ranks;
    let mut rest = data;
    (0..ranks).map(|_| rest.split_off_mut(..each).expect("the buffer has a shard for every rank")).collect()
}

impl Net {
    fn all_reduce(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp) -> Result<()> {
        let bytes = io.input().len();
        let n = self.size();
        let chosen = if n == 1 { Chosen::OneShot } else { choose(self.algorithm, cx.dtype(), bytes, n) };
        // A ring or doubling that the user chose rounds float16 and bfloat16 at every hop.
        let rounds_once = self.algorithm == Algorithm::Auto && is_half(cx.dtype());
        match chosen {
            Chosen::OneShot if bytes <= SMALL || n == 1 => self.reduce_one_shot(cx, io, op, None),
            Chosen::OneShot => self.reduce_everywhere(cx, io, op),
            Chosen::Direct => self.reduce_two_shot(cx, io, op),
            Chosen::Ring if rounds_once => self.all_reduce_in_phases(cx, in_output(io), op, true),
            Chosen::Ring => self.reduce_ring(cx, in_output(io), op),
            Chosen::Doubling if rounds_once => self.all_reduce_rounded_once(cx, in_output(io), op),
            Chosen::Doubling => self.reduce_doubling(cx, (cx.dtype(), op), in_output(io)),
            Chosen::Halving => self.all_reduce_in_phases(cx, in_output(io), op, false),
        }
    }

    fn reduce(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, op: ReduceOp, root: usize) -> Result<()> {
        let bytes = io.input().len();
        if !in_rank_order(self.algorithm, cx.dtype(), self.size()) {
            return self.reduce_in_phases(cx, io, op, root);
        }
        if bytes <= SMALL { self.reduce_one_shot(cx, io, op, Some(root)) } else { self.reduce_to(cx, io, op, root) }
    }

    fn broadcast(&mut self, cx: &OpContext<'_>, data: &mut [u8], root: usize) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = cx.fingerprint;
        if n <= STAR {
            if rank == root {
                let sends: Vec<_> = self.peers().map(|peer| Outgoing::new(peer, fingerprint, &*data)).collect();
                return self.mesh.exchange(cx, &sends, &mut []);
            }
            return self.mesh.exchange(cx, &[], &mut [Incoming::new(root, fingerprint, data)]);
        }
        self.broadcast_tree(cx, data, root)
    }

    fn all_gather(&mut self, cx: &OpContext<'_>, io: HostIo<'_>) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = cx.fingerprint;
        if n > DIRECT {
            let data = gathered(io, rank, n);
            let shards: Vec<_> = (0..n).map(chunks(data, n)).collect();
            let mut rounds = Rounds::new(&mut self.mesh, cx, data.len() - data.len() / n);
            return if data.len() / n < self.limits.ring_shard {
                dissemination::gather_shards(&mut rounds, data, &shards)
            } else {
                rounds.gather_shards_by_ring(data, &shards)
            };
        }
        let (own, mut parts) = match io {
            HostIo::InPlace(data) => {
                let mut parts = split(data, n);
                (&*std::mem::take(&mut parts[rank]), parts)
            }
            HostIo::Split { src, dst } => {
                let mut parts = split(dst, n);
                parts[rank].copy_from_slice(src);
                (src, parts)
            }
        };
        let sends: Vec<_> = self.peers().map(|peer| Outgoing::new(peer, fingerprint, own)).collect();
        let mut recvs: Vec<_> =
            self.peers().map(|peer| Incoming::new(peer, fingerprint, std::mem::take(&mut parts[peer]))).collect();
        self.mesh.exchange(cx, &sends, &mut recvs)
    }

    fn gather(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, root: usize) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = cx.fingerprint;
        if n > DIRECT {
            return self.gather_tree(cx, io, root);
        }
        if rank != root {
            let data = match &io {
                HostIo::InPlace(data) => &data[chunks(data, n)(rank)],
                HostIo::Split { src, .. } => src,
            };
            return self.mesh.exchange(cx, &[Outgoing::new(root, fingerprint, data)], &mut []);
        }
        let mut parts = split(gathered(io, rank, n), n);
        let mut recvs: Vec<_> =
            self.peers().map(|peer| Incoming::new(peer, fingerprint, std::mem::take(&mut parts[peer]))).collect();
        self.mesh.exchange(cx, &[], &mut recvs)
    }

    fn scatter(&mut self, cx: &OpContext<'_>, io: HostIo<'_>, root: usize) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = cx.fingerprint;
        if n > DIRECT {
            return self.scatter_tree(cx, io, root);
        }
        if rank != root {
            let data = match io {
                HostIo::InPlace(data) => {
                    let own = chunks(data, n)(rank);
                    &mut data[own]
                }
                HostIo::Split { dst, .. } => dst,
            };
            return self.mesh.exchange(cx, &[], &mut [Incoming::new(root, fingerprint, data)]);
        }
        let all = match io {
            HostIo::InPlace(data) => &*data,
            HostIo::Split { src, dst } => {
                dst.copy_from_slice(&src[chunks(src, n)(rank)]);
                src
            }
        };
        let chunk = chunks(all, n);
        let sends: Vec<_> = self.peers().map(|peer| Outgoing::new(peer, fingerprint, &all[chunk(peer)])).collect();
        self.mesh.exchange(cx, &sends, &mut [])
    }

    fn all_to_all(&mut self, cx: &OpContext<'_>, io: HostIo<'_>) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = cx.fingerprint;
        match io {
            HostIo::Split { src, dst } => {
                let chunk = chunks(src, n);
                dst[chunk(rank)].copy_from_slice(&src[chunk(rank)]);
                let mut parts = split(dst, n);
                let sends: Vec<_> =
                    self.peers().map(|peer| Outgoing::new(peer, fingerprint, &src[chunk(peer)])).collect();
                let mut recvs: Vec<_> = self
                    .peers()
                    .map(|peer| Incoming::new(peer, fingerprint, std::mem::take(&mut parts[peer])))
                    .collect();
                self.mesh.exchange(cx, &sends, &mut recvs)
            }
            HostIo::InPlace(data) => {
                let total = data.len() as u64 - data.len() as u64 / n as u64;
                let mut parts = split(data, n);
                let each = parts[rank].len();
                let pieces = self.pieces(each, 1);
                let mut before = 0;
                for step in 0..pieces.steps {
                    let range = pieces.range(step, each);
                    let mut copies = slots(&mut self.staging, n, range.len());
                    for (copy, part) in copies.iter_mut().zip(&parts) {
                        copy.copy_from_slice(&part[range.clone()]);
                    }
                    let peers = (1..n).map(|distance| (rank + distance) % n);
                    let sends: Vec<_> = peers.map(|peer| Outgoing::new(peer, fingerprint, &*copies[peer])).collect();
                    let others = parts.iter_mut().enumerate().filter(|(peer, _)| *peer != rank);
                    let mut recvs: Vec<_> =
                        others.map(|(peer, part)| Incoming::new(peer, fingerprint, &mut part[range.clone()])).collect();
                    self.mesh.exchange_step(cx, Step { part: step as u32, before, total }, &sends, &mut recvs)?;
                    before += (range.len() * (n - 1)) as u64;
                }
                Ok(())
            }
        }
    }

    fn barrier(&mut self, cx: &OpContext<'_>) -> Result<()> {
        if self.size() > DIRECT {
            return self.barrier_by_dissemination(cx);
        }
        let fingerprint = cx.fingerprint;
        let sends: Vec<_> = self.peers().map(|peer| Outgoing::new(peer, fingerprint, &[])).collect();
        let mut recvs: Vec<_> = self.peers().map(|peer| Incoming::new(peer, fingerprint, &mut [])).collect();
        self.mesh.exchange(cx, &sends, &mut recvs)
    }
}

impl Collective for Net {
    fn name(&self) -> &'static str {
        "net"
    }

    fn rank(&self) -> usize {
        self.mesh.rank()
    }

    fn size(&self) -> usize {
        self.mesh.size()
    }

    fn transports(&self) -> Vec<&'static str> {
        self.mesh.names()
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        let mut io = io.into_host()?;
        match verb {
            Verb::AllReduce(op) => self.all_reduce(cx, io, op),
            Verb::Reduce { op, root } => self.reduce(cx, io, op, root),
            Verb::Broadcast { root } => self.broadcast(cx, io.output(), root),
            Verb::AllGather => self.all_gather(cx, io),
            Verb::Gather { root } => self.gather(cx, io, root),
            Verb::Scatter { root } => self.scatter(cx, io, root),
            Verb::ReduceScatter(op) if in_rank_order(self.algorithm, cx.dtype(), self.size()) => {
                self.reduce_chunks(cx, io, op)
            }
            Verb::ReduceScatter(op) => self.reduce_scatter_in_phases(cx, io, op),
            Verb::AllToAll => self.all_to_all(cx, io),
            Verb::Barrier => self.barrier(cx),
            other => over_exchange(self, cx, other, io.into()),
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        self.mesh.exchange(cx, sends, recvs)
    }
}
