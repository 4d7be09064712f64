//! Borrowed tensor memory.

use std::ptr::NonNull;
use std::sync::Arc;

use super::device::{Buffer, BufferMut, Device, DeviceRef};
use crate::error::{Error, Result};
use crate::types::DType;

/// Contiguous tensor memory that another library (torch, NumPy) owns and the core borrows, on the host or on a device.
///
/// The caller of [`Region::new`] or [`Region::on`] makes one promise, so that all other code uses it without `unsafe`.
#[derive(Debug)]
pub struct Region {
    /// First byte; dangling but aligned when `count` is 0.
    ptr: NonNull<u8>,
    /// Elements.
    count: usize,
    /// Their type.
    dtype: DType,
    /// The device that the memory is on; `None` for the host.
    device: Option<Arc<dyn Device>>,
}

// SAFETY: a Region is a unique borrow, like `&mut [u8]`; the promise of `new` holds for any thread.
unsafe impl Send for Region {}

impl Region {
    /// Borrows `count` elements of host memory at `ptr`.
    ///
    /// # Errors
    /// `InvalidArgument` when `ptr` is null although `count` is not 0, or when the size in bytes overflows.
    ///
    /// # Safety
    /// Until the Region is dropped, the memory stays valid and writable for `count * dtype.size()` bytes, and no other code reads
    /// or writes it while the core does: for a bucket's tensor, from `mark_ready` until `wait` returns; for a verb,
    /// while the call lasts or until its handle is done.
    pub unsafe fn new(ptr: *mut u8, count: usize, dtype: DType) -> Result<Region> {
        // SAFETY: the caller's promise.
        unsafe { Region::at(ptr, count, dtype, None) }
    }

    /// Borrows `count` elements of a device's memory at `ptr`, an address of that device.
    ///
    /// # Errors
    /// As [`Region::new`].
    ///
    /// # Safety
    /// As [`Region::new`], for accesses by the device and by its copy functions.
    pub unsafe fn on(device: Arc<dyn Device>, ptr: *mut u8, count: usize, dtype: DType) -> Result<Region> {
        // SAFETY: the caller's promise.
        unsafe { Region::at(ptr, count, dtype, Some(device)) }
    }

    /// # Safety
    /// As [`Region::new`] or [`Region::on`].
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
        Ok(Region { ptr, count, dtype, device })
    }

    /// Elements.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Element type.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Size in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// True when there are no elements.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Address of the first byte, in the address space of its device.
    #[inline]
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// True when the two have a byte in common.
    pub fn overlaps(&self, other: &Region) -> bool {
        let together = match (&self.device, &other.device) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        let (mine, theirs) = (self.address(), other.address());
        together && !self.is_empty() && !other.is_empty() && mine < theirs + other.len() && theirs < mine + self.len()
    }

    /// The device that the memory is on; `None` for the host.
    #[inline]
    pub fn device(&self) -> DeviceRef<'_> {
        self.device.as_ref()
    }

    /// The bytes, to read.
    #[inline]
    pub fn buffer(&self) -> Buffer<'_> {
        // SAFETY: valid for len() bytes by the promise of `new` or `on`; `&self` keeps the core from writing meanwhile.
        unsafe { Buffer::new(self.ptr, self.len(), self.device.as_ref()) }
    }

    /// The bytes, to write.
    #[inline]
    pub fn buffer_mut(&mut self) -> BufferMut<'_> {
        // SAFETY: valid and writable for len() bytes by the promise of `new` or `on`; `&mut self` is the core's only access.
        unsafe { BufferMut::new(self.ptr, self.len(), self.device.as_ref()) }
    }

    /// The bytes, where they are on the host.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device.
    pub fn as_host(&self) -> Result<&[u8]> {
        self.buffer().as_host()
    }

    /// The bytes, to write, where they are on the host.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device.
    pub fn as_host_mut(&mut self) -> Result<&mut [u8]> {
        self.buffer_mut().into_host()
    }

    /// All of `parts` as one buffer, when they have one type and one device and lie back to back in this order.
    pub fn joined(parts: &mut [Region]) -> Option<BufferMut<'_>> {
        let first = parts.first()?;
        let (mut end, mut bytes) = (first.address(), 0usize);
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let together = match (&part.device, &first.device) {
                (None, None) => true,
                (Some(one), Some(other)) => Arc::ptr_eq(one, other),
                _ => false,
            };
            if !together || part.dtype != first.dtype || (bytes > 0 && part.address() != end) {
                return None;
            }
            end = part.address() + part.len();
            bytes += part.len();
        }
        let ptr = parts.iter().find(|part| !part.is_empty()).unwrap_or(first).ptr;
        // SAFETY: the regions are valid and writable, and lie back to back, so this covers exactly them; the exclusive borrow of
        // all of them lasts as long as the buffer.
        Some(unsafe { BufferMut::new(ptr, bytes, first.device.as_ref()) })
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
