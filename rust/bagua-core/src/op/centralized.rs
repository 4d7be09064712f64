//! The all-reduce of data-parallel training: every rank gets the sum or the average over all ranks.

use std::sync::Mutex;

use super::{BucketCx, Op};
use crate::error::Result;
use crate::group::Options;
use crate::memory::Region;
use crate::request::{Io, Verb};
use crate::types::{DType, ReduceOp};
use crate::wait::lock;

/// All-reduce of a bucket.
///
/// On the host, it runs in place if the tensors lie back to back, and otherwise through a buffer. On a device the
/// buffer is there too, so that ranks whose tensors lie differently do the same.
///
/// `hierarchical` always reduces inside hosts first; otherwise the group chooses the route. `scattergather` only
/// records the original's option: every route uses a reduce-scatter followed by an all-gather anyway.
pub struct CentralizedOp {
    average: bool,
    hierarchical: bool,
    scattergather: bool,
    /// Buffer for tensors that are not adjacent. Kept between runs, because fresh pages cost more than the copy.
    scratch: Mutex<Vec<u8>>,
}

impl CentralizedOp {
    /// Creates an operation that averages over all ranks, or sums if `average` is false.
    pub fn new(average: bool, hierarchical: bool, scattergather: bool) -> CentralizedOp {
        CentralizedOp { average, hierarchical, scattergather, scratch: Mutex::new(Vec::new()) }
    }

    /// Returns true for the average, false for the sum.
    pub fn average(&self) -> bool {
        self.average
    }

    /// Returns the options `hierarchical` and `scattergather`.
    pub fn route(&self) -> (bool, bool) {
        (self.hierarchical, self.scattergather)
    }

    fn reduce_op(&self) -> ReduceOp {
        if self.average { ReduceOp::Avg } else { ReduceOp::Sum }
    }
}

impl Op for CentralizedOp {
    fn name(&self) -> &'static str {
        "centralized"
    }

    fn check(&self, dtype: DType, _elements: usize) -> Result<()> {
        self.reduce_op().check(dtype)
    }

    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
        let Some(dtype) = cx.tensors.first().map(Region::dtype) else { return Ok(()) };
        let options = Options::of_bucket(cx.bucket, self.hierarchical);
        let verb = Verb::AllReduce(self.reduce_op());
        let BucketCx { tensors, lanes, .. } = cx;
        let place = tensors.first().and_then(Region::device);
        let stays = place.is_some() && lanes.reaches(place, self.hierarchical);
        Region::whole(tensors, stays, &mut lock(&self.scratch), |whole| {
            lanes.run(&options, dtype, verb, Io::InPlace(whole))
        })
    }
}
