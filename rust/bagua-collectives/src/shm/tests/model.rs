//! Models of the protocol, driven by the verbs themselves. Ranks are threads over one mapping, with slots of 64 bytes
//! and windows of 1 KiB.
//!
//! All results are compared with the oracle. loom reports bytes of the segment or of an arena that one rank writes
//! while another may use them, and missed wake-ups. Each model names the bugs in `protocol.rs` and
//! `pairwise_exchange.rs` that it was seen to find.

use std::os::fd::{AsFd, BorrowedFd};

use super::*;
use crate::memory::SharedArena;
use crate::sync::model::{explore, explore_latest, explore_three};
use crate::sync::{self, Condvar, Mutex};

/// Sizes in bytes: for a slot, and for two and three chunks in windows.
const SMALL: usize = SLOT;
const TWO: usize = 1536;
const THREE: usize = 2560;

/// Stack size of a rank in words. A verb needs more than loom provides.
const STACK: usize = 32 << 10;

/// Creates the ranks of one host, on one mapping of the segment. Their counts wrap with the second arrival.
fn world(n: usize) -> Vec<Rank> {
    let arena = Arc::new(Arena::create("bagua-model", segment_len(n)).unwrap());
    let one = |index: usize| {
        let mut shm = Shm::new(Arc::clone(&arena), index, (0..n).collect()).unwrap();
        shm.protocol.wind_forward(1);
        shm.protocol.spins = true;
        let limit = Duration::from_secs(60);
        Rank { shm, health: GroupHealth::local(index, n), stats: OpStats::default(), seq: 0, limit }
    };
    (0..n).map(one).collect()
}

/// Runs `act` as each of these ranks, in its own thread, and returns the results once all are done.
fn on_threads<R: Send + 'static, T: Send + 'static>(
    ranks: Vec<R>,
    act: impl Fn(R) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let start = |rank| {
        let act = act.clone();
        loom::thread::Builder::new().stack_size(STACK).spawn(move || act(rank)).unwrap()
    };
    let threads: Vec<_> = ranks.into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Returns a model of `n` ranks that all call these verbs, with these sizes and roots.
fn verbs(n: usize, verbs: &'static [(Kind, usize, usize)]) -> impl Fn() + Send + Sync + 'static {
    move || {
        let ranks = on_threads(world(n), move |mut rank| {
            for (verb, bytes, root) in verbs {
                one(&mut rank, *verb, DType::F32, ReduceOp::Sum, *bytes, *root, true);
            }
            rank
        });
        // Keep all ranks open until the end. Another model covers a rank that closes while its peers run.
        drop(ranks);
    }
}

/// S1 and S2. Finds an arrival without `Release` or a wake-up, a count read without `Acquire` in `has_arrived` or
/// `wait_for_one`, a waiter that does not compare the counts again after it has marked the word, a digest published
/// after the arrival, and a slot shared by all operations.
#[test]
fn slots_of_both_parities_are_not_written_while_a_peer_reads_them() {
    explore_latest(verbs(2, &[(Kind::AllReduce, SMALL, 0); 3]));
}

/// Finds counts that are compared without regard to wrap-around. Includes stale values of the arrival words.
#[test]
fn counts_wrap() {
    explore(verbs(2, &[(Kind::Barrier, 0, 0); 2]));
}

/// W1 and W2. Finds a rank that does not wait for later chunks, a window shared by all chunks, an arrival before the
/// chunk is taken, and results that are collected before all peers have arrived.
#[test]
fn windows_are_filled_again_when_all_have_taken_from_them() {
    explore_latest(verbs(2, &[(Kind::AllReduce, THREE, 0)]));
}

/// W3. Finds a second operation that does not wait for the windows, or waits for one arrival too few.
#[test]
fn an_operation_waits_for_those_who_still_take_the_last_piece_of_the_one_before() {
    explore_latest(verbs(2, &[(Kind::Broadcast, SMALL + 64, 0); 2]));
}

/// X1. Finds a rank that does not wait for later chunks, an arrival before the exchange, and a rank that looks for
/// every chunk in the peer's window.
#[test]
fn two_ranks_swap_pieces_in_one_window_each() {
    explore_latest(verbs(2, &[(Kind::AllGather, 1200, 0)]));
}

/// The descriptors that each of the two ranks has passed, and the condition that notifies the other rank.
type Passed = sync::Arc<(Mutex<[Option<Vec<OwnedFd>>; 2]>, Condvar)>;

struct BetweenThreads {
    me: usize,
    passed: Passed,
}

impl PassDescriptors for BetweenThreads {
    fn pass(&mut self, _cx: &OpContext<'_>, own: &[BorrowedFd<'_>]) -> Result<Vec<Vec<Option<OwnedFd>>>> {
        let copy = |descriptor: &BorrowedFd<'_>| descriptor.try_clone_to_owned().unwrap();
        let (lists, changed) = &*self.passed;
        let mut lists = lists.lock().unwrap();
        lists[self.me] = Some(own.iter().map(copy).collect());
        changed.notify_all();
        while lists.iter().any(Option::is_none) {
            lists = changed.wait(lists).unwrap();
        }
        let theirs = lists[1 - self.me].iter().flatten().map(|descriptor| Some(copy(&descriptor.as_fd()))).collect();
        let mut all = vec![Vec::new(), Vec::new()];
        all[1 - self.me] = theirs;
        Ok(all)
    }
}

/// Makes two ranks reduce tensors of 256 bytes twice, and touch them before and after. A rank's tensor is in its arena
/// if `in_arena` is true for it. The first operation maps the arenas.
fn explore_arena(in_arena: [bool; 2]) {
    const LEN: usize = 256;
    explore_latest(move || {
        let passed = Passed::new((Mutex::default(), Condvar::new()));
        let joined = world(2).into_iter().enumerate().map(|(me, rank)| {
            let registry = Arc::default();
            let arena = SharedArena::new("bagua-model", LEN, &registry).unwrap();
            let between = BetweenThreads { me, passed: passed.clone() };
            (Rank { shm: rank.shm.knowing(registry, Box::new(between)), ..rank }, arena)
        });
        let ranks: Vec<_> = joined.collect();
        let ranks = on_threads(ranks, move |(mut rank, arena)| {
            let me = rank.shm.rank();
            let mut private = vec![0; LEN];
            for _ in 0..2 {
                // SAFETY: one slice of this rank's arena at a time. The model shows that no peer uses it outside of an
                // operation.
                let tensor = if in_arena[me] { unsafe { arena.bytes_mut() } } else { &mut private };
                tensor.copy_from_slice(&data(me, rank.seq, DType::F32, LEN));
                let expected = combined(2, rank.seq, DType::F32, ReduceOp::Sum, LEN, 0..LEN);
                let print = rank.print(Kind::AllReduce, DType::F32, Some(ReduceOp::Sum), None, LEN);
                let verb = Verb::AllReduce(ReduceOp::Sum);
                rank.with(print, |shm, cx| shm.run(cx, verb, Io::in_place(tensor))).unwrap();
                assert!(*tensor == expected[..]);
            }
            let all = in_arena == [true; 2];
            assert_eq!(rank.stats.snapshot().zero_copy, if all { 2 } else { 0 });
            // SAFETY: as above.
            unsafe { arena.bytes_mut() }.fill(0);
            (rank, arena)
        });
        drop(ranks);
    });
}

/// D2, D3 and D4. Finds a rank that returns after its own share is done, and a rank that decides again before its peer
/// has published its new offer.
#[test]
fn tensors_in_an_arena_are_touched_by_peers_during_the_operation_only() {
    explore_arena([true; 2]);
}

/// D1. Finds offers published after the arrival, and a rank without an offer that does not wait for those with one.
#[test]
fn ranks_of_which_one_has_no_tensor_in_the_arena_all_fall_back_to_windows() {
    explore_arena([true, false]);
}

/// Fails if a rank compares its digest with a peer's before the peer has arrived.
#[test]
fn ranks_that_disagree_all_say_what_the_other_does() {
    explore(|| {
        let ranks = on_threads(world(2), |mut rank| {
            let me = rank.shm.rank();
            let kind = [Kind::AllReduce, Kind::AllGather][me];
            let print = rank.print(kind, DType::F32, None, None, SMALL);
            let verb = [Verb::AllReduce(ReduceOp::Sum), Verb::AllGather][me];
            let (src, mut dst) = ([0; SMALL], [0; 2 * SMALL]);
            let dst = &mut dst[..(1 + me) * SMALL];
            let error = rank.with(print, |shm, cx| shm.run(cx, verb, Io::split(&src, dst))).unwrap_err();
            let theirs = [Kind::AllGather, Kind::AllReduce][me].name();
            assert!(matches!(&error, Error::Mismatch(text) if text.contains(theirs)), "{error}");
            rank
        });
        drop(ranks);
    });
}

/// Fails if a waiting rank checks that its peer has closed before it checks that the peer has arrived at the barrier.
#[test]
fn a_rank_that_did_its_part_and_closed_is_not_blamed() {
    explore(|| {
        on_threads(world(2), |mut rank| one(&mut rank, Kind::Barrier, DType::U8, ReduceOp::Sum, 0, 0, false));
    });
}

/// Deadlocks if closing wakes no rank, or if a waiter that is about to sleep misses it, because the arrival word does
/// not change or because the waiter does not check again after it has marked the word.
#[test]
fn a_rank_that_closes_ends_the_wait_of_its_peer() {
    explore(|| {
        let outcomes = on_threads(world(2), |mut rank| {
            let print = rank.print(Kind::Barrier, DType::U8, None, None, 0);
            let waits = rank.shm.rank() == 0;
            waits.then(|| rank.with(print, |shm, cx| shm.run(cx, Verb::Barrier, Io::none())))
        });
        assert!(matches!(outcomes[0], Some(Err(Error::PeerLost { rank: 1, .. }))), "{:?}", outcomes[0]);
    });
}

/// Finds an arrival before the chunk is taken, and a root that collects before all peers have arrived.
#[test]
fn two_ranks_stay_in_step_through_reduce_and_gather() {
    explore_latest(verbs(2, &[(Kind::Reduce, TWO, 0), (Kind::Gather, TWO, 1)]));
}

/// Fails if all chunks share one window, or if the second operation does not wait for the windows.
#[test]
fn two_ranks_stay_in_step_through_scatter_and_reduce_scatter() {
    explore_latest(verbs(2, &[(Kind::Scatter, TWO, 0), (Kind::ReduceScatter, TWO, 0)]));
}

/// Fails if the second operation does not wait for the windows, or waits for one arrival too few.
#[test]
fn two_ranks_stay_in_step_through_all_to_all_and_broadcast() {
    explore_latest(verbs(2, &[(Kind::AllToAll, TWO, 0), (Kind::Broadcast, TWO, 1)]));
}

#[test]
fn two_ranks_stay_in_step_through_all_gather_and_all_reduce() {
    explore_latest(verbs(2, &[(Kind::AllGather, TWO, 0), (Kind::AllReduce, TWO, 0)]));
}

/// Finds a slot shared by all operations, an arrival without `Release` or a wake-up, and a count read without
/// `Acquire`.
#[test]
fn three_ranks_stay_in_step() {
    explore_three(verbs(3, &[(Kind::AllReduce, SMALL, 0); 2]));
}

/// Fails if the second operation does not wait for the windows, or waits for one arrival too few.
#[test]
fn three_ranks_wait_for_each_others_windows() {
    explore_three(verbs(3, &[(Kind::Gather, 200, 0), (Kind::Broadcast, 200, 1)]));
}
