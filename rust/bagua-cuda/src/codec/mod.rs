//! Codecs on arrays of a device. Their records have the same bytes as the core's. One file per codec.
//!
//! All work is put on the caller's stream, so later work on that stream sees the result.

mod codec_kernels;
mod half_float;
mod minmax_u8;

pub(crate) use codec_kernels::{CodecStep, Kernels};
pub use codec_kernels::{Elements, Records};

use bagua_core::codec::{Codec, chunks};
use bagua_core::error::{Error, Result};
use bagua_core::types::DType;

use crate::context::Context;
use crate::device::OperationDevice;

pub(crate) fn kernels_of(codec: &dyn Codec) -> Option<Box<dyn Kernels>> {
    match codec.name() {
        "minmax_u8" => Some(Box::new(minmax_u8::MinMaxU8Kernels)),
        "f16" => Some(Box::new(half_float::HalfKernels(DType::F16))),
        "bf16" => Some(Box::new(half_float::HalfKernels(DType::BF16))),
        _ => None,
    }
}

/// Loads the kernels that the steps `parts` of a codec need. Errors: `Unavailable` without a working NVRTC, `Device`.
pub(crate) fn load(kernels: &dyn Kernels, context: &Context, dtype: DType, parts: &[CodecStep]) -> Result<()> {
    let mut names = parts.iter().flat_map(|part| kernels.names(*part, dtype));
    names.try_for_each(|name| context.kernel(&name).map(drop))
}

/// Checks that a codec has kernels. Fails with `NotImplemented` with the codec's name.
pub fn check(codec: &dyn Codec) -> Result<()> {
    found(codec).map(drop)
}

fn found(codec: &dyn Codec) -> Result<Box<dyn Kernels>> {
    kernels_of(codec).ok_or_else(|| {
        Error::NotImplemented(format!(
            "codec {} does not run on CUDA arrays (only minmax_u8, f16 and bf16 do); encode a copy on the host",
            codec.name()
        ))
    })
}

/// Encodes elements in `chunks` equal parts, with one record each. Never waits for the device.
///
/// # Safety
/// Both must be memory of the call's device that stays allocated, and is not used otherwise, until an object that is
/// passed to [`OperationDevice::keep`] afterwards is dropped.
///
/// # Errors
/// The errors of [`check`]; `InvalidArgument` if `chunks` does not divide the elements, the records have another
/// length, the memory overlaps or the elements are not aligned; `Unavailable` without NVRTC; `Device`.
pub unsafe fn encode(
    place: &OperationDevice,
    codec: &dyn Codec,
    from: Elements,
    chunks: usize,
    to: Records,
) -> Result<()> {
    let kernels = found(codec)?;
    check_memory(codec, from, chunks, to)?;
    if from.count == 0 {
        return Ok(());
    }
    let lane_device = place.lane_device();
    let context = lane_device.context();
    load(&*kernels, context, from.dtype, &[CodecStep::Encode])?;
    // SAFETY: the caller guarantees both arrays. Their sizes were checked.
    place.on_stream(|stream| unsafe { kernels.encode(context, stream, from, chunks, to.address, 0) }.map(drop))
}

/// Decodes records into elements, in `chunks` equal parts. Never waits for the device.
///
/// # Safety
/// The conditions of [`encode`].
///
/// # Errors
/// The errors of [`encode`].
pub unsafe fn decode(
    place: &OperationDevice,
    codec: &dyn Codec,
    from: Records,
    to: Elements,
    chunks: usize,
) -> Result<()> {
    let kernels = found(codec)?;
    check_memory(codec, to, chunks, from)?;
    if to.count == 0 {
        return Ok(());
    }
    let lane_device = place.lane_device();
    let context = lane_device.context();
    load(&*kernels, context, to.dtype, &[CodecStep::Decode])?;
    // SAFETY: the caller guarantees both arrays. Their sizes were checked.
    place.on_stream(|stream| unsafe { kernels.decode(context, stream, from.address, to, chunks) }.map(drop))
}

fn check_memory(codec: &dyn Codec, elements: Elements, chunks: usize, records: Records) -> Result<()> {
    let Elements { address, count, dtype } = elements;
    let expected = chunks::records_len(codec, dtype, count, chunks)?;
    if records.len != expected {
        let text = format!("the records of {count} elements have {expected} bytes, not {}", records.len);
        return Err(Error::InvalidArgument(text));
    }
    if count > 0 && !address.is_multiple_of(dtype.size()) {
        let text = format!("the {} elements at address {address:#x} are not aligned to their size", dtype.name());
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
    use bagua_core::codec::{self, F16, MinMaxU8};

    use super::*;
    use crate::kernels::program_of;

    const ELEMENTS: Elements = Elements { address: 0x1000, count: 100, dtype: DType::F32 };
    const RECORDS: Records = Records { address: 0x2000, len: 160 };

    fn text(elements: Elements, chunks: usize, records: Records) -> String {
        check_memory(&MinMaxU8, elements, chunks, records).map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn memory_of_the_wrong_size_or_place_is_refused() {
        assert_eq!(text(ELEMENTS, 1, RECORDS), "");
        assert!(text(ELEMENTS, 3, RECORDS).contains("chunks"));
        assert!(text(ELEMENTS, 2, RECORDS).contains("have 192 bytes"));
        assert!(text(Elements { address: 0x1002, ..ELEMENTS }, 1, RECORDS).contains("not aligned"));
        assert!(text(ELEMENTS, 1, Records { address: 0x1190 - 1, ..RECORDS }).contains("overlap"));
        assert_eq!(text(ELEMENTS, 1, Records { address: 0x1190, ..RECORDS }), "");
        assert!(text(ELEMENTS, 1, Records { address: 0x1000 - 159, ..RECORDS }).contains("overlap"));
        assert_eq!(text(Elements { address: 1, count: 0, ..ELEMENTS }, 5, Records { address: 0, len: 0 }), "");
        let error = check_memory(&F16, ELEMENTS, 1, RECORDS).unwrap_err();
        assert!(error.to_string().contains("have 224 bytes"), "{error}");
    }

    #[test]
    fn codecs_without_kernels_are_refused_by_name() {
        for name in ["block_i8", "top_k", "random_k", "onebit", "int4"] {
            let codec = codec::by_name(name, &[]).unwrap();
            let error = check(&*codec).unwrap_err();
            assert!(matches!(&error, Error::NotImplemented(text) if text.contains(&format!("codec {name} "))));
        }
        for name in ["minmax_u8", "f16", "bf16"] {
            assert!(check(&*codec::by_name(name, &[]).unwrap()).is_ok());
        }
    }

    #[test]
    fn every_kernel_of_a_codec_exists() {
        for name in codec::NAMES {
            let Some(kernels) = kernels_of(&*codec::by_name(name, &[]).unwrap()) else { continue };
            for part in [CodecStep::Encode, CodecStep::Combine, CodecStep::Decode] {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    for name in kernels.names(part, dtype) {
                        assert!(program_of(&name).is_some(), "{name}");
                    }
                }
            }
        }
    }
}
