//! The operations that are made of messages, on all ranks or between hosts.
//!
//! By host, the members are the hosts: their ranks reduce to the first rank in full precision, the first ranks exchange, and each host
//! broadcasts the result.

use super::{LEADER, Lanes};
use crate::codec::{Codec, Exchange};
use crate::collective::compressed::{self, Compression, Workspace};
use crate::collective::gossip::{self, PeerSelection, Replicas, Workspace as RingWorkspace};
use crate::error::Result;
use crate::group::builder::HostCollectives;
use crate::group::lane::{
    Options, options_of, options_of_gossip, options_of_ring, print_of_compressed, print_of_gossip, print_of_ring,
};
use crate::memory::{BufferMut, DeviceRef, kind_of};
use crate::request::{Io, Verb};
use crate::types::{DType, Fingerprint, ReduceOp, flags};

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
        let print =
            Fingerprint { device: kind_of(data.device()), ..print_of_compressed(dtype, data.as_buffer(), how.codec)? };
        let payload = data.len();
        self.by_host(&options, print, payload, |HostCollectives { intra, inter }, cx| {
            intra.run(cx, Verb::Reduce { op: ReduceOp::Sum, root: LEADER }, Io::InPlace(data.reborrow()))?;
            if let Some(inter) = inter {
                compressed::all_reduce(&mut **inter, cx, data.reborrow(), &mut how, work)?;
            }
            intra.run(cx, Verb::Broadcast { root: LEADER }, Io::InPlace(data))
        })
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
        let (selection, round) = peers;
        let print = print_of_gossip(dtype, selection, self.host_count(), weights, mean)?;
        self.by_host(&options, print, weights.len(), |HostCollectives { intra, inter }, cx| {
            mean.copy_from_slice(weights);
            intra.run(cx, Verb::Reduce { op: ReduceOp::Avg, root: LEADER }, Io::in_place(mean))?;
            if let Some(inter) = inter {
                let weights = mean.to_vec();
                gossip::average(&mut **inter, cx, selection, round, &weights, mean, received)?;
            }
            intra.run(cx, Verb::Broadcast { root: LEADER }, Io::in_place(mean))
        })
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
        let print = Fingerprint {
            device: kind_of(weights.device()),
            ..print_of_ring(dtype, weights.as_buffer(), codec, &replicas)?
        };
        let payload = weights.len();
        self.by_host(&options, print, payload, |HostCollectives { intra, inter }, cx| {
            intra.run(cx, Verb::Reduce { op: ReduceOp::Avg, root: LEADER }, Io::InPlace(weights.reborrow()))?;
            if let Some(inter) = inter {
                let (weights, replicas) = (weights.reborrow(), replicas.reborrow());
                gossip::compressed_ring(&mut **inter, cx, codec, draw, weights, replicas, work)?;
            }
            intra.run(cx, Verb::Broadcast { root: LEADER }, Io::InPlace(weights.reborrow()))?;
            replicas.own.copy_in_place(weights.as_buffer())
        })
    }
}
