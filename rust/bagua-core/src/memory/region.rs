//! Tensor memory on loan.

use std::ptr::NonNull;

use crate::error::{Error, Result};
use crate::types::DType;

/// Contiguous tensor memory that belongs to somebody else (torch, NumPy) and is lent to the core.
///
/// The promise is made once, to [`Region::new`], so that everything above can use slices without `unsafe`.
#[derive(Debug)]
pub struct Region {
    /// First byte; dangling but aligned when `count` is 0.
    ptr: NonNull<u8>,
    /// Elements.
    count: usize,
    /// Their type.
    dtype: DType,
}

// SAFETY: a Region is a unique loan, like `&mut [u8]`; the promise of `new` holds for any thread.
unsafe impl Send for Region {}

impl Region {
    /// Borrows `count` elements at `ptr`.
    ///
    /// # Errors
    /// `InvalidArgument` when `ptr` is null although `count` is not 0, or when the size in bytes overflows.
    ///
    /// # Safety
    /// Until the Region is dropped, the memory stays valid and writable for `count * dtype.size()` bytes, and nobody reads
    /// or writes it while the core does: for a bucket's tensor, from `mark_ready` until `wait` returns; for a verb,
    /// while the call lasts or until its handle is done.
    pub unsafe fn new(ptr: *mut u8, count: usize, dtype: DType) -> Result<Region> {
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
        Ok(Region { ptr, count, dtype })
    }

    /// Elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Address of the first byte, to see whether two regions are neighbours.
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: valid for len() bytes by the promise of `new`; `&self` keeps the core from writing meanwhile.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len()) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: valid and writable for len() bytes by the promise of `new`; `&mut self` is the core's only access.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len()) }
    }

    /// One region that covers all of `parts`, when they have one type and lie back to back in this order.
    pub fn joined(parts: &[Region]) -> Option<Region> {
        let first = parts.first()?;
        let mut end = first.address();
        let mut count = 0usize;
        for part in parts.iter().filter(|part| !part.is_empty()) {
            if part.dtype != first.dtype || (count > 0 && part.address() != end) {
                return None;
            }
            end = part.address() + part.len();
            count += part.count;
        }
        let ptr = parts.iter().find(|part| !part.is_empty()).unwrap_or(first).ptr;
        Some(Region { ptr, count, dtype: first.dtype })
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
        assert!(unsafe { Region::new(std::ptr::null_mut(), 0, DType::U8) }.unwrap().bytes().is_empty());
    }

    #[test]
    fn neighbours_join_and_strangers_do_not() {
        let mut all = [1.0f32, 2.0, 3.0, 4.0, 5.0];
        let (left, rest) = all.split_at_mut(2);
        let (middle, right) = rest.split_at_mut(1);
        let parts = [region(left), region(&mut []), region(middle), region(right)];
        let joined = Region::joined(&parts).unwrap();
        assert_eq!((joined.count(), joined.address()), (5, parts[0].address()));
        let gap = [region(&mut all[..1]), region(&mut [9.0])];
        assert!(Region::joined(&gap).is_none());
    }
}
