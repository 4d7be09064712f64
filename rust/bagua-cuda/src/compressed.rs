//! Codecs for compressed all_reduce and for the compressed ring: a device encodes, combines and decodes, and the records travel through
//! pinned memory.
//!
//! Tensors stay where they are. The chunk in which a tensor ends, and those behind it, are encoded from a copy on the device with zeros
//! behind its elements.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bagua_core::codec::Codec;
use bagua_core::collective::{Chunks, DeviceCodec, OpContext};
use bagua_core::error::{Error, Result};
use bagua_core::memory::{Buffer, BufferMut, Device};
use bagua_core::types::DType;

use crate::api::CUstream;
use crate::codec::{Elements, Kernels, Part, kernels_of, load};
use crate::device::Place;
use crate::kernels::{Grid, short_name};
use crate::memory::Scratch;
use crate::stage::{Copier, PIECE, Stage, wait_until_reached};

/// See the module.
pub(crate) struct CodecOnDevice {
    /// A [`Place`].
    device: Arc<dyn Device>,
    kernels: Box<dyn Kernels>,
}

impl CodecOnDevice {
    /// On a device whose value is a [`Place`]; `None` for codecs without kernels, and for element types that they do not encode. The kernels
    /// are loaded then.
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
        let stage = opened.place()?.stage();
        load(&*opened.kernels, stage.context(), dtype, &[Part::Encode, Part::Combine, Part::Decode])?;
        Ok(Some(Box::new(opened)))
    }

    fn place(&self) -> Result<&Place> {
        let device: &dyn Any = &*self.device;
        device.downcast_ref().ok_or_else(|| Error::other("the device is none of CUDA"))
    }
}

impl DeviceCodec for CodecOnDevice {
    fn encode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, data: Buffer<'_>, records: &mut [u8]) -> Result<()> {
        let ends = Ends::new(chunks, data.address())?;
        self.place()?.on_lane(|stage, copier| {
            let (context, down) = (stage.context(), copier.down.handle());
            stage.order_after_last(down)?;
            let encoded = Scratch::new(context, records.len(), down)?;
            let mut launches = 0;
            if ends.whole > 0 {
                // SAFETY: the core's promise for the tensor, and the host waits for the records below; as many chunks fit both.
                launches +=
                    unsafe { self.kernels.encode(context, down, ends.inside(chunks), ends.whole, encoded.address()) }?;
            }
            if ends.rest > 0 {
                let copy = Scratch::new(context, ends.rest_bytes(chunks), down)?;
                // SAFETY: as above; the copy has room for the chunks that are left, and is freed on the stream behind them.
                launches += unsafe {
                    context.copy(copy.address(), ends.end_of_whole, ends.valued, down)?;
                    context.clear(copy.address() + ends.valued, ends.rest_bytes(chunks) - ends.valued, down)?;
                    let to = encoded.address() + ends.whole * chunks.record;
                    self.kernels.encode(context, down, ends.outside(chunks, copy.address()), ends.rest, to)?
                };
                copy.free()?;
            }
            stage.launches.fetch_add(launches, Relaxed);
            // SAFETY: the records' memory, which is freed on the stream behind the copies.
            unsafe { fetch(cx, stage, copier, down, encoded.address(), records) }?;
            encoded.free()
        })
    }

    fn combine(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        records: &[u8],
        divisor: usize,
        record: &mut [u8],
    ) -> Result<()> {
        self.place()?.on_lane(|stage, copier| {
            let (context, up) = (stage.context(), copier.up.handle());
            let given = Scratch::new(context, records.len(), up)?;
            let made = Scratch::new(context, record.len(), up)?;
            // SAFETY: the records' memory, which is freed on the stream behind its use; so is that of the result.
            let launches = unsafe {
                deliver(cx, stage, copier, records, given.address())?;
                self.kernels.combine(context, up, given.address(), chunks, divisor, made.address())?
            };
            stage.launches.fetch_add(launches, Relaxed);
            given.free()?;
            // SAFETY: as above.
            unsafe { fetch(cx, stage, copier, up, made.address(), record) }?;
            made.free()
        })
    }

    fn decode(&mut self, cx: &OpContext<'_>, chunks: &Chunks, records: &[u8], data: BufferMut<'_>) -> Result<()> {
        let ends = Ends::new(chunks, data.as_buffer().address())?;
        let place = self.place()?;
        place.on_lane(|stage, copier| {
            let (context, up) = (stage.context(), copier.up.handle());
            stage.order_after_last(up)?;
            let given = Scratch::new(context, records.len(), up)?;
            // SAFETY: the records' memory, which is freed on the stream behind its use.
            unsafe { deliver(cx, stage, copier, records, given.address()) }?;
            if ends.whole > 0 {
                // SAFETY: the core's promise for the tensor, whose end on the device is marked below; as many chunks fit both.
                let launches =
                    unsafe { self.kernels.decode(context, up, given.address(), ends.inside(chunks), ends.whole) }?;
                stage.launches.fetch_add(launches, Relaxed);
            }
            if ends.rest > 0 {
                let copy = Scratch::new(context, ends.rest_bytes(chunks), up)?;
                let from = given.address() + ends.whole * chunks.record;
                let padding = data.len() - (chunks.elements * chunks.dtype.size());
                // SAFETY: as above; the copy has room for the chunks that are left, and is freed on the stream behind them.
                let launches = unsafe {
                    let to = ends.outside(chunks, copy.address());
                    let launches = self.kernels.decode(context, up, from, to, ends.rest)?;
                    context.copy(ends.end_of_whole, copy.address(), ends.valued, up)?;
                    context.clear(ends.end_of_whole + ends.valued, padding, up)?;
                    launches
                };
                stage.launches.fetch_add(launches, Relaxed);
                copy.free()?;
            }
            given.free()?;
            place.mark_end(copier, false)
        })
    }

    fn encode_difference(
        &mut self,
        cx: &OpContext<'_>,
        chunks: &Chunks,
        weights: Buffer<'_>,
        replicas: [Buffer<'_>; 3],
        record: &mut [u8],
    ) -> Result<()> {
        let [left, right, own] = replicas;
        let addresses = [weights, left, right, own].map(|buffer| buffer.address());
        addresses.iter().try_for_each(|address| check_aligned(chunks.dtype, *address))?;
        self.place()?.on_lane(|stage, copier| {
            let (context, down) = (stage.context(), copier.down.handle());
            let kernel = context.kernel(&format!("update_ring_difference_{}", short_name(chunks.dtype)))?;
            let grid = Grid::of_bytes(weights.len() as u64, context.processors()?);
            stage.order_after_last(down)?;
            let difference = Scratch::new(context, weights.len(), down)?;
            let encoded = Scratch::new(context, record.len(), down)?;
            let [weights, left, right, own] = addresses.map(|address| address as u64);
            let mut arguments = [weights, left, right, own, difference.address() as u64, chunks.count as u64];
            let elements = Elements { address: difference.address(), count: chunks.count, dtype: chunks.dtype };
            // SAFETY: the core's promise for tensor and replicas, of one length, and the host waits for the record below; the difference and
            // the record are freed on the stream behind their use.
            unsafe {
                context.launch(kernel, grid, down, &mut arguments)?;
                let launches = self.kernels.encode(context, down, elements, 1, encoded.address())?;
                stage.launches.fetch_add(1 + launches, Relaxed);
                difference.free()?;
                fetch(cx, stage, copier, down, encoded.address(), record)?;
            }
            encoded.free()
        })
    }

    fn add(&mut self, cx: &OpContext<'_>, chunks: &Chunks, record: &[u8], replica: BufferMut<'_>) -> Result<()> {
        let address = replica.as_buffer().address();
        check_aligned(chunks.dtype, address)?;
        let place = self.place()?;
        place.on_lane(|stage, copier| {
            let (context, up) = (stage.context(), copier.up.handle());
            let kernel = context.kernel(&format!("update_ring_take_{}", short_name(chunks.dtype)))?;
            let grid = Grid::of_bytes(replica.len() as u64, context.processors()?);
            stage.order_after_last(up)?;
            let given = Scratch::new(context, record.len(), up)?;
            let difference = Scratch::new(context, replica.len(), up)?;
            let elements = Elements { address: difference.address(), count: chunks.count, dtype: chunks.dtype };
            let mut arguments = [address as u64, difference.address() as u64, chunks.count as u64];
            // SAFETY: the core's promise for the replica, whose end on the device is marked below; the record and what it decodes to are freed
            // on the stream behind their use.
            unsafe {
                deliver(cx, stage, copier, record, given.address())?;
                let launches = self.kernels.decode(context, up, given.address(), elements, 1)?;
                context.launch(kernel, grid, up, &mut arguments)?;
                stage.launches.fetch_add(1 + launches, Relaxed);
            }
            given.free()?;
            difference.free()?;
            place.mark_end(copier, false)
        })
    }

    fn is_nonfinite(&self, chunks: &Chunks, record: &[u8]) -> bool {
        self.kernels.is_nonfinite(chunks.dtype, record)
    }
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

/// Copies bytes of the device to the host, behind the work of a stream, by way of pinned memory; waits for them.
///
/// # Safety
/// As many bytes at `from` are memory of the device, which live until the stream has come so far.
unsafe fn fetch(
    cx: &OpContext<'_>,
    stage: &Stage,
    copier: &mut Copier,
    stream: CUstream,
    from: usize,
    into: &mut [u8],
) -> Result<()> {
    let total = into.len();
    let begin = |copier: &mut Copier, number: usize| -> Result<()> {
        let start = number * PIECE;
        if start < total {
            // SAFETY: the caller's promise.
            unsafe { copier.input[number % 2].fill(0..PIECE.min(total - start), from + start, stream) }?;
            copier.arrived[number % 2].record(stream)?;
        }
        Ok(())
    };
    begin(copier, 0)?;
    for (number, piece) in into.chunks_mut(PIECE).enumerate() {
        // Its memory is free since the last piece but one was read.
        begin(copier, number + 1)?;
        let done = (number * PIECE) as u64;
        wait_until_reached(&copier.arrived[number % 2], || cx.check(&[], done, total as u64))?;
        piece.copy_from_slice(copier.input[number % 2].bytes(piece.len()));
    }
    stage.to_host.fetch_add(total as u64, Relaxed);
    Ok(())
}

/// Copies bytes of the host to the device on the stream `up`, by way of pinned memory.
///
/// # Safety
/// As many bytes at `to` are memory of the device, which live and are used by nobody else until the stream has come so far.
unsafe fn deliver(cx: &OpContext<'_>, stage: &Stage, copier: &mut Copier, from: &[u8], to: usize) -> Result<()> {
    let up = copier.up.handle();
    for (number, piece) in from.chunks(PIECE).enumerate() {
        let (turn, done) = (number % 2, number * PIECE);
        wait_until_reached(&copier.left[turn], || cx.check(&[], done as u64, from.len() as u64))?;
        copier.output[turn].bytes_mut(piece.len()).copy_from_slice(piece);
        // SAFETY: the caller's promise.
        unsafe { copier.output[turn].spill(0..piece.len(), to + done, up) }?;
        copier.left[turn].record(up)?;
    }
    stage.to_device.fetch_add(from.len() as u64, Relaxed);
    Ok(())
}
