//! The operations of a lane that are made of messages: compressed all_reduce and gossip.

use super::{Lane, Options, check};
use crate::codec::{self, Codec};
use crate::collective::compressed::{self, Compression};
use crate::collective::gossip::{self, PeerSelection, Replicas};
use crate::error::{Error, Result};
use crate::memory::{Buffer, BufferMut, name_of, same_place};
use crate::types::{DType, Fingerprint, Kind, ReduceOp};

impl Lane {
    /// All_reduce of `data`, on the host or on a device, through a codec, in place. Ranks that differ in the codec, its options, the
    /// divisor or error feedback get `Mismatch`.
    ///
    /// # Errors
    /// `UnsupportedType` for an element type that the codec does not encode, before anything is sent; otherwise as [`Lane::run`].
    pub fn compressed_all_reduce(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        data: BufferMut<'_>,
        how: &mut Compression<'_>,
        work: &mut compressed::Workspace,
    ) -> Result<()> {
        self.health.check()?;
        let print = print_of_compressed(dtype, data.as_buffer(), how.codec)?;
        let options = options_of(options, how);
        let says = self.numbered(print, &options);
        let payload = data.len();
        self.perform(&options, says, payload, |collective, cx| compressed::all_reduce(collective, cx, data, how, work))
    }

    /// `mean` = the mean of `weights` and those of this rank's peers in round `round`. All ranks must give the same selection and
    /// round.
    ///
    /// # Errors
    /// `InvalidArgument` for a selection that the number of ranks does not allow or buffers of different lengths,
    /// `UnsupportedType` for elements without a mean, before anything is sent; otherwise as [`Lane::run`].
    pub fn gossip(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        (selection, round): (PeerSelection, u64),
        weights: &[u8],
        mean: &mut [u8],
        received: &mut Vec<u8>,
    ) -> Result<()> {
        self.health.check()?;
        let print = print_of_gossip(dtype, selection, self.size(), weights, mean)?;
        let options = options_of_gossip(options, (selection, round));
        let says = self.numbered(print, &options);
        let payload = weights.len();
        self.perform(&options, says, payload, |collective, cx| {
            gossip::average(collective, cx, selection, round, weights, mean, received)
        })
    }

    /// A round of the compressed ring, see [`gossip::compressed_ring`].
    ///
    /// # Errors
    /// `UnsupportedType` for an element type that the codec does not encode, `InvalidArgument` for replicas of another length than
    /// the weights or in another place, before anything is sent; otherwise as [`Lane::run`].
    #[expect(clippy::too_many_arguments, reason = "all are buffers or choices of one operation")]
    pub fn compressed_ring(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        codec: &dyn Codec,
        draw: u64,
        weights: BufferMut<'_>,
        replicas: Replicas<'_>,
        work: &mut gossip::Workspace,
    ) -> Result<()> {
        self.health.check()?;
        let print = print_of_ring(dtype, weights.as_buffer(), codec, &replicas)?;
        let options = options_of_ring(options, codec);
        let says = self.numbered(print, &options);
        let payload = weights.len();
        self.perform(&options, says, payload, |collective, cx| {
            gossip::compressed_ring(collective, cx, codec, draw, weights, replicas, work)
        })
    }
}

/// The fingerprint of a compressed all_reduce, before it has a number.
///
/// # Errors
/// Those of [`Lane::compressed_all_reduce`] for arguments that do not fit; so of the two below.
pub fn print_of_compressed(dtype: DType, data: Buffer<'_>, codec: &dyn Codec) -> Result<Fingerprint> {
    codec.check(dtype)?;
    let count = check::elements(dtype, data.len(), "the buffer")?;
    Ok(Fingerprint::new(Kind::CompressedAllReduce, dtype, count))
}

/// The same of gossip among so many members.
pub fn print_of_gossip(
    dtype: DType,
    selection: PeerSelection,
    members: usize,
    weights: &[u8],
    mean: &[u8],
) -> Result<Fingerprint> {
    ReduceOp::Avg.check(dtype)?;
    selection.check(members)?;
    let count = check::elements(dtype, weights.len(), "the buffer")?;
    if mean.len() != weights.len() {
        let elements = mean.len() / dtype.size();
        return Err(Error::InvalidArgument(format!("{count} elements of weights, {elements} of their mean")));
    }
    Ok(Fingerprint::new(Kind::Gossip, dtype, count))
}

/// The same of the compressed ring.
pub fn print_of_ring(
    dtype: DType,
    weights: Buffer<'_>,
    codec: &dyn Codec,
    replicas: &Replicas<'_>,
) -> Result<Fingerprint> {
    codec.check(dtype)?;
    let count = check::elements(dtype, weights.len(), "the buffer")?;
    for replica in [&replicas.own, &replicas.left, &replicas.right] {
        if replica.len() != weights.len() {
            let elements = replica.len() / dtype.size();
            return Err(Error::InvalidArgument(format!("{count} elements of weights, {elements} of a replica")));
        }
        if !same_place(replica.device(), weights.device()) {
            let (one, other) = (name_of(weights.device()), name_of(replica.device()));
            return Err(Error::InvalidArgument(format!("the weights are on {one}, a replica is on {other}")));
        }
    }
    Ok(Fingerprint::new(Kind::Gossip, dtype, count))
}

/// The options with what ranks must agree on of a compressed all_reduce, also in its parts inside hosts.
pub fn options_of<'a>(options: &Options<'a>, how: &Compression<'_>) -> Options<'a> {
    let feedback = if how.error.is_some() { ", error feedback" } else { "" };
    let text = format!("{}, divided by {}{feedback}", codec::describe(how.codec), how.divisor);
    Options { codec: how.codec.id(), tag: digest(&text), ..*options }
}

/// The same of gossip.
pub fn options_of_gossip<'a>(options: &Options<'a>, (selection, round): (PeerSelection, u64)) -> Options<'a> {
    Options { tag: digest(&format!("{} in round {round}", selection.name())), ..*options }
}

/// The same of the compressed ring.
pub fn options_of_ring<'a>(options: &Options<'a>, codec: &dyn Codec) -> Options<'a> {
    Options { codec: codec.id(), tag: digest(&format!("compressed ring, {}", codec::describe(codec))), ..*options }
}

/// FNV-1a, folded to 16 bits: tells options apart, and protects against nothing.
fn digest(text: &str) -> u32 {
    let hash = text.bytes().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash >> 16) ^ (hash & 0xffff)
}
