//! The names of [`super`] in loom, where the models run.
//!
//! What differs from loom itself:
//!
//! - **Sequential consistency.** loom treats `SeqCst` accesses as `AcqRel`. Here a `SeqCst` store or read-modify-write publishes
//!   all that its thread has seen, and a `SeqCst` load first acquires what all of them have published. So of two threads that each
//!   write one word and then load the other's, one sees the other's write, and where one of the four accesses is weaker neither
//!   may. (Stronger than C++ in one respect: it orders the accesses around it as well.)
//! - **Time.** Every time that was measured is [`ELAPSED`]: each spin is in vain, no deadline passes. No futex and no condition
//!   variable times out: what only a timeout would wake is a deadlock, which loom reports.
//! - **Arc.** Counts as the standard library's does, with `Relaxed` and `Release`; loom's own orders more.
//! - **Shared memory.** The bytes are real. Its atomic words are in loom instead: a pool of zeros, given to
//!   addresses in the order in which they are first asked for. Each slice counts as an access to the [`BLOCK`]s that it overlaps at
//!   the moment in which it is made, and loom reports two accesses that nothing orders.

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

/// How often a spin looks before it reads the clock.
pub const SPINS: u32 = 0;

/// What every clock says: longer than any spin, shorter than any deadline.
const ELAPSED: Duration = Duration::from_millis(1);

/// Bytes of shared memory that are tracked as one.
const BLOCK: usize = 64;

/// Words, longs and blocks that the shared memory of one model may have, and words that its threads may sleep on.
const FUTEXES: usize = 8;
const WORDS: usize = 24;
const LONGS: usize = 96;
const BLOCKS: usize = 192;

/// The size of a buffer in shared memory. Models have small ones, so that few bytes fill them.
pub const fn buffer_len(bytes: usize) -> usize {
    bytes / 256
}

/// How long a wait lasts that is no part of a model.
pub const fn patience(_time: Duration) -> Duration {
    Duration::ZERO
}

thread_local! {
    /// Whether `Acquire` loads return the latest value only, in the model that this thread runs.
    pub(super) static LATEST: Cell<bool> = const { Cell::new(false) };
}

loom::lazy_static! {
    /// What `SeqCst` stores publish and `SeqCst` loads acquire.
    static ref ORDER: inner::AtomicU64 = inner::AtomicU64::new(0);
    /// Who sleeps on a futex.
    static ref SLEEPERS: Pool<Mutex<Vec<Thread>>> = Pool::new(FUTEXES, Mutex::default);
    static ref SHARED: LoomMemory = LoomMemory::new();
}

/// Makes the model's own state. Comes first: what a later thread makes is ordered after that thread's past only.
pub(super) fn prepare() {
    let (_, _, _) = (&*ORDER, &*SLEEPERS, &*SHARED);
}

macro_rules! atomics {
    ($($name:ident($value:ty)),*) => {$(
        /// See the module.
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

/// See [`ELAPSED`].
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

/// Counted as the standard library does.
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

/// Shared memory as loom sees it.
struct LoomMemory {
    words: Pool<AtomicU32>,
    longs: Pool<AtomicU64>,
    blocks: Pool<UnsafeCell<()>>,
    /// Addresses that mean others: where memory begins that is mapped twice, its length, and where its first mapping begins.
    aliases: std::sync::Mutex<Vec<(usize, usize, usize)>>,
    /// Where the first mapping of a file begins, by inode: a model keeps it as long as there are others.
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

    /// The address in the first mapping of the memory.
    fn first(&self, address: usize) -> usize {
        let aliases = self.aliases.lock().unwrap_or_else(PoisonError::into_inner);
        let alias = aliases.iter().find(|(begin, len, _)| (*begin..begin + len).contains(&address));
        alias.map_or(address, |(begin, _, first)| address - begin + first)
    }
}

/// Notes that `len` bytes are those of a file: what was mapped before from the same one is the same memory.
pub fn mapped(file: std::os::fd::BorrowedFd<'_>, bytes: *const u8, len: usize) {
    let file = rustix::fs::fstat(file).expect("an open file").st_ino;
    let mut files = SHARED.files.lock().unwrap_or_else(PoisonError::into_inner);
    let first = *files.entry(file).or_insert(bytes as usize);
    if first != bytes as usize {
        SHARED.aliases.lock().unwrap_or_else(PoisonError::into_inner).push((bytes as usize, len, first));
    }
}

/// Objects of loom, by address.
struct Pool<T> {
    items: Vec<T>,
    /// No part of what loom explores: never locked across a switch of threads.
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
        self.items.get(index).expect("a model with more shared memory than there is room for")
    }
}

/// A 4-byte word of shared memory.
pub fn word(memory: &std::sync::atomic::AtomicU32) -> &AtomicU32 {
    SHARED.words.at(SHARED.first(memory.as_ptr() as usize))
}

/// An 8-byte word of shared memory.
pub fn long(memory: &std::sync::atomic::AtomicU64) -> &AtomicU64 {
    SHARED.longs.at(SHARED.first(memory.as_ptr() as usize))
}

fn blocks(bytes: &[u8]) -> impl Iterator<Item = &'static UnsafeCell<()>> {
    let begin = SHARED.first(bytes.as_ptr() as usize);
    (begin / BLOCK..(begin + bytes.len()).div_ceil(BLOCK)).map(|block| SHARED.blocks.at(block))
}

/// Notes that this thread is about to read bytes of shared memory.
pub fn reads(bytes: &[u8]) {
    blocks(bytes).for_each(|block| block.with(|_| ()));
}

/// Notes that this thread is about to write bytes of shared memory.
pub fn writes(bytes: &[u8]) {
    blocks(bytes).for_each(|block| block.with_mut(|_| ()));
}

/// Waiting for a word to change. As in the kernel, comparing and lying down are one step under a lock, and waking takes that lock;
/// nothing else is ordered, although the kernel orders more.
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

    /// Locks the kernel's list of a word's sleepers.
    fn sleepers(word: &AtomicU32) -> loom::sync::MutexGuard<'static, Vec<Thread>> {
        let list: &'static Mutex<_> = SLEEPERS.at(std::ptr::from_ref(word) as usize);
        list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
