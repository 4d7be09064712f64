//! A bucket's tensors as one piece of host memory.

use crate::error::Result;
use crate::memory::Region;

/// Calls `work` with all tensors as one slice: their own memory where they lie back to back, else a copy in `scratch`.
///
/// # Errors
/// `UnsupportedType` for device memory; what `work` returns.
pub(super) fn read_whole<R>(
    tensors: &mut [Region],
    scratch: &mut Vec<u8>,
    work: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    match Region::joined(tensors) {
        Some(whole) => work(whole.into_host()?),
        None => work(gathered(tensors, scratch)?),
    }
}

/// As [`read_whole`], to write: a copy goes back into the tensors when `work` succeeds.
///
/// # Errors
/// As [`read_whole`].
pub(super) fn with_whole<R>(
    tensors: &mut [Region],
    scratch: &mut Vec<u8>,
    work: impl FnOnce(&mut [u8]) -> Result<R>,
) -> Result<R> {
    if let Some(whole) = Region::joined(tensors) {
        return work(whole.into_host()?);
    }
    let result = work(gathered(tensors, scratch)?)?;
    let mut rest = scratch.as_slice();
    for tensor in tensors {
        let (head, tail) = rest.split_at(tensor.len());
        tensor.as_host_mut()?.copy_from_slice(head);
        rest = tail;
    }
    Ok(result)
}

/// A copy of all tensors, one after the other.
fn gathered<'a>(tensors: &[Region], scratch: &'a mut Vec<u8>) -> Result<&'a mut [u8]> {
    // A panic in the middle of a copy leaves bytes that the next run overwrites.
    scratch.resize(tensors.iter().map(Region::len).sum(), 0);
    let mut rest = scratch.as_mut_slice();
    for tensor in tensors {
        let (head, tail) = rest.split_at_mut(tensor.len());
        head.copy_from_slice(tensor.as_host()?);
        rest = tail;
    }
    Ok(scratch)
}
