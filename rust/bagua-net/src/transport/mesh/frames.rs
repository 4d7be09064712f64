//! What the streams to a peer carry: the frames to send, and what becomes of those that come.

use crate::transport::frame::Header;

/// The messages in both directions. [`super::Endpoint`] moves their bytes: each call is short, and borrows no memory beyond itself. A
/// message is known by the number in its header, in each direction.
pub trait Frames {
    /// The next frame to send to the peer, each once; `None` while none is ready. With several streams its bytes may travel as several
    /// frames.
    fn next(&mut self, peer: usize) -> Option<Header>;

    /// How many frames to the peer follow, as far as that is known.
    fn following(&self, peer: usize) -> usize;

    /// All bytes of a message to the peer. Not called for a frame without bytes.
    fn outgoing(&self, peer: usize, message: u64) -> &[u8];

    /// Called when a frame was handed to the stream.
    fn sent(&mut self, peer: usize, frame: &Header);

    /// True while frames of the peer are expected: otherwise none is received.
    fn expects(&self, peer: usize) -> bool;

    /// A header has come. False while there is no room for the bytes that follow it.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    fn begin(&mut self, peer: usize, frame: &Header) -> Result<bool, String>;

    /// Memory for all bytes of a message that has begun.
    fn incoming(&mut self, peer: usize, message: u64) -> &mut [u8];

    /// Called when so many more bytes of a message have come; once with 0 for a frame without bytes.
    fn came(&mut self, peer: usize, message: u64, count: usize);
}
