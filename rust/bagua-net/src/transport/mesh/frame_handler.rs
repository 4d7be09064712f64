//! The interface between the streams to a peer and the owner of the messages.

use crate::transport::frame::Header;

/// The messages of one rank, in both directions. [`super::Endpoint`] moves their bytes. Every call is short, and
/// borrows memory only while it lasts. Each direction numbers its messages, and headers carry the number.
pub trait Frames {
    /// Returns the next frame to send to the peer, or `None` while none is ready. With several streams, the frame's
    /// bytes may be sent in several smaller frames.
    fn next(&mut self, peer: usize) -> Option<Header>;

    /// Returns the number of frames to the peer that are known to follow.
    fn following(&self, peer: usize) -> usize;

    /// Returns all bytes of a message to the peer. Not called for a frame without bytes.
    fn outgoing(&self, peer: usize, message: u64) -> &[u8];

    /// Notes that a frame was handed to the stream.
    fn sent(&mut self, peer: usize, frame: &Header);

    /// True while frames from the peer are expected. Otherwise nothing is received.
    fn expects(&self, peer: usize) -> bool;

    /// Takes a header from the peer. Returns false while there is no room for the bytes that follow it.
    ///
    /// # Errors
    /// A text that says what is wrong with the header.
    fn begin(&mut self, peer: usize, frame: &Header) -> Result<bool, String>;

    /// Returns the memory for all bytes of a message that has begun.
    fn incoming(&mut self, peer: usize, message: u64) -> &mut [u8];

    /// Notes that `count` more bytes of a message have arrived. Called once with 0 for a frame without bytes.
    fn came(&mut self, peer: usize, message: u64, count: usize);
}
