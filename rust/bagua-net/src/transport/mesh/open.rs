//! Where a mesh gets its streams from: the first between two ranks opens in the first run that has messages between them, the others in the
//! first that has one which is divided between streams.
//!
//! So a rank has one stream to most of its peers in a large world. A message that is not divided goes over one stream anyway: with two
//! to each peer, 256 ranks on 64 hosts had 43 descriptors in place of 37 (`benchmarks/joining.py`). The road not taken: one stream to each
//! peer but the neighbours of the ring is fewer still, and halving and all_to_all would have one for long messages.

use crate::error::Result;
use crate::transport::{OpContext, Transport};

/// Streams between two ranks that open together. Both ends ask for a batch in the run with the same message. One may have further messages
/// in that run, the other in later ones, so that the first stream moves bytes before the others are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// The first stream, for messages of any length.
    First,
    /// All others, which may be none.
    Others,
}

/// What has become of the requested streams to a peer.
pub struct Opened {
    /// Those that have been opened since the last call.
    pub streams: Vec<Box<dyn Transport>>,
    /// No more will follow.
    pub all: bool,
}

/// Opens the streams of a mesh. Peers are indices of the mesh. No call blocks: a run moves the bytes of the peers whose streams are open
/// while others open, so that each peer gets this rank's headers as early as it can, and a mismatch is found.
pub trait OpenStreams: Send {
    /// Begins to open these batches, each of a peer, in an operation whose deadline is theirs. Called once for each batch, the first before
    /// the others.
    ///
    /// # Errors
    /// Whatever prevents it: file descriptors are short.
    fn begin(&mut self, cx: &OpContext<'_>, batches: &[(usize, Batch)]) -> Result<()>;

    /// The streams to a peer for which `begin` was called, each once. Not called again when all have been opened.
    ///
    /// # Errors
    /// The peer refused a stream.
    fn opened(&mut self, peer: usize) -> Result<Opened>;

    /// Name of the transport, as [`Transport::name`].
    fn name(&self) -> &'static str;
}
