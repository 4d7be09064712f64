//! Weights that their owner changes between two holds of a lock, and buffers for their averages.

use std::ptr::NonNull;
use std::sync::Arc;

use super::shared_arena::SharedArena;
use super::weight_lock::{WeightGuard, WeightLock};
use crate::error::{Error, Result};
use crate::types::DType;

/// Memory of another library that both sides use under one [`WeightLock`].
///
/// A [`super::Region`] belongs to a call until it is done. These weights do not: their owner reads and writes them all the time, and the
/// core does so while it holds the lock.
pub struct Weights {
    place: WeightMemory,
    count: usize,
    dtype: DType,
    lock: Arc<WeightLock>,
}

/// Where weights are.
enum WeightMemory {
    /// First byte; dangling but aligned when there are no elements.
    Host(NonNull<u8>),
    Device(Box<dyn DeviceWeights>),
}

/// Weights in the memory of a device, as the averaging thread uses them. On a device the lock is an order of work: what is done under it is
/// put behind the work of who held the lock before, and the next holder's work comes behind it.
///
/// `under_lock` is called while the lock is held and must not wait for the device. The rest is called without it; it may wait, and asks
/// `go_on` meanwhile, whose error ends the wait.
pub trait DeviceWeights: Send {
    /// Puts a step on the device.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn under_lock(&mut self, step: WeightStep) -> Result<()>;

    /// Copies the last snapshot to the host.
    ///
    /// # Errors
    /// Those of `go_on`; whatever the device reports.
    fn read_snapshot(&mut self, into: &mut [u8], go_on: &dyn Fn() -> Result<()>) -> Result<()>;

    /// Copies the average, or other values for all of the weights, to the device.
    ///
    /// # Errors
    /// As [`DeviceWeights::read_snapshot`].
    fn write_average(&mut self, from: &[u8], go_on: &dyn Fn() -> Result<()>) -> Result<()>;
}

/// What is done to weights under their lock. The snapshot and the average are memory of the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightStep {
    /// The snapshot becomes the weights.
    Snapshot,
    /// The weights get the average's progress since the snapshot, with the bits of `reduce::correct`.
    Correct,
    /// The weights become the average.
    Replace,
}

// SAFETY: the memory is only touched under the lock, by the promise of `new`.
unsafe impl Send for Weights {}

impl Weights {
    /// `count` elements at `ptr`.
    ///
    /// # Errors
    /// `InvalidArgument` when `ptr` is null although `count` is not 0, or when the size in bytes overflows.
    ///
    /// # Safety
    /// Until the value is dropped, the memory stays valid and writable for `count * dtype.size()` bytes; while an owner of `lock`
    /// holds it, no other thread reads or writes the memory, and no code writes it without the lock.
    pub unsafe fn new(ptr: *mut u8, count: usize, dtype: DType, lock: Arc<WeightLock>) -> Result<Weights> {
        let fits = count.checked_mul(dtype.size()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
        let ptr = match NonNull::new(ptr) {
            Some(ptr) if fits => ptr,
            None if count == 0 => NonNull::dangling(),
            _ => {
                let name = dtype.name();
                return Err(Error::InvalidArgument(format!(
                    "{count} {name} at {ptr:p}: null or oversized weight buffer"
                )));
            }
        };
        Ok(Weights { place: WeightMemory::Host(ptr), count, dtype, lock })
    }

    /// `count` elements in the memory of a device.
    pub fn on_device(device: Box<dyn DeviceWeights>, count: usize, dtype: DType, lock: Arc<WeightLock>) -> Weights {
        Weights { place: WeightMemory::Device(device), count, dtype, lock }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The lock that covers them.
    pub fn lock(&self) -> &Arc<WeightLock> {
        &self.lock
    }

    /// The device's side; `None` on the host.
    pub fn device(&mut self) -> Option<&mut dyn DeviceWeights> {
        match &mut self.place {
            WeightMemory::Host(_) => None,
            WeightMemory::Device(device) => Some(&mut **device),
        }
    }

    /// What is used under their lock: the bytes, or the device's side.
    ///
    /// # Panics
    /// When the guard is that of another lock.
    pub fn locked<'a>(&'a mut self, guard: &'a WeightGuard) -> Locked<'a> {
        assert!(guard.holds(&self.lock), "the guard of another lock");
        let len = self.len();
        match &mut self.place {
            // SAFETY: valid for len() bytes, and used by this thread alone while the lock is held, by the promise of `new`; `&mut
            // self` keeps the core to one access.
            WeightMemory::Host(ptr) => Locked::Host(unsafe { std::slice::from_raw_parts_mut(ptr.as_ptr(), len) }),
            WeightMemory::Device(device) => Locked::Device(&mut **device),
        }
    }
}

/// See [`Weights::locked`].
pub enum Locked<'a> {
    /// The bytes.
    Host(&'a mut [u8]),
    /// Its `under_lock` may be called.
    Device(&'a mut dyn DeviceWeights),
}

/// Memory of an arena that one owner uses as a slice: peers access it only within collectives that it is passed to.
pub struct ArenaBuffer {
    arena: SharedArena,
}

impl ArenaBuffer {
    /// The whole of an arena.
    pub fn new(arena: SharedArena) -> ArenaBuffer {
        ArenaBuffer { arena }
    }

    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: this value has the only handle that makes slices of the memory, and the borrow is unique; peers access the memory only
        // during a collective, to which the slice was passed as the exclusive borrow that it is.
        unsafe { self.arena.bytes_mut() }
    }
}

#[cfg(all(test, not(model)))]
mod tests {
    use super::*;

    #[test]
    fn weights_are_reached_under_their_own_lock_only() {
        let (lock, other) = (WeightLock::new(), WeightLock::new());
        let mut memory = vec![1.0f32, 2.0];
        // SAFETY: the vector lives as long as the value, and only this thread uses it.
        let mut weights =
            unsafe { Weights::new(memory.as_mut_ptr().cast(), 2, DType::F32, Arc::clone(&lock)) }.unwrap();
        if let Locked::Host(bytes) = weights.locked(&lock.lock(1)) {
            bytes[..4].copy_from_slice(&5.0f32.to_ne_bytes());
        }
        let wrong = other.lock(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            weights.locked(&wrong);
        }));
        assert!(panicked.is_err());
        drop(weights);
        assert_eq!(memory, [5.0, 2.0]);
    }

    #[test]
    fn null_and_sizes_beyond_the_address_space_are_refused() {
        let new = |ptr: *mut u8, count| {
            // SAFETY: refused before it is used, or without elements.
            unsafe { Weights::new(ptr, count, DType::F64, WeightLock::new()) }
        };
        assert!(new(std::ptr::null_mut(), 1).is_err());
        assert!(new(NonNull::dangling().as_ptr(), usize::MAX).is_err());
        assert!(new(std::ptr::null_mut(), 0).is_ok());
    }
}
