//! Codecs for compressed all_reduce and for the compressed ring: a device encodes, combines and decodes.
//!
//! Tensors stay where they are. The chunk in which a tensor ends, and those behind it, are encoded from a copy on the device with zeros
//! behind its elements. The host waits for nothing.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bagua_core::codec::Codec;
use bagua_core::collective::{Chunks, DeviceCodec, OpContext};
use bagua_core::error::{Error, Result};
use bagua_core::memory::{Buffer, BufferMut, Device};
use bagua_core::types::{DType, ReduceOp};

use crate::codec::{CodecStep, Elements, Kernels, kernels_of, load};
use crate::context::Context;
use crate::device::OperationDevice;
use crate::driver_functions::CUstream;
use crate::kernels::{Grid, MAX_SOURCES, short_name};
use crate::memory::Scratch;
use crate::reduction::Reduction;

/// See the module.
pub(crate) struct CodecOnDevice {
    /// An [`OperationDevice`].
    device: Arc<dyn Device>,
    kernels: Box<dyn Kernels>,
}

impl CodecOnDevice {
    /// On a device whose value is an [`OperationDevice`]; `None` for codecs without kernels, and for element types that they do not encode.
    /// The kernels are loaded then.
    ///
    /// # Errors
    /// `Unavailable` that names NVRTC where that is absent or fails; `Device`.
    pub(crate) fn open(
        device: &Arc<dyn Device>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        let Some(kernels) = kernels_of(codec).filter(|_| codec.check(dtype).is_ok()) else { return Ok(None) };
        let opened = CodecOnDevice { device: Arc::clone(device), kernels };
        let lane_device = opened.place()?.lane_device();
        load(
            &*opened.kernels,
            lane_device.context(),
            dtype,
            &[CodecStep::Encode, CodecStep::Combine, CodecStep::Decode],
        )?;
        Ok(Some(Box::new(opened)))
    }

    fn place(&self) -> Result<&OperationDevice> {
        let device: &dyn Any = &*self.device;
        device.downcast_ref().ok_or_else(|| Error::other("the device is none of CUDA"))
    }

    /// One step of the operation that runs. `work` launches kernels on a stream, with the address where they count records that are not finite,
    /// and returns how many.
    fn step(&self, cx: &OpContext<'_>, work: impl FnOnce(&Context, CUstream, usize) -> Result<u64>) -> Result<()> {
        let place = self.place()?;
        place.on_lane(|lane_device, copier| {
            let (up, counter) = (copier.up.handle(), copier.nonfinite(cx)?);
            lane_device.order_after_last(up)?;
            lane_device.launches.fetch_add(work(lane_device.context(), up, counter)?, Relaxed);
            place.mark_end(copier, false)
        })
    }
}

impl DeviceCodec for CodecOnDevice {
    fn encode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, data: Buffer<'_>, records: BufferMut<'_>) -> Result<()> {
        let (ends, to) = (Ends::new(chunks, data.address())?, records.as_buffer().address());
        self.step(cx, |context, stream, counter| {
            let mut launches = 0;
            if ends.whole > 0 {
                let from = ends.inside(chunks);
                // SAFETY: the core's promise for tensor and records, until the operation's end on the device; as many chunks fit both.
                launches += unsafe { self.kernels.encode(context, stream, from, ends.whole, to, counter) }?;
            }
            if ends.rest > 0 {
                let copy = Scratch::new(context, ends.rest_bytes(chunks), stream)?;
                // SAFETY: as above; the copy has room for the chunks that are left, and is freed on the stream behind them.
                launches += unsafe {
                    context.copy(copy.address(), ends.end_of_whole, ends.valued, stream)?;
                    context.clear(copy.address() + ends.valued, ends.rest_bytes(chunks) - ends.valued, stream)?;
                    let (from, to) = (ends.outside(chunks, copy.address()), to + ends.whole * chunks.record);
                    self.kernels.encode(context, stream, from, ends.rest, to, counter)?
                };
                copy.free()?;
            }
            Ok(launches)
        })
    }

    fn combine(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        records: Buffer<'_>,
        divisor: usize,
        record: BufferMut<'_>,
    ) -> Result<()> {
        let (from, to) = (records.address(), record.as_buffer().address());
        self.step(cx, |context, stream, counter| {
            // SAFETY: the core's promise for the records, until the operation's end on the device; the device aligns the first, and all
            // have a multiple of 16 bytes.
            unsafe { self.kernels.combine(context, stream, from, chunks, divisor, (to, counter)) }
        })
    }

    fn decode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, records: Buffer<'_>, data: BufferMut<'_>) -> Result<()> {
        let (ends, from) = (Ends::new(chunks, data.as_buffer().address())?, records.address());
        self.step(cx, |context, stream, _| {
            let mut launches = 0;
            if ends.whole > 0 {
                // SAFETY: the core's promise for tensor and records, until the operation's end on the device; as many chunks fit both.
                launches += unsafe { self.kernels.decode(context, stream, from, ends.inside(chunks), ends.whole) }?;
            }
            if ends.rest > 0 {
                let copy = Scratch::new(context, ends.rest_bytes(chunks), stream)?;
                let padding = data.len() - (chunks.elements * chunks.dtype.size());
                // SAFETY: as above; the copy has room for the chunks that are left, and is freed on the stream behind them.
                launches += unsafe {
                    let (from, to) = (from + ends.whole * chunks.record, ends.outside(chunks, copy.address()));
                    let launches = self.kernels.decode(context, stream, from, to, ends.rest)?;
                    context.copy(ends.end_of_whole, copy.address(), ends.valued, stream)?;
                    context.clear(ends.end_of_whole + ends.valued, padding, stream)?;
                    launches
                };
                copy.free()?;
            }
            Ok(launches)
        })
    }

    fn feeds_back(&self, members: usize) -> bool {
        // More are not added by one launch, and half types round once.
        members <= MAX_SOURCES
    }

    fn compensate(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        data: BufferMut<'_>,
        error: Buffer<'_>,
        after: BufferMut<'_>,
    ) -> Result<()> {
        let (data, error, after) = (data.as_buffer().address(), error.address(), after.as_buffer().address());
        check_aligned(chunks.dtype, data)?;
        check_aligned(DType::F32, error)?;
        self.step(cx, |context, stream, _| {
            let mut arguments = [data as u64, error as u64, after as u64, chunks.elements as u64];
            // SAFETY: the core's promise for the data and for both errors, a float32 for each element, until the operation's end on the device.
            unsafe { feed_back(context, stream, "add", chunks.dtype, &mut arguments, chunks.elements) }
        })
    }

    fn lose(&mut self, cx: &OpContext<'_>, chunks: &Chunks, records: Buffer<'_>, after: BufferMut<'_>) -> Result<()> {
        let (from, after) = (records.address(), after.as_buffer().address());
        self.step(cx, |context, stream, _| {
            let count = chunks.chunks * chunks.count;
            let decoded = Scratch::new(context, count * chunks.dtype.size(), stream)?;
            let elements = Elements { address: decoded.address(), count, dtype: chunks.dtype };
            let mut arguments = [after as u64, decoded.address() as u64, chunks.elements as u64];
            // SAFETY: as above; what the records decode to is freed on the stream behind its use.
            let launches = unsafe {
                self.kernels.decode(context, stream, from, elements, chunks.chunks)?
                    + feed_back(context, stream, "lose", chunks.dtype, &mut arguments, chunks.elements)?
            };
            decoded.free()?;
            Ok(launches)
        })
    }

    fn lose_mean(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        records: Buffer<'_>,
        divisor: usize,
        record: Buffer<'_>,
        after: BufferMut<'_>,
    ) -> Result<()> {
        let lane_device = self.place()?.lane_device();
        let (from, record, count) = (records.address(), record.address(), after.len() / DType::F32.size());
        if count == 0 {
            return Ok(());
        }
        let op = if divisor == 1 { ReduceOp::Sum } else { ReduceOp::Avg };
        let reduction = Reduction::new(lane_device.context(), chunks.dtype, op, divisor)?;
        self.step(cx, |context, stream, _| {
            let (members, bytes) = (chunks.chunks, chunks.count * chunks.dtype.size());
            let decoded = Scratch::new(context, members * bytes, stream)?;
            let at: Vec<usize> = (0..members).map(|member| decoded.address() + member * bytes).collect();
            let all = Elements { address: at[0], count: members * chunks.count, dtype: chunks.dtype };
            let one = Elements { address: at[1], count: chunks.count, dtype: chunks.dtype };
            let divisor = u64::from((divisor as f32).to_bits());
            let after = after.as_buffer().address() as u64;
            let mut arguments = [after, at[0] as u64, at[1] as u64, count as u64, divisor];
            // SAFETY: as above; there are two members at least. The mean is where the first one's elements were, and the record is decoded
            // where the second one's were.
            let launches = unsafe {
                let launches = self.kernels.decode(context, stream, from, all, members)?;
                reduction.launch(&lane_device, stream, &at, at[0], bytes)?;
                let launches = launches + self.kernels.decode(context, stream, record, one, 1)?;
                launches + feed_back(context, stream, "lose_mean", chunks.dtype, &mut arguments, count)?
            };
            decoded.free()?;
            Ok(launches)
        })
    }

    fn keep(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        data: Buffer<'_>,
        after: Buffer<'_>,
        error: BufferMut<'_>,
    ) -> Result<()> {
        let (data, after, error) = (data.address(), after.address(), error.as_buffer().address());
        self.step(cx, |context, stream, _| {
            let (count, elements) = (chunks.elements as u64, chunks.elements);
            let nonfinite = Scratch::new(context, size_of::<u32>(), stream)?;
            let number = nonfinite.address() as u64;
            // SAFETY: as above; the number is freed on the stream behind its use.
            let launches = unsafe {
                context.clear(nonfinite.address(), size_of::<u32>(), stream)?;
                let looked =
                    feed_back(context, stream, "look", chunks.dtype, &mut [data as u64, count, number], elements)?;
                let mut arguments = [error as u64, after as u64, count, number];
                looked + feed_back(context, stream, "keep", DType::F32, &mut arguments, elements)?
            };
            nonfinite.free()?;
            Ok(launches)
        })
    }

    fn encode_difference(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        weights: Buffer<'_>,
        replicas: [Buffer<'_>; 3],
        record: BufferMut<'_>,
    ) -> Result<()> {
        let ([left, right, own], bytes) = (replicas, weights.len());
        let addresses = [weights, left, right, own].map(|buffer| buffer.address());
        addresses.iter().try_for_each(|address| check_aligned(chunks.dtype, *address))?;
        self.step(cx, |context, stream, counter| {
            let kernel = context.kernel(&format!("update_ring_difference_{}", short_name(chunks.dtype)))?;
            let grid = Grid::of_bytes(bytes as u64, context.processors()?);
            let difference = Scratch::new(context, bytes, stream)?;
            let [weights, left, right, own] = addresses.map(|address| address as u64);
            let mut arguments = [weights, left, right, own, difference.address() as u64, chunks.count as u64];
            let elements = Elements { address: difference.address(), count: chunks.count, dtype: chunks.dtype };
            // SAFETY: the core's promise for tensor and replicas, of one length, and for the record; the difference is freed on the stream
            // behind its use.
            let launches = unsafe {
                context.launch(kernel, grid, stream, &mut arguments)?;
                self.kernels.encode(context, stream, elements, 1, record.as_buffer().address(), counter)?
            };
            difference.free()?;
            Ok(1 + launches)
        })
    }

    fn add(&mut self, cx: &OpContext<'_>, chunks: &Chunks, record: Buffer<'_>, replica: BufferMut<'_>) -> Result<()> {
        let (address, bytes) = (replica.as_buffer().address(), replica.len());
        check_aligned(chunks.dtype, address)?;
        self.step(cx, |context, stream, _| {
            let kernel = context.kernel(&format!("update_ring_take_{}", short_name(chunks.dtype)))?;
            let grid = Grid::of_bytes(bytes as u64, context.processors()?);
            let difference = Scratch::new(context, bytes, stream)?;
            let elements = Elements { address: difference.address(), count: chunks.count, dtype: chunks.dtype };
            let mut arguments = [address as u64, difference.address() as u64, chunks.count as u64];
            // SAFETY: the core's promise for replica and record; what this decodes to is freed on the stream behind its use.
            let launches = unsafe {
                let launches = self.kernels.decode(context, stream, record.address(), elements, 1)?;
                context.launch(kernel, grid, stream, &mut arguments)?;
                launches
            };
            difference.free()?;
            Ok(1 + launches)
        })
    }
}

/// Launches a kernel of error feedback on so many elements; 1.
///
/// # Safety
/// As [`Context::launch`].
unsafe fn feed_back(
    context: &Context,
    stream: CUstream,
    what: &str,
    dtype: DType,
    arguments: &mut [u64],
    elements: usize,
) -> Result<u64> {
    let kernel = context.kernel(&format!("feedback_{what}_{}", short_name(dtype)))?;
    let grid = Grid::of_bytes((elements * DType::F32.size()) as u64, context.processors()?);
    // SAFETY: the caller's promise.
    unsafe { context.launch(kernel, grid, stream, arguments) }.map(|()| 1)
}

fn check_aligned(dtype: DType, address: usize) -> Result<()> {
    if address.is_multiple_of(dtype.size()) {
        return Ok(());
    }
    let text = format!("elements of {} at address {address:#x}, which is not aligned to them", dtype.name());
    Err(Error::InvalidArgument(text))
}

/// Where the elements of a tensor end.
struct Ends {
    /// Address of the tensor.
    start: usize,
    /// Chunks in front that have values only.
    whole: usize,
    /// The others.
    rest: usize,
    /// Address behind the whole chunks.
    end_of_whole: usize,
    /// Bytes of values from there on.
    valued: usize,
}

impl Ends {
    /// # Errors
    /// `InvalidArgument` for elements that are not aligned to their size.
    fn new(chunks: &Chunks, start: usize) -> Result<Ends> {
        check_aligned(chunks.dtype, start)?;
        let size = chunks.dtype.size();
        let whole = chunks.elements / chunks.count;
        Ok(Ends {
            start,
            whole,
            rest: chunks.chunks - whole,
            end_of_whole: start + whole * chunks.count * size,
            valued: chunks.elements % chunks.count * size,
        })
    }

    /// The whole chunks, in the tensor.
    fn inside(&self, chunks: &Chunks) -> Elements {
        Elements { address: self.start, count: self.whole * chunks.count, dtype: chunks.dtype }
    }

    /// The other chunks, at an address.
    fn outside(&self, chunks: &Chunks, address: usize) -> Elements {
        Elements { address, count: self.rest * chunks.count, dtype: chunks.dtype }
    }

    /// Bytes of the other chunks.
    fn rest_bytes(&self, chunks: &Chunks) -> usize {
        self.rest * chunks.count * chunks.dtype.size()
    }
}
