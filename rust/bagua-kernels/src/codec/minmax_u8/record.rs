//! Code that the reference and the fast loops share.

/// Number of bytes before the levels.
pub(super) const HEADER: usize = 32;

/// The levels of a range of values, in float32.
#[derive(Clone, Copy)]
pub(super) struct Levels {
    /// Number of levels per unit.
    pub(super) scale: f32,
    /// Level of the largest element.
    pub(super) upper: f32,
}

impl Levels {
    /// Returns the level that is written as 0.
    pub(super) fn lower(self) -> f32 {
        self.upper - 255.0
    }
}

/// Returns the levels between two values, or `None` if one of the numbers is not finite.
pub(super) fn levels(min: f32, max: f32) -> Option<Levels> {
    let range = max - min;
    let scale = 255.0 / (range + 1e-7);
    let upper = (max * scale).round_ties_even();
    (range.is_finite() && upper.is_finite() && (min * scale).is_finite()).then_some(Levels { scale, upper })
}
