//! Element-wise kernels: how the elements of several ranks become one.
//!
//! `kernel` is the one to read first: the loop, written once over an `element` type (how it lies in memory, what it
//! accumulates in) and an `op`. `dispatch` joins a dtype and an operation to its loop. `avx2` and `avx512` compile the same loop
//! for wider registers and add the conversions that compilers cannot vectorise, `neon` adds those of 64-bit ARM processors, whose
//! registers all loops use anyway; `level` decides per call, from what the processor has, which of them runs.
//!
//! Results do not depend on that choice: nothing is reassociated and no multiply-add is fused. The one freedom is the bit
//! pattern of a NaN that arithmetic produced from two NaNs.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dispatch;
mod element;
mod kernel;
mod level;
#[cfg(target_arch = "aarch64")]
mod neon;
mod op;
#[cfg(test)]
mod tests;

pub use kernel::Before;
use level::Level;

use crate::types::{DType, ReduceOp};

/// Bytes of a stretch, see [`combine_everywhere_after`]. Measured: 256 and 512 are equally fast, 1 KiB is 4 % slower, 4 KiB 15 %.
const STRETCH: usize = 512;

/// `out = inputs[0] op inputs[1] op …`, element by element, strictly in the order given; where `inputs[i]` is `None`, the i-th
/// input is what `out` holds (at most one may be `None`). f16 and bf16 accumulate in float32 and round once at the end. `Avg`
/// divides the sum by `inputs.len()`. All slices have the same length, a multiple of the element size; alignment is not
/// required. `op.check(dtype)` was asked before.
///
/// # Panics
/// When there is no input, when lengths differ, or when `op.check(dtype)` would have refused.
pub fn combine(dtype: DType, op: ReduceOp, inputs: &[Option<&[u8]>], out: &mut [u8]) {
    dispatch::combine(Level::best(), dtype, op, inputs, out);
}

/// `parts[0] op parts[1] op …`, as [`combine`], and the result goes into every part.
///
/// # Panics
/// As [`combine`].
pub fn combine_everywhere(dtype: DType, op: ReduceOp, parts: &mut [&mut [u8]]) {
    dispatch::combine_everywhere(Level::best(), dtype, op, parts, usize::MAX, &mut |_, _| {});
}

/// As [`combine_everywhere`], in short stretches from the first to the last, and calls `before` with each of them before
/// it is combined. For memory traffic that is to overlap with the kernel's: a processor waits for several lines at a time,
/// but only for those that are near each other in its program.
///
/// # Panics
/// As [`combine`].
pub fn combine_everywhere_after(dtype: DType, op: ReduceOp, parts: &mut [&mut [u8]], before: &mut Before<'_>) {
    // Other numbers of parts begin every stretch with fresh accumulators in memory.
    let stretch = if matches!(parts.len(), 2 | 4) { STRETCH } else { element::BLOCK };
    dispatch::combine_everywhere(Level::best(), dtype, op, parts, stretch, before);
}

/// Divides every element of a float tensor by `divisor` (the second half of `Avg` when the sum was made in stages).
///
/// # Panics
/// When `dtype` is not a float type, or the length is not a multiple of its size.
pub fn divide(dtype: DType, data: &mut [u8], divisor: usize) {
    dispatch::divide(Level::best(), dtype, data, divisor);
}
