//! Averages weights with both neighbours of a ring, and sends only encoded differences.

use std::sync::{Arc, Mutex};

use super::{Beside, BucketCx, ExtraTensor, Op, require};
use crate::codec::Codec;
use crate::codec::chunks::draw;
use crate::error::{Error, Result};
use crate::group::Options;
use crate::memory::{Region, same_place};
use crate::request::{Extra, Io, Operands, Replicas, Verb, Workspace};
use crate::types::DType;
use crate::wait::lock;

/// Names of the extra tensors: the bucket's weights as both neighbours know them, then the weights of the left and the
/// right neighbour. Each is as long as the bucket, and starts with the initial weights of the member that it copies.
pub const REPLICAS: [&str; 3] = ["weight", "left_peer_weight", "right_peer_weight"];

/// Averages weights with both neighbours of a ring: see [`Verb::CompressedRing`]. If `hierarchical`, the members are
/// hosts with the mean of their ranks' weights.
///
/// If the tensors are on a device that has the codec, they and the replicas stay there. If the device does not have the
/// codec, copies on the host are averaged.
pub struct LowPrecisionDecentralizedOp {
    codec: Arc<dyn Codec>,
    hierarchical: bool,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    /// The tensors, if they are not adjacent on the host, or are on a device without the codec.
    tensors: Vec<u8>,
    /// The replicas, if they are on a device without the codec.
    replicas: [Vec<u8>; 3],
    work: Workspace,
}

impl LowPrecisionDecentralizedOp {
    /// Creates a compressed ring.
    pub fn new(codec: Arc<dyn Codec>, hierarchical: bool) -> LowPrecisionDecentralizedOp {
        LowPrecisionDecentralizedOp { codec, hierarchical, memory: Mutex::default() }
    }
}

impl Op for LowPrecisionDecentralizedOp {
    fn name(&self) -> &'static str {
        "low_precision_decentralized"
    }

    fn check(&self, dtype: DType, elements: usize) -> Result<()> {
        self.codec.check(dtype)?;
        self.codec.check_count(elements)
    }

    fn check_extra(&self, extra: &ExtraTensor, dtype: DType, elements: usize, _padding: usize) -> Result<()> {
        if REPLICAS.contains(&extra.name.as_str()) { require(extra, dtype, elements) } else { Ok(()) }
    }

    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
        let Some(dtype) = cx.tensors.first().map(Region::dtype) else { return Ok(()) };
        let options = Options::of_bucket(cx.bucket, self.hierarchical);
        let verb = Verb::CompressedRing { codec: &*self.codec, draw: draw(cx.step, 0) };
        let BucketCx { bucket, tensors, extra, lanes, .. } = cx;
        let Memory { tensors: scratch, replicas: copies, work } = &mut *lock(&self.memory);
        let replicas = replicas_of(extra, bucket)?;
        let place = tensors.first().and_then(Region::device);
        let together = replicas.iter().all(|replica| same_place(replica.device(), place));
        let stays = together && lanes.encodes_on(place, &*self.codec, dtype, self.hierarchical)?;
        Region::whole(tensors, stays, scratch, |weights| {
            let ([own, left, right], [own_copy, left_copy, right_copy]) = (replicas, copies);
            let mut own = Beside::read(own, own_copy, weights.device())?;
            let mut left = Beside::read(left, left_copy, weights.device())?;
            let mut right = Beside::read(right, right_copy, weights.device())?;
            let replicas = Replicas { own: own.buffer(), left: left.buffer(), right: right.buffer() };
            let extra = Extra { replicas: Some(replicas), work: Some(work), ..Extra::default() };
            lanes.run(&options, dtype, verb, Operands { io: Io::InPlace(weights), extra })?;
            [own, left, right].into_iter().try_for_each(Beside::write_back)
        })
    }
}

fn replicas_of<'a>(extra: &'a mut [ExtraTensor], bucket: &str) -> Result<[&'a mut Region; 3]> {
    let mut found = [None, None, None];
    for ExtraTensor { name, region } in extra {
        if let Some(at) = REPLICAS.iter().position(|replica| replica == name) {
            found[at] = Some(region);
        }
    }
    match found {
        [Some(own), Some(left), Some(right)] => Ok([own, left, right]),
        _ => Err(Error::InvalidArgument(format!("bucket '{bucket}' needs the extra tensors {}", REPLICAS.join(", ")))),
    }
}
