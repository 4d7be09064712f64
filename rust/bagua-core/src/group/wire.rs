//! The encoding of the control plane: bounded frames, messages, and errors that are sent to other ranks.
//!
//! Received bytes are untrusted: every length is checked against the bytes that are there, and no input causes a panic.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};

use crate::error::{Error, Progress, Source};

/// Version of the protocol of addresses, handshakes, control messages and rendezvous.
pub(super) const VERSION: u16 = 6;

/// The longest frame on a control connection.
pub(super) const FRAME_LIMIT: usize = 64 * 1024;

/// The longest text in any message; four of them, as an error has, fit into a frame.
const TEXT_LIMIT: usize = 12 * 1024;

/// The most ranks that an encoded error names.
pub(super) const RANKS_LIMIT: usize = 2048;

/// The highest number of a view that is taken from another rank. Each failure adds one: no job gets there, and a number near the end of
/// its type would overflow.
pub(super) const VIEWS_LIMIT: u64 = 1 << 48;

/// Version of the encoding of errors.
const ERROR_VERSION: u8 = 1;

/// Bytes that cannot be parsed. The text says why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// Appends values, little-endian.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u8(&mut self, value: u8) -> &mut Writer {
        self.0.push(value);
        self
    }

    pub(super) fn u16(&mut self, value: u16) -> &mut Writer {
        self.fixed(&value.to_le_bytes())
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Writer {
        self.fixed(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Writer {
        self.fixed(&value.to_le_bytes())
    }

    /// A rank or a count of ranks.
    pub(super) fn rank(&mut self, value: usize) -> &mut Writer {
        self.u32(u32::try_from(value).unwrap_or(u32::MAX))
    }

    /// Bytes without their length, which the reader knows.
    pub(super) fn fixed(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Bytes after their length.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.rank(bytes.len()).fixed(bytes)
    }

    /// A text after its length, truncated to [`TEXT_LIMIT`].
    pub(super) fn text(&mut self, text: &str) -> &mut Writer {
        self.bytes(&text.as_bytes()[..text.floor_char_boundary_at(TEXT_LIMIT)])
    }
}

/// `str::floor_char_boundary` for the oldest supported compiler, which lacks it.
trait FloorBoundary {
    fn floor_char_boundary_at(&self, limit: usize) -> usize;
}

impl FloorBoundary for str {
    fn floor_char_boundary_at(&self, limit: usize) -> usize {
        (0..=limit.min(self.len())).rev().find(|at| self.is_char_boundary(*at)).unwrap_or(0)
    }
}

/// Parses values in the order in which they were appended.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(Malformed("it is truncated"))?;
        self.0 = rest;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed("it is truncated"))?;
        self.0 = rest;
        Ok(*head)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn rank(&mut self) -> Result<usize, Malformed> {
        usize::try_from(self.u32()?).map_err(|_| Malformed("a number is out of range"))
    }

    /// The number of a view.
    pub(super) fn view(&mut self) -> Result<u64, Malformed> {
        let view = self.u64()?;
        if view > VIEWS_LIMIT { Err(Malformed("the number of a view is out of range")) } else { Ok(view) }
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.rank()?;
        self.take(len)
    }

    /// A text of at most [`TEXT_LIMIT`] bytes: no longer one is written, and one would lose its end when it is sent on.
    pub(super) fn text(&mut self) -> Result<String, Malformed> {
        let bytes = self.bytes()?;
        if bytes.len() > TEXT_LIMIT {
            return Err(Malformed("a text is too long"));
        }
        String::from_utf8(bytes.to_vec()).map_err(|_| Malformed("a text is not UTF-8"))
    }

    pub(super) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("it has trailing bytes")) }
    }
}

/// A message on a control connection.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    /// The sender is alive.
    Heartbeat,
    /// Whether the sender is connected by Unix sockets to all ranks with its host id. The first message of a connection.
    HostConnected(bool),
    /// A group failed.
    Fail {
        /// Id of the group.
        group: u64,
        /// The first cause.
        cause: Error,
    },
    /// The sender leaves a group. After leaving the world group it sends nothing more.
    Leave {
        /// Id of the group.
        group: u64,
    },
    /// The sender has received `Leave` of the world group.
    LeaveAck,
    /// A message of the agreement on the next view, encoded by `views`.
    View(Vec<u8>),
}

impl Message {
    /// The message as a frame, which starts with its length.
    pub(super) fn frame(&self) -> Vec<u8> {
        let mut out = Writer(vec![0; 4]);
        match self {
            Message::Heartbeat => _ = out.u8(1),
            Message::HostConnected(all) => _ = out.u8(2).u8(u8::from(*all)),
            Message::Fail { group, cause } => put_error(out.u8(3).u64(*group), cause),
            Message::Leave { group } => _ = out.u8(4).u64(*group),
            Message::LeaveAck => _ = out.u8(5),
            Message::View(body) => _ = out.u8(6).bytes(body),
        }
        let len = u32::try_from(out.0.len() - 4).unwrap_or(u32::MAX);
        out.0[..4].copy_from_slice(&len.to_le_bytes());
        out.0
    }

    /// The message that the body of a frame encodes.
    pub(super) fn parse(body: &[u8]) -> Result<Message, Malformed> {
        let mut from = Reader(body);
        let message = match from.u8()? {
            1 => Message::Heartbeat,
            2 => Message::HostConnected(match from.u8()? {
                0 => false,
                1 => true,
                _ => return Err(Malformed("a flag is neither 0 nor 1")),
            }),
            3 => Message::Fail { group: from.u64()?, cause: get_error(&mut from)? },
            4 => Message::Leave { group: from.u64()? },
            5 => Message::LeaveAck,
            6 => Message::View(from.bytes()?.to_vec()),
            _ => return Err(Malformed("a message of an unknown kind")),
        };
        from.end()?;
        Ok(message)
    }
}

/// Reads the body of one frame. A length above `limit` is `InvalidData`, before any memory is allocated for the body.
pub(super) async fn read_frame(from: &mut (impl AsyncRead + Unpin), limit: usize) -> std::io::Result<Vec<u8>> {
    let len = usize::try_from(from.read_u32_le().await?).unwrap_or(usize::MAX);
    if len > limit {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "a frame longer than the limit"));
    }
    let mut body = vec![0; len];
    from.read_exact(&mut body).await?;
    Ok(body)
}

fn put_progress(out: &mut Writer, progress: &Option<Box<Progress>>) {
    match progress.as_deref() {
        None => _ = out.u8(0),
        Some(Progress { what, label, done, total }) => _ = out.u8(1).text(what).text(label).u64(*done).u64(*total),
    }
}

fn get_progress(from: &mut Reader<'_>) -> Result<Option<Box<Progress>>, Malformed> {
    Ok(match from.u8()? {
        0 => None,
        1 => {
            Some(Box::new(Progress { what: from.text()?, label: from.text()?, done: from.u64()?, total: from.u64()? }))
        }
        _ => return Err(Malformed("a flag is neither 0 nor 1")),
    })
}

pub(super) fn put_error(out: &mut Writer, error: &Error) {
    out.u8(ERROR_VERSION);
    match error {
        Error::PeerLost { rank, host, reason, noticed_by, progress, source: _ } => {
            put_progress(out.u8(1).rank(*rank).text(host).text(reason).rank(*noticed_by), progress);
        }
        Error::Timeout { after, missing, noticed_by, progress } => {
            let missing = &missing[..missing.len().min(RANKS_LIMIT)];
            out.u8(2).u64(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)).rank(missing.len());
            missing.iter().for_each(|rank| _ = out.rank(*rank));
            put_progress(out.rank(*noticed_by), progress);
        }
        Error::PeerRaised { rank, host, kind, message } => {
            out.u8(3).rank(*rank).text(host).text(kind).text(message);
        }
        Error::Mismatch(text) => _ = out.u8(4).text(text),
        Error::Aborted(text) => _ = out.u8(5).text(text),
        Error::InvalidArgument(text) => _ = out.u8(6).text(text),
        Error::UnsupportedType(text) => _ = out.u8(7).text(text),
        Error::NotImplemented(text) => _ = out.u8(8).text(text),
        // Both go to peers as `PeerRaised`: see `Plane::register`.
        Error::Device(_) | Error::Unavailable(_) => _ = out.u8(9).text(&error.to_string()),
        Error::System { message, source: _ } => _ = out.u8(9).text(message),
    }
}

pub(super) fn get_error(from: &mut Reader<'_>) -> Result<Error, Malformed> {
    if from.u8()? != ERROR_VERSION {
        return Err(Malformed("an error of an unknown version"));
    }
    Ok(match from.u8()? {
        1 => Error::PeerLost {
            rank: from.rank()?,
            host: from.text()?,
            reason: from.text()?,
            noticed_by: from.rank()?,
            progress: get_progress(from)?,
            source: Source::default(),
        },
        2 => {
            let after = Duration::from_nanos(from.u64()?);
            let count = from.rank()?;
            if count > RANKS_LIMIT {
                return Err(Malformed("too many ranks"));
            }
            let missing = (0..count).map(|_| from.rank()).collect::<Result<_, _>>()?;
            Error::Timeout { after, missing, noticed_by: from.rank()?, progress: get_progress(from)? }
        }
        3 => Error::PeerRaised { rank: from.rank()?, host: from.text()?, kind: from.text()?, message: from.text()? },
        4 => Error::Mismatch(from.text()?),
        5 => Error::Aborted(from.text()?),
        6 => Error::InvalidArgument(from.text()?),
        7 => Error::UnsupportedType(from.text()?),
        8 => Error::NotImplemented(from.text()?),
        9 => Error::other(from.text()?),
        _ => return Err(Malformed("an error of an unknown kind")),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
            let message = Message::Fail { group, cause };
            let frame = message.frame();
            prop_assert!(frame.len() <= FRAME_LIMIT + 4);
            prop_assert_eq!(Message::parse(&frame[4..]), Ok(message));
        }

        #[test]
        fn random_bytes_are_a_message_or_malformed_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = Message::parse(&bytes) {
                prop_assert_eq!(Message::parse(&message.frame()[4..]), Ok(message));
            }
        }

        #[test]
        fn a_truncated_message_is_malformed(cause in error()) {
            let frame = Message::Fail { group: 1, cause }.frame();
            for end in 4..frame.len() {
                prop_assert!(Message::parse(&frame[4..end]).is_err());
            }
        }
    }

    #[test]
    fn the_longest_error_fits_into_a_frame() {
        let long = "é".repeat(FRAME_LIMIT);
        let progress = Some(Box::new(Progress { what: long.clone(), label: long.clone(), done: 1, total: 2 }));
        let source = Source::default();
        let cause = Error::PeerLost { rank: 1, host: long.clone(), reason: long, noticed_by: 2, progress, source };
        let frame = Message::Fail { group: 1, cause }.frame();
        assert!(frame.len() <= FRAME_LIMIT + 4);
        assert!(Message::parse(&frame[4..]).is_ok());
        let missing = (0..100_000).collect();
        let progress = Some(Box::new(Progress { what: "é".repeat(FRAME_LIMIT), ..Progress::default() }));
        let cause = Error::Timeout { after: Duration::MAX, missing, noticed_by: 0, progress };
        assert!(Message::Fail { group: 1, cause }.frame().len() <= FRAME_LIMIT + 4);
    }

    #[test]
    fn a_text_that_no_rank_writes_is_malformed() {
        let parse = |len: usize| Message::parse(&[&[3; 1][..], &[0; 8], &[1, 5], &framed(len)].concat());
        fn framed(len: usize) -> Vec<u8> {
            Writer::default().bytes(&vec![b'a'; len]).0.clone()
        }
        assert!(parse(TEXT_LIMIT).is_ok());
        assert_eq!(parse(TEXT_LIMIT + 1), Err(Malformed("a text is too long")));
    }

    #[test]
    fn every_message_is_parsed_unchanged() {
        let flags = [true, false].map(Message::HostConnected);
        let all = [Message::Heartbeat, Message::Leave { group: 7 }, Message::LeaveAck, Message::View(vec![1, 2])];
        let all = all.into_iter().chain(flags);
        for message in all {
            assert_eq!(Message::parse(&message.frame()[4..]), Ok(message));
        }
    }
}
