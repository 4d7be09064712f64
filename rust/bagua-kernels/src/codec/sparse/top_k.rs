//! top_k: the k elements with the largest magnitude. NaN counts as the largest; among equal ones, lower places win.
//!
//! Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017
//! (<https://arxiv.org/abs/1704.05021>). There, the caller must add the omitted elements to the next step's.

use super::super::float::{Float, ForFloat, for_dtype};
use super::super::options::{CodecOption, Options};
use super::super::{Codec, Encoded, Exchange, Scratch};
use super::record::Kept;
use crate::error::Result;
use crate::types::DType;

/// The codec top_k.
#[derive(Clone, Copy, Debug)]
pub struct TopK {
    kept: Kept,
}

impl TopK {
    pub(in super::super) fn new(options: &mut Options<'_>) -> Result<TopK> {
        Ok(TopK { kept: Kept::new(options)? })
    }
}

impl Codec for TopK {
    fn id(&self) -> u8 {
        5
    }

    fn name(&self) -> &'static str {
        "top_k"
    }

    fn values(&self) -> Vec<(&'static str, CodecOption)> {
        vec![("k", self.kept.value())]
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

    fn encode(&self, dtype: DType, elements: &[u8], record: &mut [u8], _draw: u64, scratch: &mut Scratch) -> Encoded {
        let count = elements.len() / dtype.size();
        assert_eq!(record.len(), self.record_len(count, dtype), "length of the record");
        self.check_count(count).expect("a count that check_count accepts");
        let kept = self.kept.of(count);
        let Scratch { words, places } = scratch;
        words.clear();
        for_dtype(dtype, Keys(elements, words));
        if kept < count {
            words.select_nth_unstable(kept);
        }
        places.clear();
        places.extend(words[..kept].iter().map(|&key| key as u32));
        places.sort_unstable();
        self.kept.write(dtype, elements, places, false, record);
        Encoded::Finite
    }

    fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()> {
        self.kept.decode(self, dtype, record, elements)
    }
}

/// Appends a key for each element, so that elements with smaller keys are chosen first. The upper half of a key is the
/// smaller, the larger the magnitude is. The lower half is the place, so no two keys are equal.
struct Keys<'a>(&'a [u8], &'a mut Vec<u64>);

impl ForFloat for Keys<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        let Keys(elements, keys) = self;
        keys.extend(elements.chunks_exact(T::SIZE).map(T::load).zip(0u64..).map(|(x, place)| {
            // The bits of magnitudes have the same order as the magnitudes. Only NaN is larger than infinity.
            let magnitude = if x.is_nan() { u32::MAX } else { x.abs().to_bits() };
            u64::from(!magnitude) << 32 | place
        }));
    }
}
