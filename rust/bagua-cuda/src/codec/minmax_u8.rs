//! `minmax_u8`: encoding takes two launches, combining three, decoding one.

use bagua_core::collective::Chunks;
use bagua_core::error::{Error, Result};
use bagua_core::types::DType;

use super::codec_kernels::{CodecStep, Elements, Kernels};
use crate::context::Context;
use crate::driver_functions::CUstream;
use crate::kernels::{Decode, Encode, Mean, short_name};
use crate::memory::Scratch;

pub(super) struct MinMaxU8Kernels;

impl Kernels for MinMaxU8Kernels {
    fn names(&self, part: CodecStep, dtype: DType) -> Vec<String> {
        let names: &[&str] = match part {
            CodecStep::Encode => &["range", "encode"],
            CodecStep::Combine => &["tables", "reduce_range", "reduce"],
            CodecStep::Decode => &["decode"],
        };
        names.iter().map(|name| format!("minmax_u8_{name}_{}", short_name(dtype))).collect()
    }

    unsafe fn encode(
        &self,
        context: &Context,
        stream: CUstream,
        from: Elements,
        chunks: usize,
        to: usize,
        nonfinite: usize,
    ) -> Result<u64> {
        let name = short_name(from.dtype);
        let range = context.kernel(&format!("minmax_u8_range_{name}"))?;
        let encode = context.kernel(&format!("minmax_u8_encode_{name}"))?;
        let (count, chunks) = ((from.count / chunks) as u64, chunks as u64);
        let Encode { grid, ranges } = Encode::new(from.dtype, count, chunks, context.processors()?);
        let ranges = Scratch::new(context, ranges, stream)?;
        let found = ranges.address() as u64;
        let mut arguments = [from.address as u64, count, chunks, found, to as u64, nonfinite as u64];
        // SAFETY: guaranteed by the caller. The ranges are as large as the launches need, and are freed after them.
        unsafe {
            context.launch(range, grid, stream, &mut arguments[..4])?;
            context.launch(encode, grid, stream, &mut arguments)?;
        }
        ranges.free()?;
        Ok(2)
    }

    unsafe fn decode(
        &self,
        context: &Context,
        stream: CUstream,
        from: usize,
        to: Elements,
        chunks: usize,
    ) -> Result<u64> {
        let decode = context.kernel(&format!("minmax_u8_decode_{}", short_name(to.dtype)))?;
        let count = (to.count / chunks) as u64;
        let Decode { tiles, grid } = Decode::new(to.dtype, count, chunks as u64, context.processors()?);
        let mut arguments = [from as u64, count, chunks as u64, tiles, to.address as u64];
        // SAFETY: the caller guarantees both arrays.
        unsafe { context.launch(decode, grid, stream, &mut arguments) }?;
        Ok(1)
    }

    unsafe fn combine(
        &self,
        context: &Context,
        stream: CUstream,
        from: usize,
        chunks: &Chunks,
        divisor: usize,
        (to, nonfinite): (usize, usize),
    ) -> Result<u64> {
        let name = short_name(chunks.dtype);
        let make_tables = context.kernel(&format!("minmax_u8_tables_{name}"))?;
        let range = context.kernel(&format!("minmax_u8_reduce_range_{name}"))?;
        let reduce = context.kernel(&format!("minmax_u8_reduce_{name}"))?;
        let ranks = u32::try_from(chunks.chunks).map_err(|_| Error::other("more members than a kernel can count"))?;
        let (from, count) = (from as u64, chunks.count as u64);
        let sizes = Mean::new(count, ranks, context.processors()?);
        let tables = Scratch::new(context, sizes.tables_bytes, stream)?;
        let ranges = Scratch::new(context, sizes.ranges, stream)?;
        let divisor = u64::from((divisor as f32).to_bits());
        let (values, found) = (tables.address() as u64, ranges.address() as u64);
        // SAFETY: guaranteed by the caller. Tables and ranges are as large as needed, and are freed after the launches.
        unsafe {
            context.launch(make_tables, sizes.tables, stream, &mut [from, count, values])?;
            let ranks = u64::from(ranks);
            context.launch(range, sizes.grid, stream, &mut [from, count, ranks, divisor, values, found])?;
            let mut arguments = [from, count, ranks, divisor, values, found, to as u64, 0, nonfinite as u64];
            context.launch(reduce, sizes.grid, stream, &mut arguments)?;
        }
        tables.free()?;
        ranges.free()?;
        Ok(3)
    }
}
