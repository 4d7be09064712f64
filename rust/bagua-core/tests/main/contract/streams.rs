//! Several streams to one peer: chunks by whichever has room, checked one by one.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bagua_core::collective::{Incoming, Net, Outgoing};
use bagua_core::error::{Error, Result};
use bagua_core::health::GroupHealth;
use bagua_core::stats::Stats;
use bagua_core::transport::frame::{self, Header};
use bagua_core::transport::{Batch, Broken, Local, Mesh, OpContext, OpenStreams, Opened, Readiness, Transport};
use bagua_core::types::{DType, Fingerprint, Kind, Shape};
use bagua_core::wait::Doorbell;

use super::world::{Rank, Say, each, on_demand, world};

type Bundle = Vec<Box<dyn Transport>>;

fn rank(index: usize, bundle: Bundle, bell: Doorbell) -> Rank {
    let mut bundles = vec![Vec::new(), Vec::new()];
    bundles[1 - index] = bundle;
    over(index, Mesh::bundled(index, vec![0, 1], bundles, Some(bell)))
}

fn over(index: usize, mesh: Mesh) -> Rank {
    let collective = Box::new(Net::new(mesh));
    Rank { collective, health: GroupHealth::local(index, 2), stats: Stats::default(), seq: 0 }
}

/// A rank 0 of 2, joined by two streams to the test itself.
fn rank_and_raw_peer() -> (Rank, [Local; 2]) {
    rank_and_raw_peer_with(|links, bell| Mesh::bundled(0, vec![0, 1], vec![Vec::new(), links], Some(bell)))
}

fn rank_and_raw_peer_with(mesh: impl FnOnce(Bundle, Doorbell) -> Mesh) -> (Rank, [Local; 2]) {
    let bells = (Doorbell::local(), Doorbell::local());
    let [(a, x), (b, y)] = [0, 1].map(|_| Local::pair(bells.clone(), 1 << 16));
    (over(0, mesh(vec![Box::new(a), Box::new(b)], bells.0)), [x, y])
}

/// Chunk `offset..offset + length` of a message of `body` bytes.
fn chunk(message: u64, body: usize, offset: u64, length: u64) -> Vec<u8> {
    let (dtype, shape, kind) = (DType::U8, Shape::flat(body), Kind::Exchange);
    let fingerprint = Fingerprint { epoch: 1, shape, ..Fingerprint::new(kind, dtype, body) };
    let header = Header { offset, length, ..Header::whole(fingerprint, 0, body, message) };
    let mut bytes = header.encode().to_vec();
    bytes.extend((offset..offset.saturating_add(length).min(offset.saturating_add(1 << 16))).map(|at| at as u8));
    bytes
}

/// Receives messages of 100 bytes in one exchange.
fn receive(rank: &mut Rank, into: &mut [[u8; 100]]) -> Result<()> {
    rank.call(Say::new(Kind::Exchange, DType::U8, 100), |x, cx| {
        let fingerprint = cx.fingerprint;
        let mut recvs: Vec<_> = into.iter_mut().map(|data| Incoming::new(1, fingerprint, data)).collect();
        x.exchange(cx, &[], &mut recvs)
    })
}

fn counted() -> [u8; 100] {
    std::array::from_fn(|at| at as u8)
}

#[test]
fn a_rank_that_receives_in_one_run_what_its_peer_sends_in_several_runs_opens_the_same_streams() {
    let outcomes = each(&mut world(on_demand, 2), |index, rank| {
        rank.call(Say::new(Kind::Exchange, DType::U8, 10), |x, cx| {
            let print = cx.fingerprint;
            let (mut short, mut long, mut answer) = ([0; 10], vec![0; 200_000], [0; 10]);
            if index == 0 {
                x.exchange(cx, &[Outgoing::new(1, print, &[1; 10])], &mut [])?;
                x.exchange(cx, &[], &mut [Incoming::new(1, print, &mut answer)])?;
                // The first message that is divided between streams.
                x.exchange(cx, &[Outgoing::new(1, print, &[2; 200_000])], &mut [])?;
                assert_eq!(answer, [3; 10]);
            } else {
                let mut recvs = [Incoming::new(0, print, &mut short), Incoming::new(0, print, &mut long)];
                x.exchange(cx, &[Outgoing::new(0, print, &[3; 10])], &mut recvs)?;
                assert!(short == [1; 10] && long == [2; 200_000]);
            }
            Ok(())
        })
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

#[test]
fn chunks_land_where_they_belong_whichever_stream_brings_them_first() {
    let (mut rank, mut peer) = rank_and_raw_peer();
    // The second message is there before the first is complete.
    for (stream, chunk) in [
        (1, chunk(1, 100, 40, 60)),
        (1, chunk(0, 100, 60, 40)),
        (0, chunk(1, 100, 0, 40)),
        (0, chunk(0, 100, 10, 50)),
        (1, chunk(0, 100, 0, 10)),
    ] {
        assert_eq!(peer[stream].send(&chunk, &[]), Ok(chunk.len()));
    }
    let mut into = [[0; 100]; 2];
    receive(&mut rank, &mut into).unwrap();
    assert_eq!(into, [counted(); 2]);
}

#[test]
fn a_chunk_of_a_later_operation_waits_for_it() {
    let (mut rank, mut peer) = rank_and_raw_peer();
    let later = chunk(1, 100, 0, 100);
    // The header that the message has in its own operation: message 1 of the pair, in operation 1.
    let mut later_header = later[..frame::LEN].to_vec();
    later_header[24] = 1;
    assert_eq!(peer[0].send(&later_header, &later[frame::LEN..]), Ok(later.len()));
    let first = chunk(0, 100, 0, 100);
    assert_eq!(peer[1].send(&first, &[]), Ok(first.len()));
    for _ in 0..2 {
        let mut into = [[0; 100]];
        receive(&mut rank, &mut into).unwrap();
        assert_eq!(into, [counted()]);
    }
}

/// An opener that has the first stream at once, and the second stream after some calls.
struct OneAfterTheOther(Vec<Box<dyn Transport>>, u32);

impl OpenStreams for OneAfterTheOther {
    fn begin(&mut self, _: &OpContext<'_>, batches: &[(usize, Batch)]) -> Result<()> {
        assert_eq!(batches, [(1, Batch::First), (1, Batch::Others)]);
        Ok(())
    }

    fn opened(&mut self, _peer: usize) -> Result<Opened> {
        self.1 += 1;
        let now = matches!(self.1, 1 | 100);
        let streams: Vec<_> = now.then(|| self.0.remove(0)).into_iter().collect();
        Ok(Opened { streams, all: self.0.is_empty() })
    }

    fn name(&self) -> &'static str {
        "local"
    }
}

#[test]
fn a_chunk_of_a_later_operation_waits_for_it_also_where_the_stream_that_it_overtook_opens_later() {
    const LONG: usize = 60_000;
    let (mut rank, mut peer) = rank_and_raw_peer_with(|links, bell| {
        let opener = Box::new(OneAfterTheOther(links, 0));
        Mesh::on_demand(0, vec![0, 1], vec![Vec::new(), Vec::new()], Some(bell), opener)
    });
    let later = chunk(1, LONG, 0, LONG as u64);
    let mut later_header = later[..frame::LEN].to_vec();
    later_header[24] = 1;
    assert_eq!(peer[0].send(&later_header, &later[frame::LEN..]), Ok(later.len()));
    let first = chunk(0, LONG, 0, LONG as u64);
    assert_eq!(peer[1].send(&first, &[]), Ok(first.len()));
    for _ in 0..2 {
        let mut into = vec![0; LONG];
        let outcome = rank.call(Say::new(Kind::Exchange, DType::U8, LONG), |x, cx| {
            x.exchange(cx, &[], &mut [Incoming::new(1, cx.fingerprint, &mut into)])
        });
        outcome.unwrap();
        assert_eq!(into, first[frame::LEN..]);
    }
}

#[test]
fn a_chunk_that_does_not_fit_is_an_error_with_a_name_before_a_byte_of_it_is_used() {
    for (bad, says) in [
        (chunk(0, 100, 60, 41), "with 41 bytes at 60 of 100"),
        (chunk(0, 100, u64::MAX, 2), "with 2 bytes at 18446744073709551615 of 100"),
        (chunk(0, 100, 5, 0), "with 0 bytes at 5 of 100"),
        (chunk(0, 101, 0, 10), "[101]"),
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n".repeat(5), "no message of this protocol"),
    ] {
        let (mut rank, mut peer) = rank_and_raw_peer();
        assert_eq!(peer[1].send(&bad, &[]), Ok(bad.len()));
        let mut into = [[0; 100]];
        let error = receive(&mut rank, &mut into).unwrap_err();
        assert!(matches!(&error, Error::Mismatch(text) if text.contains(says)), "{error}, not {says}");
        assert_eq!(into, [[0; 100]], "bytes of an unchecked chunk were used");
    }
}

#[test]
fn more_bytes_than_a_message_has_are_an_error() {
    let (mut rank, mut peer) = rank_and_raw_peer();
    for (offset, length) in [(0, 60), (50, 50)] {
        let chunk = chunk(0, 100, offset, length);
        assert_eq!(peer[0].send(&chunk, &[]), Ok(chunk.len()));
    }
    let error = receive(&mut rank, &mut [[0; 100]]).unwrap_err();
    assert!(matches!(&error, Error::Mismatch(text) if text.contains("with 50 bytes at 50 of 100")), "{error}");
}

#[test]
fn a_bundle_of_which_one_stream_breaks_loses_the_peer() {
    for in_chunk in [true, false] {
        let (mut rank, [mut first, second]) = rank_and_raw_peer();
        if in_chunk {
            let half = &chunk(0, 100, 0, 100)[..120];
            assert_eq!(first.send(half, &[]), Ok(half.len()));
            drop(first);
            let error = receive(&mut rank, &mut [[0; 100]]).unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
        } else {
            // Bytes that arrive in time on the other stream are still used.
            drop(first);
            let mut second = second;
            let whole = chunk(0, 100, 0, 100);
            assert_eq!(second.send(&whole, &[]), Ok(whole.len()));
            let mut into = [[0; 100]];
            receive(&mut rank, &mut into).unwrap();
            assert_eq!(into, [counted()]);
            let error = receive(&mut rank, &mut into).unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
        }
    }
}

/// A stream that sends with a limited rate, by a clock that counts how often its rank has tried to send, so the load of
/// the machine does not affect it.
struct Slow {
    inner: Local,
    rate: f64,
    tries: Arc<AtomicU32>,
    /// Number of bytes that may be sent, as of this time of the clock.
    credit: (f64, Duration),
}

impl Transport for Slow {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> std::result::Result<usize, Broken> {
        let now = TRY * self.tries.fetch_add(1, Relaxed);
        let (credit, since) = self.credit;
        let credit = (credit + self.rate * now.saturating_sub(since).as_secs_f64()).min(self.rate * BURST);
        let head = &head[..head.len().min(credit as usize)];
        let body = &body[..body.len().min(credit as usize - head.len())];
        let count = if head.is_empty() && body.is_empty() { 0 } else { self.inner.send(head, body)? };
        self.credit = (credit - count as f64, now);
        Ok(count)
    }

    fn recv(&mut self, into: &mut [u8]) -> std::result::Result<usize, Broken> {
        self.inner.recv(into)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Poll
    }

    fn is_wire(&self) -> bool {
        self.inner.is_wire()
    }
}

/// Time that one attempt to send takes.
const TRY: Duration = Duration::from_micros(100);

/// Maximum burst after a pause, in seconds at the rate.
const BURST: f64 = 4e-3;

const HEALTHY: f64 = 40e6;

#[test]
fn a_stream_at_a_tenth_of_the_rate_does_not_hold_up_the_other() {
    let len = 8 << 20;
    for rates in [[HEALTHY, HEALTHY / 10.0], [HEALTHY / 10.0, HEALTHY]] {
        let clocks: [Arc<AtomicU32>; 2] = Default::default();
        let bells = [Doorbell::local(), Doorbell::local()];
        let mut bundles: [Bundle; 2] = Default::default();
        for rate in rates {
            // The stream has room for everything, so that only the rate limits it.
            let (a, b) = Local::pair((bells[0].clone(), bells[1].clone()), 64 << 20);
            for (rank, inner) in [a, b].into_iter().enumerate() {
                let tries = Arc::clone(&clocks[rank]);
                bundles[rank].push(Box::new(Slow { inner, rate, tries, credit: (0.0, Duration::ZERO) }));
            }
        }
        let ([left, right], [a, b]) = (bundles, bells);
        each(&mut [rank(0, left, a), rank(1, right, b)], |r, rank| {
            let out = vec![r as u8 + 1; len];
            let mut into = vec![0; len];
            rank.call(Say::new(Kind::Exchange, DType::U8, len), |x, cx| {
                let fingerprint = cx.fingerprint;
                let send = Outgoing::new(1 - r, fingerprint, &out);
                x.exchange(cx, &[send], &mut [Incoming::new(1 - r, fingerprint, &mut into)])
            })
            .unwrap();
            assert!(into.iter().all(|byte| usize::from(*byte) == 2 - r));
        });
        let tries = clocks.iter().map(|clock| clock.load(Relaxed)).max().unwrap();
        let reached = len as f64 / (TRY * tries).as_secs_f64() / (1.1 * HEALTHY);
        assert!(reached >= 0.8, "{reached:.2} of what both streams can carry");
    }
}
