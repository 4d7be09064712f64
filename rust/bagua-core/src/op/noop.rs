//! An operation that does nothing, as a template for the others.

use super::{BucketCx, Op};
use crate::error::Result;

/// Does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoOp;

impl Op for NoOp {
    fn name(&self) -> &'static str {
        "noop"
    }

    fn run(&self, _cx: &mut BucketCx<'_>) -> Result<()> {
        Ok(())
    }
}
