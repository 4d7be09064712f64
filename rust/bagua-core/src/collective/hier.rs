//! Collectives in stages: inside each host first, between the hosts' leaders then.
//!
//! The leader of a host is its first rank. all_reduce, reduce, broadcast and barrier go in stages; for the others stages would
//! move the same bytes more often, so they go over one flat mesh with the best link per pair.
//!
//! Sums are made inside hosts first, so results equal those of the flat collectives within rounding, and themselves bit for bit.
//! Every stage runs under the fingerprint of the whole operation. A difference between hosts is seen by the leaders; the ranks
//! behind them hear it as the group's first cause.
//!
//! Large tensors go chunk by chunk, so that what a stage holds in between stays bounded. Overlapping the stages of different
//! chunks is the next thing to try where hosts are joined by a slow network.

use std::ops::Range;

use super::{Call, Collective, Incoming, Io, Outgoing};
use crate::error::Result;
use crate::reduce::divide;
use crate::types::ReduceOp;

/// Bytes that go through all stages at a time: a few times what the stages themselves cut into pieces.
const CHUNK: usize = 1 << 20;

/// Stages over other collectives.
pub struct Hier {
    /// The ranks of this host, by their index on it.
    intra: Box<dyn Collective>,
    /// The leaders, by the index of their host. Only on leaders.
    inter: Option<Box<dyn Collective>>,
    /// All ranks of the group.
    flat: Box<dyn Collective>,
    /// Group ranks of each host.
    hosts: Vec<Vec<usize>>,
    /// Where a leader gathers what it may not write to its tensor.
    scratch: Vec<u8>,
}

impl Hier {
    /// `hosts` are the group ranks of each host, ascending, hosts by their first rank. `intra` spans this rank's host, `inter` the
    /// hosts' first ranks (on those only), `flat` (a [`super::Net`]) the group.
    ///
    /// # Panics
    /// When the parts do not fit together: they are built in one place, from one list of hosts.
    pub fn new(
        intra: Box<dyn Collective>,
        inter: Option<Box<dyn Collective>>,
        flat: impl Collective + 'static,
        hosts: Vec<Vec<usize>>,
    ) -> Hier {
        let here = hosts.iter().position(|host| host.contains(&flat.rank()));
        let here = here.expect("this rank is on one of the hosts");
        assert_eq!((intra.size(), hosts[here][intra.rank()]), (hosts[here].len(), flat.rank()));
        assert_eq!(hosts.iter().map(Vec::len).sum::<usize>(), flat.size());
        assert_eq!(inter.is_some(), intra.rank() == LEADER);
        assert!(inter.as_ref().is_none_or(|inter| (inter.size(), inter.rank()) == (hosts.len(), here)));
        Hier { intra, inter, flat: Box::new(flat), hosts, scratch: Vec::new() }
    }

    /// Index of a rank's host, and of the rank on it.
    fn place(&self, rank: usize) -> (usize, usize) {
        let on = |host: &Vec<usize>| host.iter().position(|member| *member == rank);
        let found = self.hosts.iter().enumerate().find_map(|(host, members)| on(members).map(|local| (host, local)));
        found.expect("every rank of the group is on one of the hosts")
    }

    /// Moves one piece from `from` to `to`, both on this host; nothing for other ranks.
    fn hand(&mut self, call: &Call<'_>, data: &mut [u8], from: usize, to: usize) -> Result<()> {
        let fingerprint = call.fingerprint;
        if from == to {
            Ok(())
        } else if self.intra.rank() == from {
            self.intra.exchange(call, &[Outgoing { peer: to, fingerprint, data }], &mut [])
        } else if self.intra.rank() == to {
            self.intra.exchange(call, &[], &mut [Incoming { peer: from, fingerprint, data }])
        } else {
            Ok(())
        }
    }
}

/// Index of a leader on its host.
const LEADER: usize = 0;

/// The pieces of a tensor; one empty piece when it is empty, so that fingerprints are compared all the same.
fn chunks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.div_ceil(CHUNK).max(1)).map(move |at| at * CHUNK..((at + 1) * CHUNK).min(len))
}

/// What is added up in the stages: an average is divided once, after the last of them.
fn staged(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::Avg { ReduceOp::Sum } else { op }
}

impl Collective for Hier {
    fn name(&self) -> &'static str {
        "hier"
    }

    fn rank(&self) -> usize {
        self.flat.rank()
    }

    fn size(&self) -> usize {
        self.flat.size()
    }

    fn transports(&self) -> Vec<&'static str> {
        self.flat.transports()
    }

    fn all_reduce(&mut self, call: &Call<'_>, mut io: Io<'_>, op: ReduceOp) -> Result<()> {
        let len = match &io {
            Io::InPlace(data) => data.len(),
            Io::Split { src, .. } => src.len(),
        };
        for range in chunks(len) {
            let part = match &mut io {
                Io::InPlace(data) => Io::InPlace(&mut data[range.clone()]),
                Io::Split { src, dst } => Io::Split { src: &src[range.clone()], dst: &mut dst[range.clone()] },
            };
            self.intra.reduce(call, part, staged(op), LEADER)?;
            let out = match &mut io {
                Io::InPlace(data) => &mut data[range],
                Io::Split { dst, .. } => &mut dst[range],
            };
            if let Some(inter) = &mut self.inter {
                inter.all_reduce(call, Io::InPlace(out), staged(op))?;
                if op == ReduceOp::Avg {
                    divide(call.dtype(), out, self.flat.size());
                }
            }
            self.intra.broadcast(call, out, LEADER)?;
        }
        Ok(())
    }

    fn reduce(&mut self, call: &Call<'_>, mut io: Io<'_>, op: ReduceOp, root: usize) -> Result<()> {
        let (root_host, root_local) = self.place(root);
        let (my_host, _) = self.place(self.rank());
        let len = match &io {
            Io::InPlace(data) => data.len(),
            Io::Split { src, .. } => src.len(),
        };
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(len.min(CHUNK), 0);
        for range in chunks(len) {
            let sum = &mut scratch[..range.len()];
            let src = match &io {
                Io::InPlace(data) => &data[range.clone()],
                Io::Split { src, .. } => &src[range.clone()],
            };
            self.intra.reduce(call, Io::Split { src, dst: sum }, staged(op), LEADER)?;
            if let Some(inter) = &mut self.inter {
                inter.reduce(call, Io::InPlace(sum), staged(op), root_host)?;
            }
            if my_host == root_host {
                self.hand(call, sum, LEADER, root_local)?;
            }
            if self.rank() == root {
                let out = match &mut io {
                    Io::InPlace(data) => &mut data[range],
                    Io::Split { dst, .. } => &mut dst[range],
                };
                out.copy_from_slice(sum);
                if op == ReduceOp::Avg {
                    divide(call.dtype(), out, self.size());
                }
            }
        }
        self.scratch = scratch;
        Ok(())
    }

    fn broadcast(&mut self, call: &Call<'_>, data: &mut [u8], root: usize) -> Result<()> {
        let (root_host, root_local) = self.place(root);
        let (my_host, _) = self.place(self.rank());
        for range in chunks(data.len()) {
            let part = &mut data[range];
            if my_host == root_host {
                self.hand(call, part, root_local, LEADER)?;
            }
            if let Some(inter) = &mut self.inter {
                inter.broadcast(call, part, root_host)?;
            }
            self.intra.broadcast(call, part, LEADER)?;
        }
        Ok(())
    }

    fn all_gather(&mut self, call: &Call<'_>, io: Io<'_>) -> Result<()> {
        self.flat.all_gather(call, io)
    }

    fn gather(&mut self, call: &Call<'_>, io: Io<'_>, root: usize) -> Result<()> {
        self.flat.gather(call, io, root)
    }

    fn scatter(&mut self, call: &Call<'_>, io: Io<'_>, root: usize) -> Result<()> {
        self.flat.scatter(call, io, root)
    }

    fn reduce_scatter(&mut self, call: &Call<'_>, io: Io<'_>, op: ReduceOp) -> Result<()> {
        self.flat.reduce_scatter(call, io, op)
    }

    fn all_to_all(&mut self, call: &Call<'_>, io: Io<'_>) -> Result<()> {
        self.flat.all_to_all(call, io)
    }

    fn exchange(&mut self, call: &Call<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        self.flat.exchange(call, sends, recvs)
    }

    fn barrier(&mut self, call: &Call<'_>) -> Result<()> {
        self.intra.barrier(call)?;
        if let Some(inter) = &mut self.inter {
            inter.barrier(call)?;
        }
        self.intra.barrier(call)
    }
}
