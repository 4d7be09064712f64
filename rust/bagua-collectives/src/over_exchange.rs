//! The verbs that are made of messages, once for every collective: the `run` of a collective that has nothing faster calls this.

use super::{Collective, Incoming, Io, OpContext, Outgoing, Verb, compressed, gossip};
use crate::error::{Error, Result};
use crate::memory::BufferMut;
use crate::request::PartLayout;

/// Runs a verb by [`Collective::exchange`], on the host or on a device.
///
/// # Errors
/// As [`Collective::run`]; `NotImplemented` for a verb that is not made of messages.
pub fn over_exchange(collective: &mut dyn Collective, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
    match verb {
        Verb::AllToAllV { send, recv } => all_to_all_v(collective, cx, io, &send, &recv),
        Verb::CompressedAllReduce(how) => compressed::all_reduce(collective, cx, in_place(verb, io)?, &how),
        Verb::NeighborAverage { peers, round } => gossip::average(collective, cx, peers, round, io),
        Verb::CompressedRing { codec, draw } => {
            gossip::compressed_ring(collective, cx, codec, draw, in_place(verb, io)?)
        }
        _ => Err(Error::NotImplemented(format!("{} by messages of {}", verb.kind().name(), collective.name()))),
    }
}

/// The buffer of a verb that works in place.
///
/// # Errors
/// `InvalidArgument` for two buffers.
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
    // Empty parts are sent too: a rank that does something else is found out whatever the counts are.
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
