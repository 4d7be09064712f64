//! The codec in blocks of sixteen elements. It gives the same bits as the reference.
//!
//! Encoding reads the elements twice: first to find their range, then to write their levels. The second pass starts at
//! the last element, because the last elements are still in the cache.

use std::marker::PhantomData;

use super::super::Encoded;
use super::super::float::{Float, ForFloat, for_dtype};
use super::super::simd::{Kernel, LANES, Lanes, Level, filled, is_zero};
use super::record::{HEADER, levels};
use crate::types::DType;

/// Number of independent partial results in the first pass, so that a block need not wait for the one before it.
const UNROLL: usize = 4;

struct Encode<'a>(Level, &'a [u8], &'a mut [u8]);

impl ForFloat for Encode<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let Encode(level, elements, record) = self;
        let (header, body) = record.split_at_mut(HEADER);
        let (min, max, finite) = level.run(Range(elements, PhantomData::<T>));
        header.fill(0);
        let Some(levels) = levels(min, max).filter(|_| finite) else {
            T::store(f32::NAN, header);
            T::store(f32::NAN, &mut header[T::SIZE..]);
            body.fill(0);
            return Encoded::NonFinite;
        };
        T::store(min + 0.0, header);
        T::store(max + 0.0, &mut header[T::SIZE..]);
        let (body, padding) = body.split_at_mut(elements.len() / T::SIZE);
        padding.fill(0);
        level.run(Quantize { elements, body, scale: levels.scale, lower: levels.lower(), element: PhantomData::<T> });
        Encoded::Finite
    }
}

/// Finds the smallest and the largest of at least one element. The third result is true if all are finite.
struct Range<'a, T>(&'a [u8], PhantomData<T>);

impl<T: Float> Kernel for Range<'_, T> {
    type Output = (f32, f32, bool);

    #[inline(always)]
    fn run<L: Lanes>(self) -> (f32, f32, bool) {
        let size = LANES * T::SIZE;
        let mut min = [L::splat(f32::INFINITY); UNROLL];
        let mut max = [L::splat(f32::NEG_INFINITY); UNROLL];
        // x - x is 0 for finite numbers and NaN for all others, and a sum with a NaN stays NaN.
        let mut sum = [L::splat(0.0); UNROLL];
        let groups = self.0.chunks_exact(size * UNROLL);
        let rest = groups.remainder();
        for group in groups {
            for i in 0..UNROLL {
                let x = T::load_lanes::<L>(&group[i * size..]);
                min[i] = x.smaller(min[i]);
                max[i] = x.larger(max[i]);
                sum[i] = sum[i].plus(x.minus(x));
            }
        }
        let blocks = rest.chunks_exact(size);
        let left = blocks.remainder();
        for block in blocks {
            let x = T::load_lanes::<L>(block);
            min[0] = x.smaller(min[0]);
            max[0] = x.larger(max[0]);
            sum[0] = sum[0].plus(x.minus(x));
        }
        let (mut least, mut most, mut finite) = (min[0], max[0], true);
        for i in 0..UNROLL {
            least = min[i].smaller(least);
            most = max[i].larger(most);
            finite &= is_zero(sum[i]);
        }
        let mut least = least.values().into_iter().fold(f32::INFINITY, f32::min);
        let mut most = most.values().into_iter().fold(f32::NEG_INFINITY, f32::max);
        for x in left.chunks_exact(T::SIZE).map(T::load) {
            finite &= x.is_finite();
            least = least.min(x);
            most = most.max(x);
        }
        (least, most, finite)
    }
}

struct Quantize<'a, T> {
    elements: &'a [u8],
    body: &'a mut [u8],
    scale: f32,
    lower: f32,
    element: PhantomData<T>,
}

impl<T: Float> Kernel for Quantize<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (scale, lower) = (L::splat(self.scale), L::splat(self.lower));
        // The largest element has level 255, so no level is above 255. `to_u8` clamps levels below 0.
        let blocks = self.elements.chunks_exact(LANES * T::SIZE);
        let left = blocks.remainder();
        let (body, end) = self.body.as_chunks_mut::<LANES>();
        if !left.is_empty() {
            let x = T::load_lanes::<L>(&filled(left));
            end.copy_from_slice(&x.times(scale).round().minus(lower).to_u8()[..end.len()]);
        }
        for (block, q) in blocks.zip(body).rev() {
            *q = T::load_lanes::<L>(block).times(scale).round().minus(lower).to_u8();
        }
    }
}

/// Encodes at least one element into a record of the right length.
pub(super) fn encode(level: Level, dtype: DType, elements: &[u8], record: &mut [u8]) -> Encoded {
    for_dtype(dtype, Encode(level, elements, record))
}

struct Decode<'a>(Level, &'a [u8], usize, &'a mut [u8]);

impl ForFloat for Decode<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let Decode(level, record, first, elements) = self;
        let (min, max) = (T::load(record), T::load(&record[T::SIZE..]));
        match levels(min, max) {
            None => elements.chunks_exact_mut(T::SIZE).for_each(|element| T::store(f32::NAN, element)),
            Some(levels) => level.run(Restore {
                body: &record[HEADER + first..],
                elements,
                scale: levels.scale,
                lower: levels.lower(),
                element: PhantomData::<T>,
            }),
        }
    }
}

struct Restore<'a, T> {
    /// At least one byte per element.
    body: &'a [u8],
    elements: &'a mut [u8],
    scale: f32,
    lower: f32,
    element: PhantomData<T>,
}

impl<T: Float> Kernel for Restore<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (scale, lower) = (L::splat(self.scale), L::splat(self.lower));
        let (body, _) = self.body.as_chunks::<LANES>();
        let full = self.elements.len() / (LANES * T::SIZE);
        let mut blocks = self.elements.chunks_exact_mut(LANES * T::SIZE);
        for (block, q) in (&mut blocks).zip(body) {
            T::store_lanes(L::from_u8(q).plus(lower).over(scale), block);
        }
        let left = blocks.into_remainder();
        if !left.is_empty() {
            let mut block = [0; 64];
            T::store_lanes(L::from_u8(&body[full]).plus(lower).over(scale), &mut block);
            left.copy_from_slice(&block[..left.len()]);
        }
    }
}

/// Decodes at least one element, from number `first` (a multiple of 32) on, of a record of the right length.
pub(super) fn decode(level: Level, dtype: DType, record: &[u8], first: usize, elements: &mut [u8]) {
    for_dtype(dtype, Decode(level, record, first, elements));
}
