//! Borrowed tensor memory.

use std::ptr::NonNull;
use std::sync::Arc;

use super::device::{Buffer, BufferMut, Device, DeviceRef, same_place};
use super::host_memory::HostMemory;
use crate::error::{Error, Result};
use crate::types::DType;

/// Contiguous tensor memory that another library (torch, NumPy) owns and the core borrows, on the host or on a device.
///
/// The caller of [`Region::new`] or [`Region::on`] promises that the memory stays valid, so that all other code can use
/// it without `unsafe`.
///
/// # Examples
/// ```
/// use bagua_kernels::types::DType;
/// use bagua_net::memory::{HostMemory, Region};
///
/// let mut region = Region::in_memory(&mut HostMemory::new(8), 2, DType::F32)?;
/// region.as_host_mut()?.copy_from_slice(&[1.0_f32, 2.0].map(f32::to_ne_bytes).concat());
/// assert_eq!((region.count(), region.len()), (2, 8));
/// # Ok::<(), bagua_kernels::error::Error>(())
/// ```
#[derive(Debug)]
pub struct Region {
    /// First byte. Dangling but aligned if `count` is 0.
    ptr: NonNull<u8>,
    count: usize,
    dtype: DType,
    /// Device that holds the memory, or `None` for the host.
    device: Option<Arc<dyn Device>>,
    _owner: Option<Arc<HostMemory>>,
}

// SAFETY: a Region is a unique borrow, like `&mut [u8]`. The promise of `new` holds for any thread.
unsafe impl Send for Region {}

impl Region {
    /// Borrows `count` elements of host memory at `ptr`.
    ///
    /// # Errors
    /// `InvalidArgument` if `ptr` is null although `count` is not 0, or if the size in bytes overflows.
    ///
    /// # Safety
    /// Until the Region is dropped, the memory must stay valid and writable for `count * dtype.size()` bytes. No other
    /// code may read or write it while the core uses it. The core uses a bucket's tensor from `mark_ready` until `wait`
    /// returns, and a verb's tensor during the call or until its handle is done.
    pub unsafe fn new(ptr: *mut u8, count: usize, dtype: DType) -> Result<Region> {
        // SAFETY: the caller's promise.
        unsafe { Region::at(ptr, count, dtype, None) }
    }

    /// Borrows `count` elements of device memory at `ptr`, an address of that device.
    ///
    /// # Errors
    /// The errors of [`Region::new`].
    ///
    /// # Safety
    /// The conditions of [`Region::new`], for accesses by the device and its copy functions.
    pub unsafe fn on(device: Arc<dyn Device>, ptr: *mut u8, count: usize, dtype: DType) -> Result<Region> {
        // SAFETY: the caller's promise.
        unsafe { Region::at(ptr, count, dtype, Some(device)) }
    }

    /// # Safety
    /// The conditions of [`Region::new`] or [`Region::on`].
    unsafe fn at(ptr: *mut u8, count: usize, dtype: DType, device: Option<Arc<dyn Device>>) -> Result<Region> {
        let fits = count.checked_mul(dtype.size()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
        if !fits {
            return Err(Error::InvalidArgument(format!(
                "a tensor of {count} {} elements does not fit the address space",
                dtype.name()
            )));
        }
        let ptr = match NonNull::new(ptr) {
            Some(ptr) => ptr,
            None if count == 0 => NonNull::dangling(),
            None => return Err(Error::InvalidArgument(format!("a null pointer for a tensor of {count} elements"))),
        };
        Ok(Region { ptr, count, dtype, device, _owner: None })
    }

    /// Borrows the first elements of host memory owned by the core. The region keeps the memory alive.
    ///
    /// # Errors
    /// `InvalidArgument` if there are fewer elements, or while another region of the memory exists.
    pub fn in_memory(memory: &mut Arc<HostMemory>, count: usize, dtype: DType) -> Result<Region> {
        if !HostMemory::is_free_for(memory, count.saturating_mul(dtype.size())) {
            return Err(Error::InvalidArgument(format!(
                "{memory:?} is too small for {count} elements of {}, or is in use",
                dtype.name()
            )));
        }
        // SAFETY: the region keeps the memory alive, and no other region of it exists (checked).
        let region = unsafe { Region::at(memory.pointer(), count, dtype, None) }?;
        Ok(Region { _owner: Some(Arc::clone(memory)), ..region })
    }

    /// Returns the number of elements.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the element type.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the size in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// True if there are no elements.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the address of the first byte, in the address space of its device.
    #[inline]
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// True if the two regions have a byte in common.
    pub fn overlaps(&self, other: &Region) -> bool {
        let together = same_place(self.device(), other.device());
        let (mine, theirs) = (self.address(), other.address());
        together && !self.is_empty() && !other.is_empty() && mine < theirs + other.len() && theirs < mine + self.len()
    }

    /// Returns the device that holds the memory, or `None` for the host.
    #[inline]
    pub fn device(&self) -> DeviceRef<'_> {
        self.device.as_ref()
    }

    /// Returns the bytes for reading.
    #[inline]
    pub fn buffer(&self) -> Buffer<'_> {
        // SAFETY: valid for len() bytes by the promise of `new` or `on`. `&self` keeps the core from writing meanwhile.
        unsafe { Buffer::new(self.ptr, self.len(), self.device.as_ref()) }
    }

    /// Returns the bytes for writing.
    #[inline]
    pub fn buffer_mut(&mut self) -> BufferMut<'_> {
        // SAFETY: valid and writable for len() bytes by the promise of `new` or `on`. `&mut self` is the only access.
        unsafe { BufferMut::new(self.ptr, self.len(), self.device.as_ref()) }
    }

    /// Returns the bytes as a slice.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device, if they are not on the host.
    pub fn as_host(&self) -> Result<&[u8]> {
        self.buffer().as_host()
    }

    /// Returns the bytes as a writable slice.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device, if they are not on the host.
    pub fn as_host_mut(&mut self) -> Result<&mut [u8]> {
        self.buffer_mut().into_host()
    }

    /// Returns all `parts` as one buffer if they have the same type and device and lie back to back in this order.
    fn joined(parts: &mut [Region]) -> Option<BufferMut<'_>> {
        let first = parts.first()?;
        let (mut end, mut bytes) = (first.address(), 0usize);
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let together = same_place(part.device(), first.device());
            if !together || part.dtype != first.dtype || (bytes > 0 && part.address() != end) {
                return None;
            }
            end = part.address() + part.len();
            bytes += part.len();
        }
        let ptr = parts.iter().find(|part| !part.is_empty()).unwrap_or(first).ptr;
        // SAFETY: the regions are valid and writable, and lie back to back, so this covers exactly them. The exclusive
        // borrow of all of them lasts as long as the buffer.
        Some(unsafe { BufferMut::new(ptr, bytes, first.device.as_ref()) })
    }

    /// Calls `work` with all `parts` as one buffer.
    ///
    /// Parts that lie back to back are used in place on the host, and on a device if `on_device` is true. Otherwise
    /// `work` gets a copy, which is copied back if `work` succeeds. The copy is on the device if `on_device` is true
    /// and the device supports it, and otherwise on the host, in `scratch`.
    ///
    /// # Errors
    /// Returns the errors of `work` and of the device.
    pub fn whole<R>(
        parts: &mut [Region],
        on_device: bool,
        scratch: &mut Vec<u8>,
        work: impl FnOnce(BufferMut<'_>) -> Result<R>,
    ) -> Result<R> {
        Region::as_one(parts, on_device, true, scratch, work)
    }

    /// Calls `work` with all `parts` as one buffer for reading, as [`Region::whole`] does for writing. Returns the
    /// errors of [`Region::whole`].
    pub fn read_whole<R>(
        parts: &mut [Region],
        on_device: bool,
        scratch: &mut Vec<u8>,
        work: impl FnOnce(Buffer<'_>) -> Result<R>,
    ) -> Result<R> {
        Region::as_one(parts, on_device, false, scratch, |whole| work(whole.as_buffer()))
    }

    fn as_one<R>(
        parts: &mut [Region],
        on_device: bool,
        back: bool,
        scratch: &mut Vec<u8>,
        work: impl FnOnce(BufferMut<'_>) -> Result<R>,
    ) -> Result<R> {
        let device = parts.first().and_then(|first| first.device.clone());
        if (on_device || device.is_none())
            && let Some(whole) = Region::joined(parts)
        {
            return work(whole);
        }
        if let Some(device) = device.filter(|_| on_device) {
            if parts.iter().any(|part| !same_place(part.device(), Some(&device))) {
                return Err(Error::other("the tensors of a bucket are on different devices"));
            }
            let pieces: Vec<_> = parts.iter().map(|part| (part.ptr, part.len())).filter(|(_, len)| *len > 0).collect();
            // SAFETY: the caller of `on` promised memory of this device, and this function borrows it exclusively.
            if let Some(at) = unsafe { device.gather(&pieces) }? {
                let bytes = pieces.iter().map(|(_, len)| len).sum();
                // SAFETY: this number of bytes of the device's own memory, which is ours until the next `gather`.
                let result = work(unsafe { BufferMut::new(at, bytes, Some(&device)) })?;
                if back {
                    // SAFETY: as for `gather`.
                    unsafe { device.scatter(&pieces) }?;
                }
                return Ok(result);
            }
        }
        // A panic in the middle of a copy leaves bytes in `scratch` that the next call overwrites.
        scratch.resize(parts.iter().map(Region::len).sum(), 0);
        Region::each(parts, scratch, |part, copy| part.as_buffer().copy_to(copy))?;
        let result = work(scratch.as_mut_slice().into())?;
        if back {
            Region::each(parts, scratch, |part, copy| part.copy_from(copy))?;
        }
        Ok(result)
    }

    /// Calls `with` for each part and the matching bytes of `scratch`, or once for all parts if they lie back to back.
    fn each(
        parts: &mut [Region],
        scratch: &mut [u8],
        mut with: impl FnMut(&mut BufferMut<'_>, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if let Some(mut whole) = Region::joined(parts) {
            return with(&mut whole, scratch);
        }
        let mut rest = scratch;
        for part in parts {
            let (copy, behind) = rest.split_at_mut(part.len());
            with(&mut part.buffer_mut(), copy)?;
            rest = behind;
        }
        Ok(())
    }

    /// Overwrites this region with bytes of another region on the same device, starting at byte `at`. On a device, the
    /// copy is queued on `stream`. Panics if the other region has too few bytes or is on another device.
    pub fn copy_from_region(&mut self, from: &Region, at: usize, stream: Option<usize>) -> Result<()> {
        assert!(same_place(self.device(), from.device()));
        let part = from.buffer().slice(at..at + self.len());
        let Some(device) = self.device.clone() else {
            self.as_host_mut()?.copy_from_slice(part.as_host()?);
            return Ok(());
        };
        if self.is_empty() {
            return Ok(());
        }
        let first = part.first();
        // SAFETY: both are memory of that device, by the promise of `on`. Their owner lets no other code use them until
        // the stream has done the copy.
        unsafe { device.copy_within(first, self.ptr, self.len(), stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(of: &mut [f32]) -> Region {
        // SAFETY: every test keeps its array alive and untouched while it uses the region.
        unsafe { Region::new(of.as_mut_ptr().cast(), of.len(), DType::F32).unwrap() }
    }

    #[test]
    fn memory_of_the_core_is_that_of_one_region_at_a_time() {
        let mut memory = HostMemory::new(20);
        HostMemory::bytes(&mut memory).unwrap().copy_from_slice(&[7; 20]);
        let mut region = Region::in_memory(&mut memory, 5, DType::F32).unwrap();
        assert_eq!(region.as_host().unwrap(), [7; 20]);
        region.as_host_mut().unwrap().fill(9);
        assert!(HostMemory::bytes(&mut memory).is_none());
        assert!(Region::in_memory(&mut memory, 5, DType::F32).is_err());
        drop(region);
        assert_eq!(HostMemory::bytes(&mut memory).unwrap(), [9; 20]);
        assert!(Region::in_memory(&mut memory, 6, DType::F32).is_err());
        assert!(Region::in_memory(&mut memory, usize::MAX, DType::F32).is_err());
    }

    #[test]
    fn a_region_keeps_the_memory_of_the_core() {
        let mut memory = HostMemory::new(1 << 20);
        let mut region = Region::in_memory(&mut memory, 1 << 20, DType::U8).unwrap();
        drop(memory);
        region.as_host_mut().unwrap().fill(3);
        assert!(region.as_host().unwrap().iter().all(|byte| *byte == 3));
        assert!(Region::in_memory(&mut HostMemory::new(0), 0, DType::F64).unwrap().is_empty());
    }

    #[test]
    fn more_than_two_to_the_31_elements_do_not_overflow() {
        let mut one = [0.0f32];
        // SAFETY: the region is never read.
        let big = unsafe { Region::new(one.as_mut_ptr().cast(), 3 << 31, DType::F64).unwrap() };
        assert_eq!(big.len(), 8 * (3usize << 31));
    }

    #[test]
    fn a_size_beyond_the_address_space_is_refused() {
        let mut one = [0.0f32];
        // SAFETY: refused, never read.
        assert!(unsafe { Region::new(one.as_mut_ptr().cast(), usize::MAX / 4, DType::F64) }.is_err());
        // SAFETY: refused, never read.
        assert!(unsafe { Region::new(std::ptr::null_mut(), 1, DType::U8) }.is_err());
        // SAFETY: an empty region is never read.
        assert!(unsafe { Region::new(std::ptr::null_mut(), 0, DType::U8) }.unwrap().as_host().unwrap().is_empty());
    }

    #[test]
    fn adjacent_regions_join_and_separate_ones_do_not() {
        let mut all = [1.0f32, 2.0, 3.0, 4.0, 5.0];
        let address = all.as_ptr() as usize;
        let (left, rest) = all.split_at_mut(2);
        let (middle, right) = rest.split_at_mut(1);
        let mut parts = [region(left), region(&mut []), region(middle), region(right)];
        let joined = Region::joined(&mut parts).unwrap();
        assert_eq!((joined.len(), joined.as_buffer().address()), (20, address));
        let mut gap = [region(&mut all[..1]), region(&mut [9.0])];
        assert!(Region::joined(&mut gap).is_none());
    }
}
