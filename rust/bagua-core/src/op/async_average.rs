//! One round of asynchronous model averaging as an operation on a bucket: see [`crate::reduce::correct`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::{BucketCx, Op};
use crate::error::{Error, Result};
use crate::group::Options;
use crate::memory::{Owner, Region, WeightLock};
use crate::reduce;
use crate::request::{Io, Verb};
use crate::types::{DType, ReduceOp};
use crate::wait::lock;

/// Identifies the communication thread as an owner of a weight lock. Other threads use other numbers.
const COMMUNICATION: Owner = Owner::MAX - 1;

/// Averages the weights of the ranks that take part, and adds `average - snapshot` to the bucket under the weight lock.
pub struct AsyncModelAverageOp {
    weights: Arc<WeightLock>,
    takes_part: AtomicBool,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    scratch: Vec<u8>,
    snapshot: Vec<u8>,
    average: Vec<u8>,
}

impl AsyncModelAverageOp {
    /// Creates an operation on weights that are protected by this lock.
    pub fn new(weights: Arc<WeightLock>) -> AsyncModelAverageOp {
        AsyncModelAverageOp { weights, takes_part: AtomicBool::new(true), memory: Mutex::default() }
    }

    /// Sets whether this rank takes part from the next round on. Otherwise its weights neither count nor change.
    pub fn set_takes_part(&self, takes_part: bool) {
        self.takes_part.store(takes_part, Ordering::Release);
    }

    /// Returns true if this rank takes part.
    pub fn takes_part(&self) -> bool {
        self.takes_part.load(Ordering::Acquire)
    }
}

impl Op for AsyncModelAverageOp {
    fn name(&self) -> &'static str {
        "async_model_average"
    }

    fn check(&self, dtype: DType, _elements: usize) -> Result<()> {
        ReduceOp::Avg.check(dtype)?;
        if dtype.is_complex() {
            return Err(Error::UnsupportedType(format!("{} weights cannot be averaged", dtype.name())));
        }
        Ok(())
    }

    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
        let Some(dtype) = cx.tensors.first().map(Region::dtype) else { return Ok(()) };
        let options = Options { label: cx.bucket, ..Options::DEFAULT };
        let lane = &mut cx.lanes.global;
        let Memory { scratch, snapshot, average } = &mut *lock(&self.memory);
        let own = u8::from(self.takes_part());
        let mut all = vec![0; lane.size()];
        lane.run(&options, DType::U8, Verb::AllGather, Io::split(&[own], &mut all))?;
        let parts: usize = all.iter().map(|part| usize::from(*part)).sum();
        if parts == 0 {
            return Ok(());
        }
        {
            let _guard = self.weights.lock(COMMUNICATION);
            Region::read_whole(cx.tensors, false, scratch, |weights| {
                snapshot.clear();
                snapshot.extend_from_slice(weights.as_host()?);
                Ok(())
            })?;
        }
        average.clone_from(snapshot);
        if own == 0 {
            // Weights of zero add nothing to the sum.
            average.fill(0);
        }
        if parts == all.len() {
            lane.run(&options, dtype, Verb::AllReduce(ReduceOp::Avg), Io::in_place(average))?;
        } else {
            lane.run(&options, dtype, Verb::AllReduce(ReduceOp::Sum), Io::in_place(average))?;
            reduce::divide(dtype, average, parts);
        }
        if own == 0 || parts == 1 {
            return Ok(());
        }
        let _guard = self.weights.lock(COMMUNICATION);
        Region::whole(cx.tensors, false, scratch, |weights| {
            reduce::correct(dtype, weights.into_host()?, average, snapshot);
            Ok(())
        })
    }
}
