//! The source of a messenger's streams.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::error::Result;
use crate::group::MessageStreams;
use crate::memory::Region;
use crate::transport::Transport;

/// A message to send or to receive.
#[derive(Debug)]
pub struct Message {
    /// Group rank of the other end. `None` in a receive from any source.
    pub peer: Option<usize>,
    /// A message matches only receives with the same tag.
    pub tag: u32,
    /// Memory of the bytes.
    pub data: Region,
}

/// Called with the opened stream, or with the error.
pub(super) type Dialled = Box<dyn FnOnce(Result<Opened>) + Send>;

/// A stream, and a second descriptor for waiting on it.
pub(super) type Opened = (Box<dyn Transport>, OwnedFd);

/// Opens streams to other ranks.
pub(super) trait Streams: Send + Sync {
    /// Starts to open a stream to a group rank.
    fn dial(&self, peer: usize, done: Dialled);

    /// Returns the streams that peers have opened since the last call.
    fn arrived(&self) -> Vec<(usize, Result<Opened>)>;

    /// Calls `wake` whenever a peer has opened a stream.
    fn watch(&self, wake: Arc<dyn Fn() + Send + Sync>);

    /// Stops the calls of `watch`.
    fn unwatch(&self);
}

impl Streams for MessageStreams {
    fn dial(&self, peer: usize, done: Dialled) {
        MessageStreams::dial(self, peer, |opened| {
            done(opened.map(|(stream, second)| (Box::new(stream) as Box<dyn Transport>, second)));
        });
    }

    fn arrived(&self) -> Vec<(usize, Result<Opened>)> {
        let opened = MessageStreams::arrived(self).into_iter();
        opened
            .map(|(peer, opened)| {
                (peer, opened.map(|(stream, second)| (Box::new(stream) as Box<dyn Transport>, second)))
            })
            .collect()
    }

    fn watch(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        MessageStreams::watch(self, wake);
    }

    fn unwatch(&self) {
        MessageStreams::unwatch(self);
    }
}
