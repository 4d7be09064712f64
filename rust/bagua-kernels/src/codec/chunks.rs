//! A tensor in equal chunks with one record each, one record after the other.

use super::{Codec, Encoded, Scratch};
use crate::error::{Error, Result};
use crate::types::DType;

/// Returns the number to draw with for a chunk: `call << 32 | chunk`. `call` counts the calls of one encoder from 0.
pub fn draw(call: u64, chunk: usize) -> u64 {
    (call << 32) | chunk as u64
}

fn part(codec: &dyn Codec, dtype: DType, count: usize, chunks: usize) -> Result<usize> {
    codec.check(dtype)?;
    if chunks == 0 || !count.is_multiple_of(chunks) || u32::try_from(chunks).is_err() {
        return Err(Error::InvalidArgument(format!("{count} elements cannot be cut into {chunks} equal chunks")));
    }
    let part = count / chunks;
    codec.check_count(part)?;
    Ok(part)
}

/// Returns the length in bytes of the records of `count` elements in `chunks` equal chunks.
///
/// # Errors
/// `UnsupportedType` if the codec cannot encode the element type; `InvalidArgument` if `chunks` does not divide
/// `count`, if the codec's options do not fit, or if the length exceeds the address space.
pub fn records_len(codec: &dyn Codec, dtype: DType, count: usize, chunks: usize) -> Result<usize> {
    let part = part(codec, dtype, count, chunks)?;
    // A record has at most nine bytes per element, plus its header and padding.
    part.checked_mul(16)
        .and_then(|_| codec.record_len(part, dtype).checked_mul(chunks))
        .filter(|len| isize::try_from(*len).is_ok())
        .ok_or_else(|| Error::InvalidArgument(format!("the records of {count} elements do not fit the address space")))
}

fn check_len(codec: &dyn Codec, len: usize, dtype: DType, count: usize, chunks: usize) -> Result<()> {
    let expected = records_len(codec, dtype, count, chunks)?;
    if len != expected {
        return Err(Error::InvalidArgument(format!(
            "the records of {count} elements of {} with {} have {expected} bytes, not {len}",
            dtype.name(),
            codec.name()
        )));
    }
    Ok(())
}

/// Encodes each of `chunks` equal chunks of `elements` into one record. Calls `call` once, after all arguments were
/// checked, for the number of this call (see [`draw`]).
///
/// # Errors
/// The errors of [`records_len`], and `InvalidArgument` if `records` has another length than that.
pub fn encode(
    codec: &dyn Codec,
    dtype: DType,
    elements: &[u8],
    chunks: usize,
    records: &mut [u8],
    call: impl FnOnce() -> u64,
    scratch: &mut Scratch,
) -> Result<Encoded> {
    let count = elements.len() / dtype.size();
    check_len(codec, records.len(), dtype, count, chunks)?;
    if count == 0 {
        return Ok(Encoded::Finite);
    }
    let (part, record, call) = (elements.len() / chunks, records.len() / chunks, call());
    let mut all = Encoded::Finite;
    for (chunk, (elements, record)) in elements.chunks_exact(part).zip(records.chunks_exact_mut(record)).enumerate() {
        if codec.encode(dtype, elements, record, draw(call, chunk), scratch) == Encoded::NonFinite {
            all = Encoded::NonFinite;
        }
    }
    Ok(all)
}

/// Decodes one record for each of `chunks` equal chunks of `elements`.
///
/// # Errors
/// The errors of [`encode`], and `InvalidArgument` for a record that no encoder writes.
pub fn decode(codec: &dyn Codec, dtype: DType, records: &[u8], chunks: usize, elements: &mut [u8]) -> Result<()> {
    let count = elements.len() / dtype.size();
    check_len(codec, records.len(), dtype, count, chunks)?;
    if count == 0 {
        return Ok(());
    }
    let (part, record) = (elements.len() / chunks, records.len() / chunks);
    let parts = elements.chunks_exact_mut(part);
    records.chunks_exact(record).zip(parts).try_for_each(|(record, elements)| codec.decode(dtype, record, elements))
}
