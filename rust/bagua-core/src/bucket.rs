//! Tensors that travel together.

use std::sync::Arc;

use crate::error::Result;
use crate::memory::Region;
use crate::op::Op;
use crate::types::DType;

/// A named tensor of a bucket.
pub struct Tensor {
    /// Unique in its engine.
    pub name: String,
    /// Its memory.
    pub region: Region,
    /// Padding is always ready.
    pub padding: bool,
}

/// See the module. Its operations can be changed while it is not in flight.
pub struct Bucket {}

#[expect(unused_variables, reason = "signatures first")]
impl Bucket {
    /// A bucket of these tensors, all of one dtype; empty lists, repeated names and mixed dtypes are refused by name.
    pub fn new(name: &str, tensors: Vec<Tensor>) -> Result<Bucket> { unimplemented!() }
    /// Its name.
    pub fn name(&self) -> &str { unimplemented!() }
    /// Element type.
    pub fn dtype(&self) -> DType { unimplemented!() }
    /// Bytes of all tensors, padding included.
    pub fn bytes(&self) -> usize { unimplemented!() }
    /// Adds an operation; they run in the order in which they were added.
    pub fn append(&self, op: Arc<dyn Op>) { unimplemented!() }
    /// Removes all operations.
    pub fn clear_ops(&self) { unimplemented!() }
    /// Names of the operations.
    pub fn ops(&self) -> Vec<String> { unimplemented!() }
}
