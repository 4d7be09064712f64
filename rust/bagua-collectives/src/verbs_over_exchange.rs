//! The verbs that consist of messages, written once for all collectives, and the checks of their arguments. A
//! collective without a faster way calls [`over_exchange()`] from its `run`.

use super::{Collective, Incoming, Io, OpContext, Outgoing, Verb, compressed, gossip};
use crate::codec;
use crate::error::{Error, Result};
use crate::memory::{BufferMut, name_of, same_place};
use crate::request::{Compression, Extra, PartLayout, Replicas};
use crate::types::{DType, ReduceOp};

/// Runs a verb with [`Collective::exchange`], on the host or on a device.
///
/// # Errors
/// The errors of [`Collective::run`], and `NotImplemented` for a verb that does not consist of messages.
pub fn over_exchange(collective: &mut dyn Collective, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
    match verb {
        Verb::AllToAllV { send, recv } => all_to_all_v(collective, cx, io, &send, &recv),
        Verb::CompressedAllReduce(how) => compressed::all_reduce(collective, cx, in_place(verb, io)?, &how),
        Verb::NeighborAverage { peers, round } => gossip::average(collective, cx, peers, round, io),
        Verb::CompressedRing { codec, draw } => {
            gossip::compressed_ring(collective, cx, codec, draw, in_place(verb, io)?)
        }
        _ => Err(Error::NotImplemented(format!(
            "{} is not a verb that {} runs by messages",
            verb.kind().name(),
            collective.name()
        ))),
    }
}

/// Returns the buffer of a verb that works in place.
///
/// # Errors
/// `InvalidArgument` if there are two buffers.
pub fn in_place<'a>(verb: Verb<'_>, io: Io<'a>) -> Result<BufferMut<'a>> {
    match io {
        Io::InPlace(data) => Ok(data),
        Io::Split { .. } => {
            Err(Error::InvalidArgument(format!("{} works in place, on one buffer", verb.kind().name())))
        }
    }
}

fn all_to_all_v(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    io: Io<'_>,
    send: &PartLayout<'_>,
    recv: &PartLayout<'_>,
) -> Result<()> {
    let (rank, size, element) = (collective.rank(), collective.size(), cx.dtype().size());
    let place = io.device()?;
    let mut memory = Vec::new();
    let mut copy;
    let (src, dst) = match io {
        Io::InPlace(data) => {
            copy = BufferMut::room(place, &mut memory, data.len())?;
            copy.copy_in_place(data.as_buffer())?;
            (copy.as_buffer(), data)
        }
        Io::Split { src, dst } => (src, dst),
    };
    let part = |to: usize| src.slice(send.range(to, element));
    let mut targets = recv.split(dst, element);
    targets[rank].copy_in_place(part(rank))?;
    // Empty parts are sent too, so that a rank with a different operation is found whatever the counts are.
    let fingerprint = cx.fingerprint;
    let others = |peer: &usize| *peer != rank;
    let sends: Vec<_> = (0..size).filter(others).map(|peer| Outgoing { peer, fingerprint, data: part(peer) }).collect();
    let mut recvs: Vec<_> = targets
        .into_iter()
        .enumerate()
        .filter(|(peer, _)| others(peer))
        .map(|(peer, data)| Incoming { peer, fingerprint, data })
        .collect();
    collective.exchange(cx, &sends, &mut recvs)
}

/// Checks the operands of a verb that consists of messages, before anything is sent: the element type, the number of
/// members, and the length and device of replicas. Other verbs have no such operands. For the layouts of an
/// all_to_all_v, see [`check_layouts`].
///
/// # Errors
/// `InvalidArgument` or `UnsupportedType`.
pub fn check_operands(verb: Verb<'_>, dtype: DType, io: &Io<'_>, extra: &Extra<'_>, members: usize) -> Result<()> {
    match verb {
        Verb::CompressedAllReduce(Compression { codec, .. }) | Verb::CompressedRing { codec, .. } => {
            codec.check(dtype)?
        }
        Verb::NeighborAverage { peers, .. } => ReduceOp::Avg.check(dtype).and_then(|()| peers.check(members))?,
        _ => {}
    }
    match (verb, io) {
        (Verb::CompressedRing { .. }, Io::InPlace(weights)) => check_replicas(dtype, weights, extra),
        _ => Ok(()),
    }
}

fn check_replicas(dtype: DType, weights: &BufferMut<'_>, extra: &Extra<'_>) -> Result<()> {
    let Replicas { own, left, right } = extra.replicas.as_ref().ok_or_else(gossip::no_replicas)?;
    for replica in [own, left, right] {
        if replica.len() != weights.len() {
            let (count, elements) = (weights.len() / dtype.size(), replica.len() / dtype.size());
            return Err(Error::InvalidArgument(format!(
                "a replica has {elements} elements, but the weights have {count}"
            )));
        }
        if !same_place(replica.device(), weights.device()) {
            let (one, other) = (name_of(weights.device()), name_of(replica.device()));
            return Err(Error::InvalidArgument(format!("a replica is on {other}, but the weights are on {one}")));
        }
    }
    Ok(())
}

/// Returns the codec's id, and a digest of the other choices that all ranks must agree on. `None` for a verb without
/// such choices.
pub fn agreed(verb: Verb<'_>, extra: &Extra<'_>) -> Option<(u8, u32)> {
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

/// FNV-1a folded to 16 bits. Detects different options by accident, but does not protect against an attacker.
fn digest(text: &str) -> u32 {
    let hash = text.bytes().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash >> 16) ^ (hash & 0xffff)
}

/// Checks that the layouts of an all_to_all_v fit the buffers and each other on this rank. Ranks may have different
/// numbers of elements.
///
/// # Errors
/// `InvalidArgument`.
pub fn check_layouts(
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
    check_parts(send, dtype.elements_in(src, "the source")?, size, "send")?;
    check_parts(recv, dtype.elements_in(dst, "the destination")?, size, "receive")?;
    check_apart(recv)?;
    let (given, taken) = (send.counts[rank], recv.counts[rank]);
    if given != taken {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} sends {given} elements to itself and receives {taken}"
        )));
    }
    Ok(())
}

fn check_parts(parts: &PartLayout<'_>, all: usize, size: usize, what: &str) -> Result<()> {
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

/// Checks that no two parts overlap. All parts must lie within a buffer, see [`check_parts`].
fn check_apart(parts: &PartLayout<'_>) -> Result<()> {
    let order = parts.in_order();
    let overlap = |pair: &&[usize]| parts.displs[pair[1]] < parts.displs[pair[0]] + parts.counts[pair[0]];
    match order.windows(2).find(overlap) {
        None => Ok(()),
        Some(pair) => {
            Err(Error::InvalidArgument(format!("the receive parts of ranks {} and {} overlap", pair[0], pair[1])))
        }
    }
}
