//! The collective `staged`: copies from the device to pinned memory, runs the host's collective, copies back.
//!
//! It works between hosts, for several ranks on one device, and without NCCL; its bits are the host's. An operation is cut into ranges of
//! elements of a shard, each of which is an operation of the same verb on pieces of at most 4 MiB: while the host sends one piece, the
//! device copies the next one down and the one before up. Every rank cuts alike, because verb, shard and ranks decide.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bagua_core::collective::{Collective, CollectiveFactory, Incoming, Io, OpContext, Outgoing, Verb};
use bagua_core::error::{Error, Result};
use bagua_core::memory::{Buffer, DeviceRef};
use bagua_core::request::{Layout, Uses};

use crate::device::{KIND, Place, Wish, place_of};
use crate::stage::{Choice, Copier, PIECE, Stage, wait_until_reached};

/// The longest range is a multiple of so many bytes, so that no element is cut.
const ALIGNMENT: usize = 64;

/// Bytes that each rank tells of itself before the choice: a whole number of elements of any type.
const RECORD: usize = 16;

/// Makes the collectives of this crate, over those of the host.
#[derive(Debug)]
pub struct Factory;

impl CollectiveFactory for Factory {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn wrap(&self, inner: Box<dyn Collective>, _hosts: &[Vec<usize>]) -> Result<Box<dyn Collective>> {
        Ok(Box::new(Staged { inner, chosen: None, stages: Vec::new() }))
    }
}

/// See the module.
struct Staged {
    /// The host's collective.
    inner: Box<dyn Collective>,
    /// What the ranks chose at the lane's first operation on a device.
    chosen: Option<Choice>,
    /// What the lane has on devices that it has used.
    stages: Vec<Arc<Stage>>,
}

impl Collective for Staged {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn transports(&self) -> Vec<&'static str> {
        self.inner.transports()
    }

    fn reaches(&self, place: DeviceRef<'_>) -> bool {
        place.is_none_or(|device| device.kind() == KIND) || self.inner.reaches(place)
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb, io: Io<'_>) -> Result<()> {
        let Some(place) = place_of(io.device()?) else { return self.inner.run(cx, verb, io) };
        self.agree(cx, place)?;
        let parts = Parts::new(verb, &io, self.rank(), self.size());
        let stage = Arc::clone(place.stage());
        stage.copier(|copier| {
            let outcome = self.pieces(cx, verb, &parts, place, copier);
            // Also after an error: copies may be under way.
            let ended = end(place, copier, outcome.is_err());
            place.ended(ended.is_ok());
            outcome.and(ended)
        })
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        let devices = sends.iter().map(|message| message.data.device());
        let Some(place) =
            devices.chain(recvs.iter().map(|message| message.data.device())).find_map(|device| place_of(device))
        else {
            return self.inner.exchange(cx, sends, recvs);
        };
        self.agree(cx, place)?;
        let on_host = |buffer: Buffer<'_>| {
            let mut host = vec![0; buffer.len()];
            buffer.copy_to(&mut host).map(|()| host)
        };
        let given: Vec<_> = sends.iter().map(|message| on_host(message.data)).collect::<Result<_>>()?;
        let mut got: Vec<_> = recvs.iter().map(|message| vec![0; message.data.len()]).collect();
        let outgoing: Vec<_> =
            sends.iter().zip(&given).map(|(it, data)| Outgoing::new(it.peer, it.fingerprint, data)).collect();
        let mut incoming: Vec<_> =
            recvs.iter().zip(&mut got).map(|(it, data)| Incoming::new(it.peer, it.fingerprint, data)).collect();
        self.inner.exchange(cx, &outgoing, &mut incoming)?;
        // These copies are waited for, so that the operation's end is theirs.
        recvs.iter_mut().zip(&got).try_for_each(|(message, data)| message.data.copy_from(data))
    }

    fn end(&mut self) {
        self.inner.end();
        self.stages.drain(..).for_each(|stage| stage.end());
    }
}

impl Staged {
    /// All ranks choose the collective, once, over the host's.
    ///
    /// # Errors
    /// `Unavailable` on all ranks for wishes that differ or cannot be served.
    fn agree(&mut self, cx: &OpContext<'_>, place: &Place) -> Result<()> {
        if !self.stages.iter().any(|stage| Arc::ptr_eq(stage, place.stage())) {
            self.stages.push(Arc::clone(place.stage()));
        }
        let choice = match &self.chosen {
            Some(choice) => choice,
            None => {
                let mut own = [0; RECORD];
                own[0] = place.wish as u8;
                let mut all = vec![0; self.size() * RECORD];
                self.inner.run(cx, Verb::AllGather, Io::split(&own, &mut all))?;
                let wishes: Vec<u8> = all.iter().step_by(RECORD).copied().collect();
                self.chosen.insert(choose(&wishes)?)
            }
        };
        // Another device of the same lane.
        let _ = place.stage().choice.set(choice.clone());
        Ok(())
    }

    /// One operation, range by range.
    fn pieces(
        &mut self,
        cx: &OpContext<'_>,
        verb: Verb,
        parts: &Parts,
        place: &Place,
        copier: &mut Copier,
    ) -> Result<()> {
        let (down, up) = (copier.down.handle(), copier.up.handle());
        place.order_after_start(&[down, up])?;
        if let Some(last) = copier.last.take() {
            last.order(down)?;
        }
        let stage = place.stage();
        let ranges = parts.ranges();
        let fetch = |copier: &mut Copier, at: usize| -> Result<()> {
            let width = ranges[at].len();
            for (number, from) in parts.from.iter().enumerate() {
                let to = number * width..(number + 1) * width;
                // SAFETY: the range is within the shard, whose memory the operation holds until its end on the device.
                unsafe { copier.input[at % 2].fill(to, from + ranges[at].start, down) }?;
            }
            stage.to_host.fetch_add((parts.from.len() * width) as u64, Relaxed);
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
                // This piece's input is free since the host's operation on the last but one.
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
            self.inner.run(cx, verb, io)?;
            for (number, to) in parts.to.iter().enumerate() {
                let from = number * range.len()..(number + 1) * range.len();
                // SAFETY: as above; this operation alone uses the destination until its end on the device.
                unsafe { output.spill(from, to + range.start, up) }?;
            }
            if !parts.to.is_empty() {
                stage.to_device.fetch_add(taken as u64, Relaxed);
                copier.left[turn].record(up)?;
            }
        }
        Ok(())
    }
}

/// Marks the operation's end on the device: behind the copies to the device, and behind those from it where one may be under way.
fn end(place: &Place, copier: &mut Copier, failed: bool) -> Result<()> {
    if failed {
        copier.arrived[0].record(copier.down.handle())?;
        copier.arrived[0].order(copier.up.handle())?;
    }
    place.done().record(copier.up.handle())?;
    copier.last = Some(Arc::clone(place.done()));
    Ok(())
}

/// What the wishes of all ranks make.
fn choose(wishes: &[u8]) -> Result<Choice> {
    let named = |wish: &u8| Wish::ALL.get(usize::from(*wish)).copied().unwrap_or_default();
    let wishes: Vec<Wish> = wishes.iter().map(named).collect();
    let first = wishes[0];
    if let Some(rank) = wishes.iter().position(|wish| *wish != first) {
        return Err(Error::Unavailable(format!(
            "BAGUA_CUDA_COLLECTIVE is {} on rank 0 of the group and {} on rank {rank}",
            first.name(),
            wishes[rank].name()
        )));
    }
    let why = match first {
        Wish::Auto => "auto: this version has no other collective for CUDA devices",
        Wish::Staged => "BAGUA_CUDA_COLLECTIVE=staged",
        Wish::Nccl | Wish::Ipc => {
            return Err(Error::Unavailable(format!(
                "BAGUA_CUDA_COLLECTIVE={}: this version does not have that collective yet; it has staged",
                first.name()
            )));
        }
    };
    Ok(Choice { collective: "staged", why: why.to_owned() })
}

/// Where the shards of an operation are on the device.
struct Parts {
    /// Bytes of one shard (of the whole tensor where there are no shards).
    shard: usize,
    /// Addresses of the shards that this rank contributes.
    from: Vec<usize>,
    /// Addresses of the shards that this rank gets.
    to: Vec<usize>,
    /// The most shards that any rank has in one piece.
    most: usize,
}

impl Parts {
    fn new(verb: Verb, io: &Io<'_>, rank: usize, ranks: usize) -> Parts {
        let layout = verb.layout();
        let most = if layout == Layout::Equal { 1 } else { ranks };
        let uses = match verb {
            Verb::Broadcast { root } if root == rank => Uses::SourceOnly,
            Verb::Broadcast { .. } => Uses::DestinationOnly,
            other => other.uses(rank),
        };
        // How many shards each side has.
        let (given, taken) = match layout {
            Layout::Equal => (1, 1),
            Layout::EqualShards => (ranks, ranks),
            Layout::Grows => (1, ranks),
            Layout::Shrinks => (ranks, 1),
        };
        let (given, taken) = match uses {
            Uses::Both => (given, taken),
            Uses::SourceOnly => (given, 0),
            Uses::DestinationOnly => (0, taken),
        };
        let list = |first: usize, count: usize, shard: usize| (0..count).map(|at| first + at * shard).collect();
        match io {
            Io::InPlace(data) => {
                let shard = data.len() / most;
                let first = data.as_buffer().address();
                // Of several shards in one buffer a rank's own is the one at its place.
                let own = |count: usize| if most > 1 && count == 1 { first + rank * shard } else { first };
                Parts { shard, from: list(own(given), given, shard), to: list(own(taken), taken, shard), most }
            }
            Io::Split { src, dst } => {
                let shard = src.len().checked_div(given).unwrap_or_else(|| dst.len() / taken.max(1));
                Parts {
                    shard,
                    from: list(src.address(), given, shard),
                    to: list(dst.as_buffer().address(), taken, shard),
                    most,
                }
            }
        }
    }

    /// Ranges of bytes of a shard, the same on all ranks; one empty range for an empty shard.
    fn ranges(&self) -> Vec<Range<usize>> {
        let width = (PIECE / self.most / ALIGNMENT * ALIGNMENT).max(ALIGNMENT);
        let starts = (0..self.shard.max(1)).step_by(width);
        starts.map(|start| start..self.shard.min(start + width)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_a_shard_once_and_fit_a_piece_with_all_ranks() {
        for shard in [0, 1, 63, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17] {
            for most in [1, 3, 4] {
                let parts = Parts { shard, from: Vec::new(), to: Vec::new(), most };
                let ranges = parts.ranges();
                assert_eq!(ranges[0].start, 0);
                assert_eq!(ranges.last().unwrap().end, shard);
                assert!(ranges.windows(2).all(|two| two[0].end == two[1].start));
                assert!(ranges.iter().all(|range| range.len() * most <= PIECE && range.start % ALIGNMENT == 0));
            }
        }
    }

    #[test]
    fn in_place_a_rank_gives_and_gets_the_shard_at_its_place() {
        let mut data = vec![0u8; 24];
        let first = data.as_ptr() as usize;
        let parts = Parts::new(Verb::AllGather, &Io::in_place(&mut data), 2, 3);
        assert_eq!((parts.shard, parts.from, parts.to), (8, vec![first + 16], vec![first, first + 8, first + 16]));
        let parts = Parts::new(Verb::Scatter { root: 0 }, &Io::in_place(&mut data), 1, 3);
        assert_eq!((parts.shard, parts.from, parts.to), (8, vec![], vec![first + 8]));
    }

    #[test]
    fn ranks_that_wish_for_different_collectives_are_named() {
        let error = choose(&[0, 0, 3]).unwrap_err();
        assert_eq!(error.to_string(), "BAGUA_CUDA_COLLECTIVE is auto on rank 0 of the group and staged on rank 2");
        assert!(matches!(choose(&[1, 1]).unwrap_err(), Error::Unavailable(text) if text.contains("nccl")));
        assert_eq!(choose(&[0, 0]).unwrap().collective, "staged");
    }
}
