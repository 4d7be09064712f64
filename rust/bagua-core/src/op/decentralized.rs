//! Averages weights with peers in full precision. The result goes to an extra tensor, not to the bucket.

use std::sync::Mutex;

use super::{Beside, BucketCx, ExtraTensor, Op, extra_of, require};
use crate::error::Result;
use crate::group::Options;
use crate::memory::{Region, same_place};
use crate::request::{Extra, Io, Operands, PeerSelection, Verb, Workspace};
use crate::types::{DType, ReduceOp};
use crate::wait::lock;

/// Name of the extra tensor that receives the result. It is as long as the bucket.
pub const PEER_WEIGHT: &str = "peer_weight";

/// Averages weights with the selected peers: see [`Verb::NeighborAverage`]. The round number is the bucket's step.
///
/// If `hierarchical`, the members are hosts with the mean of their ranks' weights, combined on the host. Otherwise
/// tensors on a device stay there.
pub struct DecentralizedOp {
    selection: PeerSelection,
    hierarchical: bool,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    /// The tensors, if they are not adjacent on the host.
    tensors: Vec<u8>,
    /// The result, if its tensor is on a device while the mean is computed on the host.
    mean: Vec<u8>,
    work: Workspace,
}

impl DecentralizedOp {
    /// Creates an operation that computes the mean of a member's weights and those of the selected peers.
    pub fn new(selection: PeerSelection, hierarchical: bool) -> DecentralizedOp {
        DecentralizedOp { selection, hierarchical, memory: Mutex::default() }
    }
}

impl Op for DecentralizedOp {
    fn name(&self) -> &'static str {
        "decentralized"
    }

    fn check(&self, dtype: DType, _elements: usize) -> Result<()> {
        ReduceOp::Avg.check(dtype)
    }

    fn check_extra(&self, extra: &ExtraTensor, dtype: DType, elements: usize, _padding: usize) -> Result<()> {
        if extra.name == PEER_WEIGHT { require(extra, dtype, elements) } else { Ok(()) }
    }

    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
        let Some(dtype) = cx.tensors.first().map(Region::dtype) else { return Ok(()) };
        let options = Options::of_bucket(cx.bucket, self.hierarchical);
        let BucketCx { bucket, step, tensors, extra, lanes, .. } = cx;
        let Memory { tensors: scratch, mean, work } = &mut *lock(&self.memory);
        let result = extra_of(extra, bucket, PEER_WEIGHT)?;
        let verb = match self.selection {
            PeerSelection::All => Verb::AllReduce(ReduceOp::Avg),
            peers => Verb::NeighborAverage { peers, round: *step },
        };
        let place = tensors.first().and_then(Region::device);
        let together = place.is_some() && same_place(result.device(), place);
        let stays = together && !self.hierarchical && lanes.reaches(place, false);
        Region::read_whole(tensors, stays, scratch, |weights| {
            let mut mean = Beside::to_fill(result, mean, weights.device());
            let io = Io::Split { src: weights, dst: mean.buffer() };
            lanes.run(&options, dtype, verb, Operands { io, extra: Extra { work: Some(work), ..Extra::default() } })?;
            mean.write_back()
        })
    }
}
