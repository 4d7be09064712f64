//! Codecs for compressed all_reduce and the compressed ring: a device encodes, combines and decodes.
//!
//! Tensors stay where they are. The chunk in which a tensor ends, and all later chunks, are encoded from a copy on the
//! device that is padded with zeros. The host does not wait for the device.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bagua_core::codec::Codec;
use bagua_core::collective::{Chunks, DeviceCodec, OpContext};
use bagua_core::error::{Error, Result};
use bagua_core::memory::{Buffer, BufferMut, Device};
use bagua_core::types::DType;

use crate::average_on_device::Average;
use crate::codec::{CodecStep, Elements, Kernels, kernels_of, load};
use crate::context::Context;
use crate::device::OperationDevice;
use crate::driver_functions::CUstream;
use crate::kernels::{Grid, MAX_SOURCES, short_name};
use crate::memory::Scratch;

pub(crate) struct CodecOnDevice {
    device: Arc<dyn Device>,
    kernels: Box<dyn Kernels>,
}

impl CodecOnDevice {
    /// Opens a codec on a device that is an [`OperationDevice`], and loads its kernels. Returns `None` for codecs
    /// without kernels, and for element types that they do not encode. Fails with `Unavailable` if NVRTC is missing or
    /// fails, and `Device`.
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
        device.downcast_ref().ok_or_else(|| Error::other("the device is not a CUDA device"))
    }

    /// Runs one step of the operation. `work` launches kernels on a stream and returns their number. Its last argument
    /// is the address where kernels count non-finite records.
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
                // SAFETY: the core keeps the tensor and the records valid until the operation ends. Both have `chunks`.
                launches += unsafe { self.kernels.encode(context, stream, from, ends.whole, to, counter) }?;
            }
            if ends.rest > 0 {
                let copy = Scratch::new(context, ends.rest_bytes(chunks), stream)?;
                // SAFETY: as above. The copy has room for the remaining chunks, and is freed on the stream after them.
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
            // SAFETY: the core keeps the records valid until the operation ends on the device. The device aligns the
            // first one, and the size of each is a multiple of 16 bytes.
            unsafe { self.kernels.combine(context, stream, from, chunks, divisor, (to, counter)) }
        })
    }

    fn decode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, records: Buffer<'_>, data: BufferMut<'_>) -> Result<()> {
        let (ends, from) = (Ends::new(chunks, data.as_buffer().address())?, records.address());
        self.step(cx, |context, stream, _| {
            let mut launches = 0;
            if ends.whole > 0 {
                // SAFETY: the core keeps the tensor and the records valid until the operation ends. Both have `chunks`.
                launches += unsafe { self.kernels.decode(context, stream, from, ends.inside(chunks), ends.whole) }?;
            }
            if ends.rest > 0 {
                let copy = Scratch::new(context, ends.rest_bytes(chunks), stream)?;
                let padding = data.len() - (chunks.elements * chunks.dtype.size());
                // SAFETY: as above. The copy has room for the remaining chunks, and is freed on the stream after them.
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
        // One launch cannot add more, and half types must be rounded only once.
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
            // SAFETY: the core guarantees data and errors (one float32 per element) until the operation's end.
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
            // SAFETY: as above. The decoded elements are freed on the stream after their use.
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
        let average = Average::new(lane_device.context(), chunks.dtype, divisor)?;
        self.step(cx, |context, stream, _| {
            let (members, bytes) = (chunks.chunks, chunks.count * chunks.dtype.size());
            let decoded = Scratch::new(context, members * bytes, stream)?;
            let at: Vec<usize> = (0..members).map(|member| decoded.address() + member * bytes).collect();
            let all = Elements { address: at[0], count: members * chunks.count, dtype: chunks.dtype };
            let one = Elements { address: at[1], count: chunks.count, dtype: chunks.dtype };
            let divisor = u64::from((divisor as f32).to_bits());
            let after = after.as_buffer().address() as u64;
            let mut arguments = [after, at[0] as u64, at[1] as u64, count as u64, divisor];
            // SAFETY: as above, with at least two members. The mean replaces the first one's elements, and the decoded
            // record the second's.
            let launches = unsafe {
                let launches = self.kernels.decode(context, stream, from, all, members)?;
                average.launch(&lane_device, stream, &at, at[0], bytes)?;
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
            // SAFETY: as above. The number is freed on the stream after its use.
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
            // SAFETY: the core guarantees the tensor and the replicas, which have the same length, and the record. The
            // difference is freed on the stream after its use.
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
            // SAFETY: the core passes valid memory for replica and record. The difference is freed on the stream after
            // the kernels that use it.
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

/// Launches a kernel of error feedback and returns 1, the number of launches.
///
/// # Safety
/// The conditions of [`Context::launch`].
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
    // SAFETY: guaranteed by the caller.
    unsafe { context.launch(kernel, grid, stream, arguments) }.map(|()| 1)
}

fn check_aligned(dtype: DType, address: usize) -> Result<()> {
    if address.is_multiple_of(dtype.size()) {
        return Ok(());
    }
    let text = format!("the {} elements at address {address:#x} are not aligned to their size", dtype.name());
    Err(Error::InvalidArgument(text))
}

/// A tensor's chunks in two groups: those that contain only values, then those that contain padding.
struct Ends {
    start: usize,
    /// Number of chunks that contain only values.
    whole: usize,
    /// Number of remaining chunks.
    rest: usize,
    /// Address after the whole chunks.
    end_of_whole: usize,
    /// Number of bytes of values from there on.
    valued: usize,
}

impl Ends {
    /// Returns `InvalidArgument` if the elements are not aligned to their size.
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

    fn inside(&self, chunks: &Chunks) -> Elements {
        Elements { address: self.start, count: self.whole * chunks.count, dtype: chunks.dtype }
    }

    fn outside(&self, chunks: &Chunks, address: usize) -> Elements {
        Elements { address, count: self.rest * chunks.count, dtype: chunks.dtype }
    }

    fn rest_bytes(&self, chunks: &Chunks) -> usize {
        self.rest * chunks.count * chunks.dtype.size()
    }
}
