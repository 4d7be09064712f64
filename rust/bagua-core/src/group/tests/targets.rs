//! The kinds of input: which parser takes one, and what must hold whatever it gets.
//!
//! What parses is encoded again to the same bytes. The exception are socket addresses, which travel as texts: a text such as
//! "127.0.0.1:09" is taken, but never written; there the value must survive the wire.

use std::fmt::Debug;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::super::address::{Address, LIMIT};
use super::super::book::{Reply, Request};
use super::super::config::Config;
use super::super::door::DoorMessage;
use super::super::handshake::{HELLO_LEN, Hello};
use super::super::rendezvous::{Answer, Content, MissingRanks, Registration, failed_frame, fetch_frame, list_frame};
use super::super::views::{ViewMessage, replay};
use super::super::wire::{FRAME_LIMIT, Message, Writer, read_frame};
use super::allocations::peak;
use super::examples::hex;
use crate::transport::frame::{self, Header};
use crate::transport::{CHUNK_LEN, Chunk};

/// Bytes that a parser may hold for each byte of its input: the worst is a list of empty addresses, each of which takes 4 bytes of the
/// input and 24 of memory, in a list that doubles while its former half is still held.
const PER_BYTE: usize = 24;

/// Bytes that a parser may hold for a short input: the first elements of a list, the progress in an error, the text of an error.
const AT_LEAST: usize = 2 << 10;

/// How bytes that parsed compare with the encoding of what they said.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wire {
    /// Nothing else encodes to it, and it to nothing else.
    Exact,
    /// Several texts name one socket address.
    SeveralTexts,
}

/// A kind of input.
pub(super) struct Target {
    /// First word of its lines in the corpus.
    pub(super) name: &'static str,
    /// Parses bytes, and panics unless what must hold does. True when they parse.
    pub(super) check: fn(&[u8]) -> bool,
}

/// All kinds.
pub(super) const TARGETS: [Target; 14] = [
    Target { name: "frame", check: check_frame },
    Target { name: "control", check: |bytes| check_parser(bytes, Wire::Exact, Message::parse, |it| body(it.frame())) },
    Target {
        name: "hello",
        check: |bytes| {
            let bytes: [u8; HELLO_LEN] = fitted(bytes);
            let nonce = bytes.last_chunk().expect("a hello ends with a nonce");
            check_fixed(&bytes, Hello::parse, |it| it.encode(nonce))
        },
    },
    Target { name: "address", check: |bytes| check_parser(bytes, Wire::SeveralTexts, Address::parse, Address::encode) },
    Target { name: "addresses", check: check_addresses },
    Target { name: "view", check: |bytes| check_parser(bytes, Wire::Exact, ViewMessage::parse, ViewMessage::encode) },
    Target { name: "agreement", check: |bytes| replay(bytes) > 0 },
    Target {
        name: "door",
        check: |bytes| check_parser(bytes, Wire::SeveralTexts, DoorMessage::parse, DoorMessage::encode),
    },
    Target {
        name: "header",
        check: |bytes| {
            let header = check_fixed::<{ frame::LEN }, _, _>(&fitted(bytes), Header::decode, Header::encode);
            // With several streams a header is followed by its position, which any bytes are.
            let bytes: [u8; CHUNK_LEN] = fitted(bytes);
            let fits = |it: &Chunk| it.fits().then(|| assert!(it.offset + it.length <= it.header.body));
            let chunk = check_fixed(&bytes, |bytes| Chunk::decode(bytes), |it| (fits(it), it.encode()).1);
            assert_eq!(header, chunk);
            header
        },
    },
    Target {
        name: "registration",
        check: |bytes| check_parser(bytes, Wire::SeveralTexts, Registration::parse, |it| body(it.frame())),
    },
    Target {
        name: "answer",
        check: |bytes| {
            let encode = |it: &Answer| match it {
                Answer::Complete(all) => body(list_frame(all)),
                Answer::Missing(missing) => body(MissingRanks::frame(missing)),
                Answer::Fetch(from) => body(fetch_frame(*from)),
                Answer::Failed(error) => body(failed_frame(error)),
            };
            check_parser(bytes, Wire::SeveralTexts, Answer::parse, encode)
        },
    },
    Target { name: "request", check: |bytes| check_parser(bytes, Wire::Exact, Request::parse, Request::encode) },
    Target { name: "reply", check: |bytes| check_parser(bytes, Wire::Exact, Reply::parse, Reply::encode) },
    Target { name: "file", check: |bytes| check_parser(bytes, Wire::Exact, Content::parse, Content::encode) },
];

/// A frame without its length.
pub(super) fn body(mut frame: Vec<u8>) -> Vec<u8> {
    frame.drain(..4);
    frame
}

/// A body with its length before it.
pub(super) fn framed(body: &[u8]) -> Vec<u8> {
    let mut out = Writer::default();
    out.bytes(body);
    out.0
}

/// The first N bytes, and zeros where they are fewer.
fn fitted<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let (mut fitted, len) = ([0; N], N.min(bytes.len()));
    fitted[..len].copy_from_slice(&bytes[..len]);
    fitted
}

#[track_caller]
fn assert_bounded(held: usize, limit: usize) {
    assert!(held <= limit, "the parser held {held} bytes, more than {limit}");
}

/// For parsers of any length.
fn check_parser<T: PartialEq + Debug, E: PartialEq + Debug>(
    bytes: &[u8],
    wire: Wire,
    parse: impl Fn(&[u8]) -> Result<T, E>,
    encode: impl Fn(&T) -> Vec<u8>,
) -> bool {
    let (parsed, held) = peak(|| parse(bytes));
    assert_bounded(held, PER_BYTE * bytes.len() + AT_LEAST);
    let Ok(value) = parsed else { return false };
    let again = encode(&value);
    if wire == Wire::Exact {
        assert!(again == bytes, "it is encoded again as {}", hex(&again));
    } else if again != bytes {
        assert!(parse(&again) == Ok(value), "it does not survive the wire as {}", hex(&again));
    }
    true
}

/// For parsers of a fixed length, which need no memory at all.
fn check_fixed<const N: usize, T: PartialEq + Debug, E>(
    bytes: &[u8; N],
    parse: impl Fn(&[u8; N]) -> Result<T, E>,
    encode: impl Fn(&T) -> [u8; N],
) -> bool {
    let (parsed, held) = peak(|| parse(bytes));
    assert_bounded(held, 0);
    let Ok(value) = parsed else { return false };
    assert_eq!(encode(&value), *bytes, "{value:?}");
    true
}

/// What a control connection does with its bytes: a frame, its message, and the message about views in it.
fn check_frame(bytes: &[u8]) -> bool {
    let mut stream = bytes;
    let (read, held) = peak(|| now(read_frame(&mut stream, FRAME_LIMIT)));
    let said = bytes.first_chunk().map_or(0, |len| u32::from_le_bytes(*len) as usize);
    assert_bounded(held, if said > FRAME_LIMIT { 0 } else { said } + AT_LEAST);
    let Ok(body) = read else { return false };
    assert_eq!(bytes[4..][..said], body);
    let parsed = check_parser(&body, Wire::Exact, Message::parse, |it| self::body(it.frame()));
    if let Ok(Message::View(message)) = Message::parse(&body) {
        return check_parser(&message, Wire::Exact, ViewMessage::parse, ViewMessage::encode);
    }
    parsed
}

/// The addresses of a world of two, as rank 0 gets them: its own, and these bytes.
fn check_addresses(bytes: &[u8]) -> bool {
    let own = super::examples::address(0).encode();
    let (config, blobs) = (Config::new(0, 2), [own, bytes.to_vec()]);
    let (parsed, held) = peak(|| Address::parse_all(&blobs, &config, &blobs[0]));
    assert_bounded(held, PER_BYTE * bytes.len().min(LIMIT) + 2 * AT_LEAST);
    let Ok(all) = parsed else { return false };
    assert_eq!((all.len(), all[1].rank, all[1].world_size), (2, 1, 2));
    // For error texts.
    assert!(!all[1].describe().is_empty());
    true
}

/// What a future returns that never waits.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("all bytes are there"),
    }
}
