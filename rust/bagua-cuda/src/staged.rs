//! The collective `staged`: copies from the device to pinned memory, runs the host's collective, and copies back.
//!
//! This works between hosts, with several ranks on one device, and without NCCL. Its results have the host's bits. An
//! operation is divided into ranges of each shard's elements, and the same verb runs on each range, in pieces of at
//! most 4 MiB. While the host sends one piece, the device copies the next one to the host and the one before to the
//! device. Every rank divides in the same way, because only verb, shard and number of ranks matter.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use bagua_core::collective::{Collective, Incoming, Io, OpContext, Outgoing, Verb};
use bagua_core::error::Result;
use bagua_core::memory::Buffer;

use crate::device::OperationDevice;
use crate::device_lane::{Copier, PIECE, wait_until_reached};
use crate::shard_addresses::Parts;

/// The longest range is a multiple of this number of bytes, so that no element is divided.
const ALIGNMENT: usize = 64;

/// Runs a verb over the host's collective.
pub(crate) fn run(
    inner: &mut dyn Collective,
    cx: &OpContext<'_>,
    verb: Verb<'_>,
    parts: &Parts,
    place: &OperationDevice,
) -> Result<()> {
    place.lane_device().copier(|copier| {
        let outcome = pieces(inner, cx, verb, parts, place, copier);
        // Marked even after an error, because copies may still be running.
        let ended = place.mark_end(copier, outcome.is_err());
        outcome.and(ended)
    })
}

/// Exchanges messages through host memory that is kept between calls. Copies data for several ranks only once.
pub(crate) fn exchange(
    inner: &mut dyn Collective,
    cx: &OpContext<'_>,
    sends: &[Outgoing<'_>],
    recvs: &mut [Incoming<'_>],
    place: &OperationDevice,
    memory: &mut [Vec<u8>; 2],
) -> Result<()> {
    let mut given: Vec<Buffer<'_>> = Vec::new();
    for message in sends {
        if !given.iter().any(|data| is_same(*data, message.data)) {
            given.push(message.data);
        }
    }
    let [sent, received] = memory;
    sent.resize(given.iter().map(Buffer::len).sum(), 0);
    received.resize(recvs.iter().map(|message| message.data.len()).sum(), 0);
    place.on_lane(|lane_device, copier| {
        lane_device.order_after_last(copier.down.handle())?;
        lane_device.order_after_last(copier.up.handle())?;
        let total = (sent.len() + received.len()) as u64;
        let mut rest = sent.as_mut_slice();
        let mut copies = Vec::with_capacity(given.len());
        for data in &given {
            let (copy, behind) = rest.split_at_mut(data.len());
            // SAFETY: memory of the operation, which is kept until its end on the device.
            unsafe { copier.fetch(lane_device, data.address(), copy, |done| cx.check(&[], done, total)) }?;
            copies.push(&*copy);
            rest = behind;
        }
        let copy_of = |data: Buffer<'_>| copies[given.iter().position(|other| is_same(*other, data)).unwrap_or(0)];
        let outgoing: Vec<_> =
            sends.iter().map(|it| Outgoing::new(it.peer, it.fingerprint, copy_of(it.data))).collect();
        let mut rest = received.as_mut_slice();
        let mut incoming = Vec::with_capacity(recvs.len());
        for it in recvs.iter() {
            let (data, behind) = rest.split_at_mut(it.data.len());
            rest = behind;
            incoming.push(Incoming::new(it.peer, it.fingerprint, data));
        }
        inner.exchange(cx, &outgoing, &mut incoming)?;
        let mut at = 0;
        for it in recvs.iter() {
            let data = &received[at..at + it.data.len()];
            at += data.len();
            // SAFETY: as above. Only the operation uses the memory until its end on the device.
            unsafe {
                let (to, up) = (it.data.as_buffer().address(), copier.up.handle());
                copier.deliver(lane_device, data, to, up, |done| cx.check(&[], done, total))
            }?;
        }
        place.mark_end(copier, false)
    })
}

fn is_same(one: Buffer<'_>, other: Buffer<'_>) -> bool {
    (one.address(), one.len()) == (other.address(), other.len())
}

fn pieces(
    inner: &mut dyn Collective,
    cx: &OpContext<'_>,
    verb: Verb<'_>,
    parts: &Parts,
    place: &OperationDevice,
    copier: &mut Copier,
) -> Result<()> {
    let (down, up) = (copier.down.handle(), copier.up.handle());
    place.order_after_start(&[down, up])?;
    let lane_device = place.lane_device();
    lane_device.order_after_last(down)?;
    lane_device.order_after_last(up)?;
    let ranges = ranges_of(parts);
    let fetch = |copier: &mut Copier, at: usize| -> Result<()> {
        let width = ranges[at].len();
        for (number, from) in parts.from.iter().enumerate() {
            let to = number * width..(number + 1) * width;
            // SAFETY: the range is within the shard, whose memory is kept until the operation's end on the device.
            unsafe { copier.input[at % 2].fill(to, from + ranges[at].start, down) }?;
        }
        lane_device.to_host.fetch_add((parts.from.len() * width) as u64, Relaxed);
        copier.arrived[at % 2].record(down)
    };
    let total = (ranges.last().map_or(0, |last| last.end) * parts.from.len().max(parts.to.len())) as u64;
    if !parts.from.is_empty() {
        fetch(copier, 0)?;
    }
    for (at, range) in ranges.iter().enumerate() {
        let turn = at % 2;
        let done = (range.start * parts.from.len().max(parts.to.len())) as u64;
        let go_on = || cx.check(&[], done, total);
        if !parts.from.is_empty() {
            // The input of this piece is free since the host's operation on the piece before the last.
            if at + 1 < ranges.len() {
                fetch(copier, at + 1)?;
            }
            wait_until_reached(&copier.arrived[turn], go_on)?;
        }
        if !parts.to.is_empty() {
            wait_until_reached(&copier.left[turn], go_on)?;
        }
        let (given, taken) = (parts.from.len() * range.len(), parts.to.len() * range.len());
        let (input, output) = (&mut copier.input[turn], &mut copier.output[turn]);
        let io = match (matches!(verb, Verb::Broadcast { .. }), parts.from.is_empty()) {
            (true, false) => Io::in_place(input.bytes_mut(given)),
            (true, true) => Io::in_place(output.bytes_mut(taken)),
            (false, _) => Io::split(input.bytes(given), output.bytes_mut(taken)),
        };
        inner.run(cx, verb, io)?;
        for (number, to) in parts.to.iter().enumerate() {
            let from = number * range.len()..(number + 1) * range.len();
            // SAFETY: as above. Only this operation uses the destination until its end on the device.
            unsafe { output.spill(from, to + range.start, up) }?;
        }
        if !parts.to.is_empty() {
            lane_device.to_device.fetch_add(taken as u64, Relaxed);
            copier.left[turn].record(up)?;
        }
    }
    Ok(())
}

/// Returns the byte ranges of a shard, the same on all ranks. An empty shard has one empty range.
fn ranges_of(parts: &Parts) -> Vec<Range<usize>> {
    let width = (PIECE / parts.most / ALIGNMENT * ALIGNMENT).max(ALIGNMENT);
    let starts = (0..parts.shard.max(1)).step_by(width);
    starts.map(|start| start..parts.shard.min(start + width)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_a_shard_once_and_fit_a_piece_with_all_ranks() {
        for shard in [0, 1, 63, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17] {
            for most in [1, 3, 4] {
                let parts = Parts { shard, from: Vec::new(), to: Vec::new(), most };
                let ranges = ranges_of(&parts);
                assert_eq!(ranges[0].start, 0);
                assert_eq!(ranges.last().unwrap().end, shard);
                assert!(ranges.windows(2).all(|two| two[0].end == two[1].start));
                assert!(ranges.iter().all(|range| range.len() * most <= PIECE && range.start % ALIGNMENT == 0));
            }
        }
    }
}
