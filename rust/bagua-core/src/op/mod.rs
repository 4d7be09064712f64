//! The operations on a bucket: one trait, one file per operation. `noop` is the one to read first.

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

/// A tensor that belongs to a bucket's operations, not to its communication: peer weights, replicas, error memory.
#[derive(Debug)]
pub struct ExtraTensor {
    /// Unique in its bucket.
    pub name: String,
    /// Its memory.
    pub region: Region,
}

/// One communication of a bucket, as its operations see it.
pub struct BucketCx<'a> {
    /// Name of the bucket, for error texts.
    pub bucket: &'a str,
    /// How often the bucket was communicated before, since it was registered or since a step was set. Equal on all ranks.
    pub step: u64,
    /// The bucket's tensors in order, padding included, all of one dtype.
    pub tensors: &'a mut [Region],
    /// Elements at the end of the tensors that are padding.
    pub padding: usize,
    /// Tensors that were registered beside the bucket's own.
    pub extra: &'a mut [ExtraTensor],
    /// The lanes of the group: all ranks, this host, the hosts' first ranks.
    pub lanes: &'a mut Lanes,
}

impl BucketCx<'_> {
    /// Counters of the group.
    pub fn stats(&self) -> &Stats {
        self.lanes.global.stats()
    }

    /// The device that the bucket is on; `None` for the host.
    pub fn device(&self) -> DeviceRef<'_> {
        self.tensors.first().and_then(Region::device)
    }

    /// The extra tensor of this name.
    ///
    /// # Errors
    /// `InvalidArgument` when the bucket has none.
    pub fn extra(&mut self, name: &str) -> Result<&mut Region> {
        extra_of(self.extra, self.bucket, name)
    }
}

/// Refuses an extra tensor that is not `count` elements of `dtype`.
fn require(extra: &ExtraTensor, dtype: DType, count: usize) -> Result<()> {
    let ExtraTensor { name, region } = extra;
    if (region.dtype(), region.count()) == (dtype, count) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "extra tensor '{name}' has {} elements of {}, and {count} of {} are needed",
        region.count(),
        region.dtype().name(),
        dtype.name()
    )))
}

/// The extra tensor of this name, where the rest of a [`BucketCx`] is used beside it.
fn extra_of<'a>(extra: &'a mut [ExtraTensor], bucket: &str, name: &str) -> Result<&'a mut Region> {
    extra
        .iter_mut()
        .find(|extra| extra.name == name)
        .map(|extra| &mut extra.region)
        .ok_or_else(|| Error::InvalidArgument(format!("bucket '{bucket}' has no extra tensor '{name}'")))
}

/// A tensor of an operation where the tensors of the bucket are combined: its own memory, or a copy on the host, which the operation keeps
/// between its runs.
struct Beside<'a> {
    region: &'a mut Region,
    /// The copy, where the tensor is in another place.
    copy: Option<&'a mut Vec<u8>>,
}

impl<'a> Beside<'a> {
    /// The tensor with its values.
    ///
    /// # Errors
    /// Whatever a device reports.
    fn read(region: &'a mut Region, copy: &'a mut Vec<u8>, place: DeviceRef<'_>) -> Result<Beside<'a>> {
        let mut beside = Beside::to_fill(region, copy, place);
        if let Some(copy) = &mut beside.copy {
            beside.region.buffer().copy_to(copy)?;
        }
        Ok(beside)
    }

    /// The tensor, to write all of it.
    fn to_fill(region: &'a mut Region, copy: &'a mut Vec<u8>, place: DeviceRef<'_>) -> Beside<'a> {
        if same_place(region.device(), place) {
            return Beside { region, copy: None };
        }
        copy.resize(region.len(), 0);
        Beside { region, copy: Some(copy) }
    }

    /// The bytes.
    fn buffer(&mut self) -> BufferMut<'_> {
        match &mut self.copy {
            Some(copy) => copy.as_mut_slice().into(),
            None => self.region.buffer_mut(),
        }
    }

    /// The bytes go where the tensor is.
    ///
    /// # Errors
    /// Whatever a device reports.
    fn write_back(self) -> Result<()> {
        self.copy.map_or(Ok(()), |copy| self.region.buffer_mut().copy_from(copy))
    }
}

/// One operation on a bucket. Runs on the communication thread; must not wait for anything but the lanes.
///
/// An error poisons the group, whatever its class: a bucket half done on one rank cannot be completed.
pub trait Op: Send + Sync {
    /// Short name for reports.
    fn name(&self) -> &'static str;

    /// Whether it can work on a bucket of this element type and of so many elements, padding included; asked when it is added to a
    /// bucket, before any communication.
    ///
    /// # Errors
    /// `UnsupportedType` for a dtype that it cannot work on, `InvalidArgument` for the number of elements.
    fn check(&self, dtype: DType, elements: usize) -> Result<()> {
        let _ = (dtype, elements);
        Ok(())
    }

    /// Whether an extra tensor of this name serves it, on a bucket of `elements` of `dtype`, of which the last `padding` are padding;
    /// asked when the tensor is attached and when the operation is added. Tensors of names that it does not know are none of its
    /// business.
    ///
    /// # Errors
    /// `InvalidArgument` for another size or type than it works with.
    fn check_extra(&self, extra: &ExtraTensor, dtype: DType, elements: usize, padding: usize) -> Result<()> {
        let _ = (extra, dtype, elements, padding);
        Ok(())
    }

    /// Which codec it uses now, where it chooses one; nothing for none.
    fn choice(&self) -> Option<String> {
        None
    }

    /// Runs it on one communication of the bucket.
    ///
    /// # Errors
    /// Whatever goes wrong; it poisons the group.
    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()>;
}
