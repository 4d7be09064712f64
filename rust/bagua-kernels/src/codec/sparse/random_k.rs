//! random_k: k places drawn at random without replacement, different ones for each draw. The values are not rescaled.
//!
//! The places come from Floyd's algorithm (Bentley and Floyd, "Programming pearls: a sample of brilliance", 1987): for
//! each j from count - k to count - 1, draw t from 0 to j, and add t to the set, or j if t is already in it. They
//! depend on the seed, the draw, the count and k, but not on the elements, so all ranks draw the same ones. See
//! [`super::random`] for the generator.
//!
//! The set is one bit per element, 1/32 of the size of float32 elements. A scan of it returns the places in order. If k
//! is a few tenths of a percent of the elements or more, this is faster than a hash table or a sort.
//!
//! If any element is not finite, drawn or not, all values are NaN.

use super::super::float::{Float, ForFloat, for_dtype};
use super::super::options::{CodecOption, Options};
use super::super::{Codec, Encoded, Exchange, Scratch};
use super::random::SplitMix64;
use super::record::Kept;
use crate::error::Result;
use crate::types::DType;

/// The codec random_k.
#[derive(Clone, Copy, Debug)]
pub struct RandomK {
    kept: Kept,
    seed: i64,
}

impl RandomK {
    pub(in super::super) fn new(options: &mut Options<'_>) -> Result<RandomK> {
        Ok(RandomK { kept: Kept::new(options)?, seed: options.int("seed", 1, 0)? })
    }

    /// Draws the places of a record into `scratch.places`.
    fn draw(&self, count: usize, draw: u64, scratch: &mut Scratch) {
        let kept = self.kept.of(count);
        let Scratch { words, places } = scratch;
        words.clear();
        words.resize(count.div_ceil(64), 0);
        places.clear();
        places.reserve(kept);
        let mut generator = SplitMix64::of(self.seed.cast_unsigned(), draw);
        for j in count - kept..count {
            let t = generator.below(j as u64 + 1) as usize;
            let chosen = if words[t / 64] >> (t % 64) & 1 == 1 { j } else { t };
            words[chosen / 64] |= 1 << (chosen % 64);
        }
        for (word, &(mut bits)) in words.iter().enumerate() {
            while bits != 0 {
                places.push((word * 64) as u32 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }
}

impl Codec for RandomK {
    fn id(&self) -> u8 {
        6
    }

    fn name(&self) -> &'static str {
        "random_k"
    }

    fn values(&self) -> Vec<(&'static str, CodecOption)> {
        vec![("k", self.kept.value()), ("seed", CodecOption::Int(self.seed))]
    }

    fn exchange(&self) -> Exchange {
        Exchange::OneShot
    }

    fn check_count(&self, count: usize) -> Result<()> {
        Kept::check(self.name(), count)
    }

    fn record_len(&self, count: usize, dtype: DType) -> usize {
        self.kept.record_len(count, dtype)
    }

    fn encode(&self, dtype: DType, elements: &[u8], record: &mut [u8], draw: u64, scratch: &mut Scratch) -> Encoded {
        let count = elements.len() / dtype.size();
        assert_eq!(record.len(), self.record_len(count, dtype), "length of the record");
        self.check_count(count).expect("a count that check_count accepts");
        self.draw(count, draw, scratch);
        let finite = for_dtype(dtype, AllFinite(elements));
        self.kept.write(dtype, elements, &scratch.places, !finite, record);
        if finite { Encoded::Finite } else { Encoded::NonFinite }
    }

    fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()> {
        self.kept.decode(self, dtype, record, elements)
    }
}

struct AllFinite<'a>(&'a [u8]);

impl ForFloat for AllFinite<'_> {
    type Output = bool;

    fn run<T: Float>(self) -> bool {
        self.0.chunks_exact(T::SIZE).map(T::load).all(f32::is_finite)
    }
}
