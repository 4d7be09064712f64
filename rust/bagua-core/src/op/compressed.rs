//! The centralized operation through a codec: fewer bytes between ranks, or between hosts.

use std::sync::{Arc, Mutex};

use super::whole::with_whole;
use super::{BucketCx, ExtraTensor, Op, require};
use crate::codec::chunks::draw;
use crate::codec::{self, Codec, Exchange};
use crate::collective::compressed::Workspace;
use crate::error::Result;
use crate::group::{CompressedAllReduce, Options};
use crate::memory::Region;
use crate::types::DType;
use crate::wait::lock;

/// Name of the extra tensor of error feedback: a float32 for each element of the bucket, padding left out.
pub const ERROR: &str = "error";

/// Compressed all-reduce of a bucket, see [`crate::collective::compressed`]. `hierarchical` adds inside hosts in full precision, and
/// compresses between the hosts' first ranks.
pub struct CompressedOp {
    codec: Arc<dyn Codec>,
    average: bool,
    hierarchical: bool,
    error_feedback: bool,
    memory: Mutex<(Vec<u8>, Workspace)>,
}

impl CompressedOp {
    /// The average of all ranks, or the sum. Error feedback needs the extra tensor [`ERROR`].
    pub fn new(codec: Arc<dyn Codec>, average: bool, hierarchical: bool, error_feedback: bool) -> CompressedOp {
        CompressedOp { codec, average, hierarchical, error_feedback, memory: Mutex::default() }
    }

    /// Name and options of the codec.
    pub fn codec(&self) -> String {
        codec::describe(&*self.codec)
    }
}

impl Op for CompressedOp {
    fn name(&self) -> &'static str {
        "compressed"
    }

    fn check(&self, dtype: DType, elements: usize) -> Result<()> {
        self.codec.check(dtype)?;
        match self.codec.exchange() {
            Exchange::OneShot => self.codec.check_count(elements),
            Exchange::TwoShot => Ok(()),
        }
    }

    fn check_extra(&self, extra: &ExtraTensor, _dtype: DType, elements: usize, padding: usize) -> Result<()> {
        if self.error_feedback && extra.name == ERROR { require(extra, DType::F32, elements - padding) } else { Ok(()) }
    }

    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
        let Some(dtype) = cx.tensors.first().map(Region::dtype) else { return Ok(()) };
        let options = Options { label: cx.bucket, ..Options::DEFAULT };
        let BucketCx { bucket, step, tensors, extra, lanes, padding } = cx;
        let error = match self.error_feedback {
            true => Some(super::extra_of(extra, bucket, ERROR)?.as_host_mut()?),
            false => None,
        };
        let elements = tensors.iter().map(Region::count).sum::<usize>() - *padding;
        let (scratch, work) = &mut *lock(&self.memory);
        let (codec, average, hierarchical) = (&*self.codec, self.average, self.hierarchical);
        let how = CompressedAllReduce { codec, average, hierarchical, draw: draw(*step, 0), elements, error };
        with_whole(tensors, scratch, |data| lanes.compressed_all_reduce(&options, dtype, data, how, work))
    }
}
