//! Random numbers that are the same on every rank.
//!
//! The generator is SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
//! Each record has its own generator: n1 is the first number after the state `seed`, n2 is the first number after the
//! state n1 + `draw`, and the record's generator starts with the state n2. Because of the step before the addition,
//! draw d of seed s differs from draw s of seed d.

pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    pub(super) fn of(seed: u64, draw: u64) -> SplitMix64 {
        let seeded = SplitMix64(seed).number();
        SplitMix64(SplitMix64(seeded.wrapping_add(draw)).number())
    }

    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number less than `bound`, all with the same probability. Source: Lemire, "Fast Random Integer
    /// Generation in an Interval", 2019.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        let mut product = u128::from(self.number()) * u128::from(bound);
        if (product as u64) < bound {
            let threshold = bound.wrapping_neg() % bound;
            while (product as u64) < threshold {
                product = u128::from(self.number()) * u128::from(bound);
            }
        }
        (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of the authors' C program from the state 1234567, as published with it
    /// (<https://prng.di.unimi.it/splitmix64.c>, <https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64>).
    #[test]
    fn the_generator_makes_the_published_numbers() {
        let mut generator = SplitMix64(1_234_567);
        let numbers = [(); 5].map(|()| generator.number());
        assert_eq!(
            numbers,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821
            ]
        );
    }

    #[test]
    fn every_number_below_a_bound_is_as_likely_as_any_other() {
        for bound in [1, 2, 3, 7, 100] {
            let mut generator = SplitMix64::of(1, 0);
            let mut seen = vec![0u32; bound as usize];
            let draws = 2000 * bound;
            (0..draws).for_each(|_| seen[generator.below(bound) as usize] += 1);
            // Each value should be drawn 2000 times, with a standard deviation below 45.
            assert!(seen.iter().all(|&times| times.abs_diff(2000) < 250), "{bound}: {seen:?}");
        }
    }

    #[test]
    fn seeds_and_draws_make_different_numbers() {
        let mut first: Vec<u64> =
            (0..32).flat_map(|seed| (0..32).map(move |draw| SplitMix64::of(seed, draw).number())).collect();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 32 * 32);
    }
}
