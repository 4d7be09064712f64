//! Comparison of all_reduce with the limit that the memory of this machine sets.
//!
//! The limit is measured with processes that map all buffers. Each process combines its own share of all buffers in a
//! plain loop and writes the result into all of them, between two barriers. The same processes alternate these calls
//! with our all_reduce of tensors in an arena and of ordinary tensors, by [`Group`] from bind to lane. Every buffer is
//! rewritten before every call. A call takes as long as its slowest rank. The table shows medians over calls, as bytes
//! of the tensor per second, and ratios to the limit.
//!
//! `cargo bench --bench limit -- [--short] [--ranks 2|4] [--copies]`. `--copies` prints another table (`copies`). The
//! processes share one anonymous file, which they inherit.

#[path = "limit/copies.rs"]
mod copies;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use bagua_core::collective::{Io, Verb};
use bagua_core::group::{Bootstrap, Config, Group, Lane, Options};
use bagua_core::memory::{Arena, SharedArena};
use bagua_core::types::{DType, Kind, ReduceOp};

const KIB: usize = 1024;
const SIZES: [usize; 6] = [KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16_384 * KIB, 65_536 * KIB];
const MOST: usize = SIZES[SIZES.len() - 1];
/// The most calls of one kind at one size.
const CALLS: usize = 2000;
const LINE: usize = 128;
/// Offset of a rank's address. In front of the buffers, each rank has its barrier counter, its address, and nanoseconds
/// of [`Variant::ALL`] per call.
const ADDRESS: usize = LINE;
const TIMES: usize = 4096;
const CONTROL: usize = TIMES + Variant::ALL.len() * CALLS * 8;

#[derive(Clone, Copy)]
enum Variant {
    Limit,
    InPlace,
    Ordinary,
}

impl Variant {
    const ALL: [Variant; 3] = [Variant::Limit, Variant::InPlace, Variant::Ordinary];
}

/// Memory that the processes share.
struct Board {
    arena: Arena,
    rank: usize,
    ranks: usize,
    /// Barriers passed.
    passed: u32,
}

impl Board {
    fn len(ranks: usize) -> usize {
        (ranks * CONTROL).next_multiple_of(2 << 20) + ranks * MOST
    }

    /// Waits until all ranks have called this. Yields if ranks may outnumber cores, as the barriers of the core do.
    fn barrier(&mut self) {
        self.passed += 1;
        let counter = |rank: usize| self.arena.word(rank * CONTROL);
        counter(self.rank).store(self.passed, Release);
        for rank in 0..self.ranks {
            while counter(rank).load(Acquire) < self.passed {
                if self.ranks > 2 {
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
            }
        }
    }

    /// Returns a rank's buffer.
    ///
    /// # Safety
    /// The caller keeps the rule of [`Arena::slice_mut`]: this process uses one slice of a range at a time, between
    /// barriers that keep the other processes off it.
    #[expect(clippy::mut_from_ref, reason = "exclusion is across processes; the barriers promise it")]
    unsafe fn bytes(&self, rank: usize, range: std::ops::Range<usize>) -> &mut [u8] {
        let begin = (self.ranks * CONTROL).next_multiple_of(2 << 20) + rank * MOST;
        // SAFETY: by this function's promise.
        unsafe { self.arena.slice_mut(begin + range.start..begin + range.end) }
    }

    /// Returns the place of the nanoseconds that a call of a variant took on a rank.
    fn time_of(&self, rank: usize, variant: usize, call: usize) -> &std::sync::atomic::AtomicU64 {
        self.arena.long(rank * CONTROL + TIMES + (variant * CALLS + call) * 8)
    }

    /// Returns the address of every rank, by rank.
    fn spread(&mut self, mine: &[u8]) -> Vec<Vec<u8>> {
        let place = |rank: usize| rank * CONTROL + ADDRESS;
        // SAFETY: only this rank writes there, before the barrier.
        unsafe { self.arena.slice_mut(place(self.rank) + 8..place(self.rank) + 8 + mine.len()) }.copy_from_slice(mine);
        self.arena.long(place(self.rank)).store(mine.len() as u64, Relaxed);
        self.barrier();
        let read = |rank: usize| {
            let len = self.arena.long(place(rank)).load(Relaxed) as usize;
            // SAFETY: no rank writes there after the barrier.
            unsafe { self.arena.slice(place(rank) + 8..place(rank) + 8 + len) }.to_vec()
        };
        (0..self.ranks).map(read).collect()
    }
}

fn floats(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: any bits are a float.
    let (before, floats, after) = unsafe { bytes.align_to_mut() };
    assert!(before.is_empty() && after.is_empty());
    floats
}

/// The plain loop for two ranks.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
fn two(a: &mut [f32], b: &mut [f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        let sum = *a + *b;
        *a = sum;
        *b = sum;
    }
}

/// The plain loop for four ranks.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
fn four(a: &mut [f32], b: &mut [f32], c: &mut [f32], d: &mut [f32]) {
    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
        let sum = *a + *b + *c + *d;
        *a = sum;
        *b = sum;
        *c = sum;
        *d = sum;
    }
}

/// The limit.
fn plain(board: &mut Board, bytes: usize) {
    board.barrier();
    let each = bytes / board.ranks;
    let mine = board.rank * each..(board.rank + 1) * each;
    // SAFETY: between the barriers each rank uses its own share of all buffers.
    let part = |rank: usize| floats(unsafe { board.bytes(rank, mine.clone()) });
    // SAFETY: `main` has looked for the feature.
    #[allow(unused_unsafe, reason = "the loops need a feature only where there is one")]
    unsafe {
        match board.ranks {
            2 => two(part(0), part(1)),
            _ => four(part(0), part(1), part(2), part(3)),
        }
    }
    board.barrier();
}

fn ours(lane: &mut Lane, data: &mut [u8]) {
    lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(data))
        .expect("all ranks live");
}

fn rewrite(data: &mut [f32], rank: usize, call: usize) {
    let value = (rank + 1 + call) as f32;
    data.fill(std::hint::black_box(value));
}

fn check(data: &[f32], ranks: usize, call: usize) {
    let expected: f32 = (0..ranks).map(|rank| (rank + 1 + call) as f32).sum();
    // The first call is checked completely. Later calls are sampled, so that the checks do not take longer than the
    // calls.
    let step = if call == 0 { 1 } else { 509 };
    assert!(data.iter().step_by(step).all(|value| *value == expected), "call {call}: a wrong sum");
    assert_eq!(data.last(), Some(&expected), "call {call}: a wrong sum at the end");
}

/// Returns the number of calls of each kind at a size.
fn calls(bytes: usize, short: bool) -> usize {
    let budget = if short { 512 << 20 } else { 4 << 30 };
    (budget / bytes).clamp(7, if short { CALLS / 4 } else { CALLS })
}

/// This rank's tensors, one per variant.
struct Tensors {
    arena: SharedArena,
    ordinary: Vec<u8>,
}

impl Tensors {
    fn of<'a>(&'a mut self, board: &'a Board, variant: Variant, bytes: usize) -> &'a mut [u8] {
        match variant {
            // SAFETY: this process uses one slice at a time, and the others use this rank's only inside the calls.
            Variant::Limit => unsafe { board.bytes(board.rank, 0..bytes) },
            // SAFETY: as above.
            Variant::InPlace => unsafe { &mut self.arena.bytes_mut()[..bytes] },
            Variant::Ordinary => {
                // On a cache line, as torch's tensors are.
                let begin = self.ordinary.as_ptr().align_offset(64);
                &mut self.ordinary[begin..begin + bytes]
            }
        }
    }
}

fn measure(board: &mut Board, lane: &mut Lane, tensors: &mut Tensors, bytes: usize, calls: usize) {
    let (me, ranks) = (board.rank, board.ranks);
    for call in 0..calls {
        for variant in Variant::ALL {
            rewrite(floats(tensors.of(board, variant, bytes)), me, call);
            board.barrier();
            let begun = Instant::now();
            match variant {
                Variant::Limit => plain(board, bytes),
                Variant::InPlace | Variant::Ordinary => ours(lane, tensors.of(board, variant, bytes)),
            }
            let time = begun.elapsed();
            board
                .time_of(me, variant as usize, call)
                .store(u64::try_from(time.as_nanos()).expect("a short time"), Relaxed);
            check(floats(tensors.of(board, variant, bytes)), ranks, call);
            board.barrier();
        }
    }
}

/// Median over calls of the slowest rank, in seconds.
fn median_of(board: &Board, variant: usize, calls: usize) -> f64 {
    let slowest =
        |call| (0..board.ranks).map(|rank| board.time_of(rank, variant, call).load(Relaxed)).max().unwrap_or(0);
    // The first call is left out: its caches are cold and its branches are not predicted yet.
    let mut times: Vec<u64> = (1..calls).map(slowest).collect();
    times.sort_unstable();
    times[times.len() / 2] as f64 * 1e-9
}

fn rank(mut board: Board, short: bool, copies: bool) {
    let secret = b"limit".to_vec();
    let config = Config { secret, timeout: Duration::from_secs(60), ..Config::new(board.rank, board.ranks) };
    let pending = Bootstrap::bind(config).expect("a free port");
    let addresses = board.spread(pending.address());
    let group: Group = pending.connect(&addresses).expect("all ranks come");
    let mut lane = group.lane().expect("a lane");
    if copies {
        copies::rank(board, &mut lane, short);
        return;
    }
    let arena = group.arena(MOST, "bagua-limit").expect("memory for the largest size");
    let mut tensors = Tensors { arena, ordinary: vec![0; MOST + 64] };
    if board.rank == 0 {
        println!("all_reduce, float32, sum, {} ranks: median over calls of the slowest rank", board.ranks);
        println!("{:>9}  {:>19}  {:>26}  {:>26}", "bytes", "limit", "in an arena", "ordinary memory");
    }
    for bytes in SIZES {
        let calls = calls(bytes, short);
        measure(&mut board, &mut lane, &mut tensors, bytes, calls);
        if board.rank == 0 {
            let [limit, in_place, ordinary] = Variant::ALL.map(|variant| median_of(&board, variant as usize, calls));
            let column = |time: f64| format!("{:6.2} GB/s {:7.1} us", bytes as f64 / time * 1e-9, time * 1e6);
            let ratio = |time: f64| format!("{} {:5.2}", column(time), limit / time);
            println!("{:>5} KiB  {}  {}  {}", bytes / KIB, column(limit), ratio(in_place), ratio(ordinary));
        }
        board.barrier();
    }
    if board.rank == 0 {
        let zero_copy = group.stats().of(Kind::AllReduce).zero_copy.load(Relaxed);
        println!("({zero_copy} calls were zero-copy; tensors that fit a slot never are)");
    }
    board.barrier();
}

/// Starts the other ranks; kills those that are left when this one ends early.
struct Others(Vec<Child>);

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            if std::thread::panicking() {
                // It may have ended by itself.
                let _ = child.kill();
            }
            let status = child.wait().expect("a child of this process");
            assert!(std::thread::panicking() || status.success(), "a rank failed");
        }
    }
}

fn main() {
    if bagua_bench::listed("limit") {
        return;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)?.parse::<usize>().ok()
    };
    let short = arguments.iter().any(|argument| argument == "--short");
    let copies = arguments.iter().any(|argument| argument == "--copies");
    let ranks = number("--ranks").unwrap_or(2);
    assert!(ranks == 2 || !copies, "the table of copies is of 2 ranks");
    assert!(ranks == 2 || ranks == 4, "the plain loop is written for 2 and for 4 ranks");
    #[cfg(target_arch = "x86_64")]
    if !is_x86_feature_detected!("avx2") {
        println!("no AVX2: the plain loop would have to be compiled for something else");
        return;
    }
    if let (Some(index), Some(fd)) = (number("--rank"), number("--fd")) {
        // SAFETY: inherited for this purpose from the process that started this one.
        let fd = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).expect("a descriptor")) };
        let arena = Arena::from_fd(fd).expect("the file of rank 0");
        rank(Board { arena, rank: index, ranks, passed: 0 }, short, copies);
        return;
    }
    let arena = Arena::create("bagua-limit", Board::len(ranks)).expect("shared memory");
    rustix::io::fcntl_setfd(arena.fd(), rustix::io::FdFlags::empty()).expect("an open descriptor");
    let start = |rank: usize| {
        Command::new(std::env::current_exe().expect("this program"))
            .args(["--rank", &rank.to_string(), "--fd", &arena.fd().as_raw_fd().to_string()])
            .args(["--ranks", &ranks.to_string()])
            .args(short.then_some("--short"))
            .args(copies.then_some("--copies"))
            .spawn()
            .expect("another process")
    };
    let others = Others((1..ranks).map(start).collect());
    rank(Board { arena, rank: 0, ranks, passed: 0 }, short, copies);
    drop(others);
}
