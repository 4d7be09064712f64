//! Averaging with some of the ranks: the mean of a member's and its peers' weights, written once over `exchange`.
//!
//! Sources: see [`PeerSelection`]. The compressed ring is DCD-PSGD of Tang et al., NeurIPS 2018 (arXiv:1803.06443), in
//! the variant of the original Bagua.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::{Chunks, Collective, Incoming, Io, OpContext, Outgoing};
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::codec::{Codec, Encoded, Scratch};
use crate::error::{Error, Result};
use crate::memory::{Buffer, BufferMut};
use crate::request::{Extra, PeerSelection, Replicas, Workspace};

/// Writes the mean of the input and the peers' inputs to the output, added in member order and divided once. A single
/// member copies its input.
pub(super) fn average(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    selection: PeerSelection,
    round: u64,
    io: Io<'_>,
) -> Result<()> {
    let (len, place) = (io.len(), io.device()?);
    if len == 0 {
        return Ok(());
    }
    let mut fresh = Workspace::default();
    let extra = &mut *cx.extra.borrow_mut();
    let Workspace { received, .. } = extra.work.as_deref_mut().unwrap_or(&mut fresh);
    let (me, n) = (collective.rank(), collective.size());
    let peers = selection.peers(me, n, round);
    let takers = selection.takers(me, n, round);
    let mut received = BufferMut::room(place, received, peers.len() * len)?;
    let (own, mean) = match io {
        Io::InPlace(data) => (None, data),
        Io::Split { src, dst } => (Some(src), dst),
    };
    let (fingerprint, data) = (cx.fingerprint, own.unwrap_or(mean.as_buffer()));
    let sends: Vec<_> = takers.iter().map(|peer| Outgoing { peer: *peer, fingerprint, data }).collect();
    let parts = peers.iter().zip(received.reborrow().chunks(len));
    let mut recvs: Vec<_> = parts.map(|(peer, data)| Incoming { peer: *peer, fingerprint, data }).collect();
    collective.exchange(cx, &sends, &mut recvs)?;
    let start = Instant::now();
    let mut inputs: Vec<_> = received.as_buffer().chunks(len).map(Some).collect();
    inputs.insert(peers.partition_point(|peer| *peer < me), own);
    collective.average(cx, &inputs, mean)?;
    cx.stats.add_reduce(start.elapsed());
    Ok(())
}

/// Runs one round of the compressed ring. x are the weights, and W, L and R the replicas of this member and of its left
/// and right neighbour.
///
/// 1. Encode d = x + L/3 + R/3 - 5/3 W, and send the record to both neighbours.
/// 2. Decode the records of the left neighbour, the right neighbour and this member, and add them to L, R and W,
///    respectively.
/// 3. Copy W to x.
///
/// Both neighbours decode the same record as this member, so W equals bit for bit what they know of it. A single member
/// copies x to W. On a device that has the codec, everything stays there, with the same bytes in the records. Fails
/// with `UnsupportedType` if the collective does not have the codec on the device of the weights. Also returns the
/// errors of [`Collective::codec_on`] and [`Collective::run`].
pub(super) fn compressed_ring(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    codec: &dyn Codec,
    draw: u64,
    weights: BufferMut<'_>,
) -> Result<()> {
    let mut fresh = Workspace::default();
    let Extra { replicas, work, .. } = &mut *cx.extra.borrow_mut();
    let work = work.as_deref_mut().unwrap_or(&mut fresh);
    let Some(mut replicas) = replicas.as_mut().map(Replicas::reborrow) else { return Err(no_replicas()) };
    if collective.size() == 1 || weights.is_empty() {
        return replicas.own.copy_in_place(weights.as_buffer());
    }
    let count = weights.len() / cx.dtype().size();
    codec.check_count(count)?;
    let record = codec.record_len(count, cx.dtype());
    let Workspace { received, decoded, scratch, .. } = work;
    let room = BufferMut::room(weights.device(), received, 3 * record)?;
    let (own, neighbours) = room.split_at(record);
    let (left, right) = neighbours.split_at(record);
    let records = Records { own, left, right };
    match weights.device() {
        None => {
            let encoder = Encoder { codec, draw, decoded, scratch };
            ring_on_host(collective, cx, encoder, weights.into_host()?, replicas, records)
        }
        Some(_) => ring_on_device(collective, cx, codec, weights, replicas, records),
    }
}

struct Records<'a> {
    own: BufferMut<'a>,
    left: BufferMut<'a>,
    right: BufferMut<'a>,
}

struct Encoder<'a> {
    codec: &'a dyn Codec,
    draw: u64,
    decoded: &'a mut Vec<u8>,
    scratch: &'a mut Scratch,
}

/// Returns the error for a compressed ring whose replicas are missing.
pub fn no_replicas() -> Error {
    Error::InvalidArgument("the compressed ring needs the replicas of this rank and of its neighbours".to_owned())
}

fn ring_on_host(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    Encoder { codec, draw, decoded, scratch }: Encoder<'_>,
    weights: &mut [u8],
    replicas: Replicas<'_>,
    mut records: Records<'_>,
) -> Result<()> {
    let dtype = cx.dtype();
    let (own, left, right) = (replicas.own.into_host()?, replicas.left.into_host()?, replicas.right.into_host()?);
    decoded.resize(weights.len(), 0);
    let start = Instant::now();
    for_dtype(dtype, Difference { weights, own, left, right, out: decoded });
    if codec.encode(dtype, decoded, records.own.reborrow().into_host()?, draw, scratch) == Encoded::NonFinite {
        cx.stats.nonfinite_records.fetch_add(1, Relaxed);
    }
    cx.stats.add_encode(start.elapsed());
    let received = with_neighbours(collective, cx, &mut records)?;
    let start = Instant::now();
    for (record, replica) in received.into_iter().zip([left, right, &mut *own]) {
        codec.decode(dtype, record.as_host()?, decoded)?;
        for_dtype(dtype, Take { replica, difference: decoded });
    }
    weights.copy_from_slice(own);
    cx.stats.add_encode(start.elapsed());
    Ok(())
}

fn ring_on_device(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    codec: &dyn Codec,
    mut weights: BufferMut<'_>,
    replicas: Replicas<'_>,
    mut records: Records<'_>,
) -> Result<()> {
    let dtype = cx.dtype();
    let Some(mut on_device) = collective.codec_on(weights.device(), codec, dtype)? else {
        return Err(Error::UnsupportedType(format!(
            "codec {} does not run on the device of the weights",
            codec.name()
        )));
    };
    let Replicas { mut own, left, right } = replicas;
    let count = weights.len() / dtype.size();
    let chunks = Chunks { dtype, chunks: 1, count, elements: count, record: records.own.len() };
    let start = Instant::now();
    let known = [left.as_buffer(), right.as_buffer(), own.as_buffer()];
    on_device.encode_difference(cx, &chunks, weights.as_buffer(), known, records.own.reborrow())?;
    cx.stats.add_encode(start.elapsed());
    let received = with_neighbours(collective, cx, &mut records)?;
    let start = Instant::now();
    for (record, replica) in received.into_iter().zip([left, right, own.reborrow()]) {
        on_device.add(cx, &chunks, record, replica)?;
    }
    weights.copy_in_place(own.as_buffer())?;
    cx.stats.add_encode(start.elapsed());
    Ok(())
}

/// Sends this member's record to both neighbours. Returns the records of left, right and this member.
fn with_neighbours<'a>(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    records: &'a mut Records<'_>,
) -> Result<[Buffer<'a>; 3]> {
    let (me, n, fingerprint) = (collective.rank(), collective.size(), cx.fingerprint);
    let (before, after) = ((me + n - 1) % n, (me + 1) % n);
    let Records { own, left, right } = records;
    let mut sends = vec![Outgoing { peer: before, fingerprint, data: own.as_buffer() }];
    let mut recvs = vec![Incoming { peer: before, fingerprint, data: left.reborrow() }];
    // With two members, each is both neighbours of the other, so that one record serves for both.
    if before != after {
        sends.push(Outgoing { peer: after, fingerprint, data: own.as_buffer() });
        recvs.push(Incoming { peer: after, fingerprint, data: right.reborrow() });
    }
    collective.exchange(cx, &sends, &mut recvs)?;
    let right = if before == after { left.as_buffer() } else { right.as_buffer() };
    Ok([left.as_buffer(), right, own.as_buffer()])
}

/// Computes out = weights + left / 3 + right / 3 - 5/3 own in float32, with one rounding per operation, and rounds the
/// result to the element type.
struct Difference<'a> {
    weights: &'a [u8],
    own: &'a [u8],
    left: &'a [u8],
    right: &'a [u8],
    out: &'a mut [u8],
}

impl ForFloat for Difference<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        const THIRD: f32 = 1.0 / 3.0;
        const FIVE_THIRDS: f32 = 5.0 / 3.0;
        let all = [self.weights, self.left, self.right, self.own].map(|bytes| bytes.chunks_exact(T::SIZE).map(T::load));
        let [x, l, r, w] = all;
        for ((((out, x), l), r), w) in self.out.chunks_exact_mut(T::SIZE).zip(x).zip(l).zip(r).zip(w) {
            T::store(x + l * THIRD + r * THIRD - w * FIVE_THIRDS, out);
        }
    }
}

/// Computes replica += difference, rounded to the element type.
struct Take<'a> {
    replica: &'a mut [u8],
    difference: &'a [u8],
}

impl ForFloat for Take<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        for (replica, d) in self.replica.chunks_exact_mut(T::SIZE).zip(self.difference.chunks_exact(T::SIZE)) {
            T::store(T::load(replica) + T::load(d), replica);
        }
    }
}
