//! The operation that does nothing: the shape of every other one.

use super::{BucketCx, Op};
use crate::error::Result;

/// See the module.
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
