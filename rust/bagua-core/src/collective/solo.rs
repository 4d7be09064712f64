//! A group of one rank: every operation is a copy, or nothing.

use super::{Collective, Incoming, Io, OpContext, Outgoing};
use crate::error::Result;
use crate::reduce;
use crate::types::ReduceOp;

/// See the module.
#[derive(Debug, Default)]
pub struct Solo {}

impl Solo {
    /// The only rank.
    pub fn new() -> Solo {
        Solo {}
    }
}

/// With one rank a chunk is the whole buffer, wherever it comes from.
fn copy(io: Io<'_>) {
    match io {
        Io::InPlace(_) => {}
        Io::Split { src, dst } => dst.copy_from_slice(src),
    }
}

/// Even one input goes through the kernel: it writes a bool as 0 or 1, as it does for more ranks.
fn combine(cx: &OpContext<'_>, io: Io<'_>, op: ReduceOp) {
    match io {
        Io::InPlace(data) => reduce::combine(cx.dtype(), op, &[None], data),
        Io::Split { src, dst } => reduce::combine(cx.dtype(), op, &[Some(src)], dst),
    }
}

impl Collective for Solo {
    fn name(&self) -> &'static str {
        "solo"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn transports(&self) -> Vec<&'static str> {
        vec!["self"]
    }

    fn all_reduce(&mut self, cx: &OpContext<'_>, io: Io<'_>, op: ReduceOp) -> Result<()> {
        combine(cx, io, op);
        Ok(())
    }

    fn reduce(&mut self, cx: &OpContext<'_>, io: Io<'_>, op: ReduceOp, _root: usize) -> Result<()> {
        combine(cx, io, op);
        Ok(())
    }

    fn broadcast(&mut self, _call: &OpContext<'_>, _data: &mut [u8], _root: usize) -> Result<()> {
        Ok(())
    }

    fn all_gather(&mut self, _call: &OpContext<'_>, io: Io<'_>) -> Result<()> {
        copy(io);
        Ok(())
    }

    fn gather(&mut self, _call: &OpContext<'_>, io: Io<'_>, _root: usize) -> Result<()> {
        copy(io);
        Ok(())
    }

    fn scatter(&mut self, _call: &OpContext<'_>, io: Io<'_>, _root: usize) -> Result<()> {
        copy(io);
        Ok(())
    }

    fn reduce_scatter(&mut self, cx: &OpContext<'_>, io: Io<'_>, op: ReduceOp) -> Result<()> {
        combine(cx, io, op);
        Ok(())
    }

    fn all_to_all(&mut self, _call: &OpContext<'_>, io: Io<'_>) -> Result<()> {
        copy(io);
        Ok(())
    }

    fn exchange(&mut self, _call: &OpContext<'_>, _sends: &[Outgoing<'_>], _recvs: &mut [Incoming<'_>]) -> Result<()> {
        // Messages never go to the rank itself, and there is no other.
        Ok(())
    }

    fn barrier(&mut self, _call: &OpContext<'_>) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::health::GroupHealth;
    use crate::stats::OpStats;
    use crate::types::{DType, Fingerprint, Kind, Shape};
    use crate::wait::Deadline;

    /// Every verb that has an `Io`, by its place in the list.
    const VERBS: usize = 7;

    fn run(verb: usize, cx: &OpContext<'_>, io: Io<'_>) {
        let mut solo = Solo::new();
        match verb {
            0 => solo.all_reduce(cx, io, ReduceOp::Max),
            1 => solo.reduce(cx, io, ReduceOp::Max, 0),
            2 => solo.all_gather(cx, io),
            3 => solo.gather(cx, io, 0),
            4 => solo.scatter(cx, io, 0),
            5 => solo.reduce_scatter(cx, io, ReduceOp::Max),
            _ => solo.all_to_all(cx, io),
        }
        .unwrap();
    }

    #[test]
    fn with_one_rank_every_verb_gives_back_what_it_got() {
        let fingerprint = Fingerprint {
            epoch: 0,
            channel: 0,
            kind: Kind::AllReduce,
            seq: 0,
            dtype: DType::I32,
            op: None,
            root: None,
            count: 2,
            shape: Shape::flat(2),
        };
        let (health, stats) = (GroupHealth::local(0, 1), OpStats::default());
        let deadline = Deadline::after(Duration::from_secs(60));
        let cx = OpContext { fingerprint, deadline, health: &health, stats: &stats, label: "" };
        for verb in 0..VERBS {
            let src = [1, 2, 3, 4, 5, 6, 7, 8];
            let mut dst = [0; 8];
            run(verb, &cx, Io::Split { src: &src, dst: &mut dst });
            assert_eq!(dst, src, "verb {verb}, split");
            run(verb, &cx, Io::InPlace(&mut dst));
            assert_eq!(dst, src, "verb {verb}, in place");
            run(verb, &cx, Io::Split { src: &[], dst: &mut [] });
        }
    }
}
