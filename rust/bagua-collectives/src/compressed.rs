//! All_reduce through a codec, written once over `exchange`, so that it works with every collective and every set of
//! ranks. Every member decodes the same bytes, so results are bitwise equal. Source: Bagua (Gan et al., VLDB 2021,
//! arXiv:2107.01499), centralized low precision.
//!
//! **Two-shot** codecs:
//!
//! 1. Cut the tensor into one equal chunk per member, padded with zeros at the end.
//! 2. Encode all chunks, and send record j to member j.
//! 3. Member j decodes all records of chunk j, adds them in member order, divides, rounds to the element type, and
//!    encodes the result.
//! 4. All members get all results and decode them, including their own.
//!
//! **One-shot** codecs, for example of the largest elements: each member sends one record of the whole tensor to all
//! other members.
//!
//! [`reduce_scatter`] is steps 1 to 3 of two-shot without the second encoding, for every codec.
//!
//! **Error feedback** (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv:1901.09847): what encoding
//! lost is added to the next tensor. Invariant: in every step, the sum over ranks of (input + error before) = divisor *
//! result + the sum of (error after), within float32 rounding. So the owner of a chunk also keeps what its second
//! encoding lost, times the divisor.
//!
//! **Exact elements** at the end of the padding travel behind the encoded elements of each record, so they need no
//! message of their own.
//!
//! **On a device** that has the codec, a [`DeviceCodec`] encodes, combines and decodes, and the records stay there.
//! They have the same bytes as on the host, so some members may encode on a device and others on the host, if the
//! device's messages pass through the host.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::{Chunks, Collective, DeviceCodec, Incoming, OpContext, Outgoing};
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::codec::{Codec, Encoded, Exchange, PART, Scratch};
use crate::error::{Error, Result};
use crate::memory::{Buffer, BufferMut, DeviceRef, same_place};
use crate::reduce::sum_over;
use crate::request::{Compression, Extra, Workspace};
use crate::types::DType;

/// Size in bytes of an element of the error feedback, which is a float32.
const ERROR: usize = 4;

/// The way in which the members of a compressed all_reduce exchange records of equal length. Every [`Collective`] does
/// it with messages. Another communication library can use its own all_to_all and all_gather.
pub trait RecordExchange {
    /// Returns this process's position among the members.
    fn rank(&self) -> usize;

    /// Returns the number of members.
    fn size(&self) -> usize;

    /// Sends record j of `sent` to member j, and stores the record from member i at position i of `received`. May leave
    /// the member's own record in `received` as it is. Both buffers contain one record of `record` bytes for each
    /// member, and are on the same device. Returns the errors of [`Collective::exchange`].
    fn all_to_all(
        &mut self,
        cx: &OpContext<'_>,
        sent: Buffer<'_>,
        received: BufferMut<'_>,
        record: usize,
    ) -> Result<()>;

    /// Fills `records`, which contains the member's own record at its own position, with the records of all members.
    /// Returns the errors of [`Collective::exchange`].
    fn all_gather(&mut self, cx: &OpContext<'_>, records: BufferMut<'_>, record: usize) -> Result<()>;

    /// Returns the codec on a device, or `None` if copies on the host must be encoded instead. Sends nothing. Returns
    /// the errors of [`Collective::codec_on`].
    fn codec_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        let _ = (place, codec, dtype);
        Ok(None)
    }
}

impl RecordExchange for dyn Collective + '_ {
    fn rank(&self) -> usize {
        Collective::rank(self)
    }

    fn size(&self) -> usize {
        Collective::size(self)
    }

    fn all_to_all(
        &mut self,
        cx: &OpContext<'_>,
        sent: Buffer<'_>,
        received: BufferMut<'_>,
        record: usize,
    ) -> Result<()> {
        let (me, fingerprint) = (Collective::rank(self), cx.fingerprint);
        let sends: Vec<_> = sent
            .chunks(record)
            .enumerate()
            .filter(|(peer, _)| *peer != me)
            .map(|(peer, data)| Outgoing { peer, fingerprint, data })
            .collect();
        let recvs = received.chunks(record).enumerate().filter(|(peer, _)| *peer != me);
        let mut recvs: Vec<_> = recvs.map(|(peer, data)| Incoming { peer, fingerprint, data }).collect();
        self.exchange(cx, &sends, &mut recvs)
    }

    fn all_gather(&mut self, cx: &OpContext<'_>, records: BufferMut<'_>, record: usize) -> Result<()> {
        let (me, members, fingerprint) = (Collective::rank(self), Collective::size(self), cx.fingerprint);
        let mut others: Vec<_> = records.chunks(record).collect();
        let own = others.remove(me);
        let peers = (0..members).filter(|peer| *peer != me);
        let send = |peer| Outgoing { peer, fingerprint, data: own.as_buffer() };
        let sends: Vec<_> = peers.clone().map(send).collect();
        let mut recvs: Vec<_> = peers.zip(others).map(|(peer, data)| Incoming { peer, fingerprint, data }).collect();
        self.exchange(cx, &sends, &mut recvs)
    }

    fn codec_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        Collective::codec_on(self, place, codec, dtype)
    }
}

/// Combines `data`, whose element type is that of the fingerprint, in place. With a single member, only clears the
/// padding. Data on a device is encoded there if the exchange has the codec on that device. Otherwise a copy on the
/// host is encoded.
///
/// # Errors
/// `InvalidArgument` if the error memory has a wrong length, or if options of the codec do not fit the number of
/// elements. Otherwise as [`Collective::codec_on`] and [`Collective::run`].
pub fn all_reduce<E: RecordExchange + ?Sized>(
    exchange: &mut E,
    cx: &OpContext<'_>,
    mut data: BufferMut<'_>,
    how: &Compression<'_>,
) -> Result<()> {
    let Extra { error, work, .. } = &mut *cx.extra.borrow_mut();
    let mut error = error.as_mut().map(BufferMut::reborrow);
    let mut fresh = Workspace::default();
    let work = work.as_deref_mut().unwrap_or(&mut fresh);
    let place = data.device();
    if !data.is_empty() && exchange.size() > 1 {
        check_error(error.as_ref().map(BufferMut::len), how)?;
    }
    if place.is_none() {
        let error = error.map(BufferMut::into_host).transpose()?;
        return on_host(exchange, cx, data.into_host()?, how, error, work);
    }
    if data.is_empty() {
        return Ok(());
    }
    if exchange.size() == 1 {
        let carried = data.len().min(how.elements * cx.dtype().size());
        let (_, padding) = data.split_at(carried);
        let width = padding.len().saturating_sub(how.exact * cx.dtype().size());
        let (mut padding, _) = padding.split_at(width);
        let zeros = vec![0; padding.len()];
        return if zeros.is_empty() { Ok(()) } else { padding.copy_from(&zeros) };
    }
    let members = exchange.size();
    if how.exact == 0
        && error.as_ref().is_none_or(|error| same_place(error.device(), place))
        && how.codec.exchange() == Exchange::TwoShot
        && let Some(mut codec) = exchange.codec_on(place, how.codec, cx.dtype())?
        && (error.is_none() || codec.feeds_back(members))
    {
        return two_shot_on(&mut *codec, exchange, cx, data, how, error, work);
    }
    let mut host = data.as_buffer().to_vec()?;
    let mut kept = error.as_ref().map(|error| error.as_buffer().to_vec()).transpose()?;
    on_host(exchange, cx, &mut host, how, kept.as_deref_mut(), work)?;
    if let (Some(error), Some(kept)) = (&mut error, &kept) {
        error.copy_from(kept)?;
    }
    data.copy_from(&host)
}

fn on_host<E: RecordExchange + ?Sized>(
    exchange: &mut E,
    cx: &OpContext<'_>,
    data: &mut [u8],
    how: &Compression<'_>,
    error: Option<&mut [u8]>,
    work: &mut Workspace,
) -> Result<()> {
    let (dtype, members) = (cx.dtype(), exchange.size());
    let size = dtype.size();
    let (data, exact) = data.split_at_mut(data.len().saturating_sub(how.exact * size));
    let total = data.len() / size;
    let carried = how.elements.min(total) * size;
    data[carried..].fill(0);
    if members == 1 || data.is_empty() {
        return Ok(());
    }
    let owed = error.as_deref();
    let finite = match how.codec.exchange() {
        Exchange::OneShot => one_shot(exchange, cx, (data, exact), how, owed, work)?,
        Exchange::TwoShot if total.is_multiple_of(members) => two_shot(exchange, cx, (data, exact), how, owed, work)?,
        Exchange::TwoShot => {
            let mut padded = std::mem::take(&mut work.padded);
            padded.clear();
            padded.extend_from_slice(data);
            padded.resize(total.next_multiple_of(members) * size, 0);
            let outcome = two_shot(exchange, cx, (&mut padded, exact), how, owed, work);
            data.copy_from_slice(&padded[..data.len()]);
            work.padded = padded;
            outcome?
        }
    };
    data[carried..].fill(0);
    if let Some(error) = error
        && finite
    {
        error.copy_from_slice(&work.error);
    }
    Ok(())
}

/// Stores this member's part of the combined `data` in `result`. `data` consists of one part for each member, and
/// contains input plus error memory afterwards. Every codec sends one record for each part. All of it is on the host.
///
/// If this member's part of the result, or anything that this member sent, is not finite, the error memory stays.
///
/// # Errors
/// `InvalidArgument` if a length does not fit, or if options of the codec do not fit the number of elements. Otherwise
/// as [`Collective::exchange`].
pub fn reduce_scatter<E: RecordExchange + ?Sized>(
    exchange: &mut E,
    cx: &OpContext<'_>,
    data: &mut [u8],
    result: &mut [u8],
    how: &Compression<'_>,
) -> Result<()> {
    let Extra { error, work, .. } = &mut *cx.extra.borrow_mut();
    let mut fresh = Workspace::default();
    let work = work.as_deref_mut().unwrap_or(&mut fresh);
    let (dtype, members) = (cx.dtype(), exchange.size());
    if data.len() != members * result.len() {
        let (data, result) = (data.len(), result.len());
        return Err(Error::InvalidArgument(format!("{data} bytes for {members} parts of {result} bytes")));
    }
    let mut error = error.as_mut().map(|error| error.reborrow().into_host()).transpose()?;
    check_error(error.as_ref().map(|error| error.len()), how)?;
    if members == 1 || data.is_empty() {
        result.copy_from_slice(data);
        return Ok(());
    }
    scatter(exchange, cx, (data, &mut []), how, error.as_deref(), work)?;
    let record = work.received.len() / members;
    combine(cx, how, 0, &records(&work.received, record, record), &mut work.decoded, result)?;
    if let Some(error) = &mut error
        && for_dtype(dtype, IsFinite(result))
        && for_dtype(DType::F32, IsFinite(&work.error))
    {
        error.copy_from_slice(&work.error);
    }
    Ok(())
}

/// Adds the error memory to `data`, encodes it in one chunk per member, and sends record j to member j. With error
/// memory, `work.error` then has what encoding lost. Works unit by unit, so that the elements stay in the cache.
fn scatter<E: RecordExchange + ?Sized>(
    exchange: &mut E,
    cx: &OpContext<'_>,
    (data, exact): (&mut [u8], &mut [u8]),
    how: &Compression<'_>,
    owed: Option<&[u8]>,
    work: &mut Workspace,
) -> Result<()> {
    let (dtype, members, me) = (cx.dtype(), exchange.size(), exchange.rank());
    let chunk = data.len() / members;
    let count = chunk / dtype.size();
    how.codec.check_count(count)?;
    let encoded = how.codec.record_len(count, dtype);
    let record = encoded + exact.len();
    let part = part_of(how.codec.decodes_parts(), dtype, chunk);
    resize(work, members * record, members * part, owed);
    let Workspace { sent, received, decoded, error, scratch, .. } = work;

    let start = Instant::now();
    for (j, (chunk, record)) in data.chunks_mut(chunk).zip(sent.chunks_mut(record)).enumerate() {
        let how = Compression { draw: how.draw + j as u64, ..*how };
        let (record, behind) = record.split_at_mut(encoded);
        behind.copy_from_slice(exact);
        let mut state = Encoded::Finite;
        for (first, elements) in units(&how, dtype, chunk) {
            let place = |begin: usize, bytes: usize| errors(how.elements, j * count + begin, bytes / dtype.size());
            if let Some(owed) = owed {
                let place = place(first, elements.len());
                for_dtype(dtype, Compensate { data: elements, error: &owed[place.clone()], after: &mut error[place] });
            }
            encode_unit(&how, dtype, first, elements, record, scratch, &mut state);
            for at in (0..elements.len()).step_by(part).filter(|_| owed.is_some()) {
                let first = first + at / dtype.size();
                let decoded = &mut decoded[..part.min(elements.len() - at)];
                decode_part(&how, dtype, first, record, decoded)?;
                for_dtype(dtype, Lose { error: &mut error[place(first, decoded.len())], decoded });
            }
        }
        count_nonfinite(cx, state);
    }
    cx.stats.add_encode(start.elapsed());
    exchange.all_to_all(cx, sent.as_slice().into(), received.as_mut_slice().into(), record)?;
    received[me * record..][..record].copy_from_slice(&sent[me * record..][..record]);
    add_exact(dtype, received, record, exact);
    Ok(())
}

/// Returns the byte range of `count` elements from number `first` on in the error memory of `elements` elements. The
/// error memory has no padding.
fn errors(elements: usize, first: usize, count: usize) -> Range<usize> {
    let end = elements * ERROR;
    (first * ERROR).min(end)..((first + count) * ERROR).min(end)
}

/// Returns true if the result is finite, or if there is no error memory.
fn two_shot<E: RecordExchange + ?Sized>(
    exchange: &mut E,
    cx: &OpContext<'_>,
    (data, exact): (&mut [u8], &mut [u8]),
    how: &Compression<'_>,
    owed: Option<&[u8]>,
    work: &mut Workspace,
) -> Result<bool> {
    scatter(exchange, cx, (data, exact), how, owed, work)?;
    let (dtype, members, me) = (cx.dtype(), exchange.size(), exchange.rank());
    let chunk = data.len() / members;
    let count = chunk / dtype.size();
    let Workspace { sent, received, decoded, mean, error, scratch, .. } = work;
    let record = sent.len() / members;
    let encoded = record - exact.len();
    let (part, mut finite) = (part_of(how.codec.decodes_parts(), dtype, chunk), true);

    let start = Instant::now();
    let own = &mut sent[me * record..][..encoded];
    let mut state = Encoded::Finite;
    let all = records(received, record, encoded);
    mean.resize(part_of(how.codec.encodes_parts(), dtype, chunk), 0);
    for (first, mine) in units(how, dtype, &mut data[me * chunk..][..chunk]) {
        let mean = &mut mean[..mine.len()];
        combine(cx, how, first, &all, decoded, mean)?;
        encode_unit(how, dtype, first, mean, own, scratch, &mut state);
        for (mine, (number, mean)) in mine.chunks_mut(part).zip(mean.chunks(part).enumerate()) {
            let first = first + number * PART;
            decode_part(how, dtype, first, own, mine)?;
            if owed.is_some() {
                finite &= for_dtype(dtype, IsFinite(mine));
                let error = &mut error[errors(how.elements, me * count + first, mine.len() / dtype.size())];
                for_dtype(dtype, LoseMean { error, mean, decoded: mine, times: how.divisor });
            }
        }
    }
    count_nonfinite(cx, state);
    cx.stats.add_encode(start.elapsed());
    exchange.all_gather(cx, sent.as_mut_slice().into(), record)?;

    let start = Instant::now();
    for (j, (elements, record)) in data.chunks_mut(chunk).zip(sent.chunks(record)).enumerate() {
        if j == me {
            continue;
        }
        for (number, elements) in elements.chunks_mut(part).enumerate() {
            decode_part(how, dtype, number * PART, &record[..encoded], elements)?;
            finite &= owed.is_none() || for_dtype(dtype, IsFinite(elements));
        }
    }
    cx.stats.add_encode(start.elapsed());
    Ok(finite)
}

fn two_shot_on<E: RecordExchange + ?Sized>(
    codec: &mut dyn DeviceCodec,
    exchange: &mut E,
    cx: &OpContext<'_>,
    mut data: BufferMut<'_>,
    how: &Compression<'_>,
    error: Option<BufferMut<'_>>,
    work: &mut Workspace,
) -> Result<()> {
    let (dtype, members, me) = (cx.dtype(), exchange.size(), exchange.rank());
    let total = data.len() / dtype.size();
    let count = total.div_ceil(members);
    how.codec.check_count(count)?;
    let record = how.codec.record_len(count, dtype);
    let chunks = Chunks { dtype, chunks: members, count, elements: how.elements.min(total), record };
    let feedback = error.as_ref().map_or(0, BufferMut::len);
    let room = BufferMut::room(data.device(), &mut work.received, 2 * members * record + feedback)?;
    let (mut sent, room) = room.split_at(members * record);
    let (mut received, mut after) = room.split_at(members * record);
    let own = me * record..(me + 1) * record;

    let start = Instant::now();
    if let Some(error) = &error {
        codec.compensate(cx, &chunks, data.reborrow(), error.as_buffer(), after.reborrow())?;
    }
    codec.encode(cx, &chunks, data.as_buffer(), sent.reborrow())?;
    if error.is_some() {
        codec.lose(cx, &chunks, sent.as_buffer(), after.reborrow())?;
    }
    received.part(own.clone()).copy_in_place(sent.as_buffer().slice(own.clone()))?;
    cx.stats.add_encode(start.elapsed());
    exchange.all_to_all(cx, sent.as_buffer(), received.reborrow(), record)?;

    let start = Instant::now();
    codec.combine(cx, &chunks, received.as_buffer(), how.divisor, sent.part(own.clone()))?;
    if error.is_some() {
        let mine = (me * count * ERROR).min(feedback)..((me + 1) * count * ERROR).min(feedback);
        let record = sent.as_buffer().slice(own);
        codec.lose_mean(cx, &chunks, received.as_buffer(), how.divisor, record, after.part(mine))?;
    }
    cx.stats.add_encode(start.elapsed());
    exchange.all_gather(cx, sent.reborrow(), record)?;

    let start = Instant::now();
    codec.decode(cx, &chunks, sent.as_buffer(), data.reborrow())?;
    if let Some(error) = error {
        codec.keep(cx, &chunks, data.as_buffer(), after.as_buffer(), error)?;
    }
    cx.stats.add_encode(start.elapsed());
    Ok(())
}

/// Returns true if the result is finite, or if there is no error memory.
fn one_shot<E: RecordExchange + ?Sized>(
    exchange: &mut E,
    cx: &OpContext<'_>,
    (data, exact): (&mut [u8], &mut [u8]),
    how: &Compression<'_>,
    owed: Option<&[u8]>,
    work: &mut Workspace,
) -> Result<bool> {
    let (dtype, members, me) = (cx.dtype(), exchange.size(), exchange.rank());
    let count = data.len() / dtype.size();
    how.codec.check_count(count)?;
    let encoded = how.codec.record_len(count, dtype);
    let record = encoded + exact.len();
    resize(work, members * record, members * data.len(), owed);
    let Workspace { received, decoded, error, scratch, .. } = work;
    let start = Instant::now();
    if let Some(owed) = owed {
        for_dtype(dtype, Compensate { data, error: owed, after: error });
    }
    let (own, behind) = received[me * record..][..record].split_at_mut(encoded);
    behind.copy_from_slice(exact);
    count_nonfinite(cx, how.codec.encode(dtype, data, own, how.draw, scratch));
    if owed.is_some() {
        let decoded = &mut decoded[..data.len()];
        how.codec.decode(dtype, own, decoded)?;
        for_dtype(dtype, Lose { error, decoded });
    }
    cx.stats.add_encode(start.elapsed());
    exchange.all_gather(cx, received.as_mut_slice().into(), record)?;
    let start = Instant::now();
    let all = records(received, record, encoded);
    combine(cx, how, 0, &all, decoded, data)?;
    add_exact(dtype, received, record, exact);
    cx.stats.add_encode(start.elapsed());
    let carried = how.elements.min(count) * dtype.size();
    Ok(owed.is_none() || for_dtype(dtype, IsFinite(&data[..carried])))
}

fn check_error(bytes: Option<usize>, how: &Compression<'_>) -> Result<()> {
    match bytes {
        Some(bytes) if bytes != how.elements * ERROR => {
            let (kept, elements) = (bytes / ERROR, how.elements);
            Err(Error::InvalidArgument(format!("error memory of {kept} elements for {elements}")))
        }
        _ => Ok(()),
    }
}

/// Resizes the workspace to these numbers of bytes for records and decoded elements, and for the new error memory.
fn resize(work: &mut Workspace, records: usize, decoded: usize, owed: Option<&[u8]>) {
    work.sent.resize(records, 0);
    work.received.resize(records, 0);
    work.decoded.resize(decoded, 0);
    work.error.resize(owed.map_or(0, <[u8]>::len), 0);
}

/// Returns the bytes of a part of a chunk, which is a small part of it if the codec allows `parts`.
fn part_of(parts: bool, dtype: DType, chunk: usize) -> usize {
    if parts { (PART * dtype.size()).min(chunk) } else { chunk }
}

/// Returns the elements that are encoded at once, each with the number of its first element.
fn units<'a>(how: &Compression<'_>, dtype: DType, chunk: &'a mut [u8]) -> impl Iterator<Item = (usize, &'a mut [u8])> {
    let bytes = part_of(how.codec.encodes_parts(), dtype, chunk.len());
    chunk.chunks_mut(bytes).enumerate().map(|(number, elements)| (number * PART, elements))
}

/// Encodes a unit of a chunk. `state` becomes `NonFinite` if the codec cannot represent the elements.
fn encode_unit(
    how: &Compression<'_>,
    dtype: DType,
    first: usize,
    elements: &[u8],
    record: &mut [u8],
    scratch: &mut Scratch,
    state: &mut Encoded,
) {
    let encoded = if how.codec.encodes_parts() {
        how.codec.encode_part(dtype, elements, record, first)
    } else {
        how.codec.encode(dtype, elements, record, how.draw, scratch)
    };
    if encoded == Encoded::NonFinite {
        *state = encoded;
    }
}

/// Decodes a part of a chunk, from element number `first` on: the whole chunk if the codec does not decode parts.
fn decode_part(how: &Compression<'_>, dtype: DType, first: usize, record: &[u8], elements: &mut [u8]) -> Result<()> {
    if how.codec.decodes_parts() {
        how.codec.decode_part(dtype, record, first, elements);
        return Ok(());
    }
    how.codec.decode(dtype, record, elements)
}

fn count_nonfinite(cx: &OpContext<'_>, state: Encoded) {
    if state == Encoded::NonFinite {
        cx.stats.nonfinite_records.fetch_add(1, Relaxed);
    }
}

/// Returns the encoded elements of each record.
fn records(received: &[u8], record: usize, encoded: usize) -> Vec<&[u8]> {
    received.chunks(record).map(|record| &record[..encoded]).collect()
}

/// Replaces the exact elements by their sum over the records, which end with them.
fn add_exact(dtype: DType, received: &[u8], record: usize, exact: &mut [u8]) {
    if !exact.is_empty() {
        let all: Vec<_> = received.chunks(record).map(|each| Some(&each[record - exact.len()..])).collect();
        sum_over(dtype, &all, exact, 1);
    }
}

/// Decodes the same elements, from number `first` on, of the records of all members, adds them in member order in
/// float32, divides, and rounds once. Works part by part if the codec allows it, so that the decoded elements stay in
/// the cache.
fn combine(
    cx: &OpContext<'_>,
    how: &Compression<'_>,
    first: usize,
    records: &[&[u8]],
    decoded: &mut [u8],
    result: &mut [u8],
) -> Result<()> {
    let dtype = cx.dtype();
    let part = part_of(how.codec.decodes_parts(), dtype, result.len());
    for (number, result) in result.chunks_mut(part).enumerate() {
        let decoded = &mut decoded[..records.len() * result.len()];
        for (elements, record) in decoded.chunks_mut(result.len()).zip(records) {
            decode_part(how, dtype, first + number * PART, record, elements)?;
        }
        sum_all(dtype, decoded, result, how.divisor);
    }
    Ok(())
}

fn sum_all(dtype: DType, decoded: &[u8], result: &mut [u8], divisor: usize) {
    let inputs: Vec<_> = decoded.chunks(result.len()).map(Some).collect();
    sum_over(dtype, &inputs, result, divisor);
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|value| f32::from_ne_bytes(*value))
}

/// Computes `after` = data + error in float32, and stores it, rounded, in data.
struct Compensate<'a> {
    data: &'a mut [u8],
    error: &'a [u8],
    after: &'a mut [u8],
}

impl ForFloat for Compensate<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let after = self.after.as_chunks_mut::<ERROR>().0;
        for ((x, e), after) in self.data.chunks_exact_mut(T::SIZE).zip(floats(self.error)).zip(after) {
            let sum = T::load(x) + e;
            *after = sum.to_ne_bytes();
            T::store(sum, x);
        }
    }
}

/// Computes error -= decoded.
struct Lose<'a> {
    error: &'a mut [u8],
    decoded: &'a [u8],
}

impl ForFloat for Lose<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let errors = self.error.as_chunks_mut::<ERROR>().0;
        for (error, decoded) in errors.iter_mut().zip(self.decoded.chunks_exact(T::SIZE)) {
            *error = (f32::from_ne_bytes(*error) - T::load(decoded)).to_ne_bytes();
        }
    }
}

/// Computes error += times * (mean - decoded).
struct LoseMean<'a> {
    error: &'a mut [u8],
    mean: &'a [u8],
    decoded: &'a [u8],
    times: usize,
}

impl ForFloat for LoseMean<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let times = self.times as f32;
        let errors = self.error.as_chunks_mut::<ERROR>().0;
        let lost = self.mean.chunks_exact(T::SIZE).zip(self.decoded.chunks_exact(T::SIZE));
        for (error, (mean, decoded)) in errors.iter_mut().zip(lost) {
            let lost = times * (T::load(mean) - T::load(decoded));
            *error = (f32::from_ne_bytes(*error) + lost).to_ne_bytes();
        }
    }
}

struct IsFinite<'a>(&'a [u8]);

impl ForFloat for IsFinite<'_> {
    type Output = bool;

    fn run<T: Float>(self) -> bool {
        self.0.chunks_exact(T::SIZE).fold(true, |finite, x| finite & T::load(x).is_finite())
    }
}
