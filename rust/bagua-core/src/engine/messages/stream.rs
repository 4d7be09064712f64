//! One stream of a messenger: frames that wait to be sent, and the frame that is being received.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::frame::{Frame, FrameKind, LEN};
use crate::error::{Error, Result};
use crate::health::LEFT;
use crate::stats::OpStats;
use crate::transport::{Broken, Transport};
use crate::types::DType;

/// The most bytes of a message in one frame: so long may a stream keep another message waiting.
const CHUNK: usize = 1 << 20;

/// The most bytes received from one stream before the others have their turn.
const QUANTUM: usize = 4 << 20;

/// A frame that waits to be sent, with a part of its message.
#[derive(Clone, Copy, Debug)]
struct Out {
    frame: Frame,
    /// Where the part begins in the message.
    at: usize,
    /// Bytes of header and part that were sent.
    moved: usize,
}

/// Where the body of a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Into the memory of this receive, behind what it has.
    Receive(u64),
    /// Into memory of the messenger's own, until a receive takes the message.
    Kept(u64),
}

/// What the frames of a stream are about.
pub(super) trait PostedMessages {
    /// The bytes of a message of this rank.
    fn outgoing(&self, id: u64) -> &[u8];

    /// All bytes of a message were handed to the stream.
    fn sent(&mut self, id: u64);

    /// A header came from `peer`: where its body goes, for one that has a body, and what to answer.
    ///
    /// # Errors
    /// What is wrong with it.
    fn begin(&mut self, peer: usize, frame: Frame, replies: &mut Replies<'_>) -> Result<Option<Target>>;

    /// The next `len` bytes of a body go here.
    fn place(&mut self, target: Target, len: usize) -> &mut [u8];

    /// So many bytes of a body have come.
    fn came(&mut self, target: Target, count: usize);
}

/// Of frames without bodies.
struct NoBook;

impl PostedMessages for NoBook {
    fn outgoing(&self, _: u64) -> &[u8] {
        &[]
    }

    fn sent(&mut self, _: u64) {}

    fn begin(&mut self, _: usize, _: Frame, _: &mut Replies<'_>) -> Result<Option<Target>> {
        Ok(None)
    }

    fn place(&mut self, _: Target, _: usize) -> &mut [u8] {
        &mut []
    }

    fn came(&mut self, _: Target, _: usize) {}
}

/// Sends frames on the stream that a frame came on.
pub(super) struct Replies<'a>(&'a mut VecDeque<Out>);

impl Replies<'_> {
    /// A frame without a body.
    pub(super) fn frame(&mut self, frame: Frame) {
        self.0.push_back(Out { frame, at: 0, moved: 0 });
    }

    /// The bytes of an offered message.
    pub(super) fn data(&mut self, offered: Frame) {
        self.0.push_back(chunk(offered, 0));
    }
}

/// The frame with the bytes of a message from `at`.
fn chunk(message: Frame, at: usize) -> Out {
    let left = message.total - at as u64;
    Out { frame: Frame { kind: FrameKind::Data, body: left.min(CHUNK as u64), ..message }, at, moved: 0 }
}

/// See the module.
pub(super) struct Link {
    stream: Box<dyn Transport>,
    /// To wait for the stream without a lock on it.
    pub(super) descriptor: Arc<OwnedFd>,
    out: VecDeque<Out>,
    head: [u8; LEN],
    head_len: usize,
    /// Where the body goes that is being received, and how much of it is missing.
    into: Option<(Target, usize)>,
    /// Why no more bytes move.
    pub(super) broken: Option<Broken>,
    /// The peer said that it sends nothing more.
    pub(super) ended: bool,
}

impl Link {
    pub(super) fn new(stream: Box<dyn Transport>, descriptor: OwnedFd) -> Link {
        Link {
            stream,
            descriptor: Arc::new(descriptor),
            out: VecDeque::new(),
            head: [0; LEN],
            head_len: 0,
            into: None,
            broken: None,
            ended: false,
        }
    }

    /// Adds a frame; the body of an eager one is its whole message.
    pub(super) fn push(&mut self, frame: Frame) {
        self.out.push_back(Out { frame, at: 0, moved: 0 });
    }

    /// True while there are frames to send.
    pub(super) fn wants_to_send(&self) -> bool {
        !self.out.is_empty() && self.broken.is_none()
    }

    /// No more bytes move, because the peer sends none.
    pub(super) fn close(&mut self) {
        self.broken = Some(Broken::new(LEFT));
        // The descriptors are closed with the link; the peer must see the end now.
        let _ = rustix::net::shutdown(&self.descriptor, rustix::net::Shutdown::Both);
    }

    /// This rank sends no more messages: what has been begun is ended, the rest is dropped.
    pub(super) fn finish(&mut self) {
        // The memory of messages that are not sent is no longer there.
        let cut = self.out.front().is_some_and(|out| out.moved > 0 && out.frame.body > 0);
        self.out.retain(|out| out.frame.body == 0);
        if cut {
            self.close();
        }
        let kind = FrameKind::End;
        self.push(Frame { kind, dtype: DType::U8, tag: 0, id: 0, total: 0, body: 0 });
    }

    /// Sends what is left after [`Link::finish`], and drops what comes.
    pub(super) fn linger(&mut self) {
        let mut nothing = NoBook;
        self.send(&mut nothing, &OpStats::default());
        let mut dropped = [0; 4096];
        while self.broken.is_none() {
            match self.stream.recv(&mut dropped) {
                Ok(0) => break,
                Ok(_) => {}
                Err(broken) => self.broken = Some(broken),
            }
        }
    }

    /// Sends what there is room for; true when bytes moved.
    pub(super) fn send(&mut self, posted: &mut dyn PostedMessages, stats: &OpStats) -> bool {
        let mut any = false;
        while self.broken.is_none() {
            let Some(out) = self.out.front_mut() else { break };
            let (head, body) = (out.frame.encode(), out.frame.body as usize);
            let head_left = &head[out.moved.min(LEN)..];
            let sent_of_body = out.moved.saturating_sub(LEN);
            let body_left =
                if body == 0 { &[][..] } else { &posted.outgoing(out.frame.id)[out.at + sent_of_body..out.at + body] };
            let wanted = head_left.len() + body_left.len();
            match self.stream.send(head_left, body_left) {
                Ok(0) => break,
                Ok(count) => {
                    any = true;
                    out.moved += count;
                    stats.wire_bytes_sent.fetch_add(count as u64, Relaxed);
                    if count < wanted {
                        continue;
                    }
                }
                Err(broken) => {
                    self.broken = Some(broken);
                    break;
                }
            }
            let Out { frame, at, .. } = *out;
            self.out.pop_front();
            let end = at as u64 + frame.body;
            match frame.kind {
                FrameKind::Eager => posted.sent(frame.id),
                FrameKind::Data if end == frame.total => posted.sent(frame.id),
                // Behind the other messages.
                FrameKind::Data => self.out.push_back(chunk(frame, end as usize)),
                FrameKind::Offer | FrameKind::Ready | FrameKind::End => {}
            }
        }
        any
    }

    /// Receives what is there; true when bytes moved.
    ///
    /// # Errors
    /// What is wrong with a frame of the peer.
    pub(super) fn recv(&mut self, peer: usize, posted: &mut dyn PostedMessages, stats: &OpStats) -> Result<bool> {
        let mut moved = 0;
        while moved < QUANTUM && self.broken.is_none() {
            let into = match self.into {
                Some((target, left)) => posted.place(target, left),
                None => &mut self.head[self.head_len..],
            };
            let count = match self.stream.recv(into) {
                Ok(0) => break,
                Ok(count) => count,
                Err(broken) => {
                    self.broken = Some(broken);
                    break;
                }
            };
            moved += count;
            stats.wire_bytes_received.fetch_add(count as u64, Relaxed);
            if let Some((target, left)) = &mut self.into {
                let target = *target;
                *left -= count;
                if *left == 0 {
                    self.into = None;
                }
                posted.came(target, count);
                continue;
            }
            self.head_len += count;
            if self.head_len == LEN {
                self.head_len = 0;
                let frame = Frame::decode(&self.head)
                    .ok_or_else(|| Error::Mismatch("bytes that are no message of this protocol".to_owned()))?;
                self.ended |= frame.kind == FrameKind::End;
                let target = posted.begin(peer, frame, &mut Replies(&mut self.out))?;
                self.into = target.map(|target| (target, frame.body as usize)).filter(|(_, left)| *left > 0);
            }
        }
        Ok(moved > 0)
    }
}
