//! Reductions that NCCL lacks: bits, truth values, 16-bit integers, products of complex numbers. NCCL gathers the
//! elements of all ranks, and our kernel reduces them in the order of the ranks, with the host's bits.

use bagua_core::error::Result;
use bagua_core::request::{OpContext, Verb};
use bagua_core::types::ReduceOp;

use super::communicator::Communicator;
use crate::device::OperationDevice;
use crate::device_lane::LaneDevice;
use crate::driver_functions::CUstream;
use crate::kernels::MAX_SOURCES;
use crate::memory::Scratch;
use crate::reduce_on_device::Reduction;
use crate::shard_addresses::Parts;

/// Maximum number of bytes of all ranks that are reduced at once.
const TOGETHER: usize = 32 << 20;

/// The longest piece is a multiple of this number of bytes, so that no element is divided and vectors are aligned.
const ALIGNMENT: usize = 64;

impl Communicator {
    /// Runs a reduction that NCCL lacks.
    ///
    /// # Errors
    /// `Unavailable` if the kernel cannot be compiled, before any data is sent; otherwise as [`Communicator::operate`].
    pub(crate) fn run_gathered(
        &self,
        cx: &OpContext<'_>,
        verb: Verb<'_>,
        op: ReduceOp,
        parts: &Parts,
        place: &OperationDevice,
    ) -> Result<()> {
        let kernel = Reduction::new(self.context(), cx.dtype(), op, 1)?;
        let lane_device = place.lane_device();
        self.operate(cx, place, || match parts.shard {
            0 => Ok(()),
            _ => self.put_gathered(cx, verb, parts, &lane_device, &kernel),
        })
    }

    fn put_gathered(
        &self,
        cx: &OpContext<'_>,
        verb: Verb<'_>,
        parts: &Parts,
        lane_device: &LaneDevice,
        kernel: &Reduction,
    ) -> Result<()> {
        let ranks = self.ranks();
        let longest = (TOGETHER / ranks / ALIGNMENT * ALIGNMENT).max(ALIGNMENT).min(parts.shard);
        let scratch = Scratch::new(self.context(), ranks * longest, self.stream())?;
        let first = scratch.address();
        for at in (0..parts.shard).step_by(longest) {
            let bytes = longest.min(parts.shard - at);
            let places: Vec<usize> = (0..ranks).map(|rank| first + rank * bytes).collect();
            if let Verb::ReduceScatter(_) = verb {
                let from: Vec<usize> = parts.from.iter().map(|shard| shard + at).collect();
                self.exchange(cx, &from, &places, bytes, 0)?;
            } else {
                let from = parts.from.first().map_or(0, |shard| shard + at);
                self.call(cx, "ncclAllGather", |nccl| nccl.all_gather(from, first, bytes))?;
            }
            if let Some(to) = parts.to.first() {
                reduce(kernel, lane_device, self.stream(), &places, to + at, bytes)?;
            }
        }
        scratch.free()
    }
}

/// Reduces any number of sources, of `bytes` bytes each, to `to`.
fn reduce(
    kernel: &Reduction,
    lane_device: &LaneDevice,
    stream: CUstream,
    sources: &[usize],
    to: usize,
    bytes: usize,
) -> Result<()> {
    let (mut from, mut rest) = sources.split_at(sources.len().min(MAX_SOURCES));
    let mut given = from.to_vec();
    loop {
        // SAFETY: the sources are memory of the operation on this stream. The target belongs to the operation.
        unsafe { kernel.launch(lane_device, stream, &given, to, bytes) }?;
        if rest.is_empty() {
            return Ok(());
        }
        // The intermediate result is the first source of the next launch.
        (from, rest) = rest.split_at(rest.len().min(MAX_SOURCES - 1));
        given = std::iter::once(to).chain(from.iter().copied()).collect();
    }
}
