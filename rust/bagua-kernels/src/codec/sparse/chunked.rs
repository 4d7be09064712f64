//! top_k with chunks: the k largest magnitudes of each chunk of at most 4096 elements, in 14 bits per kept element.
//!
//! For each chunk, a record has a float32 scale, the kept positions, ascending, in 12 bits, and their values in 2 bits.
//! Both are packed from the lowest bit on, and each ends with a whole byte. Zeros follow up to a multiple of 32. The
//! low bit of a value is 1 if the element is negative, and the high bit is 1 if its magnitude is twice the scale
//! instead of the scale:
//!
//! - w = 2 if the magnitude is larger than 1.5 times the mean magnitude of the kept elements, otherwise 1
//! - scale = (sum of w * magnitude) / (sum of w * w), at most half of the largest magnitude if a w is 2
//! - decoded: sign * w * scale, 0 for the others
//!
//! The scale is the one with the least squared error for these w. So what is lost is always less than what was kept,
//! which error feedback needs. Sums are in float64, in the order of the positions. The sizes are those of SparseLoCo
//! (arXiv:2508.15706).
//!
//! If an element is not finite, the scale of its chunk is NaN.

use std::marker::PhantomData;

use super::super::float::{Float, ForFloat, for_dtype};
use super::super::options::{CodecOption, Options};
use super::super::simd::{Kernel, LANES, Lanes, Level, filled, is_zero};
use super::super::{Codec, Encoded, Exchange, Scratch, aligned, check_len};
use super::record::Kept;
use crate::error::{Error, Result};
use crate::types::DType;

const POSITION: usize = 12;

const VALUE: usize = 2;

const SCALE: usize = size_of::<f32>();

/// The codec top_k with the option chunk.
#[derive(Clone, Copy, Debug)]
pub struct ChunkedTopK {
    kept: Kept,
    /// Number of elements of a chunk, from 1 to 4096. The last chunk has the rest.
    chunk: usize,
}

impl ChunkedTopK {
    /// Takes all options, of which `chunk` or `bits` was given.
    pub(super) fn new(options: &mut Options<'_>) -> Result<ChunkedTopK> {
        let (chunk, bits) = (options.int("chunk", 1 << POSITION, 1)?, options.int("bits", VALUE as i64, 1)?);
        if !(1..=1 << POSITION).contains(&chunk) {
            return Err(Error::InvalidArgument(format!("top_k chunk={chunk}: must be from 1 to 4096")));
        }
        if bits != VALUE as i64 {
            return Err(Error::InvalidArgument(format!("top_k bits={bits}: must be 2")));
        }
        Ok(ChunkedTopK { kept: Kept::new(options)?, chunk: chunk as usize })
    }

    fn lengths(&self, count: usize) -> (usize, usize) {
        let kept = self.kept.of(count);
        ((kept * POSITION).div_ceil(8), (kept * VALUE).div_ceil(8))
    }

    /// Returns the length in bytes of a chunk's part of a record.
    fn part(&self, count: usize) -> usize {
        let (positions, values) = self.lengths(count);
        if count == 0 { 0 } else { SCALE + positions + values }
    }

    /// Calls `work` with each chunk's number of elements and part of the record.
    fn parts<'a>(&self, count: usize, record: &'a [u8]) -> impl Iterator<Item = (usize, &'a [u8])> + use<'a> {
        let (chunk, part) = (self.chunk, self.part(self.chunk));
        let last = self.part(count % chunk);
        let counts = (0..count).step_by(chunk).map(move |first| chunk.min(count - first));
        let end = count / chunk * part + last;
        counts.zip(record[..end].chunks(part.max(1)))
    }
}

impl Codec for ChunkedTopK {
    fn id(&self) -> u8 {
        9
    }

    fn name(&self) -> &'static str {
        "top_k"
    }

    fn values(&self) -> Vec<(&'static str, CodecOption)> {
        let (chunk, bits) = (CodecOption::Int(self.chunk as i64), CodecOption::Int(VALUE as i64));
        vec![("k", self.kept.value()), ("chunk", chunk), ("bits", bits)]
    }

    fn exchange(&self) -> Exchange {
        Exchange::OneShot
    }

    fn record_len(&self, count: usize, _dtype: DType) -> usize {
        aligned(count / self.chunk * self.part(self.chunk) + self.part(count % self.chunk))
    }

    fn encode(&self, dtype: DType, elements: &[u8], record: &mut [u8], _draw: u64, scratch: &mut Scratch) -> Encoded {
        assert_eq!(record.len(), self.record_len(elements.len() / dtype.size(), dtype), "length of the record");
        for_dtype(dtype, Encode(self, elements, record, scratch))
    }

    fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()> {
        let count = check_len(self, dtype, record, elements)?;
        elements.fill(0);
        for ((count, part), elements) in self.parts(count, record).zip(elements.chunks_mut(self.chunk * dtype.size())) {
            for_dtype(dtype, Decode(self, count, part, elements))?;
        }
        Ok(())
    }
}

struct Encode<'a>(&'a ChunkedTopK, &'a [u8], &'a mut [u8], &'a mut Scratch);

impl ForFloat for Encode<'_> {
    type Output = Encoded;

    fn run<T: Float>(self) -> Encoded {
        let Encode(codec, elements, mut record, scratch) = self;
        let (level, mut encoded) = (Level::best(), Encoded::Finite);
        for elements in elements.chunks(codec.chunk * T::SIZE) {
            let count = elements.len() / T::SIZE;
            let (part, rest) = record.split_at_mut(codec.part(count));
            record = rest;
            level.run(Select { kept: codec.kept.of(count), elements, scratch, element: PhantomData::<T> });
            let (scale, rest) = part.split_at_mut(SCALE);
            let (positions, values) = rest.split_at_mut(codec.lengths(count).0);
            let step = write::<T>(elements, &scratch.places, positions, values);
            f32::store(step, scale);
            if !step.is_finite() {
                encoded = Encoded::NonFinite;
            }
        }
        record.fill(0);
        encoded
    }
}

fn write<T: Float>(elements: &[u8], places: &[u32], positions: &mut [u8], values: &mut [u8]) -> f32 {
    let x = |place: u32| T::load(&elements[place as usize * T::SIZE..]);
    let magnitude = |place: &u32| f64::from(x(*place).abs());
    let mean = places.iter().map(magnitude).sum::<f64>() / places.len() as f64;
    let (mut sum, mut squares, mut largest) = (0.0, 0.0, 0.0f64);
    positions.fill(0);
    values.fill(0);
    for (i, place) in places.iter().enumerate() {
        let at = i * POSITION / 8;
        let bits = place << (i * POSITION % 8);
        positions[at] |= bits as u8;
        positions[at + 1] |= (bits >> 8) as u8;
        let magnitude = magnitude(place);
        let double = magnitude > 1.5 * mean;
        let weight = if double { 2.0 } else { 1.0 };
        sum += weight * magnitude;
        squares += weight * weight;
        largest = largest.max(if double { magnitude } else { 0.0 });
        values[i / 4] |= (u8::from(x(*place) < 0.0) | u8::from(double) << 1) << (i % 4 * VALUE);
    }
    if !mean.is_finite() {
        values.fill(0);
        return f32::NAN;
    }
    let scale = sum / squares;
    (if largest > 0.0 { scale.min(largest / 2.0) } else { scale }) as f32
}

/// Finds the positions of the `kept` largest magnitudes, ascending, in `scratch.places`.
///
/// The elements are put into 256 groups, or fewer. At least k elements are not smaller than the k-th largest of the
/// groups' largest magnitudes, and few others are. So only these elements are compared with each other.
struct Select<'a, T> {
    kept: usize,
    elements: &'a [u8],
    scratch: &'a mut Scratch,
    element: PhantomData<T>,
}

/// Number of blocks of elements that have a group for each lane.
const GROUP: usize = 16;

/// Returns the values of at most sixteen elements, followed by zeros.
#[inline(always)]
fn load<T: Float, L: Lanes>(block: &[u8]) -> L {
    if block.len() == LANES * T::SIZE { T::load_lanes(block) } else { T::load_lanes(&filled(block)) }
}

impl<T: Float> Kernel for Select<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Scratch { words, places } = self.scratch;
        let count = self.elements.len() / T::SIZE;
        let blocks = || self.elements.chunks(LANES * T::SIZE);
        let (mut sum, mut largest) = (L::splat(0.0), L::splat(0.0));
        words.clear();
        for (number, block) in blocks().enumerate() {
            let x = load::<T, L>(block);
            sum = sum.plus(x.minus(x));
            largest = x.abs().larger(largest);
            if number % GROUP == GROUP - 1 {
                words.extend(largest.values().map(|x| u64::from(x.to_bits())));
                largest = L::splat(0.0);
            }
        }
        let mut threshold = 0.0;
        if is_zero(sum) && words.len() >= self.kept {
            let at = words.len() - self.kept;
            threshold = f32::from_bits(*words.select_nth_unstable(at).1 as u32);
        }
        words.clear();
        let least = L::splat(threshold);
        for (number, block) in blocks().enumerate() {
            let mut bits = !load::<T, L>(block).abs().minus(least).negative();
            while bits != 0 {
                let place = number * LANES + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if place < count {
                    let magnitude = T::load(&self.elements[place * T::SIZE..]).abs();
                    // The bits of non-negative floats, as integers, are ordered like the floats. NaN counts as largest.
                    let rank = if magnitude.is_nan() { u32::MAX } else { magnitude.to_bits() };
                    words.push(u64::from(!rank) << 32 | place as u64);
                }
            }
        }
        places.clear();
        let found = words.len();
        words.extend_from_within(..);
        let (ordered, any) = words.split_at_mut(found);
        let last = *any.select_nth_unstable(self.kept - 1).1;
        places.extend(ordered.iter().filter(|key| **key <= last).map(|key| *key as u32));
    }
}

struct Decode<'a>(&'a ChunkedTopK, usize, &'a [u8], &'a mut [u8]);

impl ForFloat for Decode<'_> {
    type Output = Result<()>;

    fn run<T: Float>(self) -> Result<()> {
        let Decode(codec, count, part, elements) = self;
        let (scale, rest) = part.split_at(SCALE);
        let (positions, values) = rest.split_at(codec.lengths(count).0);
        let (scale, mut least) = (f32::load(scale), 0);
        for i in 0..codec.kept.of(count) {
            let at = i * POSITION / 8;
            let bits = u16::from_le_bytes([positions[at], positions[at + 1]]);
            let place = usize::from(bits >> (i * POSITION % 8) & 0xfff);
            if place < least || place >= count {
                return Err(Error::InvalidArgument(format!(
                    "a chunk of top_k has position {place}, which must be at least {least} and less than {count}"
                )));
            }
            least = place + 1;
            let value = values[i / 4] >> (i % 4 * VALUE) & 3;
            let magnitude = if !scale.is_finite() {
                f32::NAN
            } else if value & 2 == 2 {
                scale + scale
            } else {
                scale
            };
            T::store(if value & 1 == 1 { -magnitude } else { magnitude }, &mut elements[place * T::SIZE..]);
        }
        Ok(())
    }
}
