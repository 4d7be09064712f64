//! The operations on a bucket: one trait, and one file per operation. Read `noop` first.

mod async_average;
mod auto_compression;
mod callback;
mod centralized;
mod compressed;
mod decentralized;
mod low_precision;
mod noop;

pub use async_average::AsyncModelAverageOp;
pub use auto_compression::AutoOp;
pub use callback::CallbackOp;
pub use centralized::CentralizedOp;
pub use compressed::{CompressedOp, ERROR};
pub use decentralized::{DecentralizedOp, PEER_WEIGHT};
pub use low_precision::{LowPrecisionDecentralizedOp, REPLICAS};
pub use noop::NoOp;

use crate::error::{Error, Result};
use crate::group::Lanes;
use crate::memory::{BufferMut, DeviceRef, Region, same_place};
use crate::stats::Stats;
use crate::types::DType;

/// A tensor that a bucket's operations use but that is not communicated itself: peer weights, replicas, error memory.
#[derive(Debug)]
pub struct ExtraTensor {
    /// Unique in its bucket.
    pub name: String,
    /// The tensor's memory.
    pub region: Region,
}

/// The arguments of an operation for one communication of a bucket.
pub struct BucketCx<'a> {
    /// Name of the bucket, for error texts.
    pub bucket: &'a str,
    /// Number of the bucket's communications since its registration or the last `set_step`. Equal on all ranks.
    pub step: u64,
    /// The bucket's tensors in order, including padding. All have the same dtype.
    pub tensors: &'a mut [Region],
    /// Number of padding elements at the end of the tensors.
    pub padding: usize,
    /// Extra tensors that were attached to the bucket.
    pub extra: &'a mut [ExtraTensor],
    /// The lanes of the group: one over all ranks, one over this host's ranks, one over the hosts' first ranks.
    pub lanes: &'a mut Lanes,
}

impl BucketCx<'_> {
    /// Returns the counters of the group.
    pub fn stats(&self) -> &Stats {
        self.lanes.global.stats()
    }

    /// Returns the device that the bucket is on, or `None` for the host.
    pub fn device(&self) -> DeviceRef<'_> {
        self.tensors.first().and_then(Region::device)
    }

    /// Returns the extra tensor with this name, or `InvalidArgument` if there is none.
    pub fn extra(&mut self, name: &str) -> Result<&mut Region> {
        extra_of(self.extra, self.bucket, name)
    }
}

fn require(extra: &ExtraTensor, dtype: DType, count: usize) -> Result<()> {
    let ExtraTensor { name, region } = extra;
    if (region.dtype(), region.count()) == (dtype, count) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "extra tensor '{name}' has {} elements of {}, but {count} of {} are needed",
        region.count(),
        region.dtype().name(),
        dtype.name()
    )))
}

/// Returns the extra tensor like [`BucketCx::extra`], for callers that also use other fields.
fn extra_of<'a>(extra: &'a mut [ExtraTensor], bucket: &str, name: &str) -> Result<&'a mut Region> {
    extra
        .iter_mut()
        .find(|extra| extra.name == name)
        .map(|extra| &mut extra.region)
        .ok_or_else(|| Error::InvalidArgument(format!("bucket '{bucket}' has no extra tensor '{name}'")))
}

/// An extra tensor in the place where the bucket's tensors are combined: the tensor's own memory, or a copy on the host
/// that the operation keeps between its runs.
struct Beside<'a> {
    region: &'a mut Region,
    copy: Option<&'a mut Vec<u8>>,
}

impl<'a> Beside<'a> {
    /// Makes a tensor readable in `place`: borrows its memory if it is there, or else fills `copy`.
    fn read(region: &'a mut Region, copy: &'a mut Vec<u8>, place: DeviceRef<'_>) -> Result<Beside<'a>> {
        let mut beside = Beside::to_fill(region, copy, place);
        if let Some(copy) = &mut beside.copy {
            beside.region.buffer().copy_to(copy)?;
        }
        Ok(beside)
    }

    /// Makes a tensor writable in `place` without reading its values. The caller overwrites all of it.
    fn to_fill(region: &'a mut Region, copy: &'a mut Vec<u8>, place: DeviceRef<'_>) -> Beside<'a> {
        if same_place(region.device(), place) {
            return Beside { region, copy: None };
        }
        copy.resize(region.len(), 0);
        Beside { region, copy: Some(copy) }
    }

    fn buffer(&mut self) -> BufferMut<'_> {
        match &mut self.copy {
            Some(copy) => copy.as_mut_slice().into(),
            None => self.region.buffer_mut(),
        }
    }

    /// Copies the bytes back to the tensor, if they are a copy.
    fn write_back(self) -> Result<()> {
        self.copy.map_or(Ok(()), |copy| self.region.buffer_mut().copy_from(copy))
    }
}

/// One operation on a bucket. It runs on the communication thread, and must not wait for anything but the lanes.
///
/// Any error poisons the group, because a bucket that is half done on one rank cannot be completed.
pub trait Op: Send + Sync {
    /// Returns a short name for reports.
    fn name(&self) -> &'static str;

    /// Checks that the operation works with a bucket of this element type and number of elements (including padding).
    /// Called when the operation is added to a bucket, before any communication.
    ///
    /// # Errors
    /// `UnsupportedType` because of the dtype, `InvalidArgument` because of the number of elements.
    fn check(&self, dtype: DType, elements: usize) -> Result<()> {
        let _ = (dtype, elements);
        Ok(())
    }

    /// Checks that the operation works with this extra tensor, on a bucket of `elements` elements of `dtype`, the last
    /// `padding` of which are padding. Called when the tensor is attached and when the operation is added. Accepts
    /// tensors whose name the operation does not know.
    ///
    /// # Errors
    /// `InvalidArgument` because of the size or type.
    fn check_extra(&self, extra: &ExtraTensor, dtype: DType, elements: usize, padding: usize) -> Result<()> {
        let _ = (extra, dtype, elements, padding);
        Ok(())
    }

    /// Returns the codec in use now (empty for none), or `None` if the operation does not choose one.
    fn choice(&self) -> Option<String> {
        None
    }

    /// Runs the operation on one communication of the bucket.
    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()>;
}
