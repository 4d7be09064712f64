//! Operations in stages: what a rank does with a chunk before and after others combine it, and in which order.

use std::ops::Range;

use crate::error::Result;

/// What belongs to an all_reduce besides the ranks that run it: they call it chunk by chunk, in the order of [`Chunks`].
pub trait Stages {
    /// Puts what this rank contributes into a chunk, which lies at `range` of the tensor.
    ///
    /// # Errors
    /// Whatever goes wrong; it ends the all_reduce.
    fn before(&mut self, range: Range<usize>, chunk: &mut [u8]) -> Result<()>;

    /// Passes a combined chunk on.
    ///
    /// # Errors
    /// As [`Stages::before`].
    fn after(&mut self, chunk: &mut [u8]) -> Result<()>;
}

/// A step of [`Stages`], and its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// [`Stages::before`].
    Before(usize),
    /// [`Stages::after`].
    After(usize),
}

/// The chunks of a tensor and the order of their steps, which follow from the length alone, so that all ranks agree.
/// While a chunk travels, the next `ahead` are prepared.
#[derive(Clone, Copy, Debug)]
pub struct Chunks {
    /// Bytes of the tensor.
    pub len: usize,
    /// Bytes of a chunk, the last one excepted.
    pub each: usize,
    /// How many chunks are prepared before the one before them is passed on.
    pub ahead: usize,
}

impl Chunks {
    /// How many; one empty chunk of an empty tensor, so that fingerprints are compared all the same.
    pub fn count(&self) -> usize {
        self.len.div_ceil(self.each).max(1)
    }

    /// The bytes of a chunk.
    pub fn range(&self, chunk: usize) -> Range<usize> {
        (chunk * self.each).min(self.len)..((chunk + 1) * self.each).min(self.len)
    }

    /// Step `number`; `None` after the last.
    pub fn stage(&self, number: usize) -> Option<Stage> {
        let count = self.count();
        let ahead = self.ahead.min(count);
        // `ahead` times before, then in turns, then `ahead` times after.
        let turns = 2 * (count - ahead);
        if number < ahead {
            return Some(Stage::Before(number));
        }
        let at = number - ahead;
        if at >= turns {
            let chunk = count - ahead + (at - turns);
            return (chunk < count).then_some(Stage::After(chunk));
        }
        Some(if at.is_multiple_of(2) { Stage::Before(ahead + at / 2) } else { Stage::After(at / 2) })
    }

    /// All steps in order.
    pub fn stages(&self) -> impl Iterator<Item = Stage> + use<> {
        let chunks = *self;
        (0..).map_while(move |number| chunks.stage(number))
    }
}

/// Takes all steps of a tensor in order, and combines each chunk before it is passed on.
pub(super) fn chunk_by_chunk(
    data: &mut [u8],
    chunks: Chunks,
    stages: &mut dyn Stages,
    mut combine: impl FnMut(&mut [u8]) -> Result<()>,
) -> Result<()> {
    for stage in chunks.stages() {
        match stage {
            Stage::Before(chunk) => stages.before(chunks.range(chunk), &mut data[chunks.range(chunk)])?,
            Stage::After(chunk) => {
                let chunk = &mut data[chunks.range(chunk)];
                combine(chunk)?;
                stages.after(chunk)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_prepared_and_passed_on_once_in_order_and_never_further_ahead_than_allowed() {
        for (len, each, ahead) in [(0, 8, 1), (1, 8, 2), (8, 8, 1), (9, 8, 1), (80, 8, 2), (81, 8, 3), (24, 8, 9)] {
            let chunks = Chunks { len, each, ahead };
            let (mut prepared, mut passed, mut bytes) = (0, 0, 0);
            for stage in chunks.stages() {
                match stage {
                    Stage::Before(chunk) => {
                        assert_eq!(chunk, prepared);
                        assert_eq!(chunks.range(chunk).start, bytes);
                        bytes = chunks.range(chunk).end;
                        prepared += 1;
                    }
                    Stage::After(chunk) => {
                        assert!(chunk == passed && passed < prepared);
                        passed += 1;
                    }
                }
                assert!(prepared - passed <= ahead + 1, "{len} bytes by {each}");
            }
            assert_eq!((prepared, passed, bytes), (chunks.count(), chunks.count(), len));
        }
    }
}
