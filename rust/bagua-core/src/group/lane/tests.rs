//! Arguments, numbers and failures of a lane, over one rank and over a collective that records what it is told.

use std::sync::Mutex;

use super::*;
use crate::collective::Solo;

const SOON: Duration = Duration::from_secs(60);

/// What a [`Recorder`] was asked to do.
type Log = Arc<Mutex<Vec<Fingerprint>>>;

/// Rank 1 of 4, alone: notes each fingerprint, moves nothing, and fails with `error` if there is one.
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
    fn all_reduce(&mut self, cx: &OpContext<'_>, _: Io<'_>, _: ReduceOp) -> Result<()> {
        self.note(cx)
    }
    fn reduce(&mut self, cx: &OpContext<'_>, _: Io<'_>, _: ReduceOp, _: usize) -> Result<()> {
        self.note(cx)
    }
    fn broadcast(&mut self, cx: &OpContext<'_>, _: &mut [u8], _: usize) -> Result<()> {
        self.note(cx)
    }
    fn all_gather(&mut self, cx: &OpContext<'_>, _: Io<'_>) -> Result<()> {
        self.note(cx)
    }
    fn gather(&mut self, cx: &OpContext<'_>, _: Io<'_>, _: usize) -> Result<()> {
        self.note(cx)
    }
    fn scatter(&mut self, cx: &OpContext<'_>, _: Io<'_>, _: usize) -> Result<()> {
        self.note(cx)
    }
    fn reduce_scatter(&mut self, cx: &OpContext<'_>, _: Io<'_>, _: ReduceOp) -> Result<()> {
        self.note(cx)
    }
    fn all_to_all(&mut self, cx: &OpContext<'_>, _: Io<'_>) -> Result<()> {
        self.note(cx)
    }
    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        let messages = sends.iter().map(|m| m.fingerprint).chain(recvs.iter().map(|m| m.fingerprint));
        self.log.lock().unwrap().extend(messages);
        self.note(cx)
    }
    fn barrier(&mut self, cx: &OpContext<'_>) -> Result<()> {
        self.note(cx)
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

fn split<'a>(src: &'a [u8], dst: &'a mut [u8]) -> Io<'a> {
    Io::Split { src, dst }
}

#[test]
fn bad_arguments_are_refused_before_anything_is_sent_and_poison_nothing() {
    let Fixture { mut lane, log, health, stats } = recorder(None);
    let o = &Options::default();
    let (f, b) = (DType::F32, &mut [0u8; 64]);
    let whole = Chunks { counts: &[1; 4], displs: &[0, 1, 2, 3] };
    let refusals = [
        ("10 bytes", lane.all_reduce(o, f, Io::InPlace(&mut b[..10]), ReduceOp::Sum)),
        ("the destination 3", lane.all_reduce(o, f, split(&[0; 16], &mut b[..12]), ReduceOp::Sum)),
        ("avg of int32", lane.all_reduce(o, DType::I32, Io::InPlace(b), ReduceOp::Avg)),
        ("sum of bool", lane.reduce_scatter(o, DType::Bool, Io::InPlace(b), ReduceOp::Sum)),
        ("bor of float32", lane.reduce(o, f, Io::InPlace(b), ReduceOp::Bor, 0)),
        ("root 4", lane.reduce(o, f, Io::InPlace(b), ReduceOp::Sum, 4)),
        ("root 18446744073709551615", lane.broadcast(o, f, b, usize::MAX)),
        ("3 bytes", lane.broadcast(o, f, &mut b[..3], 0)),
        ("not 4 times", lane.all_gather(o, f, split(&[0; 8], &mut b[..28]))),
        ("not a multiple", lane.all_gather(o, f, Io::InPlace(&mut b[..12]))),
        ("not 4 times", lane.gather(o, f, split(&[0; 8], b), 1)),
        ("root 9", lane.gather(o, f, Io::InPlace(b), 9)),
        ("not 4 times", lane.scatter(o, f, split(&[0; 8], &mut b[..8]), 1)),
        ("not 4 times", lane.reduce_scatter(o, f, split(&[0; 60], &mut b[..16]), ReduceOp::Sum)),
        ("not a multiple", lane.all_to_all(o, f, split(&[0; 24], &mut b[..24]))),
        ("the destination 2", lane.all_to_all(o, f, split(&[0; 16], &mut b[..8]))),
        ("rank 4 is not", lane.send(o, f, &[0; 4], 4)),
        ("itself", lane.send(o, f, &[0; 4], 1)),
        ("itself", lane.recv(o, f, &mut b[..4], 1)),
        ("5 bytes", lane.recv(o, f, &mut b[..5], 0)),
        ("itself", lane.exchange(o, f, &[(0, &[0; 4]), (1, &[0; 4])], &mut [])),
        ("7 bytes", lane.exchange(o, f, &[(0, &[0; 4])], &mut [(2, &mut b[..7])])),
        (
            "3 send counts",
            lane.all_to_all_v(o, f, Io::InPlace(b), Chunks { counts: &[1; 3], displs: &[0, 1, 2, 3] }, whole),
        ),
        (
            "5 receive displacements",
            lane.all_to_all_v(o, f, Io::InPlace(b), whole, Chunks { counts: &[1; 4], displs: &[0; 5] }),
        ),
        (
            "rank 2, 1 elements from 18446744073709551615",
            lane.all_to_all_v(o, f, Io::InPlace(b), Chunks { counts: &[1; 4], displs: &[0, 1, usize::MAX, 3] }, whole),
        ),
        (
            "ranks 3 and 0 overlap",
            lane.all_to_all_v(o, f, Io::InPlace(b), whole, Chunks { counts: &[1, 1, 1, 2], displs: &[2, 3, 0, 1] }),
        ),
        (
            "sends 1 elements to itself and receives 2",
            lane.all_to_all_v(o, f, Io::InPlace(b), whole, Chunks { counts: &[1, 2, 1, 1], displs: &[0, 1, 3, 4] }),
        ),
    ];
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
fn what_an_operation_says_of_itself_is_what_the_header_needs() {
    let Fixture { mut lane, log, stats, .. } = recorder(None);
    let b = &mut [0u8; 64];
    let shaped = &Options { shape: Some(Shape::new(&[2, 8])), ..Options::default() };
    lane.all_reduce(shaped, DType::F32, Io::InPlace(b), ReduceOp::Max).unwrap();
    lane.broadcast(&Options::default(), DType::F64, b, 2).unwrap();
    lane.all_gather(shaped, DType::F32, Io::InPlace(b)).unwrap();
    lane.scatter(shaped, DType::F32, split(&[], &mut b[..16]), 3).unwrap();
    lane.gather(shaped, DType::F32, split(&[0; 8], &mut []), 0).unwrap();
    lane.barrier(shaped).unwrap();
    let told = log.lock().unwrap().clone();
    let plain = Fingerprint {
        epoch: 7,
        channel: 3,
        kind: Kind::AllReduce,
        seq: 0,
        dtype: DType::F32,
        op: None,
        root: None,
        count: 16,
        shape: Shape::default(),
    };
    assert_eq!(told[0], Fingerprint { op: Some(ReduceOp::Max), shape: Shape::new(&[2, 8]), ..plain });
    let broadcast = Fingerprint { kind: Kind::Broadcast, seq: 1, dtype: DType::F64, count: 8, ..plain };
    assert_eq!(told[1], Fingerprint { root: Some(2), shape: Shape::flat(8), ..broadcast });
    assert_eq!(told[2], Fingerprint { kind: Kind::AllGather, seq: 2, count: 4, ..plain });
    assert_eq!(told[3], Fingerprint { kind: Kind::Scatter, seq: 3, count: 4, root: Some(3), ..plain });
    assert_eq!(told[4], Fingerprint { kind: Kind::Gather, seq: 4, count: 2, root: Some(0), ..plain });
    assert_eq!(told[5], Fingerprint { kind: Kind::Barrier, seq: 5, dtype: DType::U8, count: 0, ..plain });
    let counted: Vec<_> = stats.snapshot().iter().map(|(kind, op)| (*kind, op.calls, op.payload_bytes)).collect();
    let expected =
        [(Kind::AllReduce, 64), (Kind::Broadcast, 64), (Kind::AllGather, 64), (Kind::Gather, 8), (Kind::Scatter, 16)];
    assert_eq!(counted[..5], expected.map(|(kind, bytes)| (kind, 1, bytes)));
}

#[test]
fn messages_are_numbered_per_pair_and_direction() {
    let Fixture { mut lane, log, .. } = recorder(None);
    let o = &Options::default();
    let b = &mut [0u8; 8];
    lane.send(o, DType::U8, &[1, 2, 3], 0).unwrap();
    lane.exchange(o, DType::U8, &[(0, &[1]), (2, &[]), (0, &[5, 6])], &mut [(0, b)]).unwrap();
    lane.recv(o, DType::U8, b, 0).unwrap();
    lane.barrier(o).unwrap();
    let told: Vec<_> = log.lock().unwrap().iter().map(|f| (f.kind, f.seq, f.count)).collect();
    let expected = [
        (Kind::Send, 0, 3),
        (Kind::Send, 0, 3),
        (Kind::Send, 1, 1),
        (Kind::Send, 0, 0),
        (Kind::Send, 2, 2),
        (Kind::Send, 0, 8),
        (Kind::Exchange, 0, 11),
        (Kind::Send, 1, 8),
        (Kind::Send, 1, 8),
        (Kind::Barrier, 0, 0),
    ];
    assert_eq!(told, expected);
}

#[test]
fn a_failure_poisons_the_lane_and_says_what_it_was_doing() {
    let lost = GroupHealth::local(1, 4).peer_lost(2, "killed");
    let Fixture { mut lane, log, health, .. } = recorder(Some(lost));
    let options = &Options { label: "bucket 3", ..Options::default() };
    let error = lane.all_reduce(options, DType::F32, Io::InPlace(&mut [0; 8]), ReduceOp::Sum).unwrap_err();
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
    assert_eq!(lane.send(o, DType::F32, &[0; 3], 77), Err(cause.clone()));
    assert_eq!(lane.all_to_all(o, DType::F32, Io::InPlace(&mut [0; 16])), Err(cause));
    assert!(log.lock().unwrap().is_empty());
}

#[test]
fn the_first_cause_wins_over_the_failure_that_it_led_to() {
    let first = Error::Aborted("the user gave up".into());
    let Fixture { mut lane, health, .. } = recorder(Some(Error::other("stream closed")));
    let listened = Arc::new(Mutex::new(Vec::new()));
    let heard = listened.clone();
    let _reports = health.subscribe_local(move |error| heard.lock().unwrap().push(error.clone()));
    // The cause arrives while the operation runs, after the lane's own look at the health: hence `perform`, not `barrier`.
    health.fail_from_peer(first.clone());
    let says = lane.next(Kind::Barrier, DType::U8, 0);
    let error = lane.perform(&Options::default(), says, 0, |collective, cx| collective.barrier(cx)).unwrap_err();
    assert_eq!(error, first);
    assert!(listened.lock().unwrap().is_empty(), "a peer's cause is not reported back");
}

#[test]
fn alone_every_verb_works_and_parts_land_where_they_should() {
    let mut lane = solo();
    let o = &Options::default();
    let mut dst = [0u8; 4];
    lane.all_reduce(o, DType::U8, split(&[1, 2, 3, 4], &mut dst), ReduceOp::Sum).unwrap();
    assert_eq!(dst, [1, 2, 3, 4]);
    let (send, recv) = (Chunks { counts: &[2], displs: &[1] }, Chunks { counts: &[2], displs: &[0] });
    lane.all_to_all_v(o, DType::U8, Io::InPlace(&mut dst), send, recv).unwrap();
    assert_eq!(dst, [2, 3, 3, 4], "in place reads the old values");
    lane.broadcast(o, DType::F16, &mut [], 0).unwrap();
    lane.exchange(o, DType::F16, &[], &mut []).unwrap();
    lane.barrier(o).unwrap();
    assert_eq!((lane.rank(), lane.size(), lane.collective(), lane.transports()), (0, 1, "solo", vec!["self"]));
}
