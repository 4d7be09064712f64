//! The corpus: the bytes that the encoders write for each kind of input. The committed copy has one line of text per
//! entry: kind and hex.

use std::net::SocketAddr;
use std::time::Duration;

use super::super::address::Address;
use super::super::handshake::{Hello, Purpose};
use super::super::joining::{COUNT_LIMIT, JobStatus, JoinMessage, JoinRequest};
use super::super::plane::{Body, Message, NOTICES, Notice, Question, Routed};
use super::super::rendezvous::{Entry, MissingRanks, Said};
use super::super::store::{KEYS_LIMIT, Reply, Request};
use super::super::views::{ENDPOINT, Endpoint, GoneRank, RANKS_LIMIT as SHRINK_LIMIT, ViewMessage};
use super::super::wire::{Encoding, RANKS_LIMIT, VERSION, WORLD_LIMIT, framed};
use super::allocations::peak;
use super::targets::{AT_LEAST, Any, TARGETS, Target};
use crate::error::{Error, Progress, Source};
use crate::transport::frame::Header;
use crate::types::{DType, Fingerprint, Kind, ReduceOp, Shape};

/// The committed corpus. [`AT_VERSION`] stands for this build's version of the protocol.
const CORPUS: &str = include_str!("corpus.txt");

/// Placeholder in the corpus for the two bytes of the version.
const AT_VERSION: &str = "VVVV";

/// Returns the committed corpus: index in [`TARGETS`] and bytes.
pub(super) fn corpus() -> Vec<(usize, Vec<u8>)> {
    let version = hex(&VERSION.to_le_bytes());
    let entry = |line: &str| {
        let (name, hex) = line.split_once(' ').expect("a kind and hex");
        let target = TARGETS.iter().position(|target| target.name == name).expect("a known kind");
        let hex = hex.replace(AT_VERSION, &version);
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
        (target, (0..hex.len()).step_by(2).map(byte).collect())
    };
    CORPUS.lines().map(entry).collect()
}

/// Returns bytes as the corpus has them. The version follows the first bytes of addresses and handshakes.
fn line(bytes: &[u8]) -> String {
    let version = hex(&VERSION.to_le_bytes());
    ["BGad", "BGhello\n"]
        .map(|magic| hex(magic.as_bytes()))
        .iter()
        .fold(hex(bytes), |line, magic| line.replace(&format!("{magic}{version}"), &format!("{magic}{AT_VERSION}")))
}

/// Returns bytes as hex.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the address of a rank in a world of two.
pub(in super::super) fn address(rank: u8) -> Address {
    Address {
        rank: rank.into(),
        world_size: 2,
        pid: 4242,
        pid_namespace: 4_026_531_836,
        tcp: Some(if rank == 0 { v4() } else { v6() }),
        unix: b"bagua-0123".to_vec(),
        host_id: "boot:4:4026531840".into(),
        host_name: "node-é".into(),
        streams: 2,
        algorithm: 0,
        tls: 0,
        nonce: [rank; 16],
    }
}

fn v4() -> SocketAddr {
    SocketAddr::from(([192, 168, 10, 7], 40_123))
}

fn v6() -> SocketAddr {
    "[fe80::1%3]:29500".parse().expect("an address")
}

fn control_messages() -> Vec<Message> {
    let progress = || {
        let (what, label) = ("all_reduce(sum) number 17".to_owned(), "bucket 3".to_owned());
        Some(Box::new(Progress { what, label, done: 1 << 20, total: 1 << 33 }))
    };
    let (host, text) = ("node-1".to_owned(), "connection reset".to_owned());
    let source = Source::default;
    let errors = [
        Error::PeerLost {
            rank: 3,
            host: host.clone(),
            reason: text.clone(),
            noticed_by: 1,
            progress: progress(),
            source: source(),
        },
        Error::PeerLost {
            rank: 0,
            host: String::new(),
            reason: String::new(),
            noticed_by: 0,
            progress: None,
            source: source(),
        },
        Error::Timeout {
            after: Duration::from_millis(1500),
            missing: vec![0, 2, 70_000],
            noticed_by: 1,
            progress: progress(),
        },
        Error::PeerRaised { rank: 2, host, kind: "ValueError".to_owned(), message: "é".to_owned() },
        Error::Mismatch(text.clone()),
        Error::Aborted(text.clone()),
        Error::InvalidArgument(text.clone()),
        Error::UnsupportedType(text.clone()),
        Error::NotImplemented(text.clone()),
        Error::other(text),
    ];
    let fails =
        errors.into_iter().map(|cause| Notice::Failed { group: 0x0102_0304_0506_0708, members: vec![1, 300], cause });
    let reason = "no heartbeat for 5.0 s".to_owned();
    let notices = [
        Notice::Lost { rank: 3, by: 1, ended: false, reason },
        Notice::Left { rank: 300, moved: true },
        Notice::Unreached { by: 0, ranks: vec![2, 300] },
        Notice::View { from: 1, message: ViewMessage::Refused { view: 3, text: "no quorum".to_owned() } },
    ];
    let question = Question { about: 300, from: 2, ticket: 7 };
    let plain = [
        Message::Heartbeat,
        Message::Attach { digest: u64::MAX },
        Message::Resend,
        Message::Ready { apart: vec![1, 200] },
        Message::Complete { apart: Vec::new() },
        Message::Notices { of: 300, number: 5, notices: notices.to_vec() },
        Message::Seen { of: 300, number: 5 },
        Message::Ask(question),
        Message::Farewell { moved: true },
    ];
    let bodies = [Body::LeftGroup { group: 9 }, Body::Ack].into_iter();
    let bodies = bodies.chain([Body::Ping, Body::Pong, Body::Lives].map(|body| body(question)));
    let bodies = bodies.chain(view_messages().into_iter().map(Body::View));
    let routed = bodies.map(|body| Message::Routed(Routed { from: 1, to: vec![0, 2, 300], body, is_down: true }));
    plain.into_iter().chain(notices.into_iter().chain(fails).map(Message::Tell)).chain(routed).collect()
}

fn view_messages() -> Vec<ViewMessage> {
    let gone = [(0, true), (2, false), (7, true)].map(|(rank, ended)| GoneRank { rank, ended }).to_vec();
    vec![
        ViewMessage::Ready { view: 2, any: false, gone, endpoint: Endpoint { port: 29_500, unix: true } },
        ViewMessage::Ready { view: 2, any: true, gone: Vec::new(), endpoint: Endpoint { port: 80, unix: false } },
        ViewMessage::Withdrawn { missing: vec![1, 2] },
        ViewMessage::Propose { view: 2, gone: vec![2, 300], endpoints: endpoints(&[80, 29_500, u16::MAX]) },
        ViewMessage::Refused { view: 3, text: "no quorum".to_owned() },
        ViewMessage::Opened { view: 2, gone: vec![2, 300] },
    ]
}

fn endpoints(ports: &[u16]) -> Vec<Endpoint> {
    ports.iter().map(|port| Endpoint { port: *port, unix: true }).collect()
}

/// Returns sequences of events for an agreement, from runs with and without losses: see `replay`.
fn agreements() -> Vec<Vec<u8>> {
    let from =
        |rank: u8, how: u8, message: ViewMessage| [&[0x40 | how | rank][..], &framed(&message.encode())].concat();
    let ready = |view: u64, ranks: &[usize]| {
        let gone = ranks.iter().map(|rank| GoneRank { rank: *rank, ended: true }).collect();
        ViewMessage::Ready { view, any: false, gone, endpoint: ENDPOINT }
    };
    let opened = |view: u64, gone: &[usize]| ViewMessage::Opened { view, gone: gone.to_vec() };
    let propose = |view: u64, gone: &[usize], count: usize| {
        let endpoints = vec![ENDPOINT; count];
        ViewMessage::Propose { view, gone: gone.to_vec(), endpoints }
    };
    let whole = [
        from(0, 0, ready(2, &[])),
        from(2, 0, ready(2, &[])),
        from(3, 0, ready(2, &[])),
        from(0, 8, propose(2, &[], 4)),
        from(0, 0, opened(2, &[])),
        vec![0x30],
    ];
    let without_zero = [
        vec![0x00],
        from(2, 0, ready(3, &[0])),
        from(3, 0, ready(3, &[0])),
        from(2, 0, ready(4, &[0])),
        from(3, 8, ready(4, &[0])),
        from(3, 0, ready(4, &[0])),
        vec![0x13],
        from(2, 0, opened(5, &[0, 3])),
        vec![0x20],
    ];
    let ends = [
        from(2, 0, ViewMessage::Withdrawn { missing: vec![3] }),
        from(3, 0, ViewMessage::Refused { view: 2, text: "no".to_owned() }),
        from(0, 0, propose(2, &[3], 3)),
        vec![0x1f],
        from(2, 0, opened(2, &[0, 1])),
    ];
    vec![whole.concat(), without_zero.concat(), ends.concat()]
}

fn join_messages() -> Vec<JoinMessage> {
    let models = vec!["net".to_owned(), String::new()];
    let request = |server| JoinRequest { model: "net".to_owned(), digest: [7; 32], server, returns: true };
    vec![
        JoinMessage::GetStatus,
        JoinMessage::Status(JobStatus { rank: 3, incarnation: u64::MAX, in_job: true, models }),
        JoinMessage::Join(request(v4())),
        JoinMessage::Join(request(v6())),
        JoinMessage::Refused { for_ever: true, text: "rank 1 is alive".to_owned() },
        JoinMessage::Bind { view: 4, place: 1, ranks: vec![0, 2, 3] },
        JoinMessage::Address(address(1).encode()),
        JoinMessage::Addresses(vec![address(0).encode(), Vec::new(), address(1).encode()]),
        JoinMessage::Joined,
    ]
}

/// Returns headers with their positions.
fn headers() -> Vec<Vec<u8>> {
    let plain = Fingerprint { epoch: 1, lane: 2, seq: 4, ..Fingerprint::new(Kind::Send, DType::U8, 100) };
    let reduce = Fingerprint {
        kind: Kind::Reduce,
        dtype: DType::BF16,
        op: Some(ReduceOp::Avg),
        root: Some(6),
        shape: Shape::new(&[7, 8, 9]),
        tag: 1,
        codec: 2,
        device: 1,
        flags: 3,
        ..plain
    };
    let chunk = |fingerprint, body, offset, length| {
        let whole = Header::whole(fingerprint, 5, 0, 8);
        Header { body, offset, length, ..whole }.encode().to_vec()
    };
    vec![chunk(plain, 100, 60, 40), chunk(reduce, 0, 0, 0), chunk(reduce, 1 << 40, 1 << 39, 256 << 10)]
}

/// Returns example messages: for each variant of [`Any`], one message of every kind that it can hold.
fn messages() -> Vec<Any> {
    let alone = Address { tcp: None, unix: Vec::new(), ..address(0) };
    let addresses = || vec![address(0).encode(), address(1).encode(), Vec::new()];
    let missing = MissingRanks::new((1..3000).step_by(40).collect(), "; a process was refused".to_owned());
    let lost = Error::PeerLost {
        rank: 3,
        host: "node-1".to_owned(),
        reason: "its connection ended".to_owned(),
        noticed_by: 0,
        progress: None,
        source: Source::default(),
    };
    let said = [Said::Address(address(1).encode()), Said::All(addresses()), Said::Missing(missing), Said::Failed(lost)];
    let (key, value) = ("rank-3".to_owned(), br#"{"server": "192.168.10.7:40123"}"#.to_vec());
    let requests = [
        Request::Get(key.clone()),
        Request::Set(key, value.clone()),
        Request::SetNew("token".to_owned(), Vec::new()),
        Request::Add("count".to_owned(), -1),
        Request::Claim("3".to_owned(), vec![1, 2]),
        Request::Remove("3".to_owned()),
        Request::Wait("all".to_owned(), 30_000),
        Request::Keys("ended/".to_owned()),
    ];
    let keys = Reply::Keys(vec!["3".to_owned(), "all".to_owned()]);
    let replies = [Reply::Nothing, Reply::Value(value), Reply::Full, Reply::NoNumber, keys];
    let mut all: Vec<Any> = control_messages().into_iter().map(Any::Control).collect();
    all.extend(join_messages().into_iter().map(Any::Join));
    all.extend(said.map(|said| Any::Entry(Entry { number: [9; 16], world_size: 3, said })));
    all.extend(requests.map(Any::Request));
    all.extend(replies.map(Any::Reply));
    all.extend([address(0), address(1), alone].map(Any::Address));
    all
}

/// The bytes that the encoders write, by kind of input.
fn examples() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let purposes = [Purpose::Control, Purpose::Stream, Purpose::Segment, Purpose::Join, Purpose::Store, Purpose::Probe];
    let hello = |purpose| {
        let hello = Hello { world_size: 4, from: 2, to: 1, purpose, group: 9, channel: 5, index: 1, job: [3; 8] };
        hello.encode(&[0x5a; 32]).to_vec()
    };
    vec![
        ("message", messages().iter().map(Any::encode).collect()),
        ("frame", control_messages().iter().map(Message::frame).collect()),
        ("hello", purposes.map(hello).to_vec()),
        ("addresses", vec![address(1).encode()]),
        ("agreement", agreements()),
        ("header", headers()),
    ]
}

#[test]
fn the_corpus_has_what_the_encoders_write_and_every_entry_parses() {
    let corpus = corpus();
    let missing: String = examples()
        .into_iter()
        .flat_map(|(name, all)| all.into_iter().map(move |bytes| (name, bytes)))
        .filter(|(name, bytes)| !corpus.iter().any(|(at, entry)| TARGETS[*at].name == *name && entry == bytes))
        .map(|(name, bytes)| format!("{name} {}\n", line(&bytes)))
        .collect();
    assert!(missing.is_empty(), "corpus.txt lacks these lines, in place of those of an older encoding:\n{missing}");
    for (at, entry) in &corpus {
        let Target { name, check, has_end } = &TARGETS[*at];
        assert!(check(entry), "{name} {}", hex(entry));
        if *has_end {
            assert!(!check(&[entry, &[0][..]].concat()), "trailing bytes of {name} {}", hex(entry));
            for end in 0..entry.len() {
                assert!(!check(&entry[..end]), "{end} bytes of {name} {}", hex(entry));
            }
        }
    }
    for (at, target) in TARGETS.iter().enumerate() {
        assert!(corpus.iter().any(|(of, _)| *of == at), "no entry for '{}'", target.name);
    }
}

#[test]
fn the_corpus_has_a_message_of_every_kind_of_every_type() {
    let kinds = |head: &[u8]| {
        let messages =
            corpus().into_iter().filter(|(at, bytes)| TARGETS[*at].name == "message" && bytes.starts_with(head));
        messages.filter_map(|(_, bytes)| bytes.get(head.len()).copied()).collect::<std::collections::BTreeSet<u8>>()
    };
    // All types of `Any`, all variants of each enum among them, all notices, and all routed messages.
    assert_eq!(kinds(&[]), (0..=5).collect());
    for (of, most) in [(0, 10), (1, 7), (2, 7), (3, 4)] {
        assert_eq!(kinds(&[of]), (0..=most).collect(), "of type {of}");
    }
    assert_eq!(kinds(&[&[5][..], &[9; 16], &[3]].concat()), (0..=3).collect());
    assert_eq!(kinds(&[0, 5]), (0..=4).collect());
    assert_eq!(kinds(&[0, 8, 1, 3, 0, 2, 0xac, 2]), (0..=5).collect());
    assert_eq!(kinds(&[0, 8, 1, 3, 0, 2, 0xac, 2, 1]), (0..=4).collect());
}

#[test]
fn a_list_that_is_longer_than_its_limit_takes_no_memory() {
    let count = |count: usize| postcard::to_allocvec(&count).expect("a number");
    let heads = [
        ("the missing ranks of an error", &[0, 5, 2, 1, 0, 1, 0, 0][..], RANKS_LIMIT),
        ("ranks that are gone", &[0, 8, 1, 0, 1, 0, 2, 0], SHRINK_LIMIT),
        ("ranks without which a view is proposed", &[0, 8, 1, 0, 1, 2, 2], SHRINK_LIMIT),
        ("where its members listen", &[0, 8, 1, 0, 1, 2, 2, 0], SHRINK_LIMIT),
        ("members of a group", &[0, 5, 2, 1], RANKS_LIMIT),
        ("notices", &[0, 6, 0, 0], NOTICES),
        ("receivers of a message", &[0, 8, 1], SHRINK_LIMIT),
        ("models", &[1, 1, 0, 0, 1], COUNT_LIMIT),
        ("members of a membership", &[1, 4, 2, 0], COUNT_LIMIT),
        ("addresses of a membership", &[1, 6], COUNT_LIMIT),
        ("keys of a store", &[3, 4], KEYS_LIMIT),
        ("all addresses", &[&[5][..], &[0; 17], &[1]].concat(), WORLD_LIMIT),
        ("missing ranks", &[&[5][..], &[0; 17], &[2]].concat(), RANKS_LIMIT),
    ];
    for (what, head, limit) in heads {
        let list = |claimed: usize, there: usize| [head, &count(claimed), &vec![0; there]].concat();
        // Lists that are too long, with all elements there, and lists that lack one element or all elements.
        let longest = list(limit + 1, limit + 9);
        for body in [longest, list(limit, limit - 1), list(limit, 0), list(usize::MAX, 100)] {
            let (parsed, held) = peak(|| Any::parse(&body));
            assert!(parsed.is_err(), "{what}");
            assert!(held <= AT_LEAST, "{what}: {held} bytes of memory for {} of a message", body.len());
        }
    }
}

#[test]
fn bytes_and_texts_beyond_the_end_of_a_message_take_no_memory() {
    let huge = postcard::to_allocvec(&(u64::MAX >> 1)).expect("a number");
    for (what, head) in [
        ("an address", &[1, 5][..]),
        ("the second address of a list", &[&[5][..], &[0; 17], &[1, 2, 0]].concat()),
        ("a text", &[0, 5, 2, 1, 0, 4]),
        ("a model", &[1, 1, 0, 0, 1, 1]),
        ("a value", &[2, 1, 0]),
    ] {
        let (parsed, held) = peak(|| Any::parse(&[head, &huge, &[0; 9]].concat()));
        assert!(parsed.is_err() && held <= AT_LEAST, "{what}: {held} bytes");
    }
}
