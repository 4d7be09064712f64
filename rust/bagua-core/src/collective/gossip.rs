//! Averaging with some of the ranks: the mean of a member's weights and its peers', written once over `exchange`.
//!
//! [`PeerSelection`] has the sources. The compressed ring is DCD-PSGD of Tang et al., NeurIPS 2018 (arXiv:1803.06443), as the original has it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::{Chunks, Collective, HostIo, Incoming, OpContext, Outgoing};
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::codec::{Codec, Encoded};
use crate::error::{Error, Result};
use crate::memory::BufferMut;
use crate::reduce::combine;
use crate::request::{Extra, PeerSelection, Replicas, Workspace};
use crate::types::ReduceOp;

/// The output becomes the mean of the input and the peers', in member order, divided once. Alone it is a copy.
///
/// # Errors
/// As [`Collective::run`].
pub(super) fn average(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    selection: PeerSelection,
    round: u64,
    mut io: HostIo<'_>,
) -> Result<()> {
    let weights = io.input();
    let mut fresh = Workspace::default();
    let extra = &mut *cx.extra.borrow_mut();
    let Workspace { received, .. } = extra.work.as_deref_mut().unwrap_or(&mut fresh);
    let (me, n) = (collective.rank(), collective.size());
    let peers = selection.peers(me, n, round);
    let takers = selection.takers(me, n, round);
    received.resize(peers.len() * weights.len(), 0);
    if weights.is_empty() {
        return Ok(());
    }
    let sends: Vec<_> = takers.iter().map(|peer| Outgoing::new(*peer, cx.fingerprint, weights)).collect();
    let parts = peers.iter().zip(received.chunks_mut(weights.len()));
    let mut recvs: Vec<_> = parts.map(|(peer, data)| Incoming::new(*peer, cx.fingerprint, data)).collect();
    collective.exchange(cx, &sends, &mut recvs)?;
    let start = Instant::now();
    let mut inputs: Vec<_> = received.chunks(weights.len()).map(Some).collect();
    let (own, mean) = match &mut io {
        HostIo::InPlace(data) => (None, &mut **data),
        HostIo::Split { src, dst } => (Some(*src), &mut **dst),
    };
    inputs.insert(peers.partition_point(|peer| *peer < me), own);
    combine(cx.dtype(), ReduceOp::Avg, &inputs, mean);
    cx.stats.add_reduce(start.elapsed());
    Ok(())
}

/// One round of the compressed ring: with W, L, R the replicas and x the weights, d = x + L/3 + R/3 - 5/3 W goes encoded to both
/// neighbours; L and R take up the neighbours' differences, W its own, and x becomes W. So W is to the bit what both neighbours
/// hold. Alone, W becomes x.
///
/// On a device that has the codec all of it stays there, and only records come to the host: those of the host, byte for byte.
///
/// # Errors
/// `UnsupportedType` on a device where the collective has not the codec; otherwise as [`Collective::codec_on`] and [`Collective::run`].
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
    work.sent.resize(record, 0);
    // Of the left neighbour, then of the right one.
    work.received.resize(2 * record, 0);
    match weights.device() {
        None => ring_on_host(collective, cx, codec, draw, weights.into_host()?, replicas, work),
        Some(_) => ring_on_device(collective, cx, codec, weights, replicas, work),
    }
}

/// For a ring without replicas.
pub(crate) fn no_replicas() -> Error {
    Error::InvalidArgument("the compressed ring needs the replicas of this rank and of its neighbours".to_owned())
}

fn ring_on_host(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    codec: &dyn Codec,
    draw: u64,
    weights: &mut [u8],
    replicas: Replicas<'_>,
    work: &mut Workspace,
) -> Result<()> {
    let dtype = cx.dtype();
    let (own, left, right) = (replicas.own.into_host()?, replicas.left.into_host()?, replicas.right.into_host()?);
    work.decoded.resize(weights.len(), 0);
    let start = Instant::now();
    for_dtype(dtype, Difference { weights, own, left, right, out: &mut work.decoded });
    if codec.encode(dtype, &work.decoded, &mut work.sent, draw, &mut work.scratch) == Encoded::NonFinite {
        cx.stats.nonfinite_records.fetch_add(1, Relaxed);
    }
    cx.stats.add_encode(start.elapsed());
    with_neighbours(collective, cx, work)?;
    let start = Instant::now();
    let (from_left, from_right) = work.received.split_at(work.sent.len());
    for (record, replica) in [(from_left, left), (from_right, right), (&work.sent, &mut *own)] {
        codec.decode(dtype, record, &mut work.decoded)?;
        for_dtype(dtype, Take { replica, difference: &work.decoded });
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
    work: &mut Workspace,
) -> Result<()> {
    let dtype = cx.dtype();
    let Some(mut on_device) = collective.codec_on(weights.device(), codec, dtype)? else {
        return Err(Error::UnsupportedType(format!("codec {} does not run where the weights are", codec.name())));
    };
    let Replicas { mut own, left, right } = replicas;
    let count = weights.len() / dtype.size();
    let chunks = Chunks { dtype, chunks: 1, count, elements: count, record: work.sent.len() };
    let start = Instant::now();
    let known = [left.as_buffer(), right.as_buffer(), own.as_buffer()];
    on_device.encode_difference(cx, &chunks, weights.as_buffer(), known, &mut work.sent)?;
    cx.stats.nonfinite_records.fetch_add(u64::from(on_device.is_nonfinite(&chunks, &work.sent)), Relaxed);
    cx.stats.add_encode(start.elapsed());
    with_neighbours(collective, cx, work)?;
    let start = Instant::now();
    let (from_left, from_right) = work.received.split_at(work.sent.len());
    for (record, replica) in [(from_left, left), (from_right, right), (&work.sent, own.reborrow())] {
        on_device.add(cx, &chunks, record, replica)?;
    }
    weights.copy_in_place(own.as_buffer())?;
    cx.stats.add_encode(start.elapsed());
    Ok(())
}

/// The record goes to both neighbours, and theirs come.
fn with_neighbours(collective: &mut dyn Collective, cx: &OpContext<'_>, work: &mut Workspace) -> Result<()> {
    let (me, n) = (collective.rank(), collective.size());
    let (before, after) = ((me + n - 1) % n, (me + 1) % n);
    let mut sends = vec![Outgoing::new(before, cx.fingerprint, &work.sent)];
    let (left, right) = work.received.split_at_mut(work.sent.len());
    let mut recvs = vec![Incoming::new(before, cx.fingerprint, left)];
    // Of two members each is both neighbours of the other: one record serves for both.
    if before != after {
        sends.push(Outgoing::new(after, cx.fingerprint, &work.sent));
        recvs.push(Incoming::new(after, cx.fingerprint, right));
    }
    collective.exchange(cx, &sends, &mut recvs)?;
    if before == after {
        work.received.copy_within(..work.sent.len(), work.sent.len());
    }
    Ok(())
}

/// out = weights + left / 3 + right / 3 - 5/3 own, in float32 with one rounding per operation, rounded.
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

/// replica += difference, rounded.
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
