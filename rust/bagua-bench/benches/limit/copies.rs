//! `--copies`: ordinary tensors, which every variant has to copy.
//!
//! There are two ranks. *windows* uses `memcpy` through shared memory in pieces that fit the cache, with bare flags.
//! *kernel* uses `process_vm_readv` and `process_vm_writev`, and each side does half of the work. *ours* runs the same
//! verb. Sizes are those of the tensor for broadcast and all_reduce, and of the result for all_gather.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use bagua_core::collective::{self, Io};
use bagua_core::group::{Lane, Options};
use bagua_core::types::{DType, ReduceOp};

use crate::{Board, CONTROL, KIB, MOST, calls, floats, median_of};

const SIZES: [usize; 6] = [256 * KIB, 512 * KIB, 1024 * KIB, 4096 * KIB, 16_384 * KIB, MOST];
/// Bytes of a window. Half and twice that are no faster.
const WINDOW: usize = 256 * KIB;
/// Offset of a rank's flags.
const FLAGS: usize = 2048;
/// Bytes that the kernel moves at once.
const TRANSFER: usize = 1024 * KIB;
const VARIANTS: [&str; 3] = ["windows", "kernel", "ours"];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Verb {
    AllReduce,
    Broadcast,
    AllGather,
}

/// A peer's process, and where its tensors begin.
struct Peer {
    process: i32,
    source: usize,
    target: usize,
}

/// This rank's tensors, and the bare variants.
struct Bare<'a> {
    board: &'a Board,
    peer: Peer,
    source: &'a [u8],
    target: &'a mut [u8],
    /// Destination of the kernel's copies, before they are added up.
    scratch: &'a mut [u8],
}

impl Bare<'_> {
    fn flag(&self, rank: usize, which: usize) -> &std::sync::atomic::AtomicU32 {
        self.board.arena.word(rank * CONTROL + FLAGS + which * 128)
    }

    /// Tells the peer that this rank has reached `count`.
    fn raise(&self, which: usize, count: usize) {
        self.flag(self.board.rank, which).store(count as u32, Release);
    }

    fn wait(&self, which: usize, count: usize) {
        while (self.flag(1 - self.board.rank, which).load(Acquire) as usize) < count {
            std::hint::spin_loop();
        }
    }

    /// Returns a rank's window for a piece.
    #[expect(clippy::mut_from_ref, reason = "the flags say whose it is")]
    fn window(&self, rank: usize, piece: usize, len: usize) -> &mut [u8] {
        let begin = piece % 2 * WINDOW;
        // SAFETY: the flags say whose it is.
        unsafe { self.board.bytes(rank, begin..begin + len) }
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        for (step, into) in into.chunks_mut(TRANSFER).enumerate() {
            let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
            let remote = libc::iovec { iov_base: (at + step * TRANSFER) as *mut _, iov_len: into.len() };
            // SAFETY: into a slice; the barriers keep the peer off what is read.
            let moved =
                unsafe { libc::process_vm_readv(self.peer.process, &raw const local, 1, &raw const remote, 1, 0) };
            assert_eq!(moved, into.len() as isize, "{}", std::io::Error::last_os_error());
        }
    }

    fn write(&self, at: usize, from: &[u8]) {
        for (step, from) in from.chunks(TRANSFER).enumerate() {
            let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
            let remote = libc::iovec { iov_base: (at + step * TRANSFER) as *mut _, iov_len: from.len() };
            // SAFETY: from a slice; the barriers keep the peer off what is written.
            let moved =
                unsafe { libc::process_vm_writev(self.peer.process, &raw const local, 1, &raw const remote, 1, 0) };
            assert_eq!(moved, from.len() as isize, "{}", std::io::Error::last_os_error());
        }
    }

    fn by_windows(&mut self, verb: Verb, bytes: usize) {
        let (me, peer) = (self.board.rank, 1 - self.board.rank);
        let half = bytes / 2;
        let piece = |of: usize, at: usize| (at * WINDOW).min(of)..((at + 1) * WINDOW).min(of);
        match verb {
            Verb::Broadcast => {
                for at in 0..bytes.div_ceil(WINDOW) {
                    let range = piece(bytes, at);
                    if me == 0 {
                        self.wait(0, (at + 1).saturating_sub(2));
                        self.window(0, at, range.len()).copy_from_slice(&self.target[range]);
                    } else {
                        self.wait(0, at + 1);
                        let window = self.window(0, at, range.len()) as *const [u8];
                        // SAFETY: the flags say whose it is.
                        self.target[range].copy_from_slice(unsafe { &*window });
                    }
                    self.raise(0, at + 1);
                }
            }
            Verb::AllGather => {
                for at in 0..half.div_ceil(WINDOW) {
                    let range = piece(half, at);
                    self.wait(1, (at + 1).saturating_sub(2));
                    self.window(me, at, range.len()).copy_from_slice(&self.source[range.clone()]);
                    self.raise(0, at + 1);
                    let own = me * half + range.start;
                    self.target[own..own + range.len()].copy_from_slice(&self.source[range.clone()]);
                    self.wait(0, at + 1);
                    let window = self.window(peer, at, range.len()) as *const [u8];
                    let theirs = peer * half + range.start;
                    // SAFETY: the flags say whose it is.
                    self.target[theirs..theirs + range.len()].copy_from_slice(unsafe { &*window });
                    self.raise(1, at + 1);
                }
            }
            Verb::AllReduce => {
                let pieces = half.div_ceil(WINDOW);
                let theirs = |range: std::ops::Range<usize>| peer * half + range.start..peer * half + range.end;
                // The peer's share goes out, and comes back one piece later.
                for at in 0..=pieces {
                    if at < pieces {
                        let range = piece(half, at);
                        self.window(me, at, range.len()).copy_from_slice(&self.target[theirs(range)]);
                        self.raise(0, at + 1);
                        self.wait(0, at + 1);
                        let range = piece(half, at);
                        let window = self.window(peer, at, range.len()) as *mut [u8];
                        let own = &mut self.target[me * half + range.start..me * half + range.end];
                        // SAFETY: the flags say whose it is; `main` has looked for the feature.
                        #[allow(unused_unsafe, reason = "the loop needs a feature only where there is one")]
                        unsafe {
                            crate::two(floats(own), floats(&mut *window));
                        }
                        self.raise(1, at + 1);
                    }
                    if at > 0 {
                        let range = piece(half, at - 1);
                        self.wait(1, at);
                        let window = self.window(me, at - 1, range.len()) as *const [u8];
                        // SAFETY: the flags say whose it is.
                        self.target[theirs(range)].copy_from_slice(unsafe { &*window });
                    }
                }
            }
        }
    }

    fn by_the_kernel(&mut self, verb: Verb, bytes: usize) {
        let me = self.board.rank;
        let half = bytes / 2;
        let target = self.target as *mut [u8];
        // SAFETY: the only slice of it that is used here.
        let target = unsafe { &mut *target };
        match verb {
            Verb::Broadcast if me == 0 => self.write(self.peer.target + half, &target[half..bytes]),
            Verb::Broadcast => self.read(self.peer.target, &mut target[..half]),
            Verb::AllGather => {
                let (theirs, own) = ((1 - me) * half, me * half);
                self.read(self.peer.source, &mut target[theirs..theirs + half]);
                target[own..own + half].copy_from_slice(&self.source[..half]);
            }
            Verb::AllReduce => {
                let scratch = self.scratch as *mut [u8];
                for begin in (me * half..(me + 1) * half).step_by(WINDOW) {
                    let len = WINDOW.min((me + 1) * half - begin);
                    // SAFETY: the only slice of it.
                    let scratch = unsafe { &mut (&mut *scratch)[..len] };
                    self.read(self.peer.target + begin, scratch);
                    let own = &mut target[begin..begin + len];
                    // SAFETY: `main` has looked for the feature.
                    #[allow(unused_unsafe, reason = "the loop needs a feature only where there is one")]
                    unsafe {
                        crate::two(floats(own), floats(scratch));
                    }
                    self.write(self.peer.target + begin, own);
                }
            }
        }
    }
}

fn ours(lane: &mut Lane, verb: Verb, source: &[u8], target: &mut [u8]) {
    let options = Options::default();
    let done = match verb {
        Verb::AllReduce => {
            lane.run(&options, DType::F32, collective::Verb::AllReduce(ReduceOp::Sum), Io::in_place(target))
        }
        Verb::Broadcast => {
            lane.run(&options, DType::F32, collective::Verb::Broadcast { root: 0 }, Io::in_place(target))
        }
        Verb::AllGather => {
            let src = &source[..target.len() / 2];
            lane.run(&options, DType::F32, collective::Verb::AllGather, Io::split(src, target))
        }
    };
    done.expect("all ranks live");
}

fn check(verb: Verb, target: &mut [u8], call: usize) {
    let floats = floats(target);
    let value = |rank: usize| (rank + 1 + call) as f32;
    let step = if call == 0 { 1 } else { 509 };
    let is = |part: &[f32], value: f32| {
        assert!(part.iter().step_by(step).chain(part.last()).all(|it| *it == value), "{verb:?}: a wrong result");
    };
    match verb {
        Verb::AllReduce => is(floats, value(0) + value(1)),
        Verb::Broadcast => is(floats, value(0)),
        Verb::AllGather => floats.chunks(floats.len() / 2).enumerate().for_each(|(rank, chunk)| is(chunk, value(rank))),
    }
}

/// A tensor on a cache line, as torch's are.
fn tensor(memory: &mut [u8]) -> &mut [u8] {
    let begin = memory.as_ptr().align_offset(64);
    &mut memory[begin..begin + MOST]
}

pub fn rank(mut board: Board, lane: &mut Lane, short: bool) {
    let (me, mut memory) = (board.rank, [vec![0; MOST + 64], vec![0; MOST + 64]]);
    let mut scratch = vec![0; WINDOW];
    let [source, target] = &mut memory;
    let (source, target) = (tensor(source), tensor(target));
    board.barrier();
    let mine = [std::process::id() as usize, source.as_ptr() as usize, target.as_ptr() as usize];
    let all = board.spread(&mine.map(usize::to_ne_bytes).concat());
    let number = |at: usize| usize::from_ne_bytes(*all[1 - me][8 * at..].first_chunk().expect("three numbers"));
    let peer = || Peer { process: number(0) as i32, source: number(1), target: number(2) };
    if me == 0 {
        println!("float32, 2 ranks, ordinary memory: median over calls of the slowest rank");
        println!("(after kernel: windows to it; after ours: windows and kernel to it; above 1 it is faster)");
        println!("{:<10} {:>9}  {:>10}  {:>16}  {:>10}", "", "bytes", "windows", "kernel", "ours");
    }
    for verb in [Verb::AllReduce, Verb::Broadcast, Verb::AllGather] {
        for bytes in SIZES {
            let calls = calls(bytes, short);
            for call in 0..calls {
                for (variant, name) in VARIANTS.into_iter().enumerate() {
                    floats(&mut source[..bytes]).fill(std::hint::black_box((me + 1 + call) as f32));
                    let old = if verb == Verb::AllGather { -7.0 } else { (me + 1 + call) as f32 };
                    floats(&mut target[..bytes]).fill(std::hint::black_box(old));
                    for which in 0..2 {
                        board.arena.word(me * CONTROL + FLAGS + which * 128).store(0, Relaxed);
                    }
                    board.barrier();
                    let begun = Instant::now();
                    if name == "ours" {
                        ours(lane, verb, source, &mut target[..bytes]);
                    } else {
                        let (source, target, scratch) = (&*source, &mut *target, &mut scratch[..]);
                        let mut bare = Bare { board: &board, peer: peer(), source, target, scratch };
                        if name == "windows" {
                            bare.by_windows(verb, bytes);
                        } else {
                            bare.by_the_kernel(verb, bytes);
                        }
                        board.barrier();
                    }
                    let time = u64::try_from(begun.elapsed().as_nanos()).expect("a short time");
                    board.time_of(me, variant, call).store(time, Relaxed);
                    check(verb, &mut target[..bytes], call);
                    board.barrier();
                }
            }
            if me == 0 {
                let [windows, kernel, ours] = [0, 1, 2].map(|variant| median_of(&board, variant, calls));
                let us = |time: f64| format!("{:>7.1} us", time * 1e6);
                println!(
                    "{:<10} {:>5} KiB  {}  {} {:>5.2}  {} {:>7.2} {:>7.2}",
                    format!("{verb:?}"),
                    bytes / KIB,
                    us(windows),
                    us(kernel),
                    windows / kernel,
                    us(ours),
                    windows / ours,
                    kernel / ours
                );
            }
            board.barrier();
        }
    }
}
