//! Element-wise kernels: how the elements of several ranks become one.
//!
//! Read `kernel` first: the loop, written once over an `element` type (its layout in memory, its accumulator) and an `op`. `dispatch`
//! selects the loop of a dtype and an operation. `avx2`, `avx512` and `zen4` compile the same loop for wider registers and add the
//! conversions that compilers cannot vectorise; `neon` adds those of 64-bit ARM processors, whose registers all loops use anyway.
//! `instruction_set` selects one of them per call, by the processor's features and vendor.
//!
//! Results do not depend on that choice: nothing is reassociated, and no multiplication is fused with an addition in a way that
//! rounds differently. Only the bit pattern of a NaN that arithmetic made from two NaNs may differ.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dispatch;
mod element;
mod instruction_set;
mod kernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod op;
#[cfg(test)]
mod tests;
mod weight_update;
#[cfg(target_arch = "x86_64")]
mod zen4;

use instruction_set::Level;
pub use kernel::Before;
pub use weight_update::{correct, subtract};

use crate::types::{DType, ReduceOp};

/// Bytes of a block of [`combine_everywhere_after`]. Measured: 256 and 512 are equally fast, 1 KiB is 4 % slower, 4 KiB 15 %.
const STRETCH: usize = 512;

/// `out = inputs[0] op inputs[1] op …`, element by element, strictly in the order given; where `inputs[i]` is `None`, the i-th
/// input is what `out` holds (at most one may be `None`). f16 and bf16 accumulate in float32 and round once at the end. `Avg`
/// divides the sum by `inputs.len()`. All slices have the same length, a multiple of the element size; alignment is not
/// required. The caller has called `op.check(dtype)`.
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

/// As [`combine_everywhere`], in short blocks from the first to the last; calls `before` with each of them before it is combined. For
/// memory traffic that is to overlap with the kernel's: a processor has several cache lines in flight at a time, but only those of
/// instructions near each other.
///
/// # Panics
/// As [`combine`].
pub fn combine_everywhere_after(dtype: DType, op: ReduceOp, parts: &mut [&mut [u8]], before: &mut Before<'_>) {
    // Other numbers of parts initialise accumulators in memory for every block.
    let stretch = if matches!(parts.len(), 2 | 4) { STRETCH } else { element::BLOCK };
    dispatch::combine_everywhere(Level::best(), dtype, op, parts, stretch, before);
}

/// The names of the levels that this processor has, for benchmarks: compilations of the same loops for the processor's features.
pub fn levels() -> impl Iterator<Item = &'static str> {
    Level::available().map(Level::name)
}

/// The name of the level in use, for benchmarks.
pub fn level() -> &'static str {
    Level::best().name()
}

/// As [`combine_everywhere`], on the level of this name, for benchmarks.
///
/// # Panics
/// As [`combine`], and when the processor lacks that level.
pub fn combine_everywhere_on(level: &str, dtype: DType, op: ReduceOp, parts: &mut [&mut [u8]]) {
    let level = Level::available().find(|each| each.name() == level).expect("a level that this processor has");
    dispatch::combine_everywhere(level, dtype, op, parts, usize::MAX, &mut |_, _| {});
}

/// As [`combine`] with `Sum`, divided by `divisor` before it is rounded: an average of more ranks than there are inputs.
///
/// # Panics
/// As [`combine`], and for a dtype that is neither float nor complex.
pub fn sum_over(dtype: DType, inputs: &[Option<&[u8]>], out: &mut [u8], divisor: usize) {
    dispatch::sum_over(Level::best(), dtype, inputs, out, divisor);
}

/// Divides every element of a float tensor by `divisor`: the second half of `Avg` where the sum was made in several steps.
///
/// # Panics
/// When `dtype` is not a float type, or the length is not a multiple of its size.
pub fn divide(dtype: DType, data: &mut [u8], divisor: usize) {
    dispatch::divide(Level::best(), dtype, data, divisor);
}
