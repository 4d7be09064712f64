//! Hierarchical collectives, made from any two collectives: first inside each host, then between the hosts' leaders,
//! and then inside each host again. The leader of a host is its first rank.
//!
//! ```text
//! host 0: ranks 0 1 2 --> 0            0 --> ranks 0 1 2
//!                         |  leaders   |
//! host 1: ranks 3 4 5 --> 3            3 --> ranks 3 4 5
//! ```
//!
//! The two collectives are `shm` and `net` in a group of several hosts, or those that the group connects for
//! `hierarchical`. all_reduce, reduce,
//! broadcast and barrier are hierarchical. The other verbs would move the same bytes more often in a hierarchy, so they
//! use one flat mesh with the best link for each pair.
//!
//! Because sums are formed inside hosts first, results equal those of the flat collectives within rounding. Repeated
//! runs give the same bits. The sum of a host may exceed the largest float16, 65504, even if the average of all ranks
//! does not. An average of float16 is therefore computed from the hosts' averages, weighted by the number of ranks.
//!
//! Every phase runs under the fingerprint of the whole operation. The leaders notice a difference between hosts, and
//! the other ranks get it as the group's first failure.
//!
//! Large tensors on the host are processed in chunks, so that the scratch memory stays bounded. The phases of different
//! chunks do not overlap: leaders that added up the next chunk while the current one was in transit were not faster,
//! within the spread of two runs (2 hosts of 2 ranks on 2 cores, 16 MiB at 1, 3 and 10 Gbit/s and at full rate,
//! `benchmarks/network.py`).

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::verbs_over_exchange::in_place;
use super::{Collective, HostIo, Incoming, Io, OpContext, Outgoing, Verb, gossip};
use crate::error::{Error, Result};
use crate::reduce::{divide, sum_over};
use crate::same_ranks_as;
use crate::types::{DType, ReduceOp};

/// Size in bytes of a chunk that goes through all phases: a few times the chunk of the collectives below.
const CHUNK: usize = 512 << 10;

const LEADER: usize = 0;

/// Returns the operation that the ranks of a host use if the leaders combine by `op`.
fn inside_hosts(op: ReduceOp, dtype: DType) -> ReduceOp {
    if dtype == DType::F16 { op } else { op.undivided() }
}

/// The collective of the leaders, each of which contributes the combined input of its host. Divides averages by the
/// number of ranks on all hosts.
struct Leaders {
    inner: Box<dyn Collective>,
    /// Number of ranks on all hosts.
    ranks: usize,
    /// Number of ranks on this host.
    here: usize,
    /// Number of ranks on the host with the most ranks.
    most: usize,
}

impl Leaders {
    /// Averages float16 over all ranks, from the average of each host. No step exceeds the largest input of any rank:
    /// hosts with fewer ranks are scaled down first, and the average over the hosts is scaled up at the end.
    fn average_averages(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        let weighed = self.most * self.size();
        if weighed == self.ranks {
            return self.inner.run(cx, verb, io);
        }
        let mut io = io.into_host()?;
        let mut scratch = io.input().to_vec();
        multiply(&scratch, io.output(), self.here, self.most);
        self.inner.run(cx, verb, Io::in_place(io.output()))?;
        if verb.root().is_none_or(|root| root == self.rank()) {
            scratch.copy_from_slice(io.output());
            multiply(&scratch, io.output(), weighed, self.ranks);
        }
        Ok(())
    }
}

/// Computes `out = from * times / divisor` in float16, rounded once.
fn multiply(from: &[u8], out: &mut [u8], times: usize, divisor: usize) {
    let common =
        (1..=times).rev().find(|common| times.is_multiple_of(*common) && divisor.is_multiple_of(*common)).unwrap_or(1);
    sum_over(DType::F16, &vec![Some(from); times / common], out, divisor / common);
}

impl Collective for Leaders {
    same_ranks_as!(self => self.inner);

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, mut io: Io<'_>) -> Result<()> {
        let sum = match verb {
            Verb::AllReduce(ReduceOp::Avg) => Verb::AllReduce(ReduceOp::Sum),
            Verb::Reduce { op: ReduceOp::Avg, root } => Verb::Reduce { op: ReduceOp::Sum, root },
            _ => return self.inner.run(cx, verb, io),
        };
        if cx.dtype() == DType::F16 {
            return self.average_averages(cx, verb, io);
        }
        self.inner.run(cx, sum, io.reborrow())?;
        if verb.root().is_none_or(|root| root == self.rank()) {
            divide(cx.dtype(), io.into_output().into_host()?, self.ranks);
        }
        Ok(())
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        self.inner.exchange(cx, sends, recvs)
    }

    fn end(&mut self) {
        self.inner.end();
    }
}

/// Hierarchical collectives that own the collectives they use.
pub struct Hier {
    intra: Box<dyn Collective>,
    /// Collective of the leaders. A leader's rank in it is the index of its host. `None` on ranks that are not leaders.
    /// Averages are over the ranks of all hosts.
    inter: Option<Leaders>,
    /// Collective of all ranks for the verbs that are not hierarchical. Without it, the verbs over messages are
    /// hierarchical.
    flat: Option<Box<dyn Collective>>,
    hosts: Vec<Vec<usize>>,
    rank: usize,
    size: usize,
    /// Memory in which a leader gathers data that it must not write to its tensor.
    scratch: Vec<u8>,
}

impl Hier {
    /// Creates the hierarchy. `hosts` are the group ranks of each host, ascending, and the hosts are ordered by their
    /// first rank. `rank` is this process's rank, `intra` spans its host, and `inter` (only on leaders) the leaders.
    /// Panics if the arguments do not fit together. The caller derives all of them from one list of hosts.
    pub fn new(
        intra: Box<dyn Collective>,
        inter: Option<Box<dyn Collective>>,
        hosts: Vec<Vec<usize>>,
        rank: usize,
    ) -> Hier {
        let here = hosts.iter().position(|host| host.contains(&rank));
        let here = here.expect("this rank is on one of the hosts");
        assert_eq!((intra.size(), hosts[here][intra.rank()]), (hosts[here].len(), rank));
        assert_eq!(inter.is_some(), intra.rank() == LEADER);
        assert!(inter.as_ref().is_none_or(|inter| (inter.size(), inter.rank()) == (hosts.len(), here)));
        let size = hosts.iter().map(Vec::len).sum();
        let most = hosts.iter().map(Vec::len).max().unwrap_or(1);
        let inter = inter.map(|inner| Leaders { inner, ranks: size, here: hosts[here].len(), most });
        Hier { intra, inter, flat: None, hosts, rank, size, scratch: Vec::new() }
    }

    /// Adds a collective of all ranks for the verbs that are not hierarchical. Panics like [`Hier::new`].
    #[must_use]
    pub fn with_flat(self, flat: impl Collective + 'static) -> Hier {
        assert_eq!((flat.rank(), flat.size()), (self.rank, self.size));
        Hier { flat: Some(Box::new(flat)), ..self }
    }

    /// Runs an all_reduce, or a verb over messages. In verbs over messages, a host acts as one member, with the sum or
    /// mean of its ranks in full precision. Returns the errors of [`Collective::run`], and `NotImplemented` for verbs
    /// that are not hierarchical.
    fn run_by_host(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, mut io: Io<'_>) -> Result<()> {
        match verb {
            Verb::AllReduce(op) => loop {
                // A collective on device memory cuts the tensor itself.
                let width = if io.device()?.is_none() { CHUNK.min(io.len()) } else { io.len() };
                let (chunk, rest) = io.split_at(width);
                self.by_leaders(cx, verb, inside_hosts(op, cx.dtype()), chunk)?;
                if rest.is_empty() {
                    return Ok(());
                }
                io = rest;
            },
            Verb::CompressedAllReduce(_) => self.by_leaders(cx, verb, ReduceOp::Sum, io),
            Verb::NeighborAverage { .. } => self.by_leaders(cx, verb, ReduceOp::Avg, io.into_host()?.into()),
            Verb::CompressedRing { .. } => {
                let mut weights = in_place(verb, io)?;
                self.by_leaders(cx, verb, ReduceOp::Avg, Io::InPlace(weights.reborrow()))?;
                let replicas = &mut cx.extra.borrow_mut().replicas;
                replicas.as_mut().ok_or_else(gossip::no_replicas)?.own.copy_in_place(weights.as_buffer())
            }
            _ => Err(Error::NotImplemented(format!("{} has no hierarchical form", verb.kind().name()))),
        }
    }

    /// Reduces to each host's leader, runs the verb between the leaders, and broadcasts the result inside each host.
    fn by_leaders(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, op: ReduceOp, mut io: Io<'_>) -> Result<()> {
        let Hier { intra, inter, .. } = self;
        if let Some(inter) = inter.as_mut().filter(|_| intra.size() == 1) {
            return inter.run(cx, verb, io);
        }
        intra.run(cx, Verb::Reduce { op, root: LEADER }, io.reborrow())?;
        let mut data = io.into_output();
        if let Some(inter) = inter {
            inter.run(cx, verb, Io::InPlace(data.reborrow()))?;
        }
        intra.run(cx, Verb::Broadcast { root: LEADER }, Io::InPlace(data))
    }

    /// Returns the index of a rank's host, and the rank's index on that host.
    fn index_of(&self, rank: usize) -> (usize, usize) {
        let on = |host: &Vec<usize>| host.iter().position(|member| *member == rank);
        let found = self.hosts.iter().enumerate().find_map(|(host, members)| on(members).map(|local| (host, local)));
        found.expect("every rank of the group is on one of the hosts")
    }

    /// Sends one chunk from `from` to `to`, both on this host. Does nothing on other ranks.
    fn forward(&mut self, cx: &OpContext<'_>, data: &mut [u8], from: usize, to: usize) -> Result<()> {
        if from == to {
            Ok(())
        } else if self.intra.rank() == from {
            self.intra.exchange(cx, &[Outgoing::new(to, cx.fingerprint, &*data)], &mut [])
        } else if self.intra.rank() == to {
            self.intra.exchange(cx, &[], &mut [Incoming::new(from, cx.fingerprint, data)])
        } else {
            Ok(())
        }
    }

    fn reduce(&mut self, cx: &OpContext<'_>, mut io: HostIo<'_>, op: ReduceOp, root: usize) -> Result<()> {
        let (root_host, root_local) = self.index_of(root);
        let (my_host, _) = self.index_of(self.rank);
        let len = io.input().len();
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(len.min(CHUNK), 0);
        for range in chunks(len) {
            let sum = &mut scratch[..range.len()];
            let to_leader = Verb::Reduce { op: inside_hosts(op, cx.dtype()), root: LEADER };
            self.intra.run(cx, to_leader, Io::split(&io.input()[range.clone()], sum))?;
            if let Some(inter) = &mut self.inter {
                inter.run(cx, Verb::Reduce { op, root: root_host }, Io::in_place(sum))?;
            }
            if my_host == root_host {
                self.forward(cx, sum, LEADER, root_local)?;
            }
            if self.rank == root {
                io.output()[range].copy_from_slice(sum);
            }
        }
        self.scratch = scratch;
        Ok(())
    }

    fn broadcast(&mut self, cx: &OpContext<'_>, data: &mut [u8], root: usize) -> Result<()> {
        let (root_host, root_local) = self.index_of(root);
        let (my_host, _) = self.index_of(self.rank);
        for range in chunks(data.len()) {
            let chunk = &mut data[range];
            if my_host == root_host {
                self.forward(cx, chunk, root_local, LEADER)?;
            }
            if let Some(inter) = &mut self.inter {
                inter.run(cx, Verb::Broadcast { root: root_host }, Io::in_place(chunk))?;
            }
            self.intra.run(cx, Verb::Broadcast { root: LEADER }, Io::in_place(chunk))?;
        }
        Ok(())
    }

    fn barrier(&mut self, cx: &OpContext<'_>) -> Result<()> {
        self.intra.run(cx, Verb::Barrier, Io::none())?;
        if let Some(inter) = &mut self.inter {
            inter.run(cx, Verb::Barrier, Io::none())?;
        }
        self.intra.run(cx, Verb::Barrier, Io::none())
    }
}

/// Returns the chunks of a tensor. An empty tensor has one empty chunk, so that fingerprints are compared nevertheless.
fn chunks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.div_ceil(CHUNK).max(1)).map(move |chunk| chunk * CHUNK..((chunk + 1) * CHUNK).min(len))
}

impl Collective for Hier {
    fn name(&self) -> &'static str {
        "hier"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn transports(&self) -> Vec<&'static str> {
        self.flat.as_ref().map_or_else(Vec::new, |flat| flat.transports())
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        let by_host = matches!(verb, Verb::AllReduce(_) | Verb::Reduce { .. } | Verb::Broadcast { .. } | Verb::Barrier);
        if let Some(flat) = self.flat.as_mut().filter(|_| !by_host) {
            return flat.run(cx, verb, io);
        }
        cx.stats.hierarchical.fetch_add(1, Relaxed);
        match verb {
            Verb::Reduce { op, root } => self.reduce(cx, io.into_host()?, op, root),
            Verb::Broadcast { root } => self.broadcast(cx, io.into_host()?.output(), root),
            Verb::Barrier => self.barrier(cx),
            _ => self.run_by_host(cx, verb, io),
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        match &mut self.flat {
            Some(flat) => flat.exchange(cx, sends, recvs),
            None => {
                Err(Error::NotImplemented("this hierarchical collective cannot send messages between hosts".to_owned()))
            }
        }
    }

    fn end(&mut self) {
        self.intra.end();
        if let Some(inter) = &mut self.inter {
            inter.end();
        }
        if let Some(flat) = &mut self.flat {
            flat.end();
        }
    }
}

#[cfg(test)]
mod tests;
