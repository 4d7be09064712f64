//! Where a messenger gets its streams from.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::error::Result;
use crate::group::MessageStreams;
use crate::memory::Region;
use crate::transport::Transport;

/// A message to send, or to receive.
#[derive(Debug)]
pub struct Message {
    /// Group rank of the other end; `None` in a receive: any source.
    pub peer: Option<usize>,
    /// Only messages and receives of one tag match.
    pub tag: u32,
    /// The bytes, in host memory.
    pub data: Region,
}

/// Called with a stream, or with why there is none.
pub(super) type Dialled = Box<dyn FnOnce(Result<Opened>) + Send>;

/// A stream, and a second descriptor of it to wait on.
pub(super) type Opened = (Box<dyn Transport>, OwnedFd);

/// Opens streams to other ranks.
pub(super) trait Streams: Send + Sync {
    /// Starts to connect to a group rank.
    fn dial(&self, peer: usize, done: Dialled);

    /// The streams that peers have opened since the last call.
    fn arrived(&self) -> Vec<(usize, Result<Opened>)>;

    /// Calls `wake` whenever a peer has opened a stream.
    fn watch(&self, wake: Arc<dyn Fn() + Send + Sync>);

    /// Ends the calls of `watch`.
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
