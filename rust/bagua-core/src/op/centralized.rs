//! The operation of data-parallel training: every rank ends with the sum or the average of all.

use std::sync::{Mutex, PoisonError};

use super::Op;
use crate::error::Result;
use crate::group::{Lane, Options};
use crate::memory::Region;
use crate::request::{Io, Verb};
use crate::types::{DType, ReduceOp};

/// All-reduce of a bucket, in place when its tensors lie back to back, through a buffer of its own otherwise.
///
/// `hierarchical` and `scattergather` ask for a route, not for a result. The group chose its route when it was built, from where
/// the ranks live: inside hosts first and then between them where that is shorter. A centralised exchange is a reduce-scatter
/// followed by an all-gather on every route. Both wishes are kept for reports, and change no number.
pub struct CentralizedOp {
    average: bool,
    hierarchical: bool,
    scattergather: bool,
    /// Where tensors that are not neighbours are gathered; kept between runs, because fresh pages cost more than the copy.
    scratch: Mutex<Vec<u8>>,
}

impl CentralizedOp {
    /// The average of all ranks, or the sum.
    pub fn new(average: bool, hierarchical: bool, scattergather: bool) -> CentralizedOp {
        CentralizedOp { average, hierarchical, scattergather, scratch: Mutex::new(Vec::new()) }
    }

    /// True for the average, false for the sum.
    pub fn average(&self) -> bool {
        self.average
    }

    /// The routes that were asked for: (hierarchical, scattergather).
    pub fn wishes(&self) -> (bool, bool) {
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

    fn check(&self, dtype: DType) -> Result<()> {
        self.reduce_op().check(dtype)
    }

    fn run(&self, bucket: &str, tensors: &mut [Region], lane: &mut Lane) -> Result<()> {
        let Some(dtype) = tensors.first().map(Region::dtype) else { return Ok(()) };
        let options = Options { label: bucket, ..Options::default() };
        let verb = Verb::AllReduce(self.reduce_op());
        if let Some(whole) = Region::joined(tensors) {
            return lane.run(&options, dtype, verb, Io::InPlace(whole));
        }
        // A panic in the middle of a copy leaves bytes that the next run overwrites.
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        scratch.resize(tensors.iter().map(Region::len).sum(), 0);
        let mut rest = scratch.as_mut_slice();
        for tensor in &*tensors {
            let (head, tail) = rest.split_at_mut(tensor.len());
            tensor.buffer().copy_to(head)?;
            rest = tail;
        }
        lane.run(&options, dtype, verb, Io::in_place(&mut scratch))?;
        let mut rest = scratch.as_slice();
        for tensor in tensors {
            let (head, tail) = rest.split_at(tensor.len());
            tensor.buffer_mut().copy_from(head)?;
            rest = tail;
        }
        Ok(())
    }
}
