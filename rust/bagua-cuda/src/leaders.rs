//! The hosts' first ranks: what their hosts have summed up becomes the sum of all hosts, by messages of the host's collective.
//!
//! With the bits of the host's `hier`: the hosts' sums are added up in the order of the hosts, and an average is divided once. A piece passes
//! through pinned memory of the first rank of each host, by [`Leaders::fetch`], [`Leaders::combine`] and [`Leaders::put`].

use std::sync::atomic::Ordering::Relaxed;

use bagua_core::collective::{Collective, Incoming, OpContext, Outgoing};
use bagua_core::error::{Error, Result};
use bagua_core::reduce::{combine, divide};
use bagua_core::types::ReduceOp;

use crate::api::CUstream;
use crate::parts::share;
use crate::stage::{Copier, Stage, wait_until_reached};

/// Index on its host of the rank that speaks for it.
pub(crate) const LEADER: usize = 0;

/// See the module.
pub(crate) struct Leaders {
    /// The first rank of each host.
    ranks: Vec<usize>,
    /// Index of this rank's host.
    host: usize,
}

impl Leaders {
    /// Of the ranks of each host, one of which is `own`.
    ///
    /// # Errors
    /// `Other` where it is on none.
    pub(crate) fn new(hosts: &[Vec<usize>], own: usize) -> Result<Leaders> {
        let host = hosts.iter().position(|host| host.contains(&own));
        let host = host.ok_or_else(|| Error::other("this rank is on no host"))?;
        Ok(Leaders { ranks: hosts.iter().map(|host| host[LEADER]).collect(), host })
    }

    /// How many hosts there are.
    pub(crate) fn hosts(&self) -> usize {
        self.ranks.len()
    }

    /// Index of this rank's host.
    pub(crate) fn host(&self) -> usize {
        self.host
    }

    /// Begins to copy the sum of this host from the device, into the input of a turn.
    ///
    /// # Safety
    /// `bytes` at `from` are memory of the device, which lives until the stream has come so far.
    pub(crate) unsafe fn fetch(
        stage: &Stage,
        copier: &mut Copier,
        turn: usize,
        (from, bytes): (usize, usize),
        stream: CUstream,
    ) -> Result<()> {
        // SAFETY: the caller's promise; `combine` waits for the copy before the host reads, and before the next one into this input.
        unsafe { copier.input[turn].fill(0..bytes, from, stream) }?;
        stage.to_host.fetch_add(bytes as u64, Relaxed);
        copier.arrived[turn].record(stream)
    }

    /// What `fetch` copies for this turn becomes the result of all hosts, in the output of the turn. Waits for the other hosts' first ranks, and
    /// for the copy. `done` bytes of `total` came before.
    pub(crate) fn combine(
        &self,
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        op: ReduceOp,
        copier: &mut Copier,
        (turn, bytes): (usize, usize),
        (done, total): (usize, usize),
    ) -> Result<()> {
        let go_on = || cx.check(&[], done as u64, total as u64);
        wait_until_reached(&copier.arrived[turn], go_on)?;
        wait_until_reached(&copier.left[turn], go_on)?;
        let data = copier.output[turn].bytes_mut(bytes);
        data.copy_from_slice(copier.input[turn].bytes(bytes));
        self.all_reduce(inner, cx, op.undivided(), data)?;
        if op == ReduceOp::Avg {
            divide(cx.dtype(), data, inner.size());
        }
        Ok(())
    }

    /// Begins to copy the output of a turn to the device.
    ///
    /// # Safety
    /// `bytes` at `to` are memory of the device, which lives until the stream has come so far, and which nobody else uses until then.
    pub(crate) unsafe fn put(
        stage: &Stage,
        copier: &Copier,
        turn: usize,
        (to, bytes): (usize, usize),
        stream: CUstream,
    ) -> Result<()> {
        // SAFETY: the caller's promise; `combine` writes to this output again when the copy is done.
        unsafe { copier.output[turn].spill(0..bytes, to, stream) }?;
        stage.to_device.fetch_add(bytes as u64, Relaxed);
        copier.left[turn].record(stream)
    }

    /// All_reduce of the hosts' first ranks: each combines a share, in the order of the hosts, and sends it to the others.
    fn all_reduce(&self, inner: &mut dyn Collective, cx: &OpContext<'_>, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        let (hosts, own) = (self.hosts(), self.host);
        let shares: Vec<_> = (0..hosts).map(|host| share(host, hosts, data.len())).collect();
        let others = || (0..hosts).filter(|host| *host != own);
        let mut got: Vec<Vec<u8>> = others().map(|_| vec![0; shares[own].len()]).collect();
        let sends: Vec<_> =
            others().map(|host| Outgoing::new(self.ranks[host], cx.fingerprint, &data[shares[host].clone()])).collect();
        let mut recvs: Vec<_> =
            others().zip(&mut got).map(|(host, data)| Incoming::new(self.ranks[host], cx.fingerprint, data)).collect();
        inner.exchange(cx, &sends, &mut recvs)?;
        drop(recvs);
        let mut inputs: Vec<Option<&[u8]>> = got.iter().map(|data| Some(&data[..])).collect();
        inputs.insert(own, None);
        combine(cx.dtype(), op, &inputs, &mut data[shares[own].clone()]);
        let result = data[shares[own].clone()].to_vec();
        let sends: Vec<_> = others().map(|host| Outgoing::new(self.ranks[host], cx.fingerprint, &result)).collect();
        let mut rest = data;
        let mut recvs = Vec::with_capacity(hosts - 1);
        for (host, share) in shares.iter().enumerate() {
            let (part, behind) = rest.split_at_mut(share.len());
            rest = behind;
            if host != own {
                recvs.push(Incoming::new(self.ranks[host], cx.fingerprint, part));
            }
        }
        inner.exchange(cx, &sends, &mut recvs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rank_of_each_host_speaks_for_it() {
        let hosts = [vec![0, 2], vec![1, 3, 4]];
        let leaders = Leaders::new(&hosts, 4).unwrap();
        assert_eq!((leaders.ranks.clone(), leaders.host(), leaders.hosts()), (vec![0, 1], 1, 2));
        assert!(Leaders::new(&hosts, 5).is_err());
    }
}
