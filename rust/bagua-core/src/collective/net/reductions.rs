//! The reducing verbs of [`Net`]: whole tensors at once, shares that overlap with sending them on, and chunks.

use std::time::Instant;

use super::ranges::{longest_share, share};
use super::{Net, slots, split};
use crate::collective::{Call, Collective, Incoming, Io, Outgoing};
use crate::error::Result;
use crate::reduce::combine;
use crate::transport::Step;
use crate::types::ReduceOp;

/// Combines what lies in the peers' slots with this rank's own input (`None`: what `out` holds), in rank order.
fn fold(call: &Call<'_>, op: ReduceOp, slots: &[&mut [u8]], rank: usize, own: Option<&[u8]>, out: &mut [u8]) {
    let start = Instant::now();
    let inputs: Vec<Option<&[u8]>> =
        slots.iter().enumerate().map(|(r, slot)| if r == rank { own } else { Some(&slot[..out.len()]) }).collect();
    combine(call.dtype(), op, &inputs, out);
    call.stats.add_reduce(start.elapsed());
}

impl Net {
    /// Root, or every rank where there is none, gets all tensors whole and combines them.
    pub(super) fn reduce_direct(
        &mut self,
        call: &Call<'_>,
        io: Io<'_>,
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = call.fingerprint;
        let size = call.dtype().size();
        let combines = root.is_none_or(|root| root == rank);
        let (src, dst) = match io {
            Io::InPlace(data) if combines => (None, data),
            Io::InPlace(data) => (Some(&*data), &mut [][..]),
            Io::Split { src, dst } => (Some(src), dst),
        };
        let len = src.map_or(dst.len(), <[u8]>::len);
        let pieces = self.pieces(len / size, size);
        let total = if combines { len as u64 * (n as u64 - 1) } else { len as u64 };
        let mut before = 0;
        for step in 0..pieces.steps {
            let range = pieces.range(step, len / size);
            let range = range.start * size..range.end * size;
            let own = match src {
                Some(src) => &src[range.clone()],
                None => &dst[range.clone()],
            };
            let targets = self.peers().filter(|peer| root.is_none_or(|root| root == *peer));
            let sends: Vec<_> = targets.map(|peer| Outgoing { peer, fingerprint, data: own }).collect();
            let mut landing = slots(&mut self.staging, n, if combines { range.len() } else { 0 });
            let at = Step { part: step as u32, before, total };
            let mut recvs: Vec<_> = Vec::new();
            if combines {
                let others = landing.iter_mut().enumerate().filter(|(peer, _)| *peer != rank);
                recvs.extend(others.map(|(peer, slot)| Incoming { peer, fingerprint, data: slot }));
            }
            self.mesh.exchange_step(call, at, &sends, &mut recvs)?;
            drop(recvs);
            if combines {
                let own = src.map(|src| &src[range.clone()]);
                before += (range.len() * (n - 1)) as u64;
                fold(call, op, &landing, rank, own, &mut dst[range]);
            } else {
                before += range.len() as u64;
            }
        }
        Ok(())
    }

    /// Each rank combines its share of the elements and sends the result to root, or to all where there is none. While the
    /// results of one piece travel, so do the inputs of the next.
    pub(super) fn reduce_shares(
        &mut self,
        call: &Call<'_>,
        io: Io<'_>,
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = call.fingerprint;
        let size = call.dtype().size();
        let gets = |peer: usize| root.is_none_or(|root| root == peer);
        // Where to read, where to write; one buffer when `src` is `None`. A rank that gets nothing combines in its own slot.
        let (src, dst) = match io {
            Io::InPlace(data) if gets(rank) => (None, data),
            Io::InPlace(data) => (Some(&*data), &mut [][..]),
            Io::Split { src, .. } if !gets(rank) => (Some(src), &mut [][..]),
            Io::Split { src, dst } => (Some(src), dst),
        };
        let count = src.map_or(dst.len(), <[u8]>::len) / size;
        let pieces = self.pieces(longest_share(count, n), size);
        // Bytes of piece `step` of a rank's share, from the beginning of the tensor.
        let piece = |owner: usize, step: usize| {
            let whole = share(count, n, owner);
            let part = pieces.range(step, whole.len());
            (whole.start + part.start) * size..(whole.start + part.end) * size
        };
        let own_share = share(count, n, rank).len() as u64 * size as u64;
        let total = own_share * (n as u64 - 1) + if gets(rank) { (count * size) as u64 - own_share } else { 0 };
        let mut before = 0;
        let slot = pieces.each * size;
        for step in 0..=pieces.steps {
            let mut landing = slots(&mut self.staging, n, slot);
            let mut sends = Vec::with_capacity(2 * n);
            let mut recvs = Vec::with_capacity(2 * n);
            let peers = || (1..n).map(|distance| (rank + distance) % n);
            // The last piece's result on its way; for a rank that keeps none it lies in the own slot.
            let finished = piece(rank, step.wrapping_sub(1));
            let mut results: Vec<&mut [u8]> = Vec::new();
            let mut inputs: Vec<&[u8]> = Vec::new();
            let mut own_result: &[u8] = &[];
            if gets(rank) {
                // Cuts every share into (what was combined last, what is to be combined now): disjoint, also in one buffer.
                let mut rest = &mut *dst;
                for owner in 0..n {
                    let mine =
                        rest.split_off_mut(..share(count, n, owner).len() * size).expect("shares cover the tensor");
                    let start = share(count, n, owner).start * size;
                    let now = piece(owner, step);
                    let (done, coming) = mine.split_at_mut(now.start - start);
                    let last = if step > 0 { piece(owner, step - 1).start - start } else { done.len() };
                    results.push(&mut done[last..]);
                    inputs.push(match src {
                        Some(src) => &src[now],
                        None => &coming[..now.len()],
                    });
                }
                own_result = &*std::mem::take(&mut results[rank]);
            } else if let Some(src) = src {
                inputs.extend((0..n).map(|owner| &src[piece(owner, step)]));
            }
            let mut kept: &mut [u8] = &mut [];
            if !gets(rank) {
                kept = std::mem::take(&mut landing[rank]);
                if step > 0 {
                    own_result = &kept[..finished.len()];
                }
            }
            for peer in peers() {
                if step < pieces.steps {
                    sends.push(Outgoing { peer, fingerprint, data: inputs[peer] });
                }
                if step > 0 && gets(peer) {
                    sends.push(Outgoing { peer, fingerprint, data: own_result });
                }
            }
            let now = piece(rank, step).len();
            for (peer, slot) in landing.iter_mut().enumerate().filter(|(peer, _)| *peer != rank) {
                if step < pieces.steps {
                    recvs.push(Incoming { peer, fingerprint, data: &mut slot[..now] });
                }
                if step > 0 && gets(rank) {
                    recvs.push(Incoming { peer, fingerprint, data: std::mem::take(&mut results[peer]) });
                }
            }
            let at = Step { part: step as u32, before, total };
            self.mesh.exchange_step(call, at, &sends, &mut recvs)?;
            before += recvs.iter().map(|m| m.data.len() as u64).sum::<u64>();
            drop((sends, recvs));
            if step < pieces.steps {
                let own = piece(rank, step);
                if gets(rank) {
                    fold(call, op, &landing, rank, src.map(|src| &src[own.clone()]), &mut dst[own]);
                } else {
                    let input = src.map(|src| &src[own]);
                    fold(call, op, &landing, rank, input, &mut kept[..now]);
                }
            }
        }
        Ok(())
    }

    /// Each rank combines its own chunk of all tensors.
    pub(super) fn reduce_chunks(&mut self, call: &Call<'_>, io: Io<'_>, op: ReduceOp) -> Result<()> {
        let (rank, n) = (self.rank(), self.size());
        let fingerprint = call.fingerprint;
        let size = call.dtype().size();
        let (inputs, own, out): (Vec<&[u8]>, Option<&[u8]>, &mut [u8]) = match io {
            Io::InPlace(data) => {
                let mut parts = split(data, n);
                let out = std::mem::take(&mut parts[rank]);
                (parts.into_iter().map(|part| &*part).collect(), None, out)
            }
            Io::Split { src, dst } => {
                let each = dst.len();
                let parts: Vec<&[u8]> = (0..n).map(|peer| &src[peer * each..(peer + 1) * each]).collect();
                let own = parts[rank];
                (parts, Some(own), dst)
            }
        };
        let pieces = self.pieces(out.len() / size, size);
        let total = out.len() as u64 * (n as u64 - 1);
        let mut before = 0;
        for step in 0..pieces.steps {
            let range = pieces.range(step, out.len() / size);
            let range = range.start * size..range.end * size;
            let sends: Vec<_> =
                self.peers().map(|peer| Outgoing { peer, fingerprint, data: &inputs[peer][range.clone()] }).collect();
            let mut landing = slots(&mut self.staging, n, range.len());
            let others = landing.iter_mut().enumerate().filter(|(peer, _)| *peer != rank);
            let mut recvs: Vec<_> = others.map(|(peer, slot)| Incoming { peer, fingerprint, data: slot }).collect();
            self.mesh.exchange_step(call, Step { part: step as u32, before, total }, &sends, &mut recvs)?;
            drop(recvs);
            before += (range.len() * (n - 1)) as u64;
            fold(call, op, &landing, rank, own.map(|own| &own[range.clone()]), &mut out[range]);
        }
        Ok(())
    }
}
