//! The verbs as calls of NCCL: five of its collectives. Gather, scatter and all_to_all are groups of messages.

use bagua_core::error::{Error, Result};
use bagua_core::memory::Buffer;
use bagua_core::request::{Incoming, OpContext, Outgoing, Verb};
use bagua_core::types::{DType, ReduceOp};
use nccl_sys::ncclRedOp_t;

use super::communicator::{Communicator, Message, Reduction, elements};
use crate::device::OperationDevice;
use crate::memory::Scratch;
use crate::shard_addresses::Parts;

/// Returns NCCL's operation. `None` for bits, truth values, 16-bit integers, and products of complex numbers.
fn operation(op: ReduceOp, dtype: DType) -> Option<ncclRedOp_t> {
    match op {
        ReduceOp::Sum => Some(ncclRedOp_t::SUM),
        ReduceOp::Product => (!dtype.is_complex()).then_some(ncclRedOp_t::PRODUCT),
        ReduceOp::Min => Some(ncclRedOp_t::MIN),
        ReduceOp::Max => Some(ncclRedOp_t::MAX),
        ReduceOp::Avg => Some(ncclRedOp_t::AVERAGE),
        _ => None,
    }
}

fn reduction(op: ReduceOp, dtype: DType, bytes: usize) -> Option<Reduction> {
    let (kind, times) = elements(dtype)?;
    Some(Reduction { count: bytes / dtype.size() * times, dtype: kind, op: operation(op, dtype)? })
}

/// Returns true if NCCL can run a verb on elements of a type.
pub(crate) fn serves(verb: Verb<'_>, dtype: DType) -> bool {
    verb.op().is_none_or(|op| reduction(op, dtype, 0).is_some())
}

impl Communicator {
    /// Runs a verb that NCCL [`serves`]. Returns the errors of [`Communicator::operate`].
    pub(crate) fn run(&self, cx: &OpContext<'_>, verb: Verb<'_>, parts: &Parts, place: &OperationDevice) -> Result<()> {
        self.operate(cx, place, || if parts.shard == 0 { Ok(()) } else { self.put(cx, verb, parts) })
    }

    /// Puts the work of a verb on the stream. For operations in place, the addresses are as NCCL expects for that.
    fn put(&self, cx: &OpContext<'_>, verb: Verb<'_>, parts: &Parts) -> Result<()> {
        let bytes = parts.shard;
        let (from, to) = (parts.from.first().copied(), parts.to.first().copied());
        if let (1, Some(_), Some(from), Some(to)) = (self.ranks(), verb.op(), from, to) {
            // With one rank, the result is the rank's own data. NCCL would multiply it by one for an average.
            // SAFETY: `bytes` bytes each, of the operation's own arrays, on the stream.
            return if from == to { Ok(()) } else { unsafe { self.context().copy(to, from, bytes, self.stream()) } };
        }
        let how = |op| reduction(op, cx.dtype(), bytes).expect("`serves` was true");
        match verb {
            Verb::AllReduce(op) => {
                self.call(cx, "ncclAllReduce", |nccl| nccl.all_reduce(from.unwrap_or(0), to.unwrap_or(0), how(op)))
            }
            Verb::Reduce { op, root } => {
                self.call(cx, "ncclReduce", |nccl| nccl.reduce(from.unwrap_or(0), to.unwrap_or(0), how(op), root))
            }
            Verb::ReduceScatter(op) => self
                .call(cx, "ncclReduceScatter", |nccl| nccl.reduce_scatter(from.unwrap_or(0), to.unwrap_or(0), how(op))),
            Verb::Broadcast { root } => {
                self.call(cx, "ncclBroadcast", |nccl| nccl.broadcast(from.or(to).unwrap_or(0), bytes, root))
            }
            Verb::AllGather => {
                self.call(cx, "ncclAllGather", |nccl| nccl.all_gather(from.unwrap_or(0), to.unwrap_or(0), bytes))
            }
            Verb::Gather { root } | Verb::Scatter { root } => self.exchange(cx, &parts.from, &parts.to, bytes, root),
            Verb::AllToAll if from == to => {
                // In place, a message could arrive before the data at its place was sent.
                let whole = bytes * parts.from.len();
                let scratch = Scratch::new(self.context(), whole, self.stream())?;
                let copy = scratch.address();
                // SAFETY: `whole` bytes each, on the stream. The array belongs to the operation.
                unsafe { self.context().copy(copy, parts.from[0], whole, self.stream()) }?;
                let copies: Vec<usize> = (0..parts.from.len()).map(|rank| copy + rank * bytes).collect();
                self.exchange(cx, &copies, &parts.to, bytes, 0)?;
                scratch.free()
            }
            Verb::AllToAll => self.exchange(cx, &parts.from, &parts.to, bytes, 0),
            Verb::Barrier => Ok(()),
            // `OnDevices` runs the other verbs over its exchange.
            other => Err(Error::NotImplemented(format!("NCCL has no call for {}", other.kind().name()))),
        }
    }

    /// Exchanges a shard with each rank. A side with only one shard exchanges it with `root`.
    pub(super) fn exchange(
        &self,
        cx: &OpContext<'_>,
        from: &[usize],
        to: &[usize],
        bytes: usize,
        root: usize,
    ) -> Result<()> {
        let rank = self.rank();
        let with_others = |shards: &[usize]| -> Vec<Message> {
            let alone = shards.len() == 1;
            let message = |(at, address): (usize, &usize)| Message {
                address: *address,
                bytes,
                peer: if alone { root } else { at },
            };
            shards.iter().enumerate().map(message).filter(|message| message.peer != rank).collect()
        };
        let own = |shards: &[usize]| match shards {
            [] => None,
            [one] => Some(*one),
            several => Some(several[rank]),
        };
        // A rank that both sends and receives copies its own shard, because NCCL gets only messages to other ranks.
        if let (Some(from), Some(to)) = (own(from), own(to))
            && from != to
        {
            // SAFETY: `bytes` bytes each, of the operation's own arrays, on the stream.
            unsafe { self.context().copy(to, from, bytes, self.stream()) }?;
        }
        self.put_messages(cx, &with_others(from), &with_others(to))
    }

    fn put_messages(&self, cx: &OpContext<'_>, sends: &[Message], recvs: &[Message]) -> Result<()> {
        if sends.is_empty() && recvs.is_empty() {
            return Ok(());
        }
        self.call(cx, "ncclGroupEnd", |nccl| nccl.exchange(sends, recvs))
    }

    /// Exchanges messages on the communicator's device as a step of the operation. Empty messages are not sent.
    pub(crate) fn run_messages(
        &self,
        cx: &OpContext<'_>,
        sends: &[Outgoing<'_>],
        recvs: &[Incoming<'_>],
        place: &OperationDevice,
    ) -> Result<()> {
        let message = |data: Buffer<'_>, peer| Message { address: data.address(), bytes: data.len(), peer };
        let some = |message: &Message| message.bytes > 0;
        let sends: Vec<_> = sends.iter().map(|it| message(it.data, it.peer)).filter(some).collect();
        let recvs: Vec<_> = recvs.iter().map(|it| message(it.data.as_buffer(), it.peer)).filter(some).collect();
        self.operate(cx, place, || self.put_messages(cx, &sends, &recvs))
    }
}

#[cfg(test)]
mod tests {
    use bagua_core::types::ElementTypes;

    use super::*;

    #[test]
    fn serves_is_false_for_what_nccl_cannot_reduce() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                let bits = op.element_types() == ElementTypes::Bits;
                let product = op == ReduceOp::Product && dtype.is_complex();
                let absent = matches!(dtype, DType::Bool | DType::I16 | DType::U16);
                assert_eq!(serves(Verb::AllReduce(op), dtype), !bits && !product && !absent);
            }
            assert!(serves(Verb::AllGather, dtype) && serves(Verb::Broadcast { root: 0 }, dtype));
        }
    }

    #[test]
    fn complex_numbers_are_pairs() {
        let pair = reduction(ReduceOp::Sum, DType::C128, 48).unwrap();
        assert_eq!((pair.count, pair.dtype), (6, nccl_sys::ncclDataType_t::FLOAT64));
    }
}
