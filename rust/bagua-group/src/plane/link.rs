//! A control link: one task that reads messages from a stream, and one that writes them.

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::super::wire::{Encoding, FRAME_LIMIT, read_frame};
use super::message::Message;

/// The most frames that one call writes.
const AT_ONCE: usize = 16;

/// Bytes that one call reads at most.
const READ: usize = 2048;

/// How a link ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    /// Why, for the error of the user.
    pub(super) reason: String,
    /// True if the stream ended or broke. False if the peer sent bytes that cannot be understood.
    pub(super) is_broken: bool,
}

/// An open link. Dropping it sends what is queued and then closes the stream.
#[derive(Debug)]
pub(super) struct Link {
    /// Distinguishes this link from an earlier one to the same rank.
    pub(super) id: u64,
    /// Frames for the writing task.
    outbox: mpsc::UnboundedSender<Vec<u8>>,
    /// See [`Network::is_watched`](super::rank::Network::is_watched).
    pub(super) is_watched: bool,
    /// The reading task, if it must not outlive the link.
    reader: Option<AbortHandle>,
    /// When the last message came, moved forward by the time in which this process did not run.
    pub(super) heard: Instant,
    /// Set if the peer has left and closes the link. True if it may live on in another view.
    pub(super) farewell: Option<bool>,
    /// True if the peer has said that it takes its notices from this link.
    pub(super) is_attached: bool,
    /// The ranks below the peer that are apart, once the peer and all ranks below it are connected.
    pub(super) ready: Option<Vec<usize>>,
    /// The coordinator and the number of the last notice that the peer and all ranks below it have.
    pub(super) seen: (usize, u64),
}

impl Link {
    /// Opens a link on a stream. `read` gets every message, and then the end.
    pub(super) fn open<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        id: u64,
        is_watched: bool,
        stream: S,
        tasks: &mut JoinSet<()>,
        read: impl Fn(Result<Message, End>) + Send + 'static,
    ) -> Link {
        let (outbox, frames) = mpsc::unbounded_channel();
        let (reader, writer) = tokio::io::split(stream);
        let reader = tasks.spawn(read_all(reader, is_watched, read));
        tasks.spawn(write_all(writer, frames));
        let (reader, heard) = (Some(reader), Instant::now());
        Link { id, is_watched, outbox, reader, heard, farewell: None, is_attached: false, ready: None, seen: (0, 0) }
    }

    /// Queues a message. Does nothing if the link has ended; the reading task reports that.
    pub(super) fn send(&self, message: &Message) {
        self.send_frame(message.frame());
    }

    /// Sends like [`Link::send`], for a message that is already a frame.
    pub(super) fn send_frame(&self, frame: Vec<u8>) {
        let _ = self.outbox.send(frame);
    }

    /// Sends what is queued, closes this rank's direction, and lets the reading task run until the peer closes its
    /// direction, so that no byte from the peer makes the kernel drop what this rank has sent last.
    pub(super) fn finish(mut self) {
        self.reader = None;
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.abort();
        }
    }
}

async fn read_all<S: AsyncRead>(reader: ReadHalf<S>, is_on_host: bool, read: impl Fn(Result<Message, End>)) {
    let mut reader = BufReader::with_capacity(READ, reader);
    let end = loop {
        match read_frame(&mut reader, FRAME_LIMIT).await.map(|body| Message::parse(&body)) {
            Ok(Ok(message)) => read(Ok(message)),
            Ok(Err(malformed)) => {
                break End { reason: format!("it sent a malformed message: {malformed}"), is_broken: false };
            }
            Err(error) => {
                break match error.kind() {
                    std::io::ErrorKind::InvalidData => {
                        End { reason: format!("it sent a malformed frame: {error}"), is_broken: false }
                    }
                    kind => {
                        let is_end = kind == std::io::ErrorKind::UnexpectedEof;
                        let detail = if is_end { "end of stream".to_owned() } else { error.to_string() };
                        let place = if is_on_host { " on this host" } else { "" };
                        let reason = format!("its process died{place} or its connection broke ({detail})");
                        End { reason, is_broken: true }
                    }
                };
            }
        }
    };
    read(Err(end));
}

async fn write_all<S: AsyncWrite>(mut writer: WriteHalf<S>, mut frames: mpsc::UnboundedReceiver<Vec<u8>>) {
    let mut queued = Vec::new();
    while frames.recv_many(&mut queued, AT_ONCE).await > 0 {
        if writer.write_all(&queued.concat()).await.is_err() {
            return;
        }
        queued.clear();
    }
    let _ = writer.shutdown().await;
}
