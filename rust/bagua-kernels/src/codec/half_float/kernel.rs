//! The codecs in blocks of sixteen elements. They give the same bits as the reference.

use std::marker::PhantomData;

use super::super::float::{Float, ForFloat, for_dtype};
use super::super::simd::{Kernel, LANES, Lanes, Level, filled};
use crate::types::DType;

struct Convert<'a, From, To>(&'a [u8], &'a mut [u8], PhantomData<(From, To)>);

impl<From: Float, To: Float> Kernel for Convert<'_, From, To> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Convert(from, to, _) = self;
        let blocks = from.chunks_exact(LANES * From::SIZE);
        let left = blocks.remainder();
        let mut out = to.chunks_exact_mut(LANES * To::SIZE);
        for (block, out) in blocks.zip(&mut out) {
            To::store_lanes(From::load_lanes::<L>(block), out);
        }
        let end = out.into_remainder();
        if !left.is_empty() {
            let mut block = [0; 64];
            To::store_lanes(From::load_lanes::<L>(&filled(left)), &mut block);
            end.copy_from_slice(&block[..end.len()]);
        }
    }
}

struct Encode<'a, To>(Level, &'a [u8], &'a mut [u8], PhantomData<To>);

impl<To: Float> ForFloat for Encode<'_, To> {
    type Output = ();

    fn run<T: Float>(self) {
        let Encode(level, elements, record, _) = self;
        let (halves, padding) = record.split_at_mut(elements.len() / T::SIZE * To::SIZE);
        padding.fill(0);
        level.run(Convert(elements, halves, PhantomData::<(T, To)>));
    }
}

pub(super) fn encode<Half: Float>(level: Level, dtype: DType, elements: &[u8], record: &mut [u8]) {
    for_dtype(dtype, Encode(level, elements, record, PhantomData::<Half>));
}

struct Decode<'a, From>(Level, &'a [u8], &'a mut [u8], PhantomData<From>);

impl<From: Float> ForFloat for Decode<'_, From> {
    type Output = ();

    fn run<T: Float>(self) {
        let Decode(level, record, elements, _) = self;
        let halves = &record[..elements.len() / T::SIZE * From::SIZE];
        level.run(Convert(halves, elements, PhantomData::<(From, T)>));
    }
}

pub(super) fn decode<Half: Float>(level: Level, dtype: DType, record: &[u8], elements: &mut [u8]) {
    for_dtype(dtype, Decode(level, record, elements, PhantomData::<Half>));
}
