//! The contract of `Collective`, verb by verb, against the oracle; the numbers of the invariants are those of
//! `bagua_core::collective`.

use bagua_core::collective::{Io, Verb};
use bagua_core::types::{DType, Kind, ReduceOp};

use super::implementations::in_rank_order;
use super::oracle::{assert_combined, input, noise};
use super::world::{Rank, Ranks, Say, each, local, world};

macro_rules! contract {
    ($name:ident, $ranks:expr, [$($size:literal),*]) => {
        mod $name {
            use super::*;

            #[test]
            fn reductions_equal_the_oracle_in_every_type_and_op() {
                [$($size),*].into_iter().for_each(|size| super::reductions_equal_the_oracle_in_every_type_and_op($ranks, size));
            }

            #[test]
            fn large_reductions_equal_the_oracle() {
                [$($size),*].into_iter().filter(|size| *size <= 4).for_each(|size| super::large_reductions_equal_the_oracle($ranks, size));
            }

            #[test]
            fn verbs_that_move_bytes_put_each_where_it_belongs() {
                [$($size),*].into_iter().for_each(|size| super::verbs_that_move_bytes_put_each_where_it_belongs($ranks, size));
            }

            #[test]
            fn messages_of_an_exchange_arrive_in_the_order_given() {
                [$($size),*].into_iter().for_each(|size| super::messages_of_an_exchange_arrive_in_the_order_given($ranks, size));
            }

            #[test]
            fn a_barrier_waits_for_every_rank() {
                [$($size),*].into_iter().for_each(|size| super::a_barrier_waits_for_every_rank($ranks, size));
            }

            // Invariant 1: rank order, hence the same bits from run to run and over every transport.
            #[test]
            fn results_are_bitwise_those_of_local_streams() {
                [$($size),*].into_iter().filter(|size| *size <= 4).for_each(|size| super::results_are_bitwise_those_of_local_streams($ranks, size));
            }
        }
    };
}

const SMALL: [usize; 4] = [0, 1, 7, 1023];

fn legal() -> impl Iterator<Item = (DType, ReduceOp)> {
    let all = DType::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op)));
    all.filter(|(dtype, op)| op.check(*dtype).is_ok())
}

/// Returns the elements of a chunk of reduce_scatter in the case of `count`. For large tensors it is less than `count`,
/// so that the test stays fast.
fn chunk_of(count: usize) -> usize {
    if count > 100_000 { count / 4 + 1 } else { count }
}

/// A rank's buffers after a reducing verb.
struct Reduced {
    all_reduce: Vec<u8>,
    reduce: Vec<u8>,
    reduce_scatter: Vec<u8>,
}

/// Runs the three reducing verbs on chunks of `count` elements, in place or split; root is `root`.
fn reduce_all(ranks: &mut [Rank], dtype: DType, op: ReduceOp, count: usize, root: usize, split: bool) -> Vec<Reduced> {
    let n = ranks.len();
    each(ranks, |r, rank| {
        let mine = input(dtype, op, r, count);
        let chunks = input(dtype, op, r, n * chunk_of(count));
        let mut say = Say { op: Some(op), ..Say::new(Kind::AllReduce, dtype, count) };
        let mut run = |say: Say,
                       src: &[u8],
                       out: usize,
                       verb: &dyn Fn(
            &mut dyn bagua_core::collective::Collective,
            &bagua_core::collective::OpContext<'_>,
            Io<'_>,
        ) -> bagua_core::error::Result<()>| {
            if split {
                let mut dst = vec![0xee; out];
                rank.call(say, |c, cx| verb(c, cx, Io::split(src, &mut dst))).unwrap();
                dst
            } else {
                let mut data = src.to_vec();
                rank.call(say, |c, cx| verb(c, cx, Io::in_place(&mut data))).unwrap();
                data
            }
        };
        let all_reduce = run(say, &mine, mine.len(), &|c, cx, io| c.run(cx, Verb::AllReduce(op), io));
        say.kind = Kind::Reduce;
        say.root = Some(root);
        let out = if r == root { mine.len() } else { 0 };
        let mut reduce = run(say, &mine, out, &|c, cx, io| c.run(cx, Verb::Reduce { op, root }, io));
        if r != root && !split {
            assert_eq!(reduce, mine, "reduce changed rank {r}, which is not root");
            reduce.clear();
        }
        (say.kind, say.root) = (Kind::ReduceScatter, None);
        let c = chunk_of(count) * dtype.size();
        let mut reduce_scatter = run(say, &chunks, c, &|c, cx, io| c.run(cx, Verb::ReduceScatter(op), io));
        if !split {
            let own = reduce_scatter[r * c..(r + 1) * c].to_vec();
            reduce_scatter[r * c..(r + 1) * c].copy_from_slice(&chunks[r * c..(r + 1) * c]);
            assert_eq!(reduce_scatter, chunks, "reduce_scatter changed chunks that are not rank {r}'s");
            reduce_scatter = own;
        }
        Reduced { all_reduce, reduce, reduce_scatter }
    })
}

fn check_reductions(ranks: &mut [Rank], dtype: DType, op: ReduceOp, count: usize, in_order: bool) {
    let n = ranks.len();
    let root = (count + op as usize) % n;
    let what = format!("{op:?} of {count} {dtype:?} over {n}");
    let inputs: Vec<Vec<u8>> = (0..n).map(|r| input(dtype, op, r, count)).collect();
    let chunks: Vec<Vec<u8>> = (0..n).map(|r| input(dtype, op, r, n * chunk_of(count))).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let outcomes = [true, false].map(|split| reduce_all(ranks, dtype, op, count, root, split));
    let first = &outcomes[0][0].all_reduce;
    assert_eq!(first.len(), count * dtype.size());
    assert_combined(&what, dtype, op, &inputs, first);
    let of_forms = outcomes.iter().enumerate();
    for (form, r, outcome) in of_forms.flat_map(|(form, o)| o.iter().enumerate().map(move |(r, o)| (form, r, o))) {
        assert!(outcome.all_reduce == *first, "{what}: rank {r}'s all_reduce has other bits than rank 0's");
        if r == root && !in_order {
            assert_combined(&format!("{what}: reduce"), dtype, op, &inputs, &outcome.reduce);
        } else {
            assert!(outcome.reduce.is_empty() && r != root || outcome.reduce == *first, "{what}: reduce on rank {r}");
        }
        let c = chunk_of(count) * dtype.size();
        assert_eq!(outcome.reduce_scatter.len(), c);
        let of_chunk: Vec<&[u8]> = chunks.iter().map(|chunk| &chunk[r * c..(r + 1) * c]).collect();
        // The bits of the other form (in place or split) are compared below.
        if form == 0 && (n <= 9 || r % 16 == 0) {
            assert_combined(&what, dtype, op, &of_chunk, &outcome.reduce_scatter);
        }
    }
    for (r, (in_place, split)) in outcomes[0].iter().zip(&outcomes[1]).enumerate() {
        assert!(in_place.reduce_scatter == split.reduce_scatter, "{what}: reduce_scatter on rank {r}");
    }
}

pub fn reductions_equal_the_oracle_in_every_type_and_op(ranks: Ranks, size: usize) {
    let in_order = in_rank_order(ranks, size);
    let mut ranks = world(ranks, size);
    // In worlds of more than 64 ranks, only the half-precision types are combined in a different way.
    let is_half = |dtype: DType| matches!(dtype, DType::F16 | DType::BF16);
    for (dtype, op) in legal().filter(|(dtype, _)| size <= 64 || is_half(*dtype)) {
        for count in SMALL {
            // Worlds of more than 4 ranks test every type and op with one size only. All sizes occur many times.
            if size <= 4 || count == SMALL[(dtype as usize + op as usize) % 4] {
                check_reductions(&mut ranks, dtype, op, count, in_order);
            }
        }
    }
}

pub fn large_reductions_equal_the_oracle(ranks: Ranks, size: usize) {
    let in_order = in_rank_order(ranks, size);
    let mut ranks = world(ranks, size);
    for (dtype, op) in [(DType::F32, ReduceOp::Sum), (DType::BF16, ReduceOp::Avg), (DType::I64, ReduceOp::Max)] {
        check_reductions(&mut ranks, dtype, op, (1 << 20) + 3, in_order);
    }
    // The ranks' shares have several pieces and differ in length.
    check_reductions(&mut ranks, DType::U8, ReduceOp::Bxor, (3 << 20) + 1, in_order);
}

/// Bytes that differ by rank and place.
fn mark(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| noise(rank, i) as u8).collect()
}

pub fn verbs_that_move_bytes_put_each_where_it_belongs(ranks: Ranks, size: usize) {
    let mut ranks = world(ranks, size);
    let n = size;
    let mut sizes = vec![0, 1, 7, 1023];
    if n <= 4 {
        sizes.push((1 << 20) + 3);
    } else if n <= 9 {
        sizes.push(150_001);
    }
    for (turn, c) in sizes.into_iter().enumerate() {
        let root = turn % n;
        let everybody: Vec<u8> = (0..n).flat_map(|r| mark(r, c)).collect();
        let crossed =
            |r: usize| -> Vec<u8> { (0..n).flat_map(|p| mark(p, n * c)[r * c..(r + 1) * c].to_vec()).collect() };
        each(&mut ranks, |r, rank| {
            let own = r * c..(r + 1) * c;
            let mut say = Say::new(Kind::Broadcast, DType::U8, c);
            say.root = Some(root);
            let mut data = mark(r, c);
            rank.call(say, |x, cx| x.run(cx, Verb::Broadcast { root }, Io::in_place(&mut data))).unwrap();
            assert!(data == mark(root, c), "broadcast of {c} from {root} to {r}");

            (say.kind, say.root) = (Kind::AllGather, None);
            let mut dst = vec![0xee; n * c];
            rank.call(say, |x, cx| x.run(cx, Verb::AllGather, Io::split(&mark(r, c), &mut dst))).unwrap();
            assert!(dst == everybody, "all_gather of {c} to {r}");
            let mut data = vec![0xee; n * c];
            data[own.clone()].copy_from_slice(&mark(r, c));
            rank.call(say, |x, cx| x.run(cx, Verb::AllGather, Io::in_place(&mut data))).unwrap();
            assert!(data == everybody, "all_gather of {c} in place on {r}");

            (say.kind, say.root) = (Kind::Gather, Some(root));
            let mut dst = vec![0xee; if r == root { n * c } else { 0 }];
            rank.call(say, |x, cx| x.run(cx, Verb::Gather { root }, Io::split(&mark(r, c), &mut dst))).unwrap();
            assert!(r != root || dst == everybody, "gather of {c} on {root}");
            let mut data = vec![0xee; n * c];
            data[own.clone()].copy_from_slice(&mark(r, c));
            let before = data.clone();
            rank.call(say, |x, cx| x.run(cx, Verb::Gather { root }, Io::in_place(&mut data))).unwrap();
            assert!(data == if r == root { everybody.clone() } else { before }, "gather of {c} in place on {r}");

            say.kind = Kind::Scatter;
            let src = if r == root { everybody.clone() } else { Vec::new() };
            let mut dst = vec![0xee; c];
            rank.call(say, |x, cx| x.run(cx, Verb::Scatter { root }, Io::split(&src, &mut dst))).unwrap();
            assert!(dst == mark(r, c), "scatter of {c} from {root} to {r}");
            let mut data = if r == root { everybody.clone() } else { vec![0xee; n * c] };
            let mut expected = data.clone();
            expected[own.clone()].copy_from_slice(&mark(r, c));
            rank.call(say, |x, cx| x.run(cx, Verb::Scatter { root }, Io::in_place(&mut data))).unwrap();
            assert!(data == expected, "scatter of {c} in place on {r}");

            (say.kind, say.root) = (Kind::AllToAll, None);
            let mut dst = vec![0xee; n * c];
            rank.call(say, |x, cx| x.run(cx, Verb::AllToAll, Io::split(&mark(r, n * c), &mut dst))).unwrap();
            assert!(dst == crossed(r), "all_to_all of {c} to {r}");
            let mut data = mark(r, n * c);
            rank.call(say, |x, cx| x.run(cx, Verb::AllToAll, Io::in_place(&mut data))).unwrap();
            assert!(data == crossed(r), "all_to_all of {c} in place on {r}");
        });
    }
}

pub fn messages_of_an_exchange_arrive_in_the_order_given(ranks: Ranks, size: usize) {
    use bagua_core::collective::{Incoming, Outgoing};
    let mut ranks = world(ranks, size);
    let n = size;
    // To the peer at distance d: d messages, of lengths that differ by pair and place.
    let message = |from: usize, to: usize, i: usize| mark(from * n + to, (from * 7 + to * 31 + i * 1000) % 2500);
    let distance = |from: usize, to: usize| (to + n - from) % n % 4;
    each(&mut ranks, |r, rank| {
        let out: Vec<(usize, Vec<u8>)> =
            (0..n).flat_map(|to| (0..distance(r, to)).map(move |i| (to, message(r, to, i)))).collect();
        let expected: Vec<(usize, Vec<u8>)> =
            (0..n).flat_map(|from| (0..distance(from, r)).map(move |i| (from, message(from, r, i)))).collect();
        let mut got: Vec<(usize, Vec<u8>)> = expected.iter().map(|(from, m)| (*from, vec![0xee; m.len()])).collect();
        rank.call(Say::new(Kind::Exchange, DType::U8, 0), |x, cx| {
            let fingerprint = cx.fingerprint;
            let sends: Vec<_> = out.iter().map(|(peer, data)| Outgoing::new(*peer, fingerprint, data)).collect();
            let mut recvs: Vec<_> =
                got.iter_mut().map(|(peer, data)| Incoming::new(*peer, fingerprint, data)).collect();
            x.exchange(cx, &sends, &mut recvs)
        })
        .unwrap();
        assert!(got == expected, "messages to rank {r}");
    });
}

pub fn a_barrier_waits_for_every_rank(ranks: Ranks, size: usize) {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    let mut ranks = world(ranks, size);
    let arrived = AtomicUsize::new(0);
    each(&mut ranks, |_, rank| {
        for turn in 1..=20 {
            arrived.fetch_add(1, SeqCst);
            rank.call(Say::new(Kind::Barrier, DType::U8, 0), |x, cx| x.run(cx, Verb::Barrier, Io::none())).unwrap();
            assert!(arrived.load(SeqCst) >= turn * size);
        }
    });
}

pub fn results_are_bitwise_those_of_local_streams(ranks: Ranks, size: usize) {
    for (dtype, count) in [(DType::F32, 1023), (DType::F16, 70_001), (DType::F32, 300_007), (DType::BF16, 7)] {
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product] {
            let bits = |ranks: Ranks| {
                let outcome = reduce_all(&mut world(ranks, size), dtype, op, count, size - 1, false);
                outcome.into_iter().map(|r| (r.all_reduce, r.reduce, r.reduce_scatter)).collect::<Vec<_>>()
            };
            let (first, again, reference) = (bits(ranks), bits(ranks), bits(local));
            assert!(first == again, "{op:?} of {count} {dtype:?} over {size} differs from run to run");
            assert!(
                first == reference || !in_rank_order(ranks, size),
                "{op:?} of {count} {dtype:?} over {size} differs from local streams"
            );
        }
    }
}
