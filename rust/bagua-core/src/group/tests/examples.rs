//! The corpus: what the encoders write for each kind of input. The committed copy has it as text, a line per entry: kind and hex.

use std::net::SocketAddr;
use std::time::Duration;

use super::super::address::Address;
use super::super::book::{Reply, Request};
use super::super::door::{Answer as DoorAnswer, Asked, DoorMessage};
use super::super::handshake::{Hello, Purpose};
use super::super::rendezvous::{Content, MissingRanks, Registration, failed_frame, fetch_frame, list_frame};
use super::super::views::{GoneRank, ViewMessage};
use super::super::wire::{Message, Reader};
use super::targets::{TARGETS, body, framed};
use crate::error::{Error, Progress, Source};
use crate::transport::Chunk;
use crate::transport::frame::Header;
use crate::types::{DType, Fingerprint, Kind, ReduceOp, Shape};

/// The committed corpus.
const CORPUS: &str = include_str!("corpus.txt");

/// The committed corpus: index in [`TARGETS`] and bytes.
pub(super) fn corpus() -> Vec<(usize, Vec<u8>)> {
    let entry = |line: &str| {
        let (name, hex) = line.split_once(' ').expect("a kind and hex");
        let target = TARGETS.iter().position(|target| target.name == name).expect("a known kind");
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
        (target, (0..hex.len()).step_by(2).map(byte).collect())
    };
    CORPUS.lines().map(entry).collect()
}

/// The hex of some bytes.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The address of a rank in a world of two.
pub(in super::super) fn address(rank: u8) -> Address {
    Address {
        rank: rank.into(),
        world_size: 2,
        pid: 4242,
        pid_namespace: 4_026_531_836,
        tcp: Some(if rank == 0 { v4() } else { v6() }),
        unix: b"bagua-0123".to_vec(),
        host_id: "boot:4:4026531840".to_owned(),
        host_name: "node-é".to_owned(),
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
    let fails = errors.into_iter().map(|cause| Message::Fail { group: 0x0102_0304_0506_0708, cause });
    let plain = [Message::Heartbeat, Message::HostConnected(true), Message::Leave { group: 9 }, Message::LeaveAck];
    plain.into_iter().chain(fails).collect()
}

fn view_messages() -> Vec<ViewMessage> {
    let gone = [(0, true), (2, false), (7, true)].map(|(rank, ended)| GoneRank { rank, ended }).to_vec();
    vec![
        ViewMessage::Ready { view: 2, any: false, gone },
        ViewMessage::Ready { view: 2, any: true, gone: Vec::new() },
        ViewMessage::Withdrawn,
        ViewMessage::Propose { view: 2, members: vec![0, 1, 3] },
        ViewMessage::Address { view: 2, address: address(1).encode() },
        ViewMessage::Refused { view: 3, text: "no quorum".to_owned() },
        ViewMessage::Opened { view: 2, members: vec![0, 1, 3] },
        ViewMessage::Abandoned,
    ]
}

/// Sequences of events for an agreement: what a run without and with losses says, see `replay`.
fn agreements() -> Vec<Vec<u8>> {
    let from =
        |rank: u8, how: u8, message: ViewMessage| [&[0x40 | how | rank][..], &framed(&message.encode())].concat();
    let ready = |view: u64, ranks: &[usize]| {
        let gone = ranks.iter().map(|rank| GoneRank { rank: *rank, ended: true }).collect();
        ViewMessage::Ready { view, any: false, gone }
    };
    let address = |view: u64| ViewMessage::Address { view, address: vec![1, 2, 3] };
    let all = [0, 1, 2, 3];
    let opened = |view: u64, members: &[usize]| ViewMessage::Opened { view, members: members.to_vec() };
    let propose = |view: u64, members: &[usize]| ViewMessage::Propose { view, members: members.to_vec() };
    let whole = [
        from(0, 0, ready(2, &[])),
        from(2, 0, ready(2, &[])),
        from(3, 0, ready(2, &[])),
        from(0, 0, propose(2, &all)),
        from(0, 0, address(2)),
        from(2, 0, address(2)),
        from(3, 8, address(2)),
        from(0, 0, opened(2, &all)),
        vec![0x30],
    ];
    let without_zero = [
        vec![0x00],
        from(2, 0, ready(3, &[0])),
        from(3, 0, ready(3, &[0])),
        from(2, 0, address(3)),
        from(3, 0, address(3)),
        from(2, 0, ready(4, &[0])),
        vec![0x13],
        from(2, 0, opened(5, &[1, 2])),
        vec![0x20],
    ];
    let ends = [
        from(2, 0, ViewMessage::Withdrawn),
        from(3, 0, ViewMessage::Refused { view: 2, text: "no".to_owned() }),
        from(0, 0, ViewMessage::Abandoned),
        from(2, 0, opened(2, &[2, 3])),
    ];
    vec![whole.concat(), without_zero.concat(), ends.concat()]
}

fn door_messages() -> Vec<DoorMessage> {
    let models = vec!["net".to_owned(), String::new()];
    let asked = |door| Asked { model: "net".to_owned(), digest: [7; 32], door, returns: true };
    vec![
        DoorMessage::Ask,
        DoorMessage::Answer(DoorAnswer { rank: 3, incarnation: u64::MAX, in_job: true, models }),
        DoorMessage::Join(asked(v4())),
        DoorMessage::Join(asked(v6())),
        DoorMessage::Refused { for_ever: true, text: "rank 1 is alive".to_owned() },
        DoorMessage::Bind { view: 4, place: 1, ranks: vec![0, 2, 3] },
        DoorMessage::Address(address(1).encode()),
        DoorMessage::Addresses(vec![address(0).encode(), Vec::new(), address(1).encode()]),
        DoorMessage::Welcome,
    ]
}

/// Headers with their positions.
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
        let header = Header { fingerprint, part: 5, body };
        Chunk { header, message: 8, offset, length }.encode().to_vec()
    };
    vec![chunk(plain, 100, 60, 40), chunk(reduce, 0, 0, 0), chunk(reduce, 1 << 40, 1 << 39, 256 << 10)]
}

/// What the encoders write, by kind.
fn examples() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let purposes = [
        Purpose::Control,
        Purpose::Stream,
        Purpose::Segment,
        Purpose::Rendezvous,
        Purpose::Door,
        Purpose::Book,
        Purpose::Probe,
    ];
    let hello = |purpose| {
        let hello = Hello { world_size: 4, from: 2, to: 1, purpose, group: 9, channel: 5, index: 1, job: [3; 8] };
        hello.encode(&[0x5a; 32]).to_vec()
    };
    let views: Vec<_> = view_messages().iter().map(ViewMessage::encode).collect();
    let control = control_messages().into_iter().chain(views.iter().cloned().map(Message::View));
    let frames: Vec<_> = control.map(|message| message.frame()).collect();
    let alone = Address { tcp: None, unix: Vec::new(), ..address(0) };
    let addresses = || vec![address(0).encode(), address(1).encode(), Vec::new()];
    let registrations = [None, Some(v4()), Some(v6())];
    let registrations = registrations.map(|relay| body(Registration { address: address(1).encode(), relay }.frame()));
    let missing = MissingRanks::new((1..3000).step_by(40).collect());
    let lost = Error::PeerLost {
        rank: 3,
        host: "node-1".to_owned(),
        reason: "its connection ended".to_owned(),
        noticed_by: 0,
        progress: None,
        source: Source::default(),
    };
    let answers =
        [list_frame(&addresses()), missing.frame(), fetch_frame(v4()), fetch_frame(v6()), failed_frame(&lost)];
    let answers = answers.map(body);
    let file = Content { number: [9; 16], world_size: 3, addresses: addresses() };
    let (name, entry) = ("rank-3".to_owned(), br#"{"door": "192.168.10.7:40123"}"#.to_vec());
    let requests = [
        Request::Read(name.clone()),
        Request::Write(name, entry.clone()),
        Request::Claim("token".to_owned(), Vec::new()),
    ];
    let replies = [Reply::Nothing, Reply::Entry(entry), Reply::Full];
    vec![
        ("control", frames.iter().cloned().map(body).collect()),
        ("frame", frames),
        ("hello", purposes.map(hello).to_vec()),
        ("address", vec![address(0).encode(), address(1).encode(), alone.encode()]),
        ("addresses", vec![address(1).encode()]),
        ("view", views),
        ("agreement", agreements()),
        ("door", door_messages().iter().map(DoorMessage::encode).collect()),
        ("header", headers()),
        ("registration", registrations.to_vec()),
        ("answer", answers.to_vec()),
        ("request", requests.iter().map(Request::encode).collect()),
        ("reply", replies.iter().map(Reply::encode).collect()),
        ("file", vec![file.encode()]),
    ]
}

#[test]
fn the_corpus_has_what_the_encoders_write_and_every_entry_parses() {
    let corpus = corpus();
    let missing: String = examples()
        .into_iter()
        .flat_map(|(name, all)| all.into_iter().map(move |bytes| (name, bytes)))
        .filter(|(name, bytes)| !corpus.iter().any(|(at, entry)| TARGETS[*at].name == *name && entry == bytes))
        .map(|(name, bytes)| format!("{name} {}\n", hex(&bytes)))
        .collect();
    assert!(missing.is_empty(), "corpus.txt lacks these lines, in place of those of an older encoding:\n{missing}");
    for (at, entry) in &corpus {
        assert!((TARGETS[*at].check)(entry), "{} {}", TARGETS[*at].name, hex(entry));
    }
    for (at, target) in TARGETS.iter().enumerate() {
        assert!(corpus.iter().any(|(of, _)| *of == at), "no entry for '{}'", target.name);
    }
}

#[test]
fn messages_in_the_corpus_are_of_every_kind() {
    let kinds = |name: &str| {
        let of = corpus().into_iter().filter(|(at, _)| TARGETS[*at].name == name);
        of.filter_map(|(_, bytes)| Reader(&bytes).u8().ok()).collect::<std::collections::BTreeSet<u8>>()
    };
    assert_eq!(kinds("control"), (1..=6).collect());
    assert_eq!(kinds("view"), (1..=7).collect());
    assert_eq!(kinds("door"), (0..=7).collect());
    assert_eq!(kinds("answer"), (0..=3).collect());
    assert_eq!(kinds("request"), (0..=2).collect());
    assert_eq!(kinds("reply"), (0..=2).collect());
}
