//! The record of the sparse codecs, and the number of elements that it keeps.

use super::super::float::{Float, ForFloat, for_dtype};
use super::super::options::{CodecOption, Options};
use super::super::{Codec, aligned, check_len};
use crate::error::{Error, Result};
use crate::types::DType;

/// Size in bytes of an element's index in a record.
const PLACE: usize = size_of::<u32>();

/// The number of elements that a record keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kept {
    /// A fraction of the elements, in (0, 1]. The number is rounded up.
    Share(f64),
    /// A number of elements, at least 1. A tensor with fewer elements, such as the last bucket of a model, keeps all.
    Number(usize),
}

impl Kept {
    /// Takes the option k, by default 0.01.
    pub(super) fn new(options: &mut Options<'_>) -> Result<Kept> {
        match options.take("k") {
            None => Ok(Kept::Share(0.01)),
            Some(CodecOption::Float(share)) if share > 0.0 && share <= 1.0 => Ok(Kept::Share(share)),
            Some(CodecOption::Int(number)) if number >= 1 => Ok(Kept::Number(number as usize)),
            Some(value @ CodecOption::Float(_)) => Err(Error::InvalidArgument(format!(
                "{} k={value}: a share must be above 0.0 and at most 1.0",
                options.codec()
            ))),
            Some(value @ CodecOption::Int(_)) => {
                Err(Error::InvalidArgument(format!("{} k={value}: a number must be at least 1", options.codec())))
            }
        }
    }

    /// Returns the number of elements that are kept of `count`.
    pub(super) fn of(self, count: usize) -> usize {
        match self {
            Kept::Share(share) => ((share * count as f64).ceil() as usize).min(count),
            Kept::Number(number) => number.min(count),
        }
    }

    pub(super) fn value(self) -> CodecOption {
        match self {
            Kept::Share(share) => CodecOption::Float(share),
            Kept::Number(number) => CodecOption::Int(number as i64),
        }
    }

    pub(super) fn check(codec: &str, count: usize) -> Result<()> {
        if u32::try_from(count).is_err() {
            return Err(Error::InvalidArgument(format!("{codec} cannot encode {count} elements, only up to 2^32 - 1")));
        }
        Ok(())
    }

    pub(super) fn record_len(self, count: usize, dtype: DType) -> usize {
        aligned(self.of(count) * (PLACE + dtype.size()))
    }

    /// Writes a record of the elements at ascending `places`. If `nan`, all values are NaN.
    pub(super) fn write(self, dtype: DType, elements: &[u8], places: &[u32], nan: bool, record: &mut [u8]) {
        let size = dtype.size();
        let (head, rest) = record.split_at_mut(places.len() * PLACE);
        let (values, padding) = rest.split_at_mut(places.len() * size);
        let of_nan = &nan_of(dtype)[..size];
        for ((place, head), value) in places.iter().zip(head.chunks_exact_mut(PLACE)).zip(values.chunks_exact_mut(size))
        {
            head.copy_from_slice(&place.to_le_bytes());
            let at = *place as usize * size;
            value.copy_from_slice(if nan { of_nan } else { &elements[at..at + size] });
        }
        padding.fill(0);
    }

    pub(super) fn decode(self, codec: &dyn Codec, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()> {
        let count = check_len(codec, dtype, record, elements)?;
        codec.check_count(count)?;
        let (size, kept) = (dtype.size(), self.of(count));
        let (head, values) = record.split_at(kept * PLACE);
        let mut least = 0;
        let places = || head.chunks_exact(PLACE).map(|place| u32::from_le_bytes(place.try_into().expect("four bytes")));
        for place in places() {
            let place = place as usize;
            if place < least || place >= count {
                return Err(Error::InvalidArgument(format!(
                    "a record of {} has place {place}, which must be at least {least} and less than {count}",
                    codec.name()
                )));
            }
            least = place + 1;
        }
        elements.fill(0);
        for (place, value) in places().zip(values.chunks_exact(size)) {
            let at = place as usize * size;
            elements[at..at + size].copy_from_slice(value);
        }
        Ok(())
    }
}

/// Returns NaN in an element type, in the first bytes.
fn nan_of(dtype: DType) -> [u8; 4] {
    struct Nan<'a>(&'a mut [u8; 4]);
    impl ForFloat for Nan<'_> {
        type Output = ();
        fn run<T: Float>(self) {
            T::store(f32::NAN, self.0);
        }
    }
    let mut bytes = [0; 4];
    for_dtype(dtype, Nan(&mut bytes));
    bytes
}
