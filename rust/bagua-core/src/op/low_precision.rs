//! Averaging weights with both neighbours of a ring, of which only encoded differences travel.

use std::sync::{Arc, Mutex};

use super::whole::with_whole;
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
    memory: Mutex<(Vec<u8>, Workspace)>,
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
        let replicas = replicas(extra, bucket)?;
        let (scratch, work) = &mut *lock(&self.memory);
        let ring =
            CompressedRing { codec: &*self.codec, hierarchical: self.hierarchical, draw: draw(*step, 0), replicas };
        with_whole(tensors, scratch, |weights| lanes.compressed_ring(&options, dtype, weights, ring, work))
    }
}

/// The three replicas among the extra tensors.
fn replicas<'a>(extra: &'a mut [ExtraTensor], bucket: &str) -> Result<Replicas<'a>> {
    let mut found = [None, None, None];
    for ExtraTensor { name, region } in extra {
        if let Some(at) = REPLICAS.iter().position(|replica| replica == name) {
            found[at] = Some(region.as_host_mut()?);
        }
    }
    match found {
        [Some(own), Some(left), Some(right)] => Ok(Replicas { own, left, right }),
        _ => Err(Error::InvalidArgument(format!("bucket '{bucket}' lacks one of {}", REPLICAS.join(", ")))),
    }
}
