//! The all-reduce of a bucket through a codec, which sends fewer bytes between ranks or between hosts.

use std::sync::{Arc, Mutex};

use super::{Beside, BucketCx, ExtraTensor, Op, extra_of, require};
use crate::codec::chunks::draw;
use crate::codec::{self, Codec, Exchange};
use crate::error::Result;
use crate::group::Options;
use crate::memory::{Region, same_place};
use crate::request::{Compression, Extra, Io, Operands, Verb, Workspace};
use crate::types::DType;
use crate::wait::lock;

/// Name of the extra tensor for error feedback: one float32 for each element of the bucket without padding.
pub const ERROR: &str = "error";

/// Compressed all-reduce of a bucket: see [`Verb::CompressedAllReduce`]. `hierarchical` sums inside hosts in full
/// precision and compresses only between the hosts' first ranks.
///
/// If the tensors are on a device that has the codec, they stay there, back to back or gathered in a buffer. If the
/// device does not have the codec, copies on the host are combined.
pub struct CompressedOp {
    codec: Arc<dyn Codec>,
    average: bool,
    hierarchical: bool,
    error_feedback: bool,
    exact: usize,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    /// The tensors, if they are not adjacent on the host.
    tensors: Vec<u8>,
    /// The extra tensor, if it is on a device while the tensors are combined on the host.
    error: Vec<u8>,
    work: Workspace,
}

impl CompressedOp {
    /// Creates an operation that averages over all ranks, or sums if `average` is false. `error_feedback` needs the
    /// extra tensor [`ERROR`]. The last `exact` elements, which must be padding, are added without the codec.
    pub fn new(
        codec: Arc<dyn Codec>,
        average: bool,
        hierarchical: bool,
        error_feedback: bool,
        exact: usize,
    ) -> CompressedOp {
        CompressedOp { codec, average, hierarchical, error_feedback, exact, memory: Mutex::default() }
    }

    /// Returns the name and options of the codec.
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
            Exchange::OneShot => self.codec.check_count(elements.saturating_sub(self.exact)),
            Exchange::TwoShot => Ok(()),
        }
    }

    fn check_extra(&self, extra: &ExtraTensor, _dtype: DType, elements: usize, padding: usize) -> Result<()> {
        if self.error_feedback && extra.name == ERROR { require(extra, DType::F32, elements - padding) } else { Ok(()) }
    }

    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
        let Some(dtype) = cx.tensors.first().map(Region::dtype) else { return Ok(()) };
        let options = Options::of_bucket(cx.bucket, self.hierarchical);
        let BucketCx { bucket, step, tensors, extra, lanes, padding } = cx;
        let Memory { tensors: scratch, error: copy, work } = &mut *lock(&self.memory);
        let error = match self.error_feedback {
            true => Some(extra_of(extra, bucket, ERROR)?),
            false => None,
        };
        let elements = tensors.iter().map(Region::count).sum::<usize>() - *padding;
        let codec = &*self.codec;
        let divisor = if self.average { lanes.global.size() } else { 1 };
        let verb = Verb::CompressedAllReduce(Compression {
            codec,
            divisor,
            draw: draw(*step, 0),
            elements,
            exact: self.exact,
        });
        let place = tensors.first().and_then(Region::device);
        let together = error.as_ref().is_none_or(|error| same_place(error.device(), place));
        let stays = together && lanes.encodes_on(place, codec, dtype, self.hierarchical)?;
        Region::whole(tensors, stays, scratch, |data| {
            let mut error = error.map(|error| Beside::read(error, copy, data.device())).transpose()?;
            let extra = Extra { error: error.as_mut().map(Beside::buffer), work: Some(work), ..Extra::default() };
            lanes.run(&options, dtype, verb, Operands { io: Io::InPlace(data), extra })?;
            error.map_or(Ok(()), Beside::write_back)
        })
    }
}
