//! A bucket's tensors, and those of its operations, as pieces of host memory: where they are, or copies that go back.
//!
//! The one place where the memory of a device comes to operations that work on the host.

use crate::error::Result;
use crate::memory::Region;

/// Calls `work` with all tensors as one slice: their own memory where they lie back to back on the host, else a copy in `scratch`.
///
/// # Errors
/// What `work` returns, and whatever a device reports.
pub(super) fn read_whole<R>(
    tensors: &mut [Region],
    scratch: &mut Vec<u8>,
    work: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    match Region::joined(tensors).filter(|whole| whole.device().is_none()) {
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
    if let Some(whole) = Region::joined(tensors).filter(|whole| whole.device().is_none()) {
        return work(whole.into_host()?);
    }
    let result = work(gathered(tensors, scratch)?)?;
    if let Some(mut whole) = Region::joined(tensors) {
        whole.copy_from(scratch)?;
        return Ok(result);
    }
    let mut rest = scratch.as_slice();
    for tensor in tensors {
        let (head, tail) = rest.split_at(tensor.len());
        tensor.buffer_mut().copy_from(head)?;
        rest = tail;
    }
    Ok(result)
}

/// A copy of all tensors, one after the other.
fn gathered<'a>(tensors: &mut [Region], scratch: &'a mut Vec<u8>) -> Result<&'a mut [u8]> {
    // A panic in the middle of a copy leaves bytes that the next run overwrites.
    scratch.resize(tensors.iter().map(Region::len).sum(), 0);
    if let Some(whole) = Region::joined(tensors) {
        whole.as_buffer().copy_to(scratch)?;
        return Ok(scratch);
    }
    let mut rest = scratch.as_mut_slice();
    for tensor in tensors {
        let (head, tail) = rest.split_at_mut(tensor.len());
        tensor.buffer().copy_to(head)?;
        rest = tail;
    }
    Ok(scratch)
}

/// A tensor of an operation as host memory: its own, or a copy in memory that the operation keeps between its runs.
pub(super) struct OnHost<'a> {
    region: &'a mut Region,
    /// The copy, where the tensor is on a device.
    copy: &'a mut Vec<u8>,
}

impl<'a> OnHost<'a> {
    /// The tensor with its values.
    ///
    /// # Errors
    /// Whatever a device reports.
    pub(super) fn read(region: &'a mut Region, copy: &'a mut Vec<u8>) -> Result<OnHost<'a>> {
        if region.device().is_some() {
            copy.resize(region.len(), 0);
            region.buffer().copy_to(copy)?;
        }
        Ok(OnHost { region, copy })
    }

    /// The tensor, to write all of it.
    pub(super) fn to_fill(region: &'a mut Region, copy: &'a mut Vec<u8>) -> OnHost<'a> {
        if region.device().is_some() {
            copy.resize(region.len(), 0);
        }
        OnHost { region, copy }
    }

    /// The bytes.
    ///
    /// # Errors
    /// None; host memory is there.
    pub(super) fn bytes(&mut self) -> Result<&mut [u8]> {
        if self.region.device().is_some() { Ok(self.copy) } else { self.region.as_host_mut() }
    }

    /// The bytes go where the tensor is, if that is a device.
    ///
    /// # Errors
    /// Whatever a device reports.
    pub(super) fn write_back(self) -> Result<()> {
        if self.region.device().is_some() { self.region.buffer_mut().copy_from(self.copy) } else { Ok(()) }
    }
}
