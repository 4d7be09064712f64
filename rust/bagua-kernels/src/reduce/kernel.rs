//! The loop over elements. It reads and writes every byte of main memory once, for any number of inputs.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use super::element::{BLOCK, Element, Op};
use crate::prefetch::prefetch_write;

/// Distance in bytes between the cache line that is combined and the one that is prefetched, on Intel processors.
///
/// The kernels of the half types execute twice as many instructions per cache line as float32. The processor executes
/// out of order only within a limited number of instructions, so without prefetching fewer lines are on their way from
/// the peer's cache at a time. Measured on two Intel cores with 1 MiB, as multiples of float32's time without
/// prefetching: bfloat16 1.28 without and 1.03 with, float16 1.15 and 1.03, float32 0.95 with. A distance of 512 bytes,
/// or prefetching a block at a time, gave 1.14 and more; 2 KiB gave the same as 1 KiB. For AMD processors see `zen4`.
#[cfg(target_arch = "x86_64")]
pub(super) const PREFETCH: usize = 1024;
const LINE: usize = 64;

/// Called by [`super::combine_everywhere_after`] with a range of bytes and the parts, before it combines them.
pub type Before<'a> = dyn FnMut(Range<usize>, &mut [&mut [u8]]) + 'a;

/// Inputs and outputs of a loop.
pub(super) enum Work<'w, 'a> {
    /// The arguments of [`super::combine`].
    Into { inputs: &'w [Option<&'a [u8]>], out: &'w mut [u8] },
    /// The arguments of [`super::combine_everywhere_after`].
    Everywhere { parts: &'w mut [&'a mut [u8]], stretch: usize, before: &'w mut Before<'w> },
}

impl Work<'_, '_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Work::Into { out, .. } => out.len(),
            Work::Everywhere { parts, .. } => parts[0].len(),
        }
    }

    /// Returns false if there is a single output that does not start at a cache line.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_aligned(&self) -> bool {
        match self {
            Work::Into { out, .. } => out.as_ptr().addr().is_multiple_of(LINE),
            Work::Everywhere { .. } => true,
        }
    }

    /// Combines the bytes in `range`, a whole number of elements. Compiled for the features of the calling function.
    #[inline(always)]
    pub(super) fn run<E: Element, O: Op<E::Acc>>(&mut self, op: O, range: Range<usize>) {
        match self {
            Work::Into { inputs, out } => combine::<E, O>(op, inputs, out, range),
            Work::Everywhere { parts, stretch, before } => {
                combine_everywhere::<E, O>(op, parts, range, *stretch, &mut **before);
            }
        }
    }
}

/// Combines the bytes in `range` of every input into the same range of `out`: see [`super::combine`].
#[inline(always)]
fn combine<E: Element, O: Op<E::Acc>>(op: O, inputs: &[Option<&[u8]>], out: &mut [u8], range: Range<usize>) {
    let in_place = inputs.iter().any(Option::is_none);
    // `held` is not initialised, because zeroing it takes as long as combining 1 KiB.
    let mut held = [const { MaybeUninit::<u8>::uninit() }; BLOCK];
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + BLOCK);
        let out = &mut out[start..end];
        let held = if in_place { copy_of(out, &mut held) } else { &[] };
        block::<E, O>(op, inputs, start, held, out);
        start = end;
    }
}

/// Returns a copy of at most [`BLOCK`] bytes.
#[inline(always)]
#[allow(unsafe_code)]
fn copy_of<'a>(bytes: &[u8], into: &'a mut [MaybeUninit<u8>; BLOCK]) -> &'a [u8] {
    let into = &mut into[..bytes.len()];
    // SAFETY: `into` has the length of `bytes` and is fully written before it is read, as u8 of equal layout.
    unsafe {
        into.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        std::slice::from_raw_parts(into.as_ptr().cast(), into.len())
    }
}

/// Combines the bytes in `range` of all parts into every part: see [`super::combine_everywhere`].
#[inline(always)]
fn combine_everywhere<E: Element, O: Op<E::Acc>>(
    op: O,
    parts: &mut [&mut [u8]],
    range: Range<usize>,
    stretch: usize,
    before: &mut Before<'_>,
) {
    let mut start = range.start;
    while start < range.end {
        let now = start..range.end.min(start.saturating_add(stretch));
        before(now.clone(), parts);
        let left = range.end - start;
        start = now.end;
        match parts {
            [] => unreachable!("combine_everywhere refuses to combine nothing"),
            [only] => {
                let units = E::units_mut(&mut only[now]);
                units.iter_mut().for_each(|unit| *unit = E::store(op.finish(E::load(*unit))));
            }
            // Two parts need no accumulators in memory.
            [first, second] => {
                both::<E, O>(op, left, E::units_mut(&mut first[now.clone()]), E::units_mut(&mut second[now]));
            }
            // Four is a common number of ranks per host. This is a third faster than `many`.
            [a, b, c, d] => {
                four::<E, O>(
                    op,
                    left,
                    E::units_mut(&mut a[now.clone()]),
                    E::units_mut(&mut b[now.clone()]),
                    E::units_mut(&mut c[now.clone()]),
                    E::units_mut(&mut d[now]),
                );
            }
            _ => many::<E, O>(op, parts, now),
        }
    }
}

#[inline(always)]
fn many<E: Element, O: Op<E::Acc>>(op: O, parts: &mut [&mut [u8]], range: Range<usize>) {
    let [first, second, rest @ ..] = parts else { unreachable!("one part is a case of its own") };
    let mut accs = E::block();
    let accs = accs.as_mut();
    let mut result = [0; BLOCK];
    let mut start = range.start;
    while start < range.end {
        let block = start..range.end.min(start + BLOCK);
        let result = &mut result[..block.len()];
        let units = E::units_mut(result);
        let accs = &mut accs[..units.len()];
        open::<E, O>(op, E::units(&first[block.clone()]), E::units(&second[block.clone()]), accs);
        if let [middle @ .., last] = &mut *rest {
            middle.iter().for_each(|part| join::<E, O>(op, accs, E::units(&part[block.clone()])));
            close::<E, O>(op, accs, E::units(&last[block.clone()]), units);
        }
        let rest = rest.iter_mut().map(|part| &mut **part);
        for part in [&mut **first, &mut **second].into_iter().chain(rest) {
            part[block.clone()].copy_from_slice(result);
        }
        start = block.end;
    }
}

/// Prefetches the cache lines [`Element::PREFETCH`] bytes after the units at this index, if they are among the `left`
/// bytes from index 0. Beyond those, another rank may be writing, and would lose the cache line.
#[inline(always)]
fn prefetch<E: Element, const PARTS: usize>(index: usize, left: usize, units: [&E::Bytes; PARTS]) {
    let at = index * size_of::<E::Bytes>();
    if E::PREFETCH > 0 && at.is_multiple_of(LINE) && at + E::PREFETCH < left {
        let line = |unit| ptr::from_ref::<E::Bytes>(unit).wrapping_byte_add(E::PREFETCH).cast();
        units.into_iter().for_each(|unit| prefetch_write(line(unit)));
    }
}

#[inline(always)]
fn both<E: Element, O: Op<E::Acc>>(op: O, left: usize, a: &mut [E::Bytes], b: &mut [E::Bytes]) {
    for (index, (a, b)) in a.iter_mut().zip(b).enumerate() {
        prefetch::<E, 2>(index, left, [a, b]);
        let result = E::store(op.finish(op.apply(E::load(*a), E::load(*b))));
        *a = result;
        *b = result;
    }
}

#[inline(always)]
fn four<E: Element, O: Op<E::Acc>>(
    op: O,
    left: usize,
    a: &mut [E::Bytes],
    b: &mut [E::Bytes],
    c: &mut [E::Bytes],
    d: &mut [E::Bytes],
) {
    for (index, (((a, b), c), d)) in a.iter_mut().zip(b).zip(c).zip(d).enumerate() {
        prefetch::<E, 4>(index, left, [a, b, c, d]);
        let first = op.apply(E::load(*a), E::load(*b));
        let result = E::store(op.finish(op.apply(op.apply(first, E::load(*c)), E::load(*d))));
        (*a, *b, *c, *d) = (result, result, result, result);
    }
}

/// Combines the inputs from byte `start` on into `out`. An input of `None` stands for `held`, the old values of `out`.
#[inline(always)]
fn block<'a, E: Element, O: Op<E::Acc>>(
    op: O,
    inputs: &[Option<&'a [u8]>],
    start: usize,
    held: &'a [u8],
    out: &mut [u8],
) {
    let end = start + out.len();
    let out = E::units_mut(out);
    let units =
        |input: Option<&'a [u8]>| -> &'a [E::Bytes] { E::units(input.map_or(held, |bytes| &bytes[start..end])) };
    // One and two inputs need no accumulators in memory. With more inputs, the first two initialise the accumulators,
    // and the last one is added while storing.
    match *inputs {
        [] => unreachable!("combine refuses to combine nothing"),
        [only] => one::<E, O>(op, units(only), out),
        [first, second] => two::<E, O>(op, units(first), units(second), out),
        [first, second, ref middle @ .., last] => {
            let mut accs = E::block();
            let accs = &mut accs.as_mut()[..out.len()];
            open::<E, O>(op, units(first), units(second), accs);
            for input in middle {
                join::<E, O>(op, accs, units(*input));
            }
            close::<E, O>(op, accs, units(last), out);
        }
    }
}

#[inline(always)]
fn one<E: Element, O: Op<E::Acc>>(op: O, a: &[E::Bytes], out: &mut [E::Bytes]) {
    for (out, a) in out.iter_mut().zip(a) {
        *out = E::store(op.finish(E::load(*a)));
    }
}

#[inline(always)]
fn two<E: Element, O: Op<E::Acc>>(op: O, a: &[E::Bytes], b: &[E::Bytes], out: &mut [E::Bytes]) {
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = E::store(op.finish(op.apply(E::load(*a), E::load(*b))));
    }
}

#[inline(always)]
fn open<E: Element, O: Op<E::Acc>>(op: O, a: &[E::Bytes], b: &[E::Bytes], accs: &mut [E::Acc]) {
    for ((acc, a), b) in accs.iter_mut().zip(a).zip(b) {
        *acc = op.apply(E::load(*a), E::load(*b));
    }
}

#[inline(always)]
fn join<E: Element, O: Op<E::Acc>>(op: O, accs: &mut [E::Acc], next: &[E::Bytes]) {
    for (acc, next) in accs.iter_mut().zip(next) {
        *acc = op.apply(*acc, E::load(*next));
    }
}

#[inline(always)]
fn close<E: Element, O: Op<E::Acc>>(op: O, accs: &[E::Acc], last: &[E::Bytes], out: &mut [E::Bytes]) {
    for ((out, acc), last) in out.iter_mut().zip(accs).zip(last) {
        *out = E::store(op.finish(op.apply(*acc, E::load(*last))));
    }
}
