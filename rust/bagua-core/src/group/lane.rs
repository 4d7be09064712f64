//! A lane: one strictly ordered sequence of operations of a group, with streams and shared memory of its own.
//!
//! The one place where arguments are checked, operations are numbered, deadlines are set, calls are counted, and a failure
//! becomes the group's first cause.

use std::sync::Arc;
use std::time::Duration;

use crate::collective::{Collective, Io};
use crate::error::Result;
use crate::stats::Stats;
use crate::types::{DType, ReduceOp, Shape};
use crate::watch::Watch;

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

/// See the module.
pub struct Lane {
    collective: Box<dyn Collective>,
}

#[expect(unused_variables, reason = "signatures first")]
impl Lane {
    /// A lane over a collective. `channel` tells the lanes of one group apart.
    pub fn new(collective: Box<dyn Collective>, watch: Arc<Watch>, stats: Arc<Stats>, epoch: u32, channel: u32, timeout: Duration) -> Lane {
        Lane { collective }
    }
    /// Rank in the group.
    pub fn rank(&self) -> usize { self.collective.rank() }
    /// Ranks in the group.
    pub fn size(&self) -> usize { self.collective.size() }
    /// Name of the collective.
    pub fn collective(&self) -> &'static str { self.collective.name() }
    /// Name of the transport towards each rank.
    pub fn transports(&self) -> Vec<&'static str> { self.collective.transports() }
    /// See [`Collective::all_reduce`].
    pub fn all_reduce(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, op: ReduceOp) -> Result<()> { unimplemented!() }
    /// See [`Collective::reduce`].
    pub fn reduce(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, op: ReduceOp, root: usize) -> Result<()> { unimplemented!() }
    /// See [`Collective::broadcast`].
    pub fn broadcast(&mut self, options: &Options<'_>, dtype: DType, data: &mut [u8], root: usize) -> Result<()> { unimplemented!() }
    /// See [`Collective::all_gather`].
    pub fn all_gather(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>) -> Result<()> { unimplemented!() }
    /// See [`Collective::gather`].
    pub fn gather(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, root: usize) -> Result<()> { unimplemented!() }
    /// See [`Collective::scatter`].
    pub fn scatter(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, root: usize) -> Result<()> { unimplemented!() }
    /// See [`Collective::reduce_scatter`].
    pub fn reduce_scatter(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, op: ReduceOp) -> Result<()> { unimplemented!() }
    /// See [`Collective::all_to_all`].
    pub fn all_to_all(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>) -> Result<()> { unimplemented!() }
    /// Rank r gets `send_counts[r]` elements from `send_displs[r]` of every rank's source, at `recv_displs` of its destination.
    /// Counts and displacements are in elements. `InPlace` reads a copy of the buffer.
    pub fn all_to_all_v(&mut self, options: &Options<'_>, dtype: DType, io: Io<'_>, send: Chunks<'_>, recv: Chunks<'_>) -> Result<()> { unimplemented!() }
    /// One message to a rank of the group (itself is refused).
    pub fn send(&mut self, options: &Options<'_>, dtype: DType, data: &[u8], to: usize) -> Result<()> { unimplemented!() }
    /// One message from a rank of the group (itself is refused).
    pub fn recv(&mut self, options: &Options<'_>, dtype: DType, data: &mut [u8], from: usize) -> Result<()> { unimplemented!() }
    /// Many messages at once: (peer, bytes).
    pub fn exchange(&mut self, options: &Options<'_>, dtype: DType, sends: &[(usize, &[u8])], recvs: &mut [(usize, &mut [u8])]) -> Result<()> { unimplemented!() }
    /// Returns when every rank has called it.
    pub fn barrier(&mut self, options: &Options<'_>) -> Result<()> { unimplemented!() }
}

/// Where each rank's part of a buffer lies, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Chunks<'a> {
    /// Elements per rank.
    pub counts: &'a [usize],
    /// First element per rank.
    pub displs: &'a [usize],
}
