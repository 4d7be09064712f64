//! The codecs element by element, easy to read, as a reference for the fast loops.

use std::marker::PhantomData;

use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::types::DType;

struct Convert<'a, To>(&'a [u8], &'a mut [u8], PhantomData<To>);

impl<To: Float> ForFloat for Convert<'_, To> {
    type Output = ();

    fn run<T: Float>(self) {
        let Convert(elements, record, _) = self;
        let used = elements.len() / T::SIZE * To::SIZE;
        let (halves, padding) = record.split_at_mut(used);
        for (element, half) in elements.chunks_exact(T::SIZE).zip(halves.chunks_exact_mut(To::SIZE)) {
            To::store(T::load(element), half);
        }
        padding.fill(0);
    }
}

pub(super) fn encode<Half: Float>(dtype: DType, elements: &[u8], record: &mut [u8]) {
    for_dtype(dtype, Convert(elements, record, PhantomData::<Half>));
}

struct ConvertBack<'a, From>(&'a [u8], &'a mut [u8], PhantomData<From>);

impl<From: Float> ForFloat for ConvertBack<'_, From> {
    type Output = ();

    fn run<T: Float>(self) {
        let ConvertBack(record, elements, _) = self;
        for (half, element) in record.chunks_exact(From::SIZE).zip(elements.chunks_exact_mut(T::SIZE)) {
            T::store(From::load(half), element);
        }
    }
}

pub(super) fn decode<Half: Float>(dtype: DType, record: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, ConvertBack(record, elements, PhantomData::<Half>));
}
