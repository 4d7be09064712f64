//! Element-wise kernels: how the elements of several ranks become one.

use crate::types::{DType, ReduceOp};

/// `out = inputs[0] op inputs[1] op …`, element by element, strictly in the order given; where `inputs[i]` is `None`, the i-th
/// input is what `out` holds (at most one may be `None`). f16 and bf16 accumulate in float32 and round once at the end. `Avg`
/// divides the sum by `inputs.len()`. All slices have the same length, a multiple of the element size; alignment is not
/// required. `op.check(dtype)` was asked before.
pub fn combine(dtype: DType, op: ReduceOp, inputs: &[Option<&[u8]>], out: &mut [u8]) {
    let _ = (dtype, op, inputs, out);
    unimplemented!("kernels")
}

/// Divides every element of a float tensor by `divisor` (the second half of `Avg` when the sum was made in stages).
pub fn divide(dtype: DType, data: &mut [u8], divisor: usize) {
    let _ = (dtype, data, divisor);
    unimplemented!("kernels")
}
