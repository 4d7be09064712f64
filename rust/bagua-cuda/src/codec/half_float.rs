//! `f16` and `bf16`: encoding, combining and decoding are one launch each, for any number of chunks and members. What is not finite is encoded
//! as such, so no record is of NaN.
//!
//! Elements of the record's own type are converted too, not copied: as on the host, a signalling NaN becomes quiet.

use bagua_core::codec::{Bf16, Codec, F16};
use bagua_core::collective::Chunks;
use bagua_core::error::{Error, Result};
use bagua_core::types::DType;

use super::launches::{CodecStep, Elements, Kernels};
use crate::context::Context;
use crate::driver_functions::CUstream;
use crate::kernels::{Grid, short_name};

/// See the module. With the type of the records' elements, float16 or bfloat16.
pub(super) struct HalfKernels(pub(super) DType);

/// Elements in equal chunks.
struct Parts {
    dtype: DType,
    address: usize,
    /// From the beginning of a chunk to that of the next one, in elements.
    step: usize,
}

impl HalfKernels {
    /// Bytes of a record of so many elements.
    fn record_len(&self, count: usize) -> usize {
        match self.0 {
            DType::F16 => F16.record_len(count, self.0),
            _ => Bf16.record_len(count, self.0),
        }
    }

    /// The records' elements, from an address on, in chunks of so many.
    fn records(&self, address: usize, count: usize) -> Parts {
        Parts { dtype: self.0, address, step: self.record_len(count) / self.0.size() }
    }
}

/// Converts chunks of `count` elements into chunks of another type, with zeros behind the elements of each.
///
/// # Safety
/// Both are memory of the context's device, which lives and has no other use until the stream has come so far.
unsafe fn convert(
    context: &Context,
    stream: CUstream,
    from: &Parts,
    to: &Parts,
    (count, chunks): (usize, usize),
) -> Result<u64> {
    let kernel = context.kernel(&format!("convert_{}_{}", short_name(from.dtype), short_name(to.dtype)))?;
    // Without gaps they are one chunk.
    let all = count * chunks;
    let (count, chunks, from_step, to_step) =
        if from.step == to.step { (all, 1, all, all) } else { (count, chunks, from.step, to.step) };
    let bytes = from_step.max(to_step) * from.dtype.size().max(to.dtype.size());
    let grid = Grid::convert(bytes as u64, chunks as u64, context.processors()?);
    let mut arguments =
        [from.address as u64, from_step as u64, to.address as u64, to_step as u64, count as u64, chunks as u64];
    // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
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
        let ranks = u32::try_from(chunks.chunks).map_err(|_| Error::other("more members than a kernel counts"))?;
        let record = self.record_len(chunks.count) as u64;
        let divisor = u64::from((divisor as f32).to_bits());
        let grid = Grid::of_bytes(record, context.processors()?);
        let mut arguments = [from as u64, record, chunks.count as u64, u64::from(ranks), divisor, to as u64];
        // SAFETY: the caller's promise.
        unsafe { context.launch(kernel, grid, stream, &mut arguments) }?;
        Ok(1)
    }
}
