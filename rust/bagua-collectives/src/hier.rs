//! Hierarchical collectives of any two: inside each host first, then between the hosts' leaders, then inside each host again.
//!
//! The leader of a host is its first rank. [`ByHost`] makes a hierarchy of two borrowed collectives, [`Hier`] owns its two: `shm` and `net` in
//! a group of several hosts, or those that [`crate::group::Lanes`] connects for `hierarchical`, in any group.
//! all_reduce, reduce, broadcast and barrier are hierarchical; the other verbs would move the same bytes more often in a hierarchy, so
//! they go over one flat mesh with the best link per pair.
//!
//! Sums are made inside hosts first, so results equal those of the flat collectives within rounding, and themselves bit for bit.
//! Every phase runs under the fingerprint of the whole operation. The leaders see a difference between hosts; the other ranks get
//! it as the group's first cause.
//!
//! Large tensors of the host go chunk by chunk, so that the scratch memory of a phase stays bounded. Leaders that added up the next chunk with
//! their host while one travels were as fast as leaders that do not, within the spread of two runs (2 hosts of 2 ranks on 2 cores,
//! 16 MiB at 1, 3 and 10 Gbit/s and at full rate, `benchmarks/network.py`), so chunks follow each other.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::over_exchange::in_place;
use super::{Collective, HostIo, Incoming, Io, OpContext, Outgoing, Verb, gossip};
use crate::error::{Error, Result};
use crate::reduce::divide;
use crate::same_ranks_as;
use crate::types::ReduceOp;

/// Bytes that go through all phases at a time: a few times the chunk of the collectives below.
const CHUNK: usize = 512 << 10;

/// Index of a leader on its host.
const LEADER: usize = 0;

/// The two collectives of a hierarchy, see [`Collective::split`].
pub struct ByHost<'a> {
    /// The ranks of this host, by their index on it.
    pub intra: &'a mut dyn Collective,
    /// The leaders, by the index of their host; on leaders only. Its averages are over the ranks of all hosts.
    pub inter: Option<&'a mut dyn Collective>,
}

impl ByHost<'_> {
    /// Runs a verb. In the verbs over exchange each host is one member, with the sum or the mean of its ranks, which is made in full precision.
    ///
    /// # Errors
    /// As [`Collective::run`]; `NotImplemented` for verbs that are not hierarchical.
    pub fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, mut io: Io<'_>) -> Result<()> {
        match verb {
            Verb::AllReduce(op) => loop {
                // A collective for memory of a device cuts that itself.
                let width = if io.device()?.is_none() { CHUNK.min(io.len()) } else { io.len() };
                let (chunk, rest) = io.split_at(width);
                self.by_leaders(cx, verb, op.undivided(), chunk)?;
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
            _ => Err(Error::NotImplemented(format!("{} inside hosts first", verb.kind().name()))),
        }
    }

    /// Each leader gets the combination of its host's ranks, the leaders run the verb, and each host gets the result.
    fn by_leaders(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, op: ReduceOp, mut io: Io<'_>) -> Result<()> {
        let ByHost { intra, inter } = self;
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
}

/// The collective of leaders, each with the result of all ranks of its host: an average is over these ranks.
struct Leaders {
    inner: Box<dyn Collective>,
    /// The ranks of all hosts.
    ranks: usize,
}

impl Collective for Leaders {
    same_ranks_as!(self => self.inner);

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, mut io: Io<'_>) -> Result<()> {
        let sum = match verb {
            Verb::AllReduce(ReduceOp::Avg) => Verb::AllReduce(ReduceOp::Sum),
            Verb::Reduce { op: ReduceOp::Avg, root } => Verb::Reduce { op: ReduceOp::Sum, root },
            _ => return self.inner.run(cx, verb, io),
        };
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

/// Hierarchical collectives over others.
pub struct Hier {
    /// The ranks of this host, by their index on it.
    intra: Box<dyn Collective>,
    /// The leaders, by the index of their host. Only on leaders.
    inter: Option<Leaders>,
    /// All ranks of the group, for the verbs that are not hierarchical; without it, those over exchange are.
    flat: Option<Box<dyn Collective>>,
    /// Group ranks of each host.
    hosts: Vec<Vec<usize>>,
    rank: usize,
    size: usize,
    /// Where a leader gathers what it may not write to its tensor.
    scratch: Vec<u8>,
}

impl Hier {
    /// `hosts` are the group ranks of each host, ascending, hosts by their first rank; `rank` is this one's. `intra` spans this rank's host,
    /// `inter` the hosts' first ranks (on those only).
    ///
    /// # Panics
    /// When the parts do not fit together: they are built in one place, from one list of hosts.
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
        let inter = inter.map(|inner| Leaders { inner, ranks: size });
        Hier { intra, inter, flat: None, hosts, rank, size, scratch: Vec::new() }
    }

    /// The same, with a collective of all ranks for the verbs that are not hierarchical.
    ///
    /// # Panics
    /// As [`Hier::new`].
    #[must_use]
    pub fn with_flat(self, flat: impl Collective + 'static) -> Hier {
        assert_eq!((flat.rank(), flat.size()), (self.rank, self.size));
        Hier { flat: Some(Box::new(flat)), ..self }
    }

    fn by_host(&mut self) -> ByHost<'_> {
        let inter = self.inter.as_mut().map(|inter| inter as &mut dyn Collective);
        ByHost { intra: &mut *self.intra, inter }
    }

    /// Index of a rank's host, and of the rank on it.
    fn index_of(&self, rank: usize) -> (usize, usize) {
        let on = |host: &Vec<usize>| host.iter().position(|member| *member == rank);
        let found = self.hosts.iter().enumerate().find_map(|(host, members)| on(members).map(|local| (host, local)));
        found.expect("every rank of the group is on one of the hosts")
    }

    /// Sends one chunk from `from` to `to`, both on this host; nothing for other ranks.
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
            let to_leader = Verb::Reduce { op: op.undivided(), root: LEADER };
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

/// The chunks of a tensor; one empty chunk of an empty tensor, so that fingerprints are compared all the same.
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

    fn split(&mut self) -> Option<ByHost<'_>> {
        Some(self.by_host())
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
            _ => self.by_host().run(cx, verb, io),
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        match &mut self.flat {
            Some(flat) => flat.exchange(cx, sends, recvs),
            None => Err(Error::NotImplemented("messages between ranks of two hosts".to_owned())),
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

// Without memory that processes share there is nothing to test.
#[cfg(all(test, not(bagua_portable)))]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::error::Error;
    use crate::health::GroupHealth;
    use crate::memory::Arena;
    use crate::shm::{Shm, segment_len, spare_links};
    use crate::stats::OpStats;
    use crate::transport::{Mesh, local_mesh};
    use crate::types::{DType, Fingerprint, Kind, Shape};
    use crate::wait::Deadline;
    use crate::{Algorithm, Net};

    /// One `Hier` per rank, hosts as segments, networks as streams between threads.
    fn hiers(hosts: &[&[usize]], algorithm: Algorithm) -> Vec<Hier> {
        let world = hosts.iter().map(|host| host.len()).sum();
        let mut flats: Vec<Option<Mesh>> = local_mesh(world).into_iter().map(Some).collect();
        let mut ranks: Vec<(usize, Hier)> = Vec::new();
        for (host, leaders) in hosts.iter().zip(local_mesh(hosts.len())) {
            let arena = Arc::new(Arena::create("bagua-test", segment_len(host.len())).unwrap());
            let mut leaders = Some(leaders);
            for (index, rank) in host.iter().enumerate() {
                let intra = Box::new(Shm::new(Arc::clone(&arena), index, host.to_vec()).unwrap());
                let inter = leaders.take().map(|mesh| Box::new(Net::new(mesh).with(algorithm)) as Box<dyn Collective>);
                let flat = Net::new(flats[*rank].take().unwrap());
                let hosts = hosts.iter().map(|host| host.to_vec()).collect();
                ranks.push((*rank, Hier::new(intra, inter, hosts, *rank).with_flat(flat)));
            }
        }
        ranks.sort_by_key(|(rank, _)| *rank);
        ranks.into_iter().map(|(_, hier)| hier).collect()
    }

    /// Runs `act` as every rank; a collective lives until all are done.
    fn on_all<T: Send>(hosts: &[&[usize]], act: impl Fn(usize, &mut Hier, &GroupHealth) -> T + Sync) -> Vec<T> {
        on_all_by(hosts, Algorithm::Auto, act)
    }

    /// The same with an algorithm between the hosts.
    fn on_all_by<T: Send>(
        hosts: &[&[usize]],
        algorithm: Algorithm,
        act: impl Fn(usize, &mut Hier, &GroupHealth) -> T + Sync,
    ) -> Vec<T> {
        let mut hiers = hiers(hosts, algorithm);
        let world = hiers.len();
        std::thread::scope(|scope| {
            let act = &act;
            let start = |(rank, hier)| scope.spawn(move || act(rank, hier, &GroupHealth::local(rank, world)));
            let threads: Vec<_> = hiers.iter_mut().enumerate().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn print(kind: Kind, seq: u64, count: usize) -> Fingerprint {
        Fingerprint { epoch: 1, seq, shape: Shape::flat(count), ..Fingerprint::new(kind, DType::F32, count) }
    }

    fn with<T>(health: &GroupHealth, fingerprint: Fingerprint, run: impl FnOnce(&OpContext<'_>) -> T) -> T {
        within(60_000, health, fingerprint, run)
    }

    fn within<T>(
        millis: u64,
        health: &GroupHealth,
        fingerprint: Fingerprint,
        run: impl FnOnce(&OpContext<'_>) -> T,
    ) -> T {
        let deadline = Deadline::after(Duration::from_millis(millis));
        let extra = &RefCell::default();
        run(&OpContext { fingerprint, deadline, health, stats: &OpStats::default(), label: "", extra })
    }

    /// Whole numbers, so that every order of adding gives the same.
    fn values(rank: usize, count: usize) -> Vec<f32> {
        (0..count).map(|at| ((at * 13 + rank * 7) % 64) as f32).collect()
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    const WORLDS: [&[&[usize]]; 6] = [
        &[&[0, 1], &[2, 3]],
        &[&[0, 2], &[1, 3, 4]],
        &[&[0], &[1, 2]],
        &[&[0], &[1]],
        &[&[0, 1, 2]],
        &[&[0, 3], &[1], &[2, 4]],
    ];
    const COUNTS: [usize; 5] = [0, 7, 20_000, 300_001, 6 * CHUNK / 4 - 1];

    #[test]
    fn reductions_in_stages_equal_the_sum_over_all_hosts() {
        for hosts in WORLDS {
            on_all(hosts, |rank, hier, health| {
                let n = hier.size();
                for (seq, count) in COUNTS.into_iter().enumerate() {
                    let sum: Vec<f32> =
                        (0..count).map(|at| (0..n).map(|r| ((at * 13 + r * 7) % 64) as f32).sum()).collect();
                    let mean: Vec<f32> = sum.iter().map(|sum| sum / n as f32).collect();
                    for (op, expected) in [(ReduceOp::Sum, bytes(&sum)), (ReduceOp::Avg, bytes(&mean))] {
                        let src = bytes(&values(rank, count));
                        let mut data = src.clone();
                        let all_reduce = print(Kind::AllReduce, seq as u64, count);
                        with(health, all_reduce, |cx| hier.run(cx, Verb::AllReduce(op), Io::in_place(&mut data)))
                            .unwrap();
                        assert!(data == expected, "all_reduce of {count} in place over {hosts:?}");
                        let mut dst = vec![1; src.len()];
                        with(health, all_reduce, |cx| hier.run(cx, Verb::AllReduce(op), Io::split(&src, &mut dst)))
                            .unwrap();
                        assert!(dst == expected, "all_reduce of {count} over {hosts:?}");
                        for root in 0..n {
                            let reduce =
                                Fingerprint { root: Some(root as u32), ..print(Kind::Reduce, seq as u64, count) };
                            let mut data = src.clone();
                            with(health, reduce, |cx| hier.run(cx, Verb::Reduce { op, root }, Io::in_place(&mut data)))
                                .unwrap();
                            assert!(
                                data == *if rank == root { &expected } else { &src },
                                "reduce to {root} over {hosts:?}"
                            );
                        }
                        let mut dst = vec![1; if rank == n - 1 { src.len() } else { 0 }];
                        let reduce = print(Kind::Reduce, seq as u64, count);
                        with(health, reduce, |cx| {
                            hier.run(cx, Verb::Reduce { op, root: n - 1 }, Io::split(&src, &mut dst))
                        })
                        .unwrap();
                        assert!(rank != n - 1 || dst == expected);
                    }
                }
            });
        }
    }

    #[test]
    fn a_hierarchy_of_the_parts_of_another_has_its_bits() {
        for hosts in WORLDS {
            on_all(hosts, |rank, hier, health| {
                let (count, avg) = (4 * CHUNK / 4 + 5, Verb::AllReduce(ReduceOp::Avg));
                let src: Vec<u8> = bytes(&values(rank, count).iter().map(|value| value / 3.0).collect::<Vec<f32>>());
                let (mut whole, mut parts) = (vec![0; src.len()], vec![0; src.len()]);
                let say = print(Kind::AllReduce, 0, count);
                with(health, say, |cx| hier.run(cx, avg, Io::split(&src, &mut whole))).unwrap();
                let mut split = hier.split().unwrap();
                assert_eq!(split.inter.is_some(), split.intra.rank() == LEADER);
                with(health, say, |cx| split.run(cx, avg, Io::split(&src, &mut parts))).unwrap();
                assert!(whole == parts, "over {hosts:?}");
                let gather = print(Kind::AllGather, 1, 1);
                let refused = with(health, gather, |cx| split.run(cx, Verb::AllGather, Io::none()));
                assert!(matches!(refused, Err(Error::NotImplemented(_))));
            });
        }
    }

    #[test]
    fn every_algorithm_between_hosts_takes_chunks_in_stages() {
        for algorithm in Algorithm::ALL {
            on_all_by(WORLDS[5], algorithm, |rank, hier, health| {
                let count = 4 * CHUNK / 4 + 5;
                let mut data = bytes(&values(rank, count));
                let say = print(Kind::AllReduce, 0, count);
                with(health, say, |cx| hier.run(cx, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))).unwrap();
                let sum = |at| (0..5).map(|r| ((at * 13 + r * 7) % 64) as f32).sum();
                assert!(data == bytes(&(0..count).map(sum).collect::<Vec<f32>>()), "{}", algorithm.name());
            });
        }
    }

    #[test]
    fn every_rank_can_be_the_root_of_a_broadcast() {
        for hosts in WORLDS {
            on_all(hosts, |rank, hier, health| {
                for (seq, count) in COUNTS.into_iter().enumerate() {
                    for root in 0..hier.size() {
                        let mut data = bytes(&values(rank, count));
                        let say = Fingerprint { root: Some(root as u32), ..print(Kind::Broadcast, seq as u64, count) };
                        with(health, say, |cx| hier.run(cx, Verb::Broadcast { root }, Io::in_place(&mut data)))
                            .unwrap();
                        assert!(data == bytes(&values(root, count)), "from {root} over {hosts:?}");
                    }
                }
            });
        }
    }

    #[test]
    fn no_rank_passes_a_barrier_before_the_last_has_come() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let come = AtomicUsize::new(0);
        on_all(WORLDS[1], |_, hier, health| {
            for round in 1..=50 {
                come.fetch_add(1, Ordering::SeqCst);
                with(health, print(Kind::Barrier, round as u64, 0), |cx| hier.run(cx, Verb::Barrier, Io::none()))
                    .unwrap();
                assert!(come.load(Ordering::SeqCst) >= round * hier.size());
            }
        });
    }

    #[test]
    fn a_difference_between_hosts_is_seen_by_the_leaders() {
        let outcomes = on_all(WORLDS[0], |rank, hier, health| {
            let count = if rank < 2 { 100 } else { 200 };
            let mut data = bytes(&values(rank, count));
            let say = print(Kind::AllReduce, 0, count);
            // Without a control plane, ranks that wait for their leader run into a short deadline.
            within(300, health, say, |cx| hier.run(cx, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data)))
        });
        for leader in [0, 2] {
            assert!(matches!(outcomes[leader], Err(Error::Mismatch(_))), "{:?}", outcomes[leader]);
        }
    }

    #[test]
    fn a_segment_carries_streams_of_its_own_beside_the_collective() {
        let arena = Arc::new(Arena::create("bagua-test", segment_len(2)).unwrap());
        std::thread::scope(|scope| {
            for index in 0..2 {
                let arena = Arc::clone(&arena);
                scope.spawn(move || {
                    let mut shm = Shm::new(Arc::clone(&arena), index, vec![0, 1]).unwrap();
                    let (links, bell) = spare_links(&arena, index, 2);
                    let mut flat = Net::new(Mesh::new(index, vec![0, 1], links, Some(bell)));
                    let health = GroupHealth::local(index, 2);
                    for round in 0..20 {
                        for collective in [&mut shm as &mut dyn Collective, &mut flat] {
                            let mut data = bytes(&values(index, 50_000));
                            let say = print(Kind::AllReduce, round, 50_000);
                            with(&health, say, |cx| {
                                collective.run(cx, Verb::AllReduce(ReduceOp::Max), Io::in_place(&mut data))
                            })
                            .unwrap();
                            let both = values(0, 50_000).into_iter().zip(values(1, 50_000));
                            assert!(data == bytes(&both.map(|(left, right)| left.max(right)).collect::<Vec<_>>()));
                        }
                    }
                });
            }
        });
    }
}
