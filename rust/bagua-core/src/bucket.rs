//! Tensors that are communicated together, and the operations on them. Plain data: the engine puts it behind a lock.

use std::collections::HashSet;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::memory::{DeviceRef, Region, name_of, same_place};
use crate::op::{ExtraTensor, Op};
use crate::types::DType;

/// A named tensor of a bucket.
pub struct Tensor {
    /// Unique among all tensors of an engine, unless the tensor is padding.
    pub name: String,
    /// The tensor's memory.
    pub region: Region,
    /// True for padding, which always counts as ready.
    pub padding: bool,
}

/// The memory and operations of a bucket that is being communicated. Returned by [`Bucket::check_out`].
#[derive(Default)]
pub struct CheckedOut {
    /// Memory of the bucket's tensors, in order.
    pub regions: Vec<Region>,
    /// Extra tensors that the operations use.
    pub extra: Vec<ExtraTensor>,
    /// The operations, in the order in which they run.
    pub ops: Vec<Arc<dyn Op>>,
    /// Number of times the bucket was checked out before.
    pub step: u64,
    /// Number of padding elements at the end.
    pub padding: usize,
}

/// A tensor's name and size. `Bucket::regions` has its memory.
struct Described {
    name: String,
    padding: bool,
    count: usize,
}

/// Tensors that are communicated together, and the operations on them. While the bucket is checked out for a
/// communication, methods that would change it return `InvalidArgument`.
///
/// # Examples
/// ```
/// use bagua_core::bucket::{Bucket, Tensor};
/// use bagua_core::memory::{HostMemory, Region};
/// use bagua_core::{op::CentralizedOp, types::DType};
///
/// let region = Region::in_memory(&mut HostMemory::new(64), 16, DType::F32)?;
/// let mut bucket = Bucket::new("b0", vec![Tensor { name: "weight".into(), region, padding: false }])?;
/// bucket.append(std::sync::Arc::new(CentralizedOp::new(true, false, false)))?;
/// assert_eq!((bucket.bytes(), bucket.ops().len()), (64, 1));
/// # Ok::<(), bagua_core::error::Error>(())
/// ```
pub struct Bucket {
    name: String,
    dtype: DType,
    tensors: Vec<Described>,
    /// Memory of each tensor, in order. `None` while the bucket is checked out for a communication.
    regions: Option<Vec<Region>>,
    /// Extra tensors that the operations use. Empty while the bucket is checked out.
    extra: Vec<ExtraTensor>,
    ops: Vec<Arc<dyn Op>>,
    /// Number of check-outs so far, counted from the last [`Bucket::set_step`].
    step: u64,
}

impl Bucket {
    /// Creates a bucket of these tensors. They must have the same dtype and place, and different names: the error names
    /// those that do not.
    pub fn new(name: &str, tensors: Vec<Tensor>) -> Result<Bucket> {
        let Some(first) = tensors.first() else {
            return Err(Error::InvalidArgument(format!("bucket '{name}' has no tensors")));
        };
        let dtype = first.region.dtype();
        let mut names = HashSet::new();
        for tensor in &tensors {
            if tensor.region.dtype() != dtype {
                return Err(Error::UnsupportedType(format!(
                    "bucket '{name}': tensor '{}' is {} but '{}' is {}",
                    tensor.name,
                    tensor.region.dtype().name(),
                    first.name,
                    dtype.name()
                )));
            }
            check_same_place(name, (&first.name, &first.region), (&tensor.name, &tensor.region))?;
            if !tensor.padding && !names.insert(tensor.name.as_str()) {
                return Err(Error::InvalidArgument(format!("bucket '{name}' has two tensors named '{}'", tensor.name)));
            }
        }
        let (tensors, regions) = tensors
            .into_iter()
            .map(|Tensor { name, region, padding }| (Described { name, padding, count: region.count() }, region))
            .unzip();
        Ok(Bucket {
            name: name.to_owned(),
            dtype,
            tensors,
            regions: Some(regions),
            extra: Vec::new(),
            ops: Vec::new(),
            step: 0,
        })
    }

    /// Returns the bucket's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the element type of all tensors.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the size of all tensors in bytes, including padding.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.count * self.dtype.size()).sum()
    }

    /// Returns the name of each tensor, and true if it is padding.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, bool)> {
        self.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.padding))
    }

    /// Returns the tensors' memory, or `None` while the bucket is checked out.
    pub fn regions(&self) -> Option<&[Region]> {
        self.regions.as_deref()
    }

    /// Returns the device that the tensors are on, or `None` if they are on the host or checked out.
    pub fn device(&self) -> DeviceRef<'_> {
        self.regions.as_ref()?.first()?.device()
    }

    /// Adds an operation, which runs after the earlier ones. Returns an error if it cannot work with the bucket's
    /// dtype, size or extra tensors.
    pub fn append(&mut self, op: Arc<dyn Op>) -> Result<()> {
        self.check_idle()?;
        op.check(self.dtype, self.elements()).map_err(|error| self.named(self.with_tensors(error)))?;
        self.extra.iter().try_for_each(|extra| self.check_extra(&*op, extra))?;
        self.ops.push(op);
        Ok(())
    }

    /// Removes all operations.
    pub fn clear_ops(&mut self) -> Result<()> {
        self.check_idle()?;
        self.ops.clear();
        Ok(())
    }

    /// Returns the names of the operations.
    pub fn ops(&self) -> Vec<&'static str> {
        self.ops.iter().map(|op| op.name()).collect()
    }

    /// Returns the codec chosen by the first operation that chooses one: see [`Op::choice`].
    pub fn choice(&self) -> Option<String> {
        self.ops.iter().find_map(|op| op.choice())
    }

    /// Tells the bucket that the values of a tensor are final. `region` replaces the tensor's memory, and must have the
    /// same count, dtype and place. On a device, the bucket is communicated after the work that is queued on `stream`
    /// now: see [`Device::mark`](crate::memory::Device::mark).
    ///
    /// # Errors
    /// `InvalidArgument` or `UnsupportedType` if the new memory differs from the old; or errors of the device.
    pub fn mark_ready(&mut self, tensor: usize, region: Option<Region>, stream: Option<usize>) -> Result<()> {
        let Some(regions) = &mut self.regions else {
            let name = &self.tensors[tensor].name;
            let error = self.in_flight();
            return Err(Error::InvalidArgument(format!("tensor '{name}' was marked ready, but {error}")));
        };
        // Marking may fail, so it comes before the first change.
        if let Some(device) = regions.first().and_then(Region::device) {
            device.mark(stream)?;
        }
        let Some(region) = region else { return Ok(()) };
        let (described, before) = (&self.tensors[tensor], &regions[tensor]);
        if (region.count(), region.dtype()) != (described.count, self.dtype) {
            return Err(Error::InvalidArgument(format!(
                "tensor '{}' has {} elements of {}, but its new memory has {} of {}",
                described.name,
                described.count,
                self.dtype.name(),
                region.count(),
                region.dtype().name()
            )));
        }
        if !same_place(before.device(), region.device()) {
            return Err(Error::UnsupportedType(format!(
                "tensor '{}' is on {}, but its new memory is on {}",
                described.name,
                name_of(before.device()),
                name_of(region.device())
            )));
        }
        regions[tensor] = region;
        Ok(())
    }

    /// Checks out the memory for one communication. Nothing can be changed until [`Bucket::check_in`].
    pub fn check_out(&mut self) -> Result<CheckedOut> {
        match self.regions.take() {
            Some(regions) => {
                let step = self.step;
                self.step += 1;
                let extra = std::mem::take(&mut self.extra);
                Ok(CheckedOut { regions, extra, ops: self.ops.clone(), step, padding: self.padding() })
            }
            None => Err(self.in_flight()),
        }
    }

    /// Takes back the memory that [`Bucket::check_out`] returned.
    pub fn check_in(&mut self, CheckedOut { regions, extra, .. }: CheckedOut) {
        debug_assert_eq!(regions.len(), self.tensors.len());
        self.regions = Some(regions);
        self.extra = extra;
    }

    /// Registers an extra tensor for the operations. It replaces an earlier one of the same name.
    ///
    /// # Errors
    /// `InvalidArgument` if an operation rejects the tensor or if another tensor of the bucket shares its memory;
    /// `UnsupportedType` if it is in another place than the bucket.
    pub fn attach(&mut self, extra: ExtraTensor) -> Result<()> {
        self.check_idle()?;
        if let Some((first, region)) = self.tensors.first().zip(self.regions.iter().flatten().next()) {
            check_same_place(&self.name, (&first.name, region), (&extra.name, &extra.region))?;
        }
        self.ops.iter().try_for_each(|op| self.check_extra(&**op, &extra))?;
        let others = self.extra.iter().filter(|known| known.name != extra.name).map(|known| &known.region);
        if let Some(other) = self.regions.iter().flatten().chain(others).find(|other| other.overlaps(&extra.region)) {
            return Err(Error::InvalidArgument(format!(
                "bucket '{}': extra tensor '{}' shares memory with another tensor of the bucket, at {:#x}",
                self.name,
                extra.name,
                other.address()
            )));
        }
        self.extra.retain(|known| known.name != extra.name);
        self.extra.push(extra);
        Ok(())
    }

    /// Sets the step counter, to continue from a checkpoint.
    pub fn set_step(&mut self, step: u64) -> Result<()> {
        self.check_idle()?;
        self.step = step;
        Ok(())
    }

    /// Returns the number of communications so far, counted from the last [`Bucket::set_step`].
    pub fn step(&self) -> u64 {
        self.step
    }

    fn elements(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.count).sum()
    }

    fn check_extra(&self, op: &dyn Op, extra: &ExtraTensor) -> Result<()> {
        op.check_extra(extra, self.dtype, self.elements(), self.padding()).map_err(|error| self.named(error))
    }

    /// Adds the name of a tensor to an error about the element type, because a bucket's name may be a mere number.
    fn with_tensors(&self, error: Error) -> Error {
        let Error::UnsupportedType(text) = error else { return error };
        let mut names = self.tensors.iter().filter(|tensor| !tensor.padding).map(|tensor| &tensor.name);
        let first = names.next().map_or("", String::as_str);
        let more = match names.count() {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        Error::UnsupportedType(format!("tensor '{first}'{more}: {text}"))
    }

    /// Puts the bucket's name in front of an error about an argument.
    fn named(&self, error: Error) -> Error {
        match error {
            Error::UnsupportedType(text) => Error::UnsupportedType(format!("bucket '{}': {text}", self.name)),
            Error::InvalidArgument(text) => Error::InvalidArgument(format!("bucket '{}': {text}", self.name)),
            Error::NotImplemented(text) => Error::NotImplemented(format!("bucket '{}': {text}", self.name)),
            other => other,
        }
    }

    fn padding(&self) -> usize {
        self.tensors.iter().rev().take_while(|tensor| tensor.padding).map(|tensor| tensor.count).sum()
    }

    /// Copies an extra tensor of the bucket's length into its tensors. On a device, the copy is work of `stream`.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no extra tensor of this name and length; otherwise the errors of the device.
    pub fn copy_from_extra(&mut self, name: &str, stream: Option<usize>) -> Result<()> {
        self.check_idle()?;
        let Some(extra) = self.extra.iter().find(|extra| extra.name == name) else {
            return Err(Error::InvalidArgument(format!("bucket '{}' has no extra tensor '{name}'", self.name)));
        };
        if extra.region.len() != self.bytes() {
            let (bytes, extra) = (self.bytes(), extra.region.len());
            return Err(Error::InvalidArgument(format!(
                "bucket '{}' has {bytes} bytes, but its extra tensor '{name}' has {extra}",
                self.name
            )));
        }
        let mut at = 0;
        for region in self.regions.iter_mut().flatten() {
            region.copy_from_region(&extra.region, at, stream)?;
            at += region.len();
        }
        Ok(())
    }

    /// Returns an error while the bucket is checked out.
    pub fn check_idle(&self) -> Result<()> {
        if self.regions.is_some() { Ok(()) } else { Err(self.in_flight()) }
    }

    fn in_flight(&self) -> Error {
        Error::InvalidArgument(format!("bucket '{}' is still being communicated; wait() first", self.name))
    }
}

fn check_same_place(bucket: &str, (first, region): (&str, &Region), (second, other): (&str, &Region)) -> Result<()> {
    if same_place(region.device(), other.device()) {
        return Ok(());
    }
    Err(Error::UnsupportedType(format!(
        "bucket '{bucket}': tensor '{second}' is on {} but '{first}' is on {}",
        name_of(other.device()),
        name_of(region.device())
    )))
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code)]

    use super::*;
    use crate::op::{CentralizedOp, NoOp};

    fn tensor(name: &str, dtype: DType, memory: &mut [u8]) -> Tensor {
        // SAFETY: every test keeps its array alive and does not touch it while it uses the bucket.
        let region = unsafe { Region::new(memory.as_mut_ptr(), memory.len() / dtype.size(), dtype).unwrap() };
        Tensor { name: name.to_owned(), region, padding: false }
    }

    fn empty(name: &str) -> Tensor {
        // SAFETY: there are no elements, so the pointer is never read.
        let region = unsafe { Region::new(std::ptr::null_mut(), 0, DType::F32).unwrap() };
        Tensor { name: name.to_owned(), region, padding: false }
    }

    #[test]
    fn an_empty_bucket_a_repeated_name_and_mixed_dtypes_are_refused_by_name() {
        let (mut a, mut b) = ([0u8; 8], [0u8; 8]);
        let mixed = vec![tensor("a", DType::F32, &mut a), tensor("b", DType::F16, &mut b)];
        let error = Bucket::new("first", mixed).err().unwrap();
        assert!(matches!(error, Error::UnsupportedType(_)));
        assert_eq!(error.to_string(), "bucket 'first': tensor 'b' is float16 but 'a' is float32");
        let twice = vec![tensor("a", DType::F32, &mut a), tensor("a", DType::F32, &mut b)];
        assert_eq!(Bucket::new("x", twice).err().unwrap().to_string(), "bucket 'x' has two tensors named 'a'");
        assert_eq!(Bucket::new("x", vec![]).err().unwrap().to_string(), "bucket 'x' has no tensors");
    }

    #[test]
    fn several_tensors_without_elements_are_fine() {
        let mut a = [0u8; 8];
        let bucket = Bucket::new("x", vec![empty("e"), tensor("a", DType::F32, &mut a), empty("f")]).unwrap();
        assert_eq!((bucket.bytes(), bucket.tensors().count()), (8, 3));
        assert_eq!(Bucket::new("x", vec![empty("e"), empty("f")]).unwrap().bytes(), 0);
    }

    #[test]
    fn memory_can_move_but_not_change_its_size_or_type() {
        let (mut a, mut b) = ([0u8; 8], [0u8; 16]);
        let mut bucket = Bucket::new("x", vec![tensor("a", DType::F32, &mut a)]).unwrap();
        let moved = tensor("", DType::F32, &mut b[..8]).region;
        let address = moved.address();
        bucket.mark_ready(0, Some(moved), None).unwrap();
        assert_eq!(bucket.regions().unwrap()[0].address(), address);
        let error = bucket.mark_ready(0, Some(tensor("", DType::F32, &mut b).region), None).unwrap_err();
        assert_eq!(error.to_string(), "tensor 'a' has 2 elements of float32, but its new memory has 4 of float32");
        assert!(bucket.mark_ready(0, Some(tensor("", DType::I32, &mut b[..8]).region), None).is_err());
    }

    #[test]
    fn a_bucket_that_is_checked_out_cannot_be_changed_or_checked_out_again() {
        let mut a = [0u8; 8];
        let mut bucket = Bucket::new("x", vec![tensor("a", DType::F32, &mut a)]).unwrap();
        bucket.append(Arc::new(NoOp)).unwrap();
        let checked_out = bucket.check_out().unwrap();
        assert_eq!((checked_out.regions.len(), checked_out.ops.len()), (1, 1));
        assert!(bucket.check_out().err().unwrap().to_string().contains("'x' is still being communicated"));
        assert!(bucket.append(Arc::new(NoOp)).is_err() && bucket.clear_ops().is_err());
        assert!(
            bucket.mark_ready(0, None, None).unwrap_err().to_string().starts_with("tensor 'a' was marked ready, but")
        );
        bucket.check_in(checked_out);
        bucket.clear_ops().unwrap();
        assert!(bucket.ops().is_empty());
    }

    #[test]
    fn the_average_of_integers_is_refused_when_the_operation_is_added() {
        let (mut a, mut b) = ([0u8; 8], [0u8; 8]);
        let mut bucket = Bucket::new("counts", vec![tensor("a", DType::I32, &mut a)]).unwrap();
        let average = || Arc::new(CentralizedOp::new(true, false, false));
        let error = bucket.append(average()).unwrap_err();
        assert_eq!(error, Error::UnsupportedType("bucket 'counts': tensor 'a': avg of int32 is not defined".into()));
        let mut two =
            Bucket::new("two", vec![tensor("a", DType::I32, &mut a), tensor("b", DType::I32, &mut b)]).unwrap();
        let error = two.append(average()).unwrap_err();
        assert_eq!(
            error,
            Error::UnsupportedType("bucket 'two': tensor 'a' and 1 more: avg of int32 is not defined".into())
        );
        bucket.append(Arc::new(CentralizedOp::new(false, false, false))).unwrap();
        assert_eq!(bucket.ops(), ["centralized"]);
    }
}
