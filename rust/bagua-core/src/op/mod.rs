//! What is done to a bucket: one trait, one file per operation.

use crate::error::Result;
use crate::group::Lane;
use crate::memory::Region;

/// One operation on a bucket. Runs on the communication thread; must not wait for anything but the lane.
pub trait Op: Send + Sync {
    /// Short name for reports.
    fn name(&self) -> &'static str;
    /// Does it. `bucket` is the bucket's name, `tensors` its memory in order, padding included, all of one dtype.
    fn run(&self, bucket: &str, tensors: &mut [Region], lane: &mut Lane) -> Result<()>;
}
