//! A lane: one strictly ordered sequence of operations of a group, with streams and shared memory of its own.
//!
//! The one place where arguments are checked, operations are numbered, deadlines are set, calls are counted, and a failure
//! becomes the group's first cause.

mod check;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_mesh;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use self::check::{Layout, Uses};
use crate::collective::{Collective, Incoming, Io, OpContext, Outgoing};
use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::stats::Stats;
use crate::types::{DType, Fingerprint, Kind, ReduceOp, Shape};
use crate::wait::Deadline;

/// What a caller may say about one operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Deadline; `None`: the group's default.
    pub timeout: Option<Duration>,
    /// Bucket or other label for error texts.
    pub label: &'a str,
    /// Shape of the tensor where it matters (all_reduce, reduce, broadcast); `None`: flat.
    pub shape: Option<Shape>,
}

/// Where each rank's part of a buffer lies, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Chunks<'a> {
    /// Elements per rank.
    pub counts: &'a [usize],
    /// First element per rank.
    pub displs: &'a [usize],
}

/// See the module.
///
/// Invariant: an argument error leaves everything as it was, counters included; any other error has poisoned the health, so
/// that no operation follows on streams that may be in the middle of a message.
pub struct Lane {
    /// Does the work.
    collective: Box<dyn Collective>,
    /// The group's state of failure: asked before each operation, told of each failure.
    health: Arc<GroupHealth>,
    /// The group's counters.
    stats: Arc<Stats>,
    /// Incarnation of the group, for fingerprints.
    epoch: u32,
    /// Which lane of the group this is, for fingerprints.
    channel: u32,
    /// Deadline of operations that bring none.
    timeout: Duration,
    /// Collective operations begun; equal on all ranks that are in step.
    seq: u64,
    /// Grouped exchanges begun on this rank, for error texts only: ranks may differ.
    exchanges: u64,
    /// Messages begun towards each rank by send and exchange; equal to `received` there.
    sent: Vec<u64>,
    /// Messages begun from each rank by recv and exchange.
    received: Vec<u64>,
}

impl Lane {
    /// A lane over a collective. `channel` tells the lanes of one group apart.
    pub fn new(
        collective: Box<dyn Collective>,
        health: Arc<GroupHealth>,
        stats: Arc<Stats>,
        epoch: u32,
        channel: u32,
        timeout: Duration,
    ) -> Lane {
        let none = vec![0; collective.size()];
        Lane {
            collective,
            health,
            stats,
            epoch,
            channel,
            timeout,
            seq: 0,
            exchanges: 0,
            sent: none.clone(),
            received: none,
        }
    }

    /// Rank in the group.
    pub fn rank(&self) -> usize {
        self.collective.rank()
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.collective.size()
    }

    /// Name of the collective.
    pub fn collective(&self) -> &'static str {
        self.collective.name()
    }

    /// Name of the transport towards each rank.
    pub fn transports(&self) -> Vec<&'static str> {
        self.collective.transports()
    }

    /// See [`Collective::all_reduce`].
    pub fn all_reduce(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, op: ReduceOp) -> Result<()> {
        self.health.check()?;
        op.check(dtype)?;
        let count = check::count(dtype, &io, Layout::Equal, Uses::Both, self.size())?;
        let shape = options.shape.unwrap_or(Shape::flat(count));
        let says = Fingerprint { op: Some(op), shape, ..self.next(Kind::AllReduce, dtype, count) };
        let payload = payload(&io);
        self.perform(options, says, payload, |collective, cx| collective.all_reduce(cx, io, op))
    }

    /// See [`Collective::reduce`].
    pub fn reduce(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, op: ReduceOp, root: usize) -> Result<()> {
        self.health.check()?;
        op.check(dtype)?;
        let code = check::root(root, self.size())?;
        let uses = if root == self.rank() { Uses::Both } else { Uses::SourceOnly };
        let count = check::count(dtype, &io, Layout::Equal, uses, self.size())?;
        let shape = options.shape.unwrap_or(Shape::flat(count));
        let says = Fingerprint { op: Some(op), root: Some(code), shape, ..self.next(Kind::Reduce, dtype, count) };
        let payload = payload(&io);
        self.perform(options, says, payload, |collective, cx| collective.reduce(cx, io, op, root))
    }

    /// See [`Collective::broadcast`].
    pub fn broadcast(&mut self, options: &Options<'_>, dtype: DType, data: &mut [u8], root: usize) -> Result<()> {
        self.health.check()?;
        let code = check::root(root, self.size())?;
        let count = check::elements(dtype, data.len(), "the buffer")?;
        let shape = options.shape.unwrap_or(Shape::flat(count));
        let says = Fingerprint { root: Some(code), shape, ..self.next(Kind::Broadcast, dtype, count) };
        let payload = data.len();
        self.perform(options, says, payload, |collective, cx| collective.broadcast(cx, data, root))
    }

    /// See [`Collective::all_gather`].
    pub fn all_gather(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>) -> Result<()> {
        self.health.check()?;
        let count = check::count(dtype, &io, Layout::Grows, Uses::Both, self.size())?;
        let says = self.next(Kind::AllGather, dtype, count);
        let payload = payload(&io);
        self.perform(options, says, payload, |collective, cx| collective.all_gather(cx, io))
    }

    /// See [`Collective::gather`].
    pub fn gather(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, root: usize) -> Result<()> {
        self.health.check()?;
        let code = check::root(root, self.size())?;
        let uses = if root == self.rank() { Uses::Both } else { Uses::SourceOnly };
        let count = check::count(dtype, &io, Layout::Grows, uses, self.size())?;
        let says = Fingerprint { root: Some(code), ..self.next(Kind::Gather, dtype, count) };
        let payload = payload(&io);
        self.perform(options, says, payload, |collective, cx| collective.gather(cx, io, root))
    }

    /// See [`Collective::scatter`].
    pub fn scatter(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, root: usize) -> Result<()> {
        self.health.check()?;
        let code = check::root(root, self.size())?;
        let uses = if root == self.rank() { Uses::Both } else { Uses::DestinationOnly };
        let count = check::count(dtype, &io, Layout::Shrinks, uses, self.size())?;
        let says = Fingerprint { root: Some(code), ..self.next(Kind::Scatter, dtype, count) };
        let payload = payload(&io);
        self.perform(options, says, payload, |collective, cx| collective.scatter(cx, io, root))
    }

    /// See [`Collective::reduce_scatter`].
    pub fn reduce_scatter(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, op: ReduceOp) -> Result<()> {
        self.health.check()?;
        op.check(dtype)?;
        let count = check::count(dtype, &io, Layout::Shrinks, Uses::Both, self.size())?;
        let says = Fingerprint { op: Some(op), ..self.next(Kind::ReduceScatter, dtype, count) };
        let payload = payload(&io);
        self.perform(options, says, payload, |collective, cx| collective.reduce_scatter(cx, io, op))
    }

    /// See [`Collective::all_to_all`].
    pub fn all_to_all(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>) -> Result<()> {
        self.health.check()?;
        let count = check::count(dtype, &io, Layout::EqualChunks, Uses::Both, self.size())?;
        let says = self.next(Kind::AllToAll, dtype, count);
        let payload = payload(&io);
        self.perform(options, says, payload, |collective, cx| collective.all_to_all(cx, io))
    }

    /// Rank r gets `send_counts[r]` elements from `send_displs[r]` of every rank's source, at `recv_displs` of its destination.
    /// Counts and displacements are in elements; parts of the destination must not overlap. `InPlace` reads a copy of the
    /// buffer.
    pub fn all_to_all_v(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        io: Io<'_>,
        send: Chunks<'_>,
        recv: Chunks<'_>,
    ) -> Result<()> {
        self.health.check()?;
        let payload = payload(&io);
        let copy;
        let (src, dst) = match io {
            Io::InPlace(data) => {
                copy = data.to_vec();
                (copy.as_slice(), data)
            }
            Io::Split { src, dst } => (src, dst),
        };
        let (rank, size, element) = (self.rank(), self.size(), dtype.size());
        check::parts(&send, check::elements(dtype, src.len(), "the source")?, size, "send")?;
        check::parts(&recv, check::elements(dtype, dst.len(), "the destination")?, size, "receive")?;
        if send.counts[rank] != recv.counts[rank] {
            return Err(Error::InvalidArgument(format!(
                "rank {rank} sends {} elements to itself and receives {}",
                send.counts[rank], recv.counts[rank]
            )));
        }
        let part = |to: usize| &src[send.displs[to] * element..(send.displs[to] + send.counts[to]) * element];
        let mut targets = check::split(dst, &recv, element)?;
        targets[rank].copy_from_slice(part(rank));

        // Empty parts are sent too: a rank that does something else is found out whatever the counts are.
        let says = self.next(Kind::AllToAllV, dtype, 0);
        let peers = || (0..size).filter(|peer| *peer != rank);
        let sends: Vec<_> = peers().map(|peer| Outgoing { peer, fingerprint: says, data: part(peer) }).collect();
        let mut recvs: Vec<_> = targets
            .into_iter()
            .enumerate()
            .filter(|(peer, _)| *peer != rank)
            .map(|(peer, data)| Incoming { peer, fingerprint: says, data })
            .collect();
        self.perform(options, says, payload, |collective, cx| collective.exchange(cx, &sends, &mut recvs))
    }

    /// One message to a rank of the group (itself is refused).
    pub fn send(&mut self, options: &Options<'_>, dtype: DType, data: &[u8], to: usize) -> Result<()> {
        self.health.check()?;
        check::peer(to, self.rank(), self.size())?;
        let count = check::elements(dtype, data.len(), "the buffer")?;
        let seq = next(&mut self.sent[to]);
        let says = self.message(dtype, count, seq);
        let sends = [Outgoing { peer: to, fingerprint: says, data }];
        self.perform(options, says, data.len(), |collective, cx| collective.exchange(cx, &sends, &mut []))
    }

    /// One message from a rank of the group (itself is refused).
    pub fn recv(&mut self, options: &Options<'_>, dtype: DType, data: &mut [u8], from: usize) -> Result<()> {
        self.health.check()?;
        check::peer(from, self.rank(), self.size())?;
        let count = check::elements(dtype, data.len(), "the buffer")?;
        let seq = next(&mut self.received[from]);
        let says = self.message(dtype, count, seq);
        let payload = data.len();
        let mut recvs = [Incoming { peer: from, fingerprint: says, data }];
        self.perform(options, says, payload, |collective, cx| collective.exchange(cx, &[], &mut recvs))
    }

    /// Many messages at once: (peer, bytes). Each is a message like any other: the peer may take it by recv or by exchange.
    pub fn exchange(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        sends: &[(usize, &[u8])],
        recvs: &mut [(usize, &mut [u8])],
    ) -> Result<()> {
        self.health.check()?;
        let (rank, size) = (self.rank(), self.size());
        let parts = sends.iter().map(|(peer, data)| (*peer, data.len()));
        let mut payload = 0;
        for (peer, len) in parts.chain(recvs.iter().map(|(peer, data)| (*peer, data.len()))) {
            check::peer(peer, rank, size)?;
            check::elements(dtype, len, "a message")?;
            payload += len;
        }
        let mut outgoing = Vec::with_capacity(sends.len());
        for (peer, data) in sends {
            let seq = next(&mut self.sent[*peer]);
            let fingerprint = self.message(dtype, data.len() / dtype.size(), seq);
            outgoing.push(Outgoing { peer: *peer, fingerprint, data });
        }
        let mut incoming = Vec::with_capacity(recvs.len());
        for (peer, data) in recvs {
            let seq = next(&mut self.received[*peer]);
            let fingerprint = self.message(dtype, data.len() / dtype.size(), seq);
            incoming.push(Incoming { peer: *peer, fingerprint, data });
        }
        let says = Fingerprint {
            kind: Kind::Exchange,
            seq: next(&mut self.exchanges),
            ..self.message(dtype, payload / dtype.size(), 0)
        };
        self.perform(options, says, payload, |collective, cx| collective.exchange(cx, &outgoing, &mut incoming))
    }

    /// Returns when every rank has called it.
    pub fn barrier(&mut self, options: &Options<'_>) -> Result<()> {
        self.health.check()?;
        // A barrier has no data; headers have to name some type.
        let says = self.next(Kind::Barrier, DType::U8, 0);
        self.perform(options, says, 0, |collective, cx| collective.barrier(cx))
    }

    /// The fingerprint of the next collective operation, without op, root and shape. Takes its number, so it comes after
    /// all checks.
    fn next(&mut self, kind: Kind, dtype: DType, count: usize) -> Fingerprint {
        let seq = next(&mut self.seq);
        Fingerprint { kind, ..self.message(dtype, count, seq) }
    }

    /// The fingerprint of a point-to-point message.
    fn message(&self, dtype: DType, count: usize, seq: u64) -> Fingerprint {
        Fingerprint {
            epoch: self.epoch,
            channel: self.channel,
            kind: Kind::Send,
            seq,
            dtype,
            op: None,
            root: None,
            count: count as u64,
            shape: Shape::default(),
        }
    }

    /// Counts the call, sets its deadline, and turns its failure into the group's first cause.
    fn perform(
        &mut self,
        options: &Options<'_>,
        fingerprint: Fingerprint,
        payload: usize,
        body: impl FnOnce(&mut dyn Collective, &OpContext<'_>) -> Result<()>,
    ) -> Result<()> {
        let stats = self.stats.of(fingerprint.kind);
        stats.calls.fetch_add(1, Relaxed);
        stats.payload_bytes.fetch_add(payload as u64, Relaxed);
        let deadline = Deadline::after(options.timeout.unwrap_or(self.timeout));
        let cx = OpContext { fingerprint, deadline, health: &self.health, stats, label: options.label };
        body(self.collective.as_mut(), &cx).map_err(|error| {
            if error.is_argument() {
                return error;
            }
            // What this rank was doing is told even when the first cause came from elsewhere and knows nothing of it.
            let progress = match &error {
                Error::PeerLost { progress: Some(progress), .. } | Error::Timeout { progress: Some(progress), .. } => {
                    progress.as_ref().clone()
                }
                _ => cx.progress(0, payload as u64),
            };
            self.health.fail(error).during(progress)
        })
    }
}

/// The counter, which then counts one more.
fn next(counter: &mut u64) -> u64 {
    let now = *counter;
    *counter += 1;
    now
}

/// Bytes of the user's tensor: of the larger one where there are two.
fn payload(io: &Io<'_>) -> usize {
    match io {
        Io::InPlace(data) => data.len(),
        Io::Split { src, dst } => src.len().max(dst.len()),
    }
}
