//! Sets of processors.

use std::ffi::c_ulong;

/// A set of processor numbers below [`Processors::MAX`], with the bit layout of Linux (`cpu_set_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Processors([c_ulong; Processors::MAX / BITS]);

const BITS: usize = c_ulong::BITS as usize;

impl Processors {
    /// Upper limit: all processor numbers are below it.
    pub const MAX: usize = 1024;

    /// The empty set.
    pub const NONE: Processors = Processors([0; Processors::MAX / BITS]);

    /// Returns the set with one processor. Panics if `number` is [`Processors::MAX`] or more.
    pub fn only(number: usize) -> Processors {
        let mut set = Processors::NONE;
        set.add(number);
        set
    }

    /// Adds a processor. Panics if `number` is [`Processors::MAX`] or more.
    pub fn add(&mut self, number: usize) {
        self.0[number / BITS] |= 1 << (number % BITS);
    }

    /// Removes a processor. Panics if `number` is [`Processors::MAX`] or more.
    pub fn remove(&mut self, number: usize) {
        self.0[number / BITS] &= !(1 << (number % BITS));
    }

    /// True if the set contains this processor. Panics if `number` is [`Processors::MAX`] or more.
    pub fn contains(&self, number: usize) -> bool {
        self.0[number / BITS] & 1 << (number % BITS) != 0
    }

    /// Returns the number of processors in the set.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the numbers of the processors, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..Processors::MAX).filter(|number| self.contains(*number)).take(self.count() as usize)
    }
}
