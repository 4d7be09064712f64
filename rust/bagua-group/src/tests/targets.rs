//! The kinds of input: the parser of each, and the properties that must hold for any bytes.
//!
//! A parsed value must be equal after it is encoded and parsed again. The bytes may differ, because the encoding allows
//! a number to have more bytes than it needs.

use std::fmt::Debug;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use serde::{Deserialize, Serialize};

use super::super::address::{Address, LIMIT};
use super::super::config::Config;
use super::super::handshake::{HELLO_LEN, Hello};
use super::super::joining::JoinMessage;
use super::super::plane::Message;
use super::super::rendezvous::Entry;
use super::super::store::{Reply, Request};
use super::super::views::replay;
use super::super::wire::{Encoding, FRAME_LIMIT, Malformed, read_frame};
use super::allocations::peak;
use super::examples::hex;
use crate::transport::frame::{self, Header};

/// Number of bytes that a parser may hold for each byte of its input. The worst case is a list with as many addresses
/// as its length says: each may be 1 byte of input and 24 bytes of memory, and the bytes of the addresses are held too.
const PER_BYTE: usize = 24 + 1;

/// Bytes that a parser may hold for a short input: the first elements of a list, the progress in an error, the text of an
/// error.
pub(super) const AT_LEAST: usize = 2 << 10;

/// Every message that one process encodes for another, as one type. The first byte of an input is the kind.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Any {
    Control(Message),
    Join(JoinMessage),
    Request(Request),
    Reply(Reply),
    Address(Address),
    Entry(Entry),
}

impl Encoding for Any {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            Any::Control(message) => message.check(),
            Any::Join(message) => message.check(),
            Any::Request(message) => message.check(),
            Any::Reply(message) => message.check(),
            Any::Address(message) => message.check(),
            Any::Entry(message) => message.check(),
        }
    }
}

/// A kind of input.
pub(super) struct Target {
    /// First word of the kind's lines in the corpus.
    pub(super) name: &'static str,
    /// Parses bytes, and panics if a property does not hold. Returns true if the bytes parse.
    pub(super) check: fn(&[u8]) -> bool,
    /// True if an input with a byte less or more is malformed.
    pub(super) has_end: bool,
}

/// All kinds of input.
pub(super) const TARGETS: [Target; 6] = [
    Target { name: "message", check: check_message, has_end: true },
    Target { name: "frame", check: check_frame, has_end: false },
    Target {
        name: "hello",
        check: |bytes| {
            let bytes: [u8; HELLO_LEN] = fitted(bytes);
            let nonce = bytes.last_chunk().expect("a hello ends with a nonce");
            check_fixed(&bytes, Hello::parse, |it| it.encode(nonce))
        },
        has_end: false,
    },
    Target { name: "addresses", check: check_addresses, has_end: true },
    Target { name: "agreement", check: |bytes| replay(bytes) > 0, has_end: false },
    Target {
        name: "header",
        check: |bytes| {
            let fits = |it: &Header| it.fits().then(|| assert!(it.offset + it.length <= it.body));
            check_fixed::<{ frame::LEN }, _, _>(&fitted(bytes), Header::decode, |it| (fits(it), it.encode()).1)
        },
        has_end: false,
    },
];

/// Returns the first N bytes, filled up with zeros.
fn fitted<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let (mut fitted, len) = ([0; N], N.min(bytes.len()));
    fitted[..len].copy_from_slice(&bytes[..len]);
    fitted
}

#[track_caller]
fn assert_bounded(held: usize, limit: usize) {
    assert!(held <= limit, "the parser held {held} bytes, more than {limit}");
}

/// Checks a message of any type.
fn check_message(bytes: &[u8]) -> bool {
    check_encoding::<Any>(bytes)
}

fn check_encoding<T: Encoding + PartialEq + Debug>(bytes: &[u8]) -> bool {
    let (parsed, held) = peak(|| T::parse(bytes));
    assert_bounded(held, PER_BYTE * bytes.len() + AT_LEAST);
    let Ok(value) = parsed else { return false };
    let again = value.encode();
    assert!(T::parse(&again) == Ok(value), "it is encoded again as {}", hex(&again));
    true
}

/// Checks a parser of a fixed length, which needs no memory at all.
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

/// Parses the bytes as a control connection does: a frame, and its message.
fn check_frame(bytes: &[u8]) -> bool {
    let mut stream = bytes;
    let (read, held) = peak(|| now(read_frame(&mut stream, FRAME_LIMIT)));
    let said = bytes.first_chunk().map_or(0, |len| u32::from_le_bytes(*len) as usize);
    assert_bounded(held, if said > FRAME_LIMIT { 0 } else { said } + AT_LEAST);
    let Ok(body) = read else { return false };
    assert_eq!(bytes[4..][..said], body);
    check_encoding::<Message>(&body)
}

/// Checks the addresses of a world of two as rank 0 gets them: its own, and these bytes.
fn check_addresses(bytes: &[u8]) -> bool {
    let own = super::examples::address(0).encode();
    let (config, blobs) = (Config::new(0, 2), [own, bytes.to_vec()]);
    let (parsed, held) = peak(|| Address::parse_all(&blobs, &config, &blobs[0]));
    assert_bounded(held, PER_BYTE * bytes.len().min(LIMIT) + 2 * AT_LEAST);
    let Ok(all) = parsed else { return false };
    assert_eq!((all.len(), all[1].rank, all[1].world_size), (2, 1, 2));
    // Error texts use `describe`.
    assert!(!all[1].describe().is_empty());
    true
}

/// Returns the output of a future that never waits.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("all bytes are there"),
    }
}
