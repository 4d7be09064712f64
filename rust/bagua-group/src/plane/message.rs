//! The messages on a control link, and their encoding.

use serde::{Deserialize, Serialize};

use super::super::views::ViewMessage;
use super::super::wire::{AtMost, Encoding, Malformed, RANKS_LIMIT, Ranks, cause, rank, text};
use crate::error::Error;

/// The most ranks in a list of a message.
const RANKS: usize = super::super::views::RANKS_LIMIT;

/// The most notices in one message. Their texts may be long, so [`Message::notices`] also limits the bytes.
const NOTICES: usize = 64;

/// A message on a control link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The sender is alive.
    Heartbeat,
    /// To the parent: the sender takes its notices from this link from now on.
    Attach {
        /// [`Log::digest`](super::log::Log::digest) of the sender.
        digest: u64,
    },
    /// To the child: its log differs from the parent's, so it has to send the parent all its notices.
    Resend,
    /// To the parent: the sender and all ranks below it are connected.
    Ready {
        /// Ranks among them that cannot use the Unix sockets of their host.
        #[serde(with = "Ranks::<RANKS>")]
        apart: Vec<usize>,
    },
    /// To the child: all ranks of the world are connected.
    Complete {
        /// The ranks that cannot use the Unix sockets of their host.
        #[serde(with = "Ranks::<RANKS>")]
        apart: Vec<usize>,
    },
    /// To the parent: something that all ranks must be told.
    Tell(Notice),
    /// To the child: what all ranks are told, in the coordinator's order.
    Notices {
        /// The coordinator.
        #[serde(with = "rank")]
        of: usize,
        /// Number of the last of these notices; 0 for notices that need no confirmation.
        number: u64,
        /// The notices.
        #[serde(with = "AtMost::<NOTICES>")]
        notices: Vec<Notice>,
    },
    /// To the parent: the sender and all ranks below it have these notices.
    Seen {
        /// The coordinator that numbered them.
        #[serde(with = "rank")]
        of: usize,
        /// Number of the last one.
        number: u64,
    },
    /// Something for some ranks.
    Routed(Routed),
    /// A rank asks the coordinator whether another rank lives.
    Ask(Question),
}

/// A question whether a rank lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Question {
    /// The rank in question.
    #[serde(with = "rank")]
    pub(super) about: usize,
    /// The rank that asks.
    #[serde(with = "rank")]
    pub(super) from: usize,
    /// Number of the question on the rank that asks.
    pub(super) ticket: u64,
}

/// A message for all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Notice {
    /// A rank is lost.
    Lost {
        /// The lost rank.
        #[serde(with = "rank")]
        rank: usize,
        /// The rank that noticed.
        #[serde(with = "rank")]
        by: usize,
        /// True if its process is known to have ended.
        ended: bool,
        /// How the loss was noticed.
        #[serde(with = "text")]
        reason: String,
    },
    /// A rank leaves the world group.
    Left {
        /// The rank.
        #[serde(with = "rank")]
        rank: usize,
        /// True if it does not use the group, but may live on in another view.
        moved: bool,
    },
    /// A group failed.
    Failed {
        /// Id of the group.
        group: u64,
        /// The world ranks of its members; empty for the world and for large groups.
        #[serde(with = "Ranks::<RANKS_LIMIT>")]
        members: Vec<usize>,
        /// The first cause.
        #[serde(with = "cause")]
        cause: Error,
    },
    /// The deadline of joining is near, and a rank has no connection to others.
    Unreached {
        /// The rank.
        #[serde(with = "rank")]
        by: usize,
        /// The ranks that it could not connect to.
        #[serde(with = "Ranks::<RANKS>")]
        ranks: Vec<usize>,
    },
    /// `Opened` or `Refused` of the agreement on the next view.
    View {
        /// The sender.
        #[serde(with = "rank")]
        from: usize,
        /// The message.
        message: ViewMessage,
    },
}

/// A message for some ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Routed {
    /// The sender.
    #[serde(with = "rank")]
    pub(super) from: usize,
    /// The receivers.
    #[serde(with = "Ranks::<RANKS>")]
    pub(super) to: Vec<usize>,
    /// The content.
    pub(super) body: Body,
}

/// Content of a [`Routed`] message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Body {
    /// The sender leaves a sub-group.
    LeftGroup {
        /// Id of the group.
        group: u64,
    },
    /// A message of the agreement on the next view.
    View(ViewMessage),
    /// From the coordinator: every rank knows that the receiver leaves.
    Ack,
    /// From the coordinator: asks the receiver to return the question as `Pong`.
    Ping(Question),
    /// To the coordinator: the sender lives, and has sent everything that it knew before.
    Pong(Question),
    /// From the coordinator: the rank in question lives.
    Lives(Question),
}

impl Message {
    /// Divides notices into messages that fit into a frame. The last message has the number, the others have 0.
    pub(super) fn notices(of: usize, number: u64, notices: &[Notice]) -> Vec<Message> {
        const BYTES: usize = super::super::wire::FRAME_LIMIT - 64;
        let mut parts = vec![Vec::new()];
        let mut bytes = 0;
        for notice in notices {
            let len = postcard::experimental::serialized_size(notice).unwrap_or(BYTES);
            let part = parts.last().expect("there is one");
            if !part.is_empty() && (part.len() == NOTICES || bytes + len > BYTES) {
                parts.push(Vec::new());
                bytes = 0;
            }
            bytes += len;
            parts.last_mut().expect("there is one").push(notice.clone());
        }
        let last = parts.len() - 1;
        let number = |at| if at == last { number } else { 0 };
        parts
            .into_iter()
            .enumerate()
            .map(|(at, notices)| Message::Notices { of, number: number(at), notices })
            .collect()
    }
}

impl Encoding for Message {
    fn check(&self) -> Result<(), Malformed> {
        let check = |notice: &Notice| match notice {
            Notice::View { message, .. } => message.check(),
            _ => Ok(()),
        };
        match self {
            Message::Tell(notice) => check(notice),
            Message::Notices { notices, .. } => notices.iter().try_for_each(check),
            Message::Routed(Routed { body: Body::View(message), .. }) => message.check(),
            _ => Ok(()),
        }
    }
}
