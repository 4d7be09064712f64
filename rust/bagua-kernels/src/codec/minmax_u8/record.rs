//! What the reference and the fast loops have in common.

/// Bytes before the elements.
pub(super) const HEADER: usize = 32;

/// The levels of a range, in float32.
#[derive(Clone, Copy)]
pub(super) struct Levels {
    /// Levels per unit.
    pub(super) scale: f32,
    /// The level of the largest element.
    pub(super) upper: f32,
}

impl Levels {
    /// The level that is written as 0.
    pub(super) fn lower(self) -> f32 {
        self.upper - 255.0
    }
}

/// The levels between two values; `None` when one of the quantities is not finite.
pub(super) fn levels(min: f32, max: f32) -> Option<Levels> {
    let range = max - min;
    let scale = 255.0 / (range + 1e-7);
    let upper = (max * scale).round_ties_even();
    (range.is_finite() && upper.is_finite() && (min * scale).is_finite()).then_some(Levels { scale, upper })
}
