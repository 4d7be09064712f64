//! The operations that are made of messages, on all ranks or between hosts.
//!
//! By host, the members are the hosts: their ranks reduce to the first rank in full precision, the first ranks exchange, and each host
//! broadcasts the result.

use std::sync::atomic::Ordering::Relaxed;

use super::{LEADER, Lanes};
use crate::codec::{Codec, Exchange};
use crate::collective::compressed::{Compression, Workspace};
use crate::collective::gossip::{PeerSelection, Replicas, Workspace as RingWorkspace};
use crate::error::Result;
use crate::group::lane::{HostLanes, Options, options_of, options_of_gossip, options_of_ring};
use crate::memory::{BufferMut, DeviceRef};
use crate::request::{Io, Verb};
use crate::types::{DType, Kind, ReduceOp, flags};

/// A compressed all_reduce on all ranks or between hosts.
pub struct CompressedAllReduce<'a> {
    /// Encodes it.
    pub codec: &'a dyn Codec,
    /// The average of all ranks, or the sum.
    pub average: bool,
    /// Inside hosts in full precision, through the codec between them.
    pub hierarchical: bool,
    /// See [`Compression::draw`].
    pub draw: u64,
    /// See [`Compression::elements`].
    pub elements: usize,
    /// See [`Compression::error`]; by host only a host's first rank uses it.
    pub error: Option<&'a mut [u8]>,
}

/// A round of the compressed ring of all ranks or of hosts.
pub struct CompressedRing<'a> {
    /// Encodes the differences.
    pub codec: &'a dyn Codec,
    /// Members are the hosts, with the means of their ranks.
    pub hierarchical: bool,
    /// Number of the call, for codecs that draw at random.
    pub draw: u64,
    /// By host only a host's first rank knows its neighbours; the others get `own`.
    pub replicas: Replicas<'a>,
}

impl Lanes {
    /// How many hosts the ranks are on; 1 for a lane that belongs to no group.
    fn host_count(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.machines().len())
    }

    /// Counts a call by host of this kind; the lane between hosts has counted it on their first ranks.
    fn count_hierarchical(&self, kind: Kind, payload: usize, counted: bool) {
        let stats = self.global.stats().of(kind);
        stats.hierarchical.fetch_add(1, Relaxed);
        if !counted {
            stats.calls.fetch_add(1, Relaxed);
            stats.payload_bytes.fetch_add(payload as u64, Relaxed);
        }
    }

    /// All_reduce of `data` through a codec, in place. By host, with one host, it is the plain all_reduce to the bit. On a device for which
    /// [`Lanes::encodes_on`] is true, nothing but records comes to the host.
    ///
    /// # Errors
    /// As [`crate::group::Lane::compressed_all_reduce`].
    pub fn compressed_all_reduce(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        mut data: BufferMut<'_>,
        how: CompressedAllReduce<'_>,
        work: &mut Workspace,
    ) -> Result<()> {
        let CompressedAllReduce { codec, average, hierarchical, draw, elements, error } = how;
        let divisor = if average { self.global.size() } else { 1 };
        let mut how = Compression { codec, divisor, draw, elements, error };
        if !hierarchical {
            return self.global.compressed_all_reduce(options, dtype, data, &mut how, work);
        }
        let options = Options { flags: options.flags | flags::HIERARCHICAL, ..options_of(options, &how) };
        if self.host_count() == 1 {
            let op = if average { ReduceOp::Avg } else { ReduceOp::Sum };
            return self.all_reduce(&options, dtype, Io::InPlace(data), op, true);
        }
        let HostLanes { intra, inter } = self.hosts()?;
        let sum = Verb::Reduce { op: ReduceOp::Sum, root: LEADER };
        intra.run(&options, dtype, sum, Io::InPlace(data.reborrow()))?;
        let counted = inter.is_some();
        if let Some(inter) = inter {
            inter.compressed_all_reduce(&options, dtype, data.reborrow(), &mut how, work)?;
        }
        let payload = data.len();
        intra.run(&options, dtype, Verb::Broadcast { root: LEADER }, Io::InPlace(data))?;
        self.count_hierarchical(Kind::CompressedAllReduce, payload, counted);
        Ok(())
    }

    /// Whether [`Lanes::compressed_all_reduce`] without error feedback, and [`Lanes::compressed_ring`], leave the tensor on this device, and
    /// encode it there.
    ///
    /// # Errors
    /// As [`crate::collective::Collective::codec_on`].
    pub fn encodes_on(
        &self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
        hierarchical: bool,
    ) -> Result<bool> {
        let one_host = hierarchical && self.host_count() == 1;
        if place.is_none() || codec.exchange() != Exchange::TwoShot || !self.reaches(place, one_host) {
            return Ok(false);
        }
        self.global.codec_on(place, codec, dtype).map(|found| found.is_some())
    }

    /// `mean` = the mean of `weights` and those of the selected peers; by host, of the hosts' means. `All` is an all_reduce.
    ///
    /// # Errors
    /// As [`crate::group::Lane::gossip`].
    #[expect(clippy::too_many_arguments, reason = "all are buffers or choices of one operation")]
    pub fn gossip(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        peers: (PeerSelection, u64),
        hierarchical: bool,
        weights: &[u8],
        mean: &mut [u8],
        received: &mut Vec<u8>,
    ) -> Result<()> {
        if peers.0 == PeerSelection::All {
            return self.all_reduce(options, dtype, Io::split(weights, mean), ReduceOp::Avg, hierarchical);
        }
        if !hierarchical {
            return self.global.gossip(options, dtype, peers, weights, mean, received);
        }
        let options = Options { flags: options.flags | flags::HIERARCHICAL, ..options_of_gossip(options, peers) };
        let HostLanes { intra, inter } = self.hosts()?;
        mean.copy_from_slice(weights);
        let average = Verb::Reduce { op: ReduceOp::Avg, root: LEADER };
        intra.run(&options, dtype, average, Io::in_place(mean))?;
        let counted = inter.is_some();
        if let Some(inter) = inter {
            let weights = mean.to_vec();
            inter.gossip(&options, dtype, peers, &weights, mean, received)?;
        }
        intra.run(&options, dtype, Verb::Broadcast { root: LEADER }, Io::in_place(mean))?;
        self.count_hierarchical(Kind::Gossip, mean.len(), counted);
        Ok(())
    }

    /// A round of the compressed ring; `weights` become the replica `own` on every rank. On a device for which [`Lanes::encodes_on`] is true,
    /// nothing but records comes to the host.
    ///
    /// # Errors
    /// As [`crate::group::Lane::compressed_ring`].
    pub fn compressed_ring(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        mut weights: BufferMut<'_>,
        ring: CompressedRing<'_>,
        work: &mut RingWorkspace,
    ) -> Result<()> {
        let CompressedRing { codec, hierarchical, draw, mut replicas } = ring;
        if !hierarchical {
            return self.global.compressed_ring(options, dtype, codec, draw, weights, replicas, work);
        }
        let options = Options { flags: options.flags | flags::HIERARCHICAL, ..options_of_ring(options, codec) };
        let HostLanes { intra, inter } = self.hosts()?;
        let average = Verb::Reduce { op: ReduceOp::Avg, root: LEADER };
        intra.run(&options, dtype, average, Io::InPlace(weights.reborrow()))?;
        let counted = inter.is_some();
        if let Some(inter) = inter {
            inter.compressed_ring(&options, dtype, codec, draw, weights.reborrow(), replicas.reborrow(), work)?;
        }
        intra.run(&options, dtype, Verb::Broadcast { root: LEADER }, Io::InPlace(weights.reborrow()))?;
        replicas.own.copy_in_place(weights.as_buffer())?;
        self.count_hierarchical(Kind::Gossip, weights.len(), counted);
        Ok(())
    }
}
