//! A set of processors.

use std::ffi::c_ulong;

/// Processors by their numbers, below [`Processors::MAX`]. The bits lie as Linux has them (`cpu_set_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Processors([c_ulong; Processors::MAX / BITS]);

/// Bits of a word.
const BITS: usize = c_ulong::BITS as usize;

impl Processors {
    /// The set holds no number from this one on.
    pub const MAX: usize = 1024;

    /// None.
    pub const NONE: Processors = Processors([0; Processors::MAX / BITS]);

    /// One.
    ///
    /// # Panics
    /// From [`Processors::MAX`] on.
    pub fn only(number: usize) -> Processors {
        let mut set = Processors::NONE;
        set.add(number);
        set
    }

    /// Adds one.
    ///
    /// # Panics
    /// From [`Processors::MAX`] on.
    pub fn add(&mut self, number: usize) {
        self.0[number / BITS] |= 1 << (number % BITS);
    }

    /// Takes one out.
    ///
    /// # Panics
    /// From [`Processors::MAX`] on.
    pub fn remove(&mut self, number: usize) {
        self.0[number / BITS] &= !(1 << (number % BITS));
    }

    /// Whether it has this one.
    ///
    /// # Panics
    /// From [`Processors::MAX`] on.
    pub fn contains(&self, number: usize) -> bool {
        self.0[number / BITS] & 1 << (number % BITS) != 0
    }

    /// How many it has.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Their numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..Processors::MAX).filter(|number| self.contains(*number)).take(self.count() as usize)
    }
}
