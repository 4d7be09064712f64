//! Replacements for [`super`]'s items in models, built on loom.
//!
//! Differences from loom itself:
//!
//! - **Sequential consistency.** loom treats `SeqCst` accesses as `AcqRel`. Here, a `SeqCst` store or read-modify-write
//!   publishes everything its thread has seen, and a `SeqCst` load first acquires everything published so far. So if
//!   two threads each write one word and then load the other's word, at least one of them sees the other's write; if
//!   any of the four accesses is weaker, possibly neither does. This also orders the surrounding accesses, and is thus
//!   stronger than C++.
//! - **Time.** Every measured time is [`ELAPSED`]: a spin never succeeds, and no deadline passes. Futexes and condition
//!   variables never time out, so a thread that only a timeout would wake is a deadlock, which loom reports.
//! - **Arc.** Counts references like the standard library, with `Relaxed` and `Release`. loom's own `Arc` orders more.
//! - **Shared memory.** The bytes are real. The atomic words come from a pool of zeroed loom atomics, assigned to
//!   addresses in the order of first use. Creating a slice counts as an access to every [`BLOCK`] it overlaps, and loom
//!   reports conflicting accesses that nothing orders.

#![allow(missing_docs, reason = "the methods are those of the standard library")]

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;

pub use loom::hint::spin_loop;
pub use loom::sync::atomic::fence;
pub use loom::sync::{Condvar, Mutex, MutexGuard};

use loom::cell::UnsafeCell;
use loom::sync::atomic as inner;
use loom::thread::Thread;

/// Number of checks in a spin between two readings of the clock.
pub const SPINS: u32 = 0;

/// Duration shown by every clock: longer than any spin, and shorter than any deadline.
const ELAPSED: Duration = Duration::from_millis(1);

/// Size of a block of shared memory, whose accesses are tracked together.
const BLOCK: usize = 64;

/// Limits per model: words that threads may sleep on, and words, longs and blocks of shared memory.
const FUTEXES: usize = 8;
const WORDS: usize = 24;
const LONGS: usize = 96;
const BLOCKS: usize = 192;

/// Returns the size of a buffer in shared memory. Models use small buffers, so that a few bytes fill them.
pub const fn buffer_len(bytes: usize) -> usize {
    bytes / 256
}

thread_local! {
    /// True if `Acquire` loads return only the latest value in the model that this thread runs.
    pub(super) static LATEST: Cell<bool> = const { Cell::new(false) };
}

loom::lazy_static! {
    /// Every `SeqCst` operation accesses this variable, which orders stores before later loads.
    static ref ORDER: inner::AtomicU64 = inner::AtomicU64::new(0);
    static ref SLEEPERS: Pool<Mutex<Vec<Thread>>> = Pool::new(FUTEXES, Mutex::default);
    static ref SHARED: LoomMemory = LoomMemory::new();
}

/// Creates the state of the model. Must run first, because state created by a later thread is ordered only after that
/// thread's past.
pub(super) fn prepare() {
    let (_, _, _) = (&*ORDER, &*SLEEPERS, &*SHARED);
}

macro_rules! atomics {
    ($($name:ident($value:ty)),*) => {$(
        /// The atomic of loom with the name of the standard library's.
        #[derive(Debug)]
        pub struct $name(inner::$name);

        #[allow(dead_code)]
        impl $name {
            pub fn new(value: $value) -> $name {
                $name(inner::$name::new(value))
            }

            pub fn load(&self, order: Ordering) -> $value {
                if order == SeqCst {
                    ORDER.fetch_add(0, Acquire);
                }
                match order {
                    Acquire if LATEST.get() => self.0.fetch_or(<$value>::default(), Acquire),
                    SeqCst => self.0.load(Acquire),
                    _ => self.0.load(order),
                }
            }

            pub fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, if order == SeqCst { Release } else { order });
                published(order);
            }

            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                let before = self.0.swap(value, weaker(order));
                published(order);
                before
            }

            pub fn fetch_or(&self, bits: $value, order: Ordering) -> $value {
                let before = self.0.fetch_or(bits, weaker(order));
                published(order);
                before
            }

            pub fn fetch_and(&self, bits: $value, order: Ordering) -> $value {
                let before = self.0.fetch_and(bits, weaker(order));
                published(order);
                before
            }
        }
    )*};
}

macro_rules! counters {
    ($($name:ident($value:ty)),*) => {$(
        #[allow(dead_code)]
        impl $name {
            pub fn fetch_add(&self, more: $value, order: Ordering) -> $value {
                let before = self.0.fetch_add(more, weaker(order));
                published(order);
                before
            }

            pub fn fetch_sub(&self, less: $value, order: Ordering) -> $value {
                let before = self.0.fetch_sub(less, weaker(order));
                published(order);
                before
            }
        }

        impl Default for $name {
            fn default() -> $name {
                $name::new(0)
            }
        }
    )*};
}

atomics!(AtomicBool(bool), AtomicU32(u32), AtomicU64(u64));
counters!(AtomicU32(u32), AtomicU64(u64));

fn weaker(order: Ordering) -> Ordering {
    if order == SeqCst { AcqRel } else { order }
}

fn published(order: Ordering) {
    if order == SeqCst {
        ORDER.fetch_add(0, Release);
    }
}

/// A clock that always shows [`ELAPSED`].
#[derive(Clone, Copy, Debug)]
pub struct Instant;

impl Instant {
    pub fn now() -> Instant {
        Instant
    }

    pub fn elapsed(&self) -> Duration {
        ELAPSED
    }
}

/// An `Arc` that counts references like the standard library's.
#[derive(Debug)]
pub struct Arc<T>(std::sync::Arc<Counted<T>>);

#[derive(Debug)]
struct Counted<T> {
    count: inner::AtomicUsize,
    value: T,
}

impl<T> Arc<T> {
    pub fn new(value: T) -> Arc<T> {
        Arc(std::sync::Arc::new(Counted { count: inner::AtomicUsize::new(1), value }))
    }

    pub fn strong_count(this: &Arc<T>) -> usize {
        this.0.count.load(Relaxed)
    }
}

impl<T> Clone for Arc<T> {
    fn clone(&self) -> Arc<T> {
        self.0.count.fetch_add(1, Relaxed);
        Arc(std::sync::Arc::clone(&self.0))
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Release) == 1 {
            fence(Acquire);
        }
    }
}

impl<T> std::ops::Deref for Arc<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

struct LoomMemory {
    words: Pool<AtomicU32>,
    longs: Pool<AtomicU64>,
    blocks: Pool<UnsafeCell<()>>,
    /// Second mappings of the same memory: start, length, and start of the first mapping.
    aliases: std::sync::Mutex<Vec<(usize, usize, usize)>>,
    /// Start of the first mapping of each file, by inode. A model keeps the first mapping as long as any other.
    files: std::sync::Mutex<HashMap<u64, usize>>,
}

impl LoomMemory {
    fn new() -> LoomMemory {
        LoomMemory {
            words: Pool::new(WORDS, AtomicU32::default),
            longs: Pool::new(LONGS, AtomicU64::default),
            blocks: Pool::new(BLOCKS, || UnsafeCell::new(())),
            aliases: std::sync::Mutex::default(),
            files: std::sync::Mutex::default(),
        }
    }

    /// Returns the corresponding address in the first mapping of the memory.
    fn first(&self, address: usize) -> usize {
        let aliases = self.aliases.lock().unwrap_or_else(PoisonError::into_inner);
        let alias = aliases.iter().find(|(begin, len, _)| (*begin..begin + len).contains(&address));
        alias.map_or(address, |(begin, _, first)| address - begin + first)
    }
}

/// Registers `len` bytes as those of a file. Earlier mappings of the same file are the same memory.
pub fn mapped(file: std::os::fd::BorrowedFd<'_>, bytes: *const u8, len: usize) {
    let file = rustix::fs::fstat(file).expect("an open file").st_ino;
    let mut files = SHARED.files.lock().unwrap_or_else(PoisonError::into_inner);
    let first = *files.entry(file).or_insert(bytes as usize);
    if first != bytes as usize {
        SHARED.aliases.lock().unwrap_or_else(PoisonError::into_inner).push((bytes as usize, len, first));
    }
}

/// Loom objects, assigned to addresses.
struct Pool<T> {
    items: Vec<T>,
    /// Position of each address's object. Not part of what loom explores: never locked across a switch of threads.
    given: std::sync::Mutex<HashMap<usize, usize>>,
}

impl<T> Pool<T> {
    fn new(len: usize, item: impl Fn() -> T) -> Pool<T> {
        Pool { items: (0..len).map(|_| item()).collect(), given: std::sync::Mutex::default() }
    }

    fn at(&self, address: usize) -> &T {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let next = given.len();
        let index = *given.entry(address).or_insert(next);
        self.items.get(index).expect("the model uses more shared memory than its pools hold")
    }
}

/// Returns a 4-byte word of shared memory.
pub fn word(memory: &std::sync::atomic::AtomicU32) -> &AtomicU32 {
    SHARED.words.at(SHARED.first(memory.as_ptr() as usize))
}

/// Returns an 8-byte word of shared memory.
pub fn long(memory: &std::sync::atomic::AtomicU64) -> &AtomicU64 {
    SHARED.longs.at(SHARED.first(memory.as_ptr() as usize))
}

fn blocks(bytes: &[u8]) -> impl Iterator<Item = &'static UnsafeCell<()>> {
    let begin = SHARED.first(bytes.as_ptr() as usize);
    (begin / BLOCK..(begin + bytes.len()).div_ceil(BLOCK)).map(|block| SHARED.blocks.at(block))
}

/// Tells loom that this thread is about to read these bytes of shared memory.
pub fn reads(bytes: &[u8]) {
    blocks(bytes).for_each(|block| block.with(|_| ()));
}

/// Tells loom that this thread is about to write these bytes of shared memory.
pub fn writes(bytes: &[u8]) {
    blocks(bytes).for_each(|block| block.with_mut(|_| ()));
}

/// Waits for a word to change. As in the kernel, comparing and falling asleep are one step under a lock, and waking
/// takes the same lock. The kernel's futex orders memory more strictly than this model.
pub mod futex {
    use super::*;

    /// Sleeps while `*word == seen`.
    pub fn wait(word: &AtomicU32, seen: u32, _timeout: Duration) {
        let mut sleepers = sleepers(word);
        if word.0.load(Relaxed) == seen {
            sleepers.push(loom::thread::current());
            drop(sleepers);
            loom::thread::park();
        }
    }

    /// Wakes every thread that sleeps on `word`.
    pub fn wake(word: &AtomicU32) {
        sleepers(word).drain(..).for_each(|thread| thread.unpark());
    }

    fn sleepers(word: &AtomicU32) -> loom::sync::MutexGuard<'static, Vec<Thread>> {
        let list: &'static Mutex<_> = SLEEPERS.at(std::ptr::from_ref(word) as usize);
        list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
