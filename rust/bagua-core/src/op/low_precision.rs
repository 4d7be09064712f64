//! Averaging weights with both neighbours of a ring, of which only encoded differences travel.

use std::sync::{Arc, Mutex};

use super::whole::{OnHost, with_whole};
use super::{BucketCx, ExtraTensor, Op, require};
use crate::codec::Codec;
use crate::codec::chunks::draw;
use crate::collective::gossip::{Replicas, Workspace};
use crate::error::{Error, Result};
use crate::group::{CompressedRing, Options};
use crate::memory::Region;
use crate::types::DType;
use crate::wait::lock;

/// Names of the extra tensors: the bucket's weights as both neighbours have them, and those of the neighbours. Each is as long as
/// the bucket, and begins with the initial weights of the member that it stands for.
pub const REPLICAS: [&str; 3] = ["weight", "left_peer_weight", "right_peer_weight"];

/// See the module and [`crate::collective::gossip::compressed_ring`]. `hierarchical`: members are the hosts, with the means of their
/// ranks.
pub struct LowPrecisionDecentralizedOp {
    codec: Arc<dyn Codec>,
    hierarchical: bool,
    memory: Mutex<Memory>,
}

/// What is kept between runs.
#[derive(Default)]
struct Memory {
    /// The tensors, where they are not adjacent on the host.
    tensors: Vec<u8>,
    /// The replicas, where they are on a device.
    replicas: [Vec<u8>; 3],
    work: Workspace,
}

impl LowPrecisionDecentralizedOp {
    /// The compressed ring.
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
        let options = Options { label: cx.bucket, ..Options::DEFAULT };
        let BucketCx { bucket, step, tensors, extra, lanes, .. } = cx;
        let Memory { tensors: scratch, replicas, work } = &mut *lock(&self.memory);
        let [mut own, mut left, mut right] = on_host(extra, bucket, replicas)?;
        let replicas = Replicas { own: own.bytes()?, left: left.bytes()?, right: right.bytes()? };
        let ring =
            CompressedRing { codec: &*self.codec, hierarchical: self.hierarchical, draw: draw(*step, 0), replicas };
        with_whole(tensors, scratch, |weights| lanes.compressed_ring(&options, dtype, weights, ring, work))?;
        [own, left, right].into_iter().try_for_each(OnHost::write_back)
    }
}

/// The three replicas among the extra tensors.
fn on_host<'a>(extra: &'a mut [ExtraTensor], bucket: &str, copies: &'a mut [Vec<u8>; 3]) -> Result<[OnHost<'a>; 3]> {
    let mut found = [None, None, None];
    let mut copies = copies.each_mut().map(Some);
    for ExtraTensor { name, region } in extra {
        if let Some(at) = REPLICAS.iter().position(|replica| replica == name) {
            found[at] = copies[at].take().map(|copy| OnHost::read(region, copy)).transpose()?;
        }
    }
    match found {
        [Some(own), Some(left), Some(right)] => Ok([own, left, right]),
        _ => Err(Error::InvalidArgument(format!("bucket '{bucket}' lacks one of {}", REPLICAS.join(", ")))),
    }
}
