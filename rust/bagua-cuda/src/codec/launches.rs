//! What the kernels of every codec do.

use bagua_core::collective::Chunks;
use bagua_core::error::Result;
use bagua_core::types::DType;

use crate::context::Context;
use crate::driver_functions::CUstream;

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

/// One launch or several of a codec's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodecStep {
    /// Elements become records.
    Encode,
    /// The records of all members for one chunk become one.
    Combine,
    /// Records become elements.
    Decode,
}

/// The kernels of a codec. What a method of this trait launches is loaded then, if it was not before; the number of launches is
/// returned.
pub(crate) trait Kernels: Send + Sync {
    /// The names of those that a part of the work needs.
    fn names(&self, part: CodecStep, dtype: DType) -> Vec<String>;

    /// Encodes elements, at least one, in equal chunks. The number (u32) at the address `nonfinite`, if that is not 0, becomes larger by the
    /// records that are of NaN, as the codec counts them.
    ///
    /// # Safety
    /// The elements, the records' bytes from `to` on, and the number, are memory of the context's device, which lives and has no other use until the
    /// stream has come so far; the elements are aligned to their type.
    ///
    /// # Errors
    /// `Unavailable` without NVRTC; `Device`.
    unsafe fn encode(
        &self,
        context: &Context,
        stream: CUstream,
        from: Elements,
        chunks: usize,
        to: usize,
        nonfinite: usize,
    ) -> Result<u64>;

    /// Decodes records into elements, at least one, in equal chunks.
    ///
    /// # Safety
    /// As [`Kernels::encode`], with the records' bytes from `from` on.
    ///
    /// # Errors
    /// As [`Kernels::encode`].
    unsafe fn decode(
        &self,
        context: &Context,
        stream: CUstream,
        from: usize,
        to: Elements,
        chunks: usize,
    ) -> Result<u64>;

    /// The records of all members become one, as [`bagua_core::collective::DeviceCodec::combine`] says: at the first of the two addresses that
    /// come last. The second one is that of the number, as in [`Kernels::encode`].
    ///
    /// # Safety
    /// There are a record of each member from `from` on, and room for one at the first of the other addresses, in memory of the context's device,
    /// which lives and has no other use until the stream has come so far. Both are aligned to 16 bytes.
    ///
    /// # Errors
    /// As [`Kernels::encode`].
    unsafe fn combine(
        &self,
        context: &Context,
        stream: CUstream,
        from: usize,
        chunks: &Chunks,
        divisor: usize,
        to_and_nonfinite: (usize, usize),
    ) -> Result<u64>;
}
