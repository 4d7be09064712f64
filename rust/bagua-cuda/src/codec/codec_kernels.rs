//! The interface of a codec's kernels.

use bagua_core::collective::Chunks;
use bagua_core::error::Result;
use bagua_core::types::DType;

use crate::context::Context;
use crate::driver_functions::CUstream;

/// Elements on a device.
#[derive(Clone, Copy, Debug)]
pub struct Elements {
    /// Address of the first element.
    pub address: usize,
    /// Number of elements.
    pub count: usize,
    /// Element type.
    pub dtype: DType,
}

/// Records on a device.
#[derive(Clone, Copy, Debug)]
pub struct Records {
    /// Address of the first byte.
    pub address: usize,
    /// Number of bytes.
    pub len: usize,
}

/// A step of a codec, which takes one or several launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodecStep {
    Encode,
    /// Combines the records of all members for one chunk into one.
    Combine,
    Decode,
}

/// The kernels of a codec. Methods load the kernels that they launch if necessary, and return the number of launches.
pub(crate) trait Kernels: Send + Sync {
    fn names(&self, part: CodecStep, dtype: DType) -> Vec<String>;

    /// Encodes at least one element, in equal chunks. Unless `nonfinite` is 0, adds the number of non-finite records,
    /// as the codec counts them, to the u32 at that address.
    ///
    /// # Safety
    /// Elements, records and that number must be memory of the context's device that stays allocated, and is not used
    /// otherwise, until the work on the stream is done. The elements must be aligned to their type.
    ///
    /// # Errors
    /// `Unavailable` without NVRTC, and `Device`.
    unsafe fn encode(
        &self,
        context: &Context,
        stream: CUstream,
        from: Elements,
        chunks: usize,
        to: usize,
        nonfinite: usize,
    ) -> Result<u64>;

    /// Decodes records into at least one element, in equal chunks.
    ///
    /// # Safety
    /// The conditions of [`Kernels::encode`], with the records from `from` on.
    ///
    /// # Errors
    /// The errors of [`Kernels::encode`].
    unsafe fn decode(
        &self,
        context: &Context,
        stream: CUstream,
        from: usize,
        to: Elements,
        chunks: usize,
    ) -> Result<u64>;

    /// Combines the records of all members into one: see [`bagua_core::collective::DeviceCodec::combine`]. The last
    /// argument is the address of the result and, as in [`Kernels::encode`], of the number of non-finite records.
    ///
    /// # Safety
    /// The conditions of [`Kernels::encode`], for a record of each member from `from` on, and for the result, aligned
    /// to 16 bytes.
    ///
    /// # Errors
    /// The errors of [`Kernels::encode`].
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
