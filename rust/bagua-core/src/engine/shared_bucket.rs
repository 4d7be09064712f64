//! A bucket that its owner and a communication thread share.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::bucket::{Bucket, CheckedOut};
use crate::error::Result;
use crate::group::Lanes;
use crate::memory::{DeviceRef, Region};
use crate::op::{BucketCx, ExtraTensor, Op};
use crate::types::DType;
use crate::wait::lock;

/// A [`Bucket`] behind a lock that is held for moments only: while the bucket is communicated, its memory is checked out and the
/// lock is free. Cheap to clone; all clones are one bucket.
#[derive(Clone)]
pub struct SharedBucket {
    name: Arc<str>,
    dtype: DType,
    bytes: usize,
    bucket: Arc<Mutex<Bucket>>,
}

impl SharedBucket {
    /// Shares a bucket.
    pub fn new(bucket: Bucket) -> SharedBucket {
        SharedBucket {
            name: bucket.name().into(),
            dtype: bucket.dtype(),
            bytes: bucket.bytes(),
            bucket: Arc::new(Mutex::new(bucket)),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of all tensors, padding included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// See [`Bucket::append`].
    pub fn append(&self, op: Arc<dyn Op>) -> Result<()> {
        self.lock().append(op)
    }

    /// See [`Bucket::clear_ops`].
    pub fn clear_ops(&self) -> Result<()> {
        self.lock().clear_ops()
    }

    /// Names of the operations.
    pub fn ops(&self) -> Vec<&'static str> {
        self.lock().ops()
    }

    /// See [`Bucket::choice`].
    pub fn choice(&self) -> Option<String> {
        self.lock().choice()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Bucket> {
        // Nothing in Bucket panics in the middle of a change.
        lock(&self.bucket)
    }

    /// See [`Bucket::attach`].
    pub fn attach(&self, extra: ExtraTensor) -> Result<()> {
        self.lock().attach(extra)
    }

    /// See [`Bucket::set_step`].
    pub fn set_step(&self, step: u64) -> Result<()> {
        self.lock().set_step(step)
    }

    /// See [`Bucket::step`].
    pub fn step(&self) -> u64 {
        self.lock().step()
    }

    /// See [`Bucket::copy_from_extra`].
    pub fn copy_from_extra(&self, name: &str, stream: Option<usize>) -> Result<()> {
        self.lock().copy_from_extra(name, stream)
    }

    /// Takes the bucket's memory and operations for one communication.
    pub(super) fn check_out(&self) -> Result<(InFlight, Vec<Arc<dyn Op>>)> {
        let CheckedOut { regions, extra, ops, step, padding } = self.lock().check_out()?;
        Ok((InFlight { bucket: self.clone(), regions, extra, step, padding }, ops))
    }
}

/// The memory of a bucket that is being communicated. Goes back when it is dropped, so that neither an error, nor a panic, nor a
/// job that never ran can lose it.
pub(super) struct InFlight {
    bucket: SharedBucket,
    regions: Vec<Region>,
    extra: Vec<ExtraTensor>,
    /// How often the bucket was communicated before.
    step: u64,
    /// Elements at the end that are padding.
    padding: usize,
}

impl InFlight {
    pub(super) fn name(&self) -> &str {
        self.bucket.name()
    }

    /// The device that the memory is on; `None` for the host.
    pub(super) fn device(&self) -> DeviceRef<'_> {
        self.regions.first().and_then(Region::device)
    }

    /// What an operation gets.
    pub(super) fn cx<'a>(&'a mut self, lanes: &'a mut Lanes) -> BucketCx<'a> {
        let InFlight { bucket, regions, extra, step, padding } = self;
        BucketCx { bucket: bucket.name(), step: *step, tensors: regions, padding: *padding, extra, lanes }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let (regions, extra) = (std::mem::take(&mut self.regions), std::mem::take(&mut self.extra));
        self.bucket.lock().check_in(regions, extra);
    }
}
