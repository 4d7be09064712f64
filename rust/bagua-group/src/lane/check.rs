//! What arguments must satisfy before anything is sent.

use crate::codec;
use crate::collective::gossip;
use crate::error::{Error, Result};
use crate::memory::{name_of, same_place};
use crate::request::{Compression, Extra, Io, Layout, PartLayout, Replicas, Uses, Verb};
use crate::types::{DType, ReduceOp};

/// Elements in a buffer of `bytes` bytes.
pub(super) fn elements(dtype: DType, bytes: usize, what: &str) -> Result<usize> {
    if !bytes.is_multiple_of(dtype.size()) {
        return Err(Error::InvalidArgument(format!(
            "{what} has {bytes} bytes, not a whole number of {} elements",
            dtype.name()
        )));
    }
    Ok(bytes / dtype.size())
}

/// Elements as the fingerprint counts them: of the whole tensor for [`Layout::Equal`], of one shard for the others.
pub(super) fn verb(verb: Verb<'_>, dtype: DType, io: &Io<'_>, rank: usize, size: usize) -> Result<usize> {
    if let Some(op) = verb.op() {
        op.check(dtype)?;
    }
    if let Some(root) = verb.root() {
        self::root(root, size)?;
    }
    if let Verb::AllToAllV { send, recv } = verb {
        // Ranks may differ in the number of elements.
        return layouts(dtype, io, (&send, &recv), rank, size).map(|()| 0);
    }
    let (layout, uses) = (verb.layout(), verb.uses(rank));
    let (src, dst) = match io {
        Io::InPlace(data) => {
            let all = elements(dtype, data.len(), "the buffer")?;
            return match layout {
                Layout::Equal | Layout::Parts => Ok(all),
                Layout::EqualShards | Layout::Grows | Layout::Shrinks => shard(all, size, "the buffer"),
            };
        }
        Io::Split { .. }
            if matches!(verb, Verb::Broadcast { .. } | Verb::CompressedAllReduce(_) | Verb::CompressedRing { .. }) =>
        {
            return Err(Error::InvalidArgument(format!("{} works in place, on one buffer", verb.kind().name())));
        }
        Io::Split { src, dst } => (src.len(), dst.len()),
    };
    // A buffer that is ignored may have any size, so only the used ones are looked at.
    let source = |()| elements(dtype, src, "the source");
    let destination = |()| elements(dtype, dst, "the destination");
    match (layout, uses) {
        (Layout::Equal | Layout::Parts, Uses::SourceOnly) => source(()),
        (Layout::Equal | Layout::Parts, Uses::DestinationOnly) => destination(()),
        (Layout::Equal | Layout::EqualShards | Layout::Parts, _) => {
            let (src, dst) = (source(())?, destination(())?);
            if src != dst {
                return Err(Error::InvalidArgument(format!("the source has {src} elements, the destination {dst}")));
            }
            if matches!(layout, Layout::Equal) { Ok(src) } else { shard(src, size, "the source") }
        }
        (Layout::Grows, Uses::SourceOnly) => source(()),
        (Layout::Grows, Uses::DestinationOnly) => shard(destination(())?, size, "the destination"),
        (Layout::Grows, Uses::Both) => {
            let (one, all) = (source(())?, destination(())?);
            times(one, all, size, "source", "destination").map(|()| one)
        }
        (Layout::Shrinks, Uses::DestinationOnly) => destination(()),
        (Layout::Shrinks, Uses::SourceOnly) => shard(source(())?, size, "the source"),
        (Layout::Shrinks, Uses::Both) => {
            let (all, one) = (source(())?, destination(())?);
            times(one, all, size, "destination", "source").map(|()| one)
        }
    }
}

/// The element type and the number of members suit what the verb does with them.
pub(super) fn members(verb: Verb<'_>, dtype: DType, members: usize) -> Result<()> {
    match verb {
        Verb::CompressedAllReduce(Compression { codec, .. }) | Verb::CompressedRing { codec, .. } => codec.check(dtype),
        Verb::NeighborAverage { peers, .. } => ReduceOp::Avg.check(dtype).and_then(|()| peers.check(members)),
        _ => Ok(()),
    }
}

/// The replicas of the compressed ring are as long as the weights, and in the same place.
pub(super) fn extra(verb: Verb<'_>, dtype: DType, io: &Io<'_>, extra: &Extra<'_>) -> Result<()> {
    let (Verb::CompressedRing { .. }, Io::InPlace(weights)) = (verb, io) else { return Ok(()) };
    let Replicas { own, left, right } = extra.replicas.as_ref().ok_or_else(gossip::no_replicas)?;
    for replica in [own, left, right] {
        if replica.len() != weights.len() {
            let (count, elements) = (weights.len() / dtype.size(), replica.len() / dtype.size());
            return Err(Error::InvalidArgument(format!("{count} elements of weights, {elements} of a replica")));
        }
        if !same_place(replica.device(), weights.device()) {
            let (one, other) = (name_of(weights.device()), name_of(replica.device()));
            return Err(Error::InvalidArgument(format!("the weights are on {one}, a replica is on {other}")));
        }
    }
    Ok(())
}

/// Id of the codec, and a digest of the other choices that ranks must agree on, of a verb that has them.
pub(super) fn agreed(verb: Verb<'_>, extra: &Extra<'_>) -> Option<(u8, u32)> {
    match verb {
        Verb::CompressedAllReduce(Compression { codec, divisor, .. }) => {
            let feedback = if extra.error.is_some() { ", error feedback" } else { "" };
            let text = format!("{}, divided by {divisor}{feedback}", codec::describe(codec));
            Some((codec.id(), digest(&text)))
        }
        Verb::NeighborAverage { peers, round } => Some((0, digest(&format!("{} in round {round}", peers.name())))),
        Verb::CompressedRing { codec, .. } => {
            Some((codec.id(), digest(&format!("compressed ring, {}", codec::describe(codec)))))
        }
        _ => None,
    }
}

/// FNV-1a, folded to 16 bits: distinguishes options, and protects against nothing.
fn digest(text: &str) -> u32 {
    let hash = text.bytes().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash >> 16) ^ (hash & 0xffff)
}

fn shard(all: usize, size: usize, what: &str) -> Result<usize> {
    if !all.is_multiple_of(size) {
        return Err(Error::InvalidArgument(format!("{what} has {all} elements, not a multiple of the {size} ranks")));
    }
    Ok(all / size)
}

fn times(one: usize, all: usize, size: usize, small: &str, large: &str) -> Result<()> {
    if one.checked_mul(size) != Some(all) {
        return Err(Error::InvalidArgument(format!(
            "the {large} has {all} elements, not {size} times (once per rank) the {one} of the {small}"
        )));
    }
    Ok(())
}

/// `root` is a rank of a group of `size`.
pub(super) fn root(root: usize, size: usize) -> Result<u32> {
    match u32::try_from(root) {
        Ok(code) if root < size => Ok(code),
        _ => Err(Error::InvalidArgument(format!("root {root} is not a rank of this group of {size}"))),
    }
}

/// The layouts of an all_to_all_v fit the buffers and each other.
fn layouts(
    dtype: DType,
    io: &Io<'_>,
    (send, recv): (&PartLayout<'_>, &PartLayout<'_>),
    rank: usize,
    size: usize,
) -> Result<()> {
    let (src, dst) = match io {
        Io::InPlace(data) => (data.len(), data.len()),
        Io::Split { src, dst } => (src.len(), dst.len()),
    };
    parts(send, elements(dtype, src, "the source")?, size, "send")?;
    parts(recv, elements(dtype, dst, "the destination")?, size, "receive")?;
    apart(recv)?;
    let (given, taken) = (send.counts[rank], recv.counts[rank]);
    if given != taken {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} sends {given} elements to itself and receives {taken}"
        )));
    }
    Ok(())
}

/// Every rank has a part, and every part lies within the `all` elements of the buffer.
fn parts(parts: &PartLayout<'_>, all: usize, size: usize, what: &str) -> Result<()> {
    for (name, given) in [("counts", parts.counts.len()), ("displacements", parts.displs.len())] {
        if given != size {
            return Err(Error::InvalidArgument(format!("{given} {what} {name} for {size} ranks")));
        }
    }
    for (rank, (count, displ)) in parts.counts.iter().zip(parts.displs).enumerate() {
        if displ.checked_add(*count).is_none_or(|end| end > all) {
            return Err(Error::InvalidArgument(format!(
                "the {what} part of rank {rank}, {count} elements from {displ}, is not within a buffer of {all}"
            )));
        }
    }
    Ok(())
}

/// No two parts have an element in common. They lie within a buffer, see [`parts`].
fn apart(parts: &PartLayout<'_>) -> Result<()> {
    let order = parts.in_order();
    let overlap = |pair: &&[usize]| parts.displs[pair[1]] < parts.displs[pair[0]] + parts.counts[pair[0]];
    match order.windows(2).find(overlap) {
        None => Ok(()),
        Some(pair) => {
            Err(Error::InvalidArgument(format!("the receive parts of ranks {} and {} overlap", pair[0], pair[1])))
        }
    }
}
