//! `f16` and `bf16`. Encoding, combining and decoding are one launch each, for any number of chunks and members. Values
//! that are not finite are encoded as such, so no record counts as non-finite.
//!
//! Elements of the record's own type are converted too, not copied: as on the host, a signalling NaN becomes quiet.

use bagua_core::codec::{Bf16, Codec, F16};
use bagua_core::collective::Chunks;
use bagua_core::error::{Error, Result};
use bagua_core::types::DType;

use super::codec_kernels::{CodecStep, Elements, Kernels};
use crate::context::Context;
use crate::driver_functions::CUstream;
use crate::kernels::{Grid, short_name};

/// The kernels of the codec with records of this type, float16 or bfloat16.
pub(super) struct HalfKernels(pub(super) DType);

struct Parts {
    dtype: DType,
    address: usize,
    /// Distance between the starts of two chunks, in elements.
    step: usize,
}

impl HalfKernels {
    fn record_len(&self, count: usize) -> usize {
        match self.0 {
            DType::F16 => F16.record_len(count, self.0),
            _ => Bf16.record_len(count, self.0),
        }
    }

    fn records(&self, address: usize, count: usize) -> Parts {
        Parts { dtype: self.0, address, step: self.record_len(count) / self.0.size() }
    }
}

/// Converts chunks of `count` elements to chunks of another type, padded with zeros.
///
/// # Safety
/// The conditions of [`Kernels::encode`], for the memory of both.
unsafe fn convert(
    context: &Context,
    stream: CUstream,
    from: &Parts,
    to: &Parts,
    (count, chunks): (usize, usize),
) -> Result<u64> {
    let kernel = context.kernel(&format!("convert_{}_{}", short_name(from.dtype), short_name(to.dtype)))?;
    // Chunks without gaps are converted as one chunk.
    let all = count * chunks;
    let (count, chunks, from_step, to_step) =
        if from.step == to.step { (all, 1, all, all) } else { (count, chunks, from.step, to.step) };
    let bytes = from_step.max(to_step) * from.dtype.size().max(to.dtype.size());
    let grid = Grid::convert(bytes as u64, chunks as u64, context.processors()?);
    let mut arguments =
        [from.address as u64, from_step as u64, to.address as u64, to_step as u64, count as u64, chunks as u64];
    // SAFETY: guaranteed by the caller.
    unsafe { context.launch(kernel, grid, stream, &mut arguments) }?;
    Ok(1)
}

impl Kernels for HalfKernels {
    fn names(&self, part: CodecStep, dtype: DType) -> Vec<String> {
        let (elements, halves) = (short_name(dtype), short_name(self.0));
        vec![match part {
            CodecStep::Encode => format!("convert_{elements}_{halves}"),
            CodecStep::Combine => format!("convert_reduce_{elements}_{halves}"),
            CodecStep::Decode => format!("convert_{halves}_{elements}"),
        }]
    }

    unsafe fn encode(
        &self,
        context: &Context,
        stream: CUstream,
        from: Elements,
        chunks: usize,
        to: usize,
        _nonfinite: usize,
    ) -> Result<u64> {
        let count = from.count / chunks;
        let elements = Parts { dtype: from.dtype, address: from.address, step: count };
        // SAFETY: guaranteed by the caller.
        unsafe { convert(context, stream, &elements, &self.records(to, count), (count, chunks)) }
    }

    unsafe fn decode(
        &self,
        context: &Context,
        stream: CUstream,
        from: usize,
        to: Elements,
        chunks: usize,
    ) -> Result<u64> {
        let count = to.count / chunks;
        let elements = Parts { dtype: to.dtype, address: to.address, step: count };
        // SAFETY: guaranteed by the caller.
        unsafe { convert(context, stream, &self.records(from, count), &elements, (count, chunks)) }
    }

    unsafe fn combine(
        &self,
        context: &Context,
        stream: CUstream,
        from: usize,
        chunks: &Chunks,
        divisor: usize,
        (to, _): (usize, usize),
    ) -> Result<u64> {
        let kernel = context.kernel(&self.names(CodecStep::Combine, chunks.dtype)[0])?;
        let ranks = u32::try_from(chunks.chunks).map_err(|_| Error::other("more members than a kernel can count"))?;
        let record = self.record_len(chunks.count) as u64;
        let divisor = u64::from((divisor as f32).to_bits());
        let grid = Grid::of_bytes(record, context.processors()?);
        let mut arguments = [from as u64, record, chunks.count as u64, u64::from(ranks), divisor, to as u64];
        // SAFETY: guaranteed by the caller.
        unsafe { context.launch(kernel, grid, stream, &mut arguments) }?;
        Ok(1)
    }
}
