//! Where a mesh gets its streams from: they open in the first run that has messages between two ranks.

use crate::error::Result;
use crate::transport::{OpContext, Transport};

/// Opens the streams of a mesh. Peers are indices of the mesh. No call blocks: a run moves the bytes of the peers whose streams are open
/// while others open, so that each peer gets this rank's headers as early as it can, and a mismatch is found.
pub trait OpenStreams: Send {
    /// Begins to open the streams to all of these peers, in an operation whose deadline is theirs. Called for a peer that has none: before
    /// its first streams are opened, and after they were closed.
    ///
    /// # Errors
    /// Whatever prevents it: file descriptors are short.
    fn begin(&mut self, cx: &OpContext<'_>, peers: &[usize]) -> Result<()>;

    /// All streams to a peer for which `begin` was called, once for each call, and in an order on which both ends agree; `None` while one is missing.
    ///
    /// # Errors
    /// The peer refused a stream.
    fn opened(&mut self, peer: usize) -> Result<Option<Vec<Box<dyn Transport>>>>;

    /// Name of the transport, as [`Transport::name`].
    fn name(&self) -> &'static str;
}
