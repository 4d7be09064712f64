//! A bucket's tensors as one piece of host memory.

use crate::error::Result;
use crate::memory::Region;

/// Calls `work` with all tensors as one slice: their own memory where they lie back to back, else a copy in `scratch`, which is copied
/// back when `work` succeeds.
///
/// # Errors
/// `UnsupportedType` for device memory; what `work` returns.
pub(super) fn with_whole<R>(
    tensors: &mut [Region],
    scratch: &mut Vec<u8>,
    work: impl FnOnce(&mut [u8]) -> Result<R>,
) -> Result<R> {
    if let Some(whole) = Region::joined(tensors) {
        return work(whole.into_host()?);
    }
    // A panic in the middle of a copy leaves bytes that the next run overwrites.
    scratch.resize(tensors.iter().map(Region::len).sum(), 0);
    let mut rest = scratch.as_mut_slice();
    for tensor in &*tensors {
        let (head, tail) = rest.split_at_mut(tensor.len());
        head.copy_from_slice(tensor.as_host()?);
        rest = tail;
    }
    let result = work(scratch)?;
    let mut rest = scratch.as_slice();
    for tensor in tensors {
        let (head, tail) = rest.split_at(tensor.len());
        tensor.as_host_mut()?.copy_from_slice(head);
        rest = tail;
    }
    Ok(result)
}
