//! Codecs on arrays of a device: `minmax_u8`, whose records are those of the core's, byte for byte.
//!
//! Everything is put on the caller's stream, so that what the caller puts there afterwards sees the result.

use bagua_core::codec::{Codec, MinMaxU8, chunks};
use bagua_core::error::{Error, Result};
use bagua_core::types::DType;

use crate::api::CUstream;
use crate::context::Context;
use crate::device::Place;
use crate::kernels::{self, Grid, short_name};
use crate::memory::Scratch;
use crate::programs::Kernel;

/// Elements on a device.
#[derive(Clone, Copy, Debug)]
pub struct Elements {
    /// Of the first one.
    pub address: usize,
    /// How many.
    pub count: usize,
    /// Their type.
    pub dtype: DType,
}

/// Bytes on a device.
#[derive(Clone, Copy, Debug)]
pub struct Records {
    /// Of the first one.
    pub address: usize,
    /// How many.
    pub len: usize,
}

/// Refuses codecs that have no kernels.
///
/// # Errors
/// `NotImplemented` with the codec's name.
pub fn check(codec: &dyn Codec) -> Result<()> {
    if codec.id() == MinMaxU8.id() {
        return Ok(());
    }
    Err(Error::NotImplemented(format!(
        "codec {} on CUDA arrays: of the codecs only {} runs on a device; encode a copy on the host",
        codec.name(),
        MinMaxU8.name()
    )))
}

/// Encodes elements in `chunks` equal parts with a record each. Never waits for the device.
///
/// # Safety
/// Both are memory of the call's device, which lives and is used by nobody else until [`Place::keep`] lets go of what is kept then.
///
/// # Errors
/// `InvalidArgument` unless `chunks` divides the elements, for records of another length, for memory that overlaps or elements that are not
/// aligned; `Unavailable` without NVRTC; `Device`.
pub unsafe fn encode(place: &Place, from: Elements, chunks: usize, to: Records) -> Result<()> {
    check_memory(from, chunks, to)?;
    if from.count == 0 {
        return Ok(());
    }
    let stage = place.stage();
    let encoder = Encoder::new(stage.context(), from.dtype)?;
    // SAFETY: the caller's promise for both arrays, whose sizes were checked.
    place.on_stream(|stream| unsafe { encoder.launch(stream, from, chunks, to.address) }.map(drop))
}

/// The kernels that encode.
pub(crate) struct Encoder<'a> {
    context: &'a Context,
    range: Kernel,
    encode: Kernel,
    processors: u32,
}

impl<'a> Encoder<'a> {
    /// For elements of this type.
    ///
    /// # Errors
    /// `Unavailable` without NVRTC; `Device`.
    pub(crate) fn new(context: &'a Context, dtype: DType) -> Result<Encoder<'a>> {
        let name = short_name(dtype);
        Ok(Encoder {
            range: context.kernel(&format!("minmax_u8_range_{name}"))?,
            encode: context.kernel(&format!("minmax_u8_encode_{name}"))?,
            processors: context.processors()?,
            context,
        })
    }

    /// Encodes elements, at least one, in equal chunks. Returns the number of launches.
    ///
    /// # Safety
    /// The elements, and the records' bytes from `to` on, are memory of the context's device, which lives and is used by nobody else until the
    /// stream has come so far; the elements are of the encoder's type and aligned to it.
    ///
    /// # Errors
    /// `Device`.
    pub(crate) unsafe fn launch(&self, stream: CUstream, from: Elements, chunks: usize, to: usize) -> Result<u64> {
        let Encoder { context, range, encode, processors } = *self;
        let count = from.count / chunks;
        let passes = || kernels::encode(from.dtype, count as u64, chunks as u64, processors);
        let bytes = passes().map(|pass| pass.ranges).max().unwrap_or(0);
        let ranges = Scratch::new(context, bytes, stream)?;
        let mut launches = 0;
        for pass in passes() {
            let elements = from.address as u64 + pass.first * (count * from.dtype.size()) as u64;
            let records = to as u64 + pass.first * MinMaxU8.record_len(count, from.dtype) as u64;
            let mut arguments = [elements, count as u64, pass.chunks, ranges.address() as u64, records, 0];
            // SAFETY: the caller's promise for both arrays; the ranges are as many as the passes ask for, and freed on the stream after both
            // launches.
            unsafe {
                context.launch(range, pass.grid, stream, &mut arguments[..4])?;
                context.launch(encode, pass.grid, stream, &mut arguments)?;
            }
            launches += 2;
        }
        ranges.free()?;
        Ok(launches)
    }
}

/// Decodes records into elements, in `chunks` equal parts. Never waits for the device.
///
/// # Safety
/// As [`encode`].
///
/// # Errors
/// As [`encode`].
pub unsafe fn decode(place: &Place, from: Records, to: Elements, chunks: usize) -> Result<()> {
    check_memory(to, chunks, from)?;
    if to.count == 0 {
        return Ok(());
    }
    let stage = place.stage();
    let decoder = Decoder::new(stage.context(), to.dtype)?;
    // SAFETY: the caller's promise for both arrays, whose sizes were checked.
    place.on_stream(|stream| unsafe { decoder.launch(stream, from.address, to, chunks) })
}

/// The kernel that decodes.
pub(crate) struct Decoder<'a> {
    context: &'a Context,
    decode: Kernel,
    processors: u32,
}

impl<'a> Decoder<'a> {
    /// For elements of this type.
    ///
    /// # Errors
    /// As [`Encoder::new`].
    pub(crate) fn new(context: &'a Context, dtype: DType) -> Result<Decoder<'a>> {
        let decode = context.kernel(&format!("minmax_u8_decode_{}", short_name(dtype)))?;
        Ok(Decoder { decode, processors: context.processors()?, context })
    }

    /// Decodes records into elements, at least one, in equal chunks: one launch.
    ///
    /// # Safety
    /// As [`Encoder::launch`], with the records' bytes from `from` on.
    ///
    /// # Errors
    /// `Device`.
    pub(crate) unsafe fn launch(&self, stream: CUstream, from: usize, to: Elements, chunks: usize) -> Result<()> {
        let count = (to.count / chunks) as u64;
        let grid = Grid::decode(to.dtype, count, chunks as u64, self.processors);
        let mut arguments = [from as u64, count, chunks as u64, to.address as u64];
        // SAFETY: the caller's promise for both arrays.
        unsafe { self.context.launch(self.decode, grid, stream, &mut arguments) }
    }
}

fn check_memory(elements: Elements, chunks: usize, records: Records) -> Result<()> {
    let Elements { address, count, dtype } = elements;
    let expected = chunks::records_len(&MinMaxU8, dtype, count, chunks)?;
    if records.len != expected {
        let text = format!("{} bytes for the records of {count} elements, which have {expected}", records.len);
        return Err(Error::InvalidArgument(text));
    }
    if count > 0 && !address.is_multiple_of(dtype.size()) {
        let text = format!("elements of {} at address {address:#x}, which is not aligned to them", dtype.name());
        return Err(Error::InvalidArgument(text));
    }
    let (end, end_of_records) = (address + count * dtype.size(), records.address + records.len);
    if count > 0 && address < end_of_records && records.address < end {
        return Err(Error::InvalidArgument("source and destination overlap".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bagua_core::codec;

    use super::*;

    const ELEMENTS: Elements = Elements { address: 0x1000, count: 100, dtype: DType::F32 };
    const RECORDS: Records = Records { address: 0x2000, len: 160 };

    fn text(elements: Elements, chunks: usize, records: Records) -> String {
        check_memory(elements, chunks, records).map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn memory_of_the_wrong_size_or_place_is_refused() {
        assert_eq!(text(ELEMENTS, 1, RECORDS), "");
        assert!(text(ELEMENTS, 3, RECORDS).contains("chunks"));
        assert!(text(ELEMENTS, 2, RECORDS).contains("which have 192"));
        assert!(text(Elements { address: 0x1002, ..ELEMENTS }, 1, RECORDS).contains("not aligned"));
        assert!(text(ELEMENTS, 1, Records { address: 0x1190 - 1, ..RECORDS }).contains("overlap"));
        assert_eq!(text(ELEMENTS, 1, Records { address: 0x1190, ..RECORDS }), "");
        assert!(text(ELEMENTS, 1, Records { address: 0x1000 - 159, ..RECORDS }).contains("overlap"));
        assert_eq!(text(Elements { address: 1, count: 0, ..ELEMENTS }, 5, Records { address: 0, len: 0 }), "");
    }

    #[test]
    fn codecs_without_kernels_are_refused_by_name() {
        for name in ["f16", "bf16", "block_i8", "top_k", "random_k", "onebit"] {
            let codec = codec::by_name(name, &[]).unwrap();
            let error = check(&*codec).unwrap_err();
            assert!(matches!(&error, Error::NotImplemented(text) if text.contains(&format!("codec {name} "))));
        }
        assert!(check(&MinMaxU8).is_ok());
    }
}
