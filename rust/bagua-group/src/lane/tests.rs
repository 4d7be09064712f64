//! Arguments, numbers and failures of a lane, over one rank and over a collective that records its calls.

use std::ptr::NonNull;
use std::sync::Mutex;

use super::*;
use crate::codec::MinMaxU8;
use crate::collective::{Solo, over_exchange};
use crate::memory::{Device, Region};
use crate::request::{Compression, Extra, Incoming, Outgoing, PartLayout, PeerSelection, Replicas};
use crate::types::{Kind, ReduceOp};

const SOON: Duration = Duration::from_secs(60);

/// The operations that a [`Recorder`] was asked to run.
type Log = Arc<Mutex<Vec<Fingerprint>>>;

/// A collective that claims to be rank 1 of 4. Records each fingerprint and moves no data. Fails with `error` if that
/// is set.
struct Recorder {
    log: Log,
    error: Option<Error>,
}

impl Recorder {
    fn note(&self, cx: &OpContext<'_>) -> Result<()> {
        self.log.lock().unwrap().push(cx.fingerprint);
        self.error.clone().map_or(Ok(()), Err)
    }
}

impl Collective for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }
    fn rank(&self) -> usize {
        1
    }
    fn size(&self) -> usize {
        4
    }
    fn transports(&self) -> Vec<&'static str> {
        vec!["local", "self", "local", "local"]
    }
    fn reaches(&self, place: DeviceRef<'_>) -> bool {
        place.is_none_or(|device| device.name() == Closed.name())
    }
    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        if verb.is_over_exchange() { over_exchange(self, cx, verb, io) } else { self.note(cx) }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        let messages = sends.iter().map(|m| m.fingerprint).chain(recvs.iter().map(|m| m.fingerprint));
        self.log.lock().unwrap().extend(messages);
        self.note(cx)
    }
}

/// A device whose memory cannot be copied.
#[derive(Debug)]
struct Closed;

#[allow(unsafe_code)]
impl Device for Closed {
    fn name(&self) -> &str {
        "closed:0"
    }
    fn kind(&self) -> u8 {
        254
    }
    unsafe fn copy_to_host(&self, _: NonNull<u8>, _: &mut [u8]) -> Result<()> {
        Err(Error::other("a copy"))
    }
    unsafe fn copy_from_host(&self, _: &[u8], _: NonNull<u8>) -> Result<()> {
        Err(Error::other("a copy"))
    }
    fn room(&self, _: usize) -> Result<NonNull<u8>> {
        Err(Error::other("a copy"))
    }
}

struct Fixture {
    lane: Lane,
    log: Log,
    health: Arc<GroupHealth>,
    stats: Arc<Stats>,
}

fn recorder(error: Option<Error>) -> Fixture {
    let (log, health, stats) = (Log::default(), GroupHealth::local(1, 4), Arc::new(Stats::default()));
    let collective = Box::new(Recorder { log: log.clone(), error });
    Fixture { lane: Lane::new(collective, health.clone(), stats.clone(), 7, 3, SOON), log, health, stats }
}

fn solo() -> Lane {
    Lane::new(Box::new(Solo::new()), GroupHealth::local(0, 1), Arc::default(), 0, 0, SOON)
}

fn to_all<'a>(send: PartLayout<'a>, recv: PartLayout<'a>) -> Verb<'a> {
    Verb::AllToAllV { send, recv }
}

fn split<'a>(src: &'a [u8], dst: &'a mut [u8]) -> Io<'a> {
    Io::split(src, dst)
}

#[test]
fn bad_arguments_are_refused_before_anything_is_sent_and_poison_nothing() {
    let Fixture { mut lane, log, health, stats } = recorder(None);
    let o = &Options::default();
    let (f, b) = (DType::F32, &mut [0u8; 64]);
    let whole = PartLayout { counts: &[1; 4], displs: &[0, 1, 2, 3] };
    let average = |peers| Verb::NeighborAverage { peers, round: 0 };
    let ring = Verb::CompressedRing { codec: &MinMaxU8, draw: 0 };
    let (own, left, right) = (&mut [0; 64][..], &mut [0; 8][..], &mut [0; 64][..]);
    let replicas = Some(Replicas { own: own.into(), left: left.into(), right: right.into() });
    let short = Extra { replicas, ..Extra::default() };
    let refusals = [
        ("10 bytes", lane.run(o, f, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut b[..10]))),
        ("the destination 3", lane.run(o, f, Verb::AllReduce(ReduceOp::Sum), split(&[0; 16], &mut b[..12]))),
        ("avg of int32", lane.run(o, DType::I32, Verb::AllReduce(ReduceOp::Avg), Io::in_place(b))),
        ("sum of bool", lane.run(o, DType::Bool, Verb::ReduceScatter(ReduceOp::Sum), Io::in_place(b))),
        ("bor of float32", lane.run(o, f, Verb::Reduce { op: ReduceOp::Bor, root: 0 }, Io::in_place(b))),
        ("root 4", lane.run(o, f, Verb::Reduce { op: ReduceOp::Sum, root: 4 }, Io::in_place(b))),
        ("root 18446744073709551615", lane.run(o, f, Verb::Broadcast { root: usize::MAX }, Io::in_place(b))),
        ("3 bytes", lane.run(o, f, Verb::Broadcast { root: 0 }, Io::in_place(&mut b[..3]))),
        ("not 4 times", lane.run(o, f, Verb::AllGather, split(&[0; 8], &mut b[..28]))),
        ("not a multiple", lane.run(o, f, Verb::AllGather, Io::in_place(&mut b[..12]))),
        ("not 4 times", lane.run(o, f, Verb::Gather { root: 1 }, split(&[0; 8], b))),
        ("root 9", lane.run(o, f, Verb::Gather { root: 9 }, Io::in_place(b))),
        ("not 4 times", lane.run(o, f, Verb::Scatter { root: 1 }, split(&[0; 8], &mut b[..8]))),
        ("not 4 times", lane.run(o, f, Verb::ReduceScatter(ReduceOp::Sum), split(&[0; 60], &mut b[..16]))),
        ("not a multiple", lane.run(o, f, Verb::AllToAll, split(&[0; 24], &mut b[..24]))),
        ("the destination 2", lane.run(o, f, Verb::AllToAll, split(&[0; 16], &mut b[..8]))),
        (
            "3 send counts",
            lane.run(o, f, to_all(PartLayout { counts: &[1; 3], displs: &[0, 1, 2, 3] }, whole), Io::in_place(b)),
        ),
        (
            "5 receive displacements",
            lane.run(o, f, to_all(whole, PartLayout { counts: &[1; 4], displs: &[0; 5] }), Io::in_place(b)),
        ),
        (
            "rank 2, 1 elements from 18446744073709551615",
            lane.run(
                o,
                f,
                to_all(PartLayout { counts: &[1; 4], displs: &[0, 1, usize::MAX, 3] }, whole),
                Io::in_place(b),
            ),
        ),
        (
            "ranks 3 and 0 overlap",
            lane.run(o, f, to_all(whole, PartLayout { counts: &[1, 1, 1, 2], displs: &[2, 3, 0, 1] }), Io::in_place(b)),
        ),
        (
            "sends 1 elements to itself and receives 2",
            lane.run(o, f, to_all(whole, PartLayout { counts: &[1, 2, 1, 1], displs: &[0, 1, 3, 4] }), Io::in_place(b)),
        ),
    ];
    let how = Compression { codec: &MinMaxU8, divisor: 4, draw: 0, elements: 4, exact: 0 };
    let refusals = refusals.into_iter().chain([
        ("minmax_u8", lane.run(o, DType::I32, Verb::CompressedAllReduce(how), Io::in_place(b))),
        ("in place", lane.run(o, f, Verb::CompressedAllReduce(how), split(&[0; 16], &mut b[..16]))),
        ("the destination 3", lane.run(o, f, average(PeerSelection::Ring), split(&[0; 16], &mut b[..12]))),
        ("avg of int32", lane.run(o, DType::I32, average(PeerSelection::Ring), split(&[0; 16], &mut b[..16]))),
        ("needs the replicas", lane.run(o, f, ring, Io::in_place(b))),
        (
            "a replica has 2 elements, but the weights have 16",
            lane.run(o, f, ring, Operands { io: Io::in_place(b), extra: short }),
        ),
    ]);
    for (text, refusal) in refusals {
        let error = refusal.expect_err(text);
        assert!(error.is_argument() && error.to_string().contains(text), "{text:?} in {error}");
    }
    assert!(log.lock().unwrap().is_empty());
    assert_eq!(stats.snapshot(), []);
    health.check().unwrap();
    lane.barrier(o).unwrap();
    assert_eq!(log.lock().unwrap()[0].seq, 0, "a refused operation takes no number");
}

#[test]
#[allow(unsafe_code)]
fn the_parts_of_all_to_all_v_are_checked_before_anything_is_copied() {
    let Fixture { mut lane, log, .. } = recorder(None);
    // SAFETY: a device that copies nothing, so the memory is never used.
    let mut region = unsafe { Region::on(Arc::new(Closed), 64 as *mut u8, 4, DType::F32) }.unwrap();
    let whole = PartLayout { counts: &[1; 4], displs: &[0, 1, 2, 3] };
    let overlapping = PartLayout { counts: &[1; 4], displs: &[0; 4] };
    let mut run = |recv| {
        let io = Io::InPlace(region.buffer_mut());
        lane.run(&Options::default(), DType::F32, Verb::AllToAllV { send: whole, recv }, io).unwrap_err()
    };
    assert!(matches!(run(overlapping), Error::InvalidArgument(text) if text.contains("overlap")));
    assert_eq!(run(whole), Error::other("a copy"));
    assert!(log.lock().unwrap().is_empty());
}

#[test]
fn what_an_operation_says_of_itself_is_what_the_header_needs() {
    let Fixture { mut lane, log, stats, .. } = recorder(None);
    let b = &mut [0u8; 64];
    let shaped = &Options { shape: Some(Shape::new(&[2, 8])), ..Options::default() };
    lane.run(shaped, DType::F32, Verb::AllReduce(ReduceOp::Max), Io::in_place(b)).unwrap();
    lane.run(&Options::default(), DType::F64, Verb::Broadcast { root: 2 }, Io::in_place(b)).unwrap();
    lane.run(shaped, DType::F32, Verb::AllGather, Io::in_place(b)).unwrap();
    lane.run(shaped, DType::F32, Verb::Scatter { root: 3 }, split(&[], &mut b[..16])).unwrap();
    lane.run(shaped, DType::F32, Verb::Gather { root: 0 }, split(&[0; 8], &mut [])).unwrap();
    lane.barrier(shaped).unwrap();
    let recorded = log.lock().unwrap().clone();
    let plain = Fingerprint { epoch: 7, lane: 3, ..Fingerprint::new(Kind::AllReduce, DType::F32, 16) };
    assert_eq!(recorded[0], Fingerprint { op: Some(ReduceOp::Max), shape: Shape::new(&[2, 8]), ..plain });
    let broadcast = Fingerprint { kind: Kind::Broadcast, seq: 1, dtype: DType::F64, count: 8, ..plain };
    assert_eq!(recorded[1], Fingerprint { root: Some(2), shape: Shape::flat(8), ..broadcast });
    assert_eq!(recorded[2], Fingerprint { kind: Kind::AllGather, seq: 2, count: 4, ..plain });
    assert_eq!(recorded[3], Fingerprint { kind: Kind::Scatter, seq: 3, count: 4, root: Some(3), ..plain });
    assert_eq!(recorded[4], Fingerprint { kind: Kind::Gather, seq: 4, count: 2, root: Some(0), ..plain });
    assert_eq!(recorded[5], Fingerprint { kind: Kind::Barrier, seq: 5, dtype: DType::U8, count: 0, ..plain });
    let counted: Vec<_> = stats.snapshot().iter().map(|(kind, op)| (*kind, op.calls, op.payload_bytes)).collect();
    let expected =
        [(Kind::AllReduce, 64), (Kind::Broadcast, 64), (Kind::AllGather, 64), (Kind::Gather, 8), (Kind::Scatter, 16)];
    assert_eq!(counted[..5], expected.map(|(kind, bytes)| (kind, 1, bytes)));
}

#[test]
fn a_failure_poisons_the_lane_and_says_what_it_was_doing() {
    let lost = GroupHealth::local(1, 4).peer_lost(2, "killed");
    let Fixture { mut lane, log, health, .. } = recorder(Some(lost));
    let options = &Options { label: "bucket 3", ..Options::default() };
    let error = lane.run(options, DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut [0; 8])).unwrap_err();
    for text in ["lost rank 2", "killed", "all_reduce(sum)", "bucket 3", "0 of 8 bytes"] {
        assert!(error.to_string().contains(text), "{text:?} in {error}");
    }
    assert_eq!(health.cause().map(|cause| cause.is_argument()), Some(false));
    let again = lane.barrier(options).unwrap_err();
    assert!(again.to_string().contains("lost rank 2"), "{again}");
    assert_eq!(log.lock().unwrap().len(), 1, "nothing is sent after a failure");
}

#[test]
fn a_poisoned_group_raises_its_first_cause_even_for_bad_arguments() {
    let Fixture { mut lane, log, health, .. } = recorder(None);
    let cause = Error::PeerRaised { rank: 2, host: "h".into(), kind: "ValueError".into(), message: "no".into() };
    health.fail_from_peer(cause.clone());
    let o = &Options::default();
    let bad = lane.run(o, DType::F32, Verb::AllToAll, Io::in_place(&mut [0; 3]));
    assert_eq!(bad, Err(cause.clone()));
    assert_eq!(lane.run(o, DType::F32, Verb::AllToAll, Io::in_place(&mut [0; 16])), Err(cause));
    assert!(log.lock().unwrap().is_empty());
}

#[test]
fn the_first_cause_wins_over_the_failure_that_it_led_to() {
    let first = Error::Aborted("the user gave up".into());
    let Fixture { mut lane, health, .. } = recorder(Some(Error::other("stream closed")));
    let listened = Arc::new(Mutex::new(Vec::new()));
    let reported = listened.clone();
    let _reports = health.subscribe_local(move |error| reported.lock().unwrap().push(error.clone()));
    // The cause arrives while the operation runs, after the lane checked the health. Therefore the test calls `perform`
    // and not `barrier`.
    health.fail_from_peer(first.clone());
    let print = Fingerprint::new(Kind::Barrier, DType::U8, 0);
    let error = lane.perform(None, &Options::default(), print, Verb::Barrier, Io::none().into()).unwrap_err();
    assert_eq!(error, first);
    assert!(listened.lock().unwrap().is_empty(), "a peer's cause is not reported back");
}

#[test]
fn alone_every_verb_works_and_parts_land_where_they_should() {
    let mut lane = solo();
    let o = &Options::default();
    let mut dst = [0u8; 4];
    lane.run(o, DType::U8, Verb::AllReduce(ReduceOp::Sum), split(&[1, 2, 3, 4], &mut dst)).unwrap();
    assert_eq!(dst, [1, 2, 3, 4]);
    let (send, recv) = (PartLayout { counts: &[2], displs: &[1] }, PartLayout { counts: &[2], displs: &[0] });
    lane.run(o, DType::U8, Verb::AllToAllV { send, recv }, Io::in_place(&mut dst)).unwrap();
    assert_eq!(dst, [2, 3, 3, 4], "in place reads the old values");
    lane.run(o, DType::F16, Verb::Broadcast { root: 0 }, Io::in_place(&mut [])).unwrap();
    lane.barrier(o).unwrap();
    assert_eq!((lane.rank(), lane.size(), lane.collective(), lane.transports()), (0, 1, "solo", vec!["self"]));
}
