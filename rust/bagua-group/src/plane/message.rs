//! The messages on a control link, and their encoding.

use serde::{Deserialize, Serialize};

use super::super::views::ViewMessage;
use super::super::wire::{AtMost, Encoding, Malformed, RANKS_LIMIT, Ranks, cause, rank, text};
use crate::error::Error;

/// The most ranks in a list of a message.
const RANKS: usize = super::super::views::RANKS_LIMIT;

/// The most notices in one message. Their texts may be long, so [`Message::notices`] also limits the bytes.
pub(in super::super) const NOTICES: usize = 8;

/// A message on a control link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) enum Message {
    /// The sender is alive.
    Heartbeat,
    /// To the parent: the sender takes its notices from this link from now on.
    Attach {
        /// [`Log::digest`](super::log::Log::digest) of the sender.
        digest: u64,
    },
    /// To the child: the child's log differs from the parent's, so the child must send the parent all its notices.
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
    /// A message for some of the ranks, which every link on the way passes on.
    Routed(Routed),
    /// A rank asks the coordinator whether another rank lives.
    Ask(Question),
    /// The sender has left, and closes the link.
    Farewell {
        /// True if the sender does not use the group, but may live on in another view.
        moved: bool,
    },
}

/// A question whether a rank lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Question {
    /// The rank in question.
    #[serde(with = "rank")]
    pub(in super::super) about: usize,
    /// The rank that asks.
    #[serde(with = "rank")]
    pub(in super::super) from: usize,
    /// Number of the question on the rank that asks.
    pub(in super::super) ticket: u64,
}

/// A message for all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) enum Notice {
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
        /// The error that failed the group.
        #[serde(with = "cause")]
        cause: Error,
    },
    /// The deadline of joining is near, and a rank has no connection to others, or asks which ranks others miss.
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
pub(in super::super) struct Routed {
    /// The sender.
    #[serde(with = "rank")]
    pub(in super::super) from: usize,
    /// The receivers.
    #[serde(with = "Ranks::<RANKS>")]
    pub(in super::super) to: Vec<usize>,
    /// The content.
    pub(in super::super) body: Body,
    /// True if the message comes from the coordinator, on its way down.
    pub(in super::super) is_down: bool,
}

/// Content of a [`Routed`] message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) enum Body {
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
    pub(in super::super) fn notices(of: usize, number: u64, notices: &[Notice]) -> Vec<Message> {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::super::wire::{FRAME_LIMIT, TEXT_LIMIT};
    use super::*;
    use crate::error::{Progress, Source};

    fn rank() -> impl Strategy<Value = usize> {
        any::<u32>().prop_map(|rank| rank as usize)
    }

    fn progress() -> impl Strategy<Value = Option<Box<Progress>>> {
        let some = (any::<String>(), any::<String>(), any::<u64>(), any::<u64>());
        proptest::option::of(
            some.prop_map(|(what, label, done, total)| Box::new(Progress { what, label, done, total })),
        )
    }

    fn error() -> impl Strategy<Value = Error> {
        let lost = (rank(), any::<String>(), any::<String>(), rank(), progress()).prop_map(
            |(rank, host, reason, noticed_by, progress)| {
                let source = Source::default();
                Error::PeerLost { rank, host, reason, noticed_by, progress, source }
            },
        );
        let late = (any::<u64>(), proptest::collection::vec(rank(), 0..50), rank(), progress()).prop_map(
            |(nanos, missing, noticed_by, progress)| {
                let after = Duration::from_nanos(nanos);
                Error::Timeout { after, missing, noticed_by, progress }
            },
        );
        let raised = (rank(), any::<String>(), any::<String>(), any::<String>())
            .prop_map(|(rank, host, kind, message)| Error::PeerRaised { rank, host, kind, message });
        let plain = (0..6usize, any::<String>()).prop_map(|(which, text)| {
            let make = [
                Error::Mismatch,
                Error::Aborted,
                Error::InvalidArgument,
                Error::UnsupportedType,
                Error::NotImplemented,
                Error::other as fn(String) -> Error,
            ];
            make[which](text)
        });
        prop_oneof![lost, late, raised, plain]
    }

    proptest! {
        #[test]
        fn an_encoded_error_is_parsed_unchanged(cause in error(), group: u64) {
            let message = Message::Tell(Notice::Failed { group, members: vec![0; RANKS_LIMIT], cause });
            let frame = message.frame();
            prop_assert!(frame.len() <= FRAME_LIMIT + 4);
            prop_assert_eq!(Message::parse(&frame[4..]), Ok(message));
        }
    }

    #[test]
    fn the_longest_error_fits_into_a_frame() {
        let long = "é".repeat(FRAME_LIMIT);
        let progress = Some(Box::new(Progress { what: long.clone(), label: long.clone(), done: 1, total: 2 }));
        let source = Source::default();
        let cause = Error::PeerLost { rank: 1, host: long.clone(), reason: long, noticed_by: 2, progress, source };
        let frame =
            Message::Tell(Notice::Failed { group: 1, members: vec![u32::MAX as usize; RANKS_LIMIT], cause }).frame();
        assert!(frame.len() <= FRAME_LIMIT + 4);
        assert!(Message::parse(&frame[4..]).is_ok());
        let missing = (0..100_000).collect();
        let progress = Some(Box::new(Progress { what: "é".repeat(FRAME_LIMIT), ..Progress::default() }));
        let cause = Error::Timeout { after: Duration::MAX, missing, noticed_by: 0, progress };
        assert!(
            Message::Tell(Notice::Failed { group: 1, members: vec![u32::MAX as usize; RANKS_LIMIT], cause })
                .frame()
                .len()
                <= FRAME_LIMIT + 4
        );
    }

    /// The body of a message that says so many elements or bytes follow, with these bytes behind it.
    fn claiming(head: &[u8], count: u64, rest: &[u8]) -> Vec<u8> {
        [head, &postcard::to_allocvec(&count).unwrap(), rest].concat()
    }

    #[test]
    fn an_error_beyond_its_limits_is_malformed() {
        // Of group 1: `Aborted` with a text, and `Timeout` after no time with these ranks, noticed by rank 0, during
        // nothing.
        let text = |len: usize| Message::parse(&claiming(&[5, 2, 1, 0, 4], len as u64, &vec![b'a'; len]));
        let ranks = |count: usize| Message::parse(&claiming(&[5, 2, 1, 0, 1, 0, 0], count as u64, &vec![0; count + 2]));
        for parse in [&text as &dyn Fn(usize) -> _, &ranks] {
            assert!(matches!(parse(RANKS_LIMIT), Ok(Message::Tell(Notice::Failed { group: 1, .. }))));
        }
        assert!(text(TEXT_LIMIT).is_ok());
        let beyond = Err(Malformed("it has an unknown kind, or a value beyond its limit"));
        assert_eq!(text(TEXT_LIMIT + 1), beyond);
        assert_eq!(ranks(RANKS_LIMIT + 1), beyond);
        // A device's error is another kind where it arrives.
        let device = Message::Tell(Notice::Failed { group: 1, members: vec![], cause: Error::Device(Box::default()) });
        let Ok(Message::Tell(Notice::Failed { cause, .. })) = Message::parse(&device.encode()) else {
            panic!("it is encoded")
        };
        assert!(matches!(cause, Error::System { .. }));
        for kind in [9, 10, 11] {
            assert_eq!(Message::parse(&[5, 2, 1, 0, kind, 0, 0, 0, 0]), beyond, "no kind {kind} is ever written");
        }
    }

    #[test]
    fn a_rank_beyond_32_bits_is_malformed_and_none_is_written() {
        let lost = |rank: &[u8]| Message::parse(&[&[5, 2, 1, 0, 0][..], rank, &[0, 0, 0, 0]].concat());
        assert!(lost(&[0xff, 0xff, 0xff, 0xff, 0x0f]).is_ok());
        assert_eq!(lost(&[0xff, 0xff, 0xff, 0xff, 0x1f]), Err(Malformed("a number is out of range")));
        let message =
            Error::PeerRaised { rank: usize::MAX, host: String::new(), kind: String::new(), message: String::new() };
        let parsed =
            Message::parse(&Message::Tell(Notice::Failed { group: 1, members: vec![], cause: message }).encode());
        assert!(
            matches!(parsed, Ok(Message::Tell(Notice::Failed { cause: Error::PeerRaised { rank, .. }, .. })) if rank == u32::MAX as usize)
        );
    }

    #[test]
    fn a_number_of_more_bytes_than_it_needs_is_the_same_message() {
        let message = Message::Ready { apart: vec![1] };
        assert_eq!(message.encode(), [3, 1, 1]);
        for longer in [&[3, 1, 0x81, 0][..], &[3, 1, 0x81, 0x80, 0], &[0x83, 0, 1, 1]] {
            assert_eq!(Message::parse(longer), Ok(message.clone()));
        }
        assert_eq!(
            Message::parse(&[&[3, 1][..], &[0x80; 10], &[1]].concat()),
            Err(Malformed("a number is out of range"))
        );
    }
}
