//! Conversion of addresses into regions of memory.
//!
//! Every Python caller that passes an address to a method of these classes promises the following. The address is that
//! of `count` elements of `dtype`. The memory stays allocated from the call until the verb has returned or its handle
//! is done, and the tensors of a bucket as long as the bucket is registered. A destination is writable. No other code
//! reads or writes the memory while the core works on it. `bagua.arrays` and `bagua.torch_api` hold the owner of the
//! memory for this reason. The docstrings of the classes repeat the promise. `tools/check_layers.py` lists the files
//! whose methods take addresses; only these files call the functions here.

#![allow(unsafe_code)]

use std::sync::Arc;

use bagua_core::error::{Error, Result};
use bagua_core::memory::{DeviceRef, Region, WeightLock, Weights};
use bagua_core::request::Io;
use bagua_core::types::{DType, ReduceOp};
use bagua_cuda::{Averaged, Averaging};

/// Returns the region of `count` elements at `address`.
///
/// # Safety
/// The caller makes the promise at the top of this file.
pub unsafe fn region_at(address: usize, count: usize, dtype: DType) -> Result<Region> {
    // SAFETY: by this function's promise.
    unsafe { Region::new(address as *mut u8, count, dtype) }
}

/// Returns the region of `count` elements at `address` in a device's memory, or in host memory.
///
/// # Safety
/// The caller makes the promise at the top of this file, for memory of that device.
pub unsafe fn region_in(place: DeviceRef<'_>, address: usize, count: usize, dtype: DType) -> Result<Region> {
    match place {
        // SAFETY: the caller makes the promise that the callee needs.
        None => unsafe { region_at(address, count, dtype) },
        // SAFETY: the caller makes the promise that the callee needs.
        Some(device) => unsafe { Region::on(Arc::clone(device), address as *mut u8, count, dtype) },
    }
}

/// Returns the region of `count` elements at `address` that a lock protects, on the host or on an averaging's device.
///
/// # Safety
/// The caller makes the promise at the top of this file, with one difference: until the averaging has stopped, the
/// holder of the lock uses the elements.
pub unsafe fn weights_in(
    averaging: Option<&Arc<Averaging>>,
    address: usize,
    count: usize,
    dtype: DType,
    lock: Arc<WeightLock>,
) -> Result<Weights> {
    match averaging {
        // SAFETY: the caller makes the promise that the callee needs.
        None => unsafe { Weights::new(address as *mut u8, count, dtype, lock) },
        Some(averaging) => {
            // SAFETY: the caller makes the promise that the callee needs. The averaging keeps the memory's owner alive.
            let device = unsafe { Averaged::new(averaging, address, count, dtype) }?;
            Ok(Weights::on_device(Box::new(device), count, dtype, lock))
        }
    }
}

/// Returns the region of `per_rank` elements for each of `ranks` ranks at `address`, on a device or on the host.
///
/// # Safety
/// The promise of [`region_in`], for the elements of all ranks.
pub unsafe fn shards_in(
    place: DeviceRef<'_>,
    address: usize,
    per_rank: usize,
    ranks: usize,
    dtype: DType,
) -> Result<Region> {
    let count = per_rank.checked_mul(ranks).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "{ranks} chunks of {per_rank} {} elements do not fit the address space",
            dtype.name()
        ))
    })?;
    // SAFETY: the caller makes the promise that the callee needs, for all ranks.
    unsafe { region_in(place, address, count, dtype) }
}

/// Returns true if the two regions share no byte, because the core's slices must not alias.
fn are_apart(a: &Region, b: &Region) -> bool {
    a.is_empty() || b.is_empty() || a.address() + a.len() <= b.address() || b.address() + b.len() <= a.address()
}

/// Returns an error if two buffers overlap, for operations that cannot work in place.
pub fn check_apart(src: &Region, dst: &Region) -> Result<()> {
    if are_apart(src, dst) {
        return Ok(());
    }
    Err(Error::InvalidArgument("source and destination overlap".to_owned()))
}

/// Operands of a verb, which move to the communication thread with its job.
pub enum Operands {
    InPlace(Region),
    Split { src: Region, dst: Region },
}

impl Operands {
    /// Returns operands with two buffers, and an error if they overlap.
    pub fn split(src: Region, dst: Region) -> Result<Operands> {
        if !are_apart(&src, &dst) {
            return Err(Error::InvalidArgument(
                "source and destination overlap; use one array in place, or two that are apart".to_owned(),
            ));
        }
        Ok(Operands::Split { src, dst })
    }

    /// Returns operands with one buffer if `src` is `None`, otherwise with two.
    pub fn new(src: Option<Region>, dst: Region) -> Result<Operands> {
        match src {
            None => Ok(Operands::InPlace(dst)),
            Some(src) => Operands::split(src, dst),
        }
    }

    /// Returns the number of bytes of the larger buffer.
    pub fn bytes(&self) -> usize {
        match self {
            Operands::InPlace(both) => both.len(),
            Operands::Split { src, dst } => src.len().max(dst.len()),
        }
    }

    /// Returns the operands in the form that the core takes.
    pub fn io(&mut self) -> Io<'_> {
        match self {
            Operands::InPlace(both) => Io::InPlace(both.buffer_mut()),
            Operands::Split { src, dst } => Io::Split { src: src.buffer(), dst: dst.buffer_mut() },
        }
    }
}

/// Returns the element type with this code.
pub fn dtype(code: u8) -> Result<DType> {
    DType::from_code(code).ok_or_else(|| Error::UnsupportedType(format!("no element type has code {code}")))
}

/// Returns the reduce operation with this number.
pub fn reduce_op(code: u8) -> Result<ReduceOp> {
    ReduceOp::from_code(code).ok_or_else(|| Error::InvalidArgument(format!("no reduce operation has number {code}")))
}
