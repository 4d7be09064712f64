//! What is done to a bucket: one trait, one file per operation. `noop` is the one to read first.

mod callback;
mod centralized;
mod noop;

pub use callback::CallbackOp;
pub use centralized::CentralizedOp;
pub use noop::NoOp;

use crate::error::Result;
use crate::group::Lane;
use crate::memory::Region;
use crate::types::DType;

/// One operation on a bucket. Runs on the communication thread; must not wait for anything but the lane.
///
/// An error poisons the group, whatever its class: a bucket half done on one rank cannot be made good.
pub trait Op: Send + Sync {
    /// Short name for reports.
    fn name(&self) -> &'static str;

    /// Whether it can work on this element type; asked when it is added to a bucket, before any communication.
    fn check(&self, dtype: DType) -> Result<()> {
        let _ = dtype;
        Ok(())
    }

    /// Does it. `bucket` is the bucket's name, `tensors` its memory in order, padding included, all of one dtype.
    fn run(&self, bucket: &str, tensors: &mut [Region], lane: &mut Lane) -> Result<()>;
}
