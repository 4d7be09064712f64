//! Opening the streams of a mesh on demand. The first stream between two ranks opens in the first run that has messages
//! between them. The others open in the first run that divides a message between streams.
//!
//! In a large world, a rank therefore has one stream to most of its peers. A message that is not divided needs only one
//! stream: with two to each peer, 256 ranks on 64 hosts had 43 descriptors instead of 37 (`benchmarks/joining.py`).
//! Several streams only to the neighbours in the ring would need even fewer descriptors, but halving and all_to_all
//! would then have one stream for long messages.

use crate::error::Result;
use crate::transport::{OpContext, Transport};

/// Streams between two ranks that open together. Both ranks ask for a batch in the run with the same message. One rank
/// may have further messages in that run, and the other rank in later runs, so the first stream moves bytes before the
/// others are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// The first stream, for messages of any length.
    First,
    /// All other streams, if there are any.
    Others,
}

/// Progress of the requested streams to a peer.
pub struct Opened {
    /// Streams that have been opened since the last call.
    pub streams: Vec<Box<dyn Transport>>,
    /// True if no more streams will follow.
    pub all: bool,
}

/// Opens the streams of a mesh. Peers are indices of the mesh. No call blocks. While some streams open, a run moves the
/// bytes of peers whose streams are open, so that each peer gets this rank's headers early and a mismatch is found.
pub trait OpenStreams: Send {
    /// Begins to open these batches, each for a peer. The deadline of the operation applies to them. Called once for
    /// each batch, and for the first batch before the others.
    ///
    /// # Errors
    /// If a stream cannot be opened, for example for lack of file descriptors.
    fn begin(&mut self, cx: &OpContext<'_>, batches: &[(usize, Batch)]) -> Result<()>;

    /// Returns the new streams to a peer for which `begin` was called, each once. Not called again once all are open.
    ///
    /// # Errors
    /// If the peer refused a stream.
    fn opened(&mut self, peer: usize) -> Result<Opened>;

    /// Returns the name of the transport, as [`Transport::name`] does.
    fn name(&self) -> &'static str;
}
