//! Weights that a training loop and an averaging thread use in turn, and buffers for the averages.

use std::ptr::NonNull;
use std::sync::Arc;

use super::shared_arena::SharedArena;
use super::weight_lock::{WeightGuard, WeightLock};
use crate::error::{Error, Result};
use crate::types::DType;

/// Memory of another library that both sides access under one [`WeightLock`].
///
/// In contrast to a [`super::Region`], the memory does not belong to the core for the length of a call. Its owner reads
/// and writes it all the time, and the core does so whenever it holds the lock.
pub struct Weights {
    place: WeightMemory,
    count: usize,
    dtype: DType,
    lock: Arc<WeightLock>,
}

enum WeightMemory {
    /// First byte. Dangling but aligned if there are no elements.
    Host(NonNull<u8>),
    Device(Box<dyn DeviceWeights>),
}

/// The averaging thread's access to weights in device memory.
///
/// On a device, the lock only orders work: work issued under the lock runs after the work of the previous holder and
/// before that of the next one. `under_lock` is called while the lock is held and must not wait for the device. The
/// other methods are called without the lock. They may wait, and call `go_on` meanwhile: an error from `go_on` ends the
/// wait.
pub trait DeviceWeights: Send {
    /// Queues a step on the device.
    fn under_lock(&mut self, step: WeightStep) -> Result<()>;

    /// Copies the last snapshot to the host.
    ///
    /// # Errors
    /// The errors of `go_on` and of the device.
    fn read_snapshot(&mut self, into: &mut [u8], go_on: &dyn Fn() -> Result<()>) -> Result<()>;

    /// Copies the average, or other values for all weights, from the host to the device. Returns the errors of
    /// [`DeviceWeights::read_snapshot`].
    fn write_average(&mut self, from: &[u8], go_on: &dyn Fn() -> Result<()>) -> Result<()>;
}

/// A change made under the weight lock. The snapshot and the average are in the device's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightStep {
    /// Copies the weights into the snapshot.
    Snapshot,
    /// Adds the difference between average and snapshot to the weights. The result has the same bits as
    /// `reduce::correct`.
    Correct,
    /// Copies the average into the weights.
    Replace,
}

// SAFETY: the memory is only accessed under the lock, by the promise of `new`.
unsafe impl Send for Weights {}

impl Weights {
    /// Wraps `count` elements at `ptr`.
    ///
    /// # Errors
    /// `InvalidArgument` if `ptr` is null although `count` is not 0, or if the size in bytes overflows.
    ///
    /// # Safety
    /// Until the value is dropped, the memory must stay valid and writable for `count * dtype.size()` bytes. No code
    /// may write the memory without the lock, and while one owner holds `lock`, no other thread may read or write it.
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

    /// Wraps `count` elements in the memory of a device.
    pub fn on_device(device: Box<dyn DeviceWeights>, count: usize, dtype: DType, lock: Arc<WeightLock>) -> Weights {
        Weights { place: WeightMemory::Device(device), count, dtype, lock }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the lock that protects the weights.
    pub fn lock(&self) -> &Arc<WeightLock> {
        &self.lock
    }

    /// Returns the access to device memory, or `None` on the host.
    pub fn device(&mut self) -> Option<&mut dyn DeviceWeights> {
        match &mut self.place {
            WeightMemory::Host(_) => None,
            WeightMemory::Device(device) => Some(&mut **device),
        }
    }

    /// Returns access to the weights while `guard` holds their lock. Panics if `guard` belongs to another lock.
    pub fn locked<'a>(&'a mut self, guard: &'a WeightGuard) -> Locked<'a> {
        assert!(guard.holds(&self.lock), "the guard of another lock");
        let len = self.len();
        match &mut self.place {
            // SAFETY: valid for len() bytes, and used only by this thread while the lock is held, by the promise of
            // `new`. `&mut self` allows the core only one access.
            WeightMemory::Host(ptr) => Locked::Host(unsafe { std::slice::from_raw_parts_mut(ptr.as_ptr(), len) }),
            WeightMemory::Device(device) => Locked::Device(&mut **device),
        }
    }
}

/// Access to weights whose lock is held, from [`Weights::locked`].
pub enum Locked<'a> {
    /// The bytes on the host.
    Host(&'a mut [u8]),
    /// Weights on a device. The caller may call `under_lock`.
    Device(&'a mut dyn DeviceWeights),
}

/// Arena memory that one owner uses as a slice. Peers access it only during collectives that the owner passes it to.
pub struct ArenaBuffer {
    arena: SharedArena,
}

impl ArenaBuffer {
    /// Wraps a whole arena.
    pub fn new(arena: SharedArena) -> ArenaBuffer {
        ArenaBuffer { arena }
    }

    /// Returns the bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: only this value's handle makes slices of the memory, and the borrow is unique. Peers access the
        // memory only during a collective, and the slice was passed to that collective as an exclusive borrow.
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
