//! A group of one rank, in which every operation is a copy or nothing.

use super::{Collective, HostIo, Incoming, Io, OpContext, Outgoing, Verb, over_exchange};
use crate::error::Result;
use crate::reduce;

/// The collective of a group of one rank.
///
/// # Examples
/// ```
/// use bagua_collectives::{Collective, Solo};
///
/// let solo = Solo::new();
/// assert_eq!((solo.name(), solo.rank(), solo.size()), ("solo", 0, 1));
/// assert_eq!(solo.transports(), ["self"]);
/// ```
#[derive(Debug, Default)]
pub struct Solo {}

impl Solo {
    /// Creates the collective of the only rank.
    pub fn new() -> Solo {
        Solo {}
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

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        if verb.is_over_exchange() {
            return over_exchange(self, cx, verb, io);
        }
        match (verb.op(), io.into_host()?) {
            // Even one input goes through the kernel, because it writes a bool as 0 or 1, as it does for more ranks.
            (Some(op), HostIo::InPlace(data)) => reduce::combine(cx.dtype(), op, &[None], data),
            (Some(op), HostIo::Split { src, dst }) => reduce::combine(cx.dtype(), op, &[Some(src)], dst),
            (None, HostIo::InPlace(_)) => {}
            // With one rank, a shard is the whole buffer.
            (None, HostIo::Split { src, dst }) => dst.copy_from_slice(src),
        }
        Ok(())
    }

    fn exchange(&mut self, _cx: &OpContext<'_>, _sends: &[Outgoing<'_>], _recvs: &mut [Incoming<'_>]) -> Result<()> {
        // A rank never sends messages to itself, and there is no other rank.
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use super::*;
    use crate::health::GroupHealth;
    use crate::stats::OpStats;
    use crate::types::{DType, Fingerprint, Kind, ReduceOp};
    use crate::wait::Deadline;

    #[test]
    fn with_one_rank_every_verb_returns_its_input() {
        let fingerprint = Fingerprint::new(Kind::AllReduce, DType::I32, 2);
        let (health, stats) = (GroupHealth::local(0, 1), OpStats::default());
        let deadline = Deadline::after(Duration::from_secs(60));
        let extra = &RefCell::default();
        let cx = OpContext { fingerprint, deadline, health: &health, stats: &stats, label: "", extra };
        let mut solo = Solo::new();
        for verb in Kind::ALL.into_iter().filter_map(|kind| Verb::of(kind, ReduceOp::Max, 0).ok()) {
            let src = [1, 2, 3, 4, 5, 6, 7, 8];
            let mut dst = [0; 8];
            solo.run(&cx, verb, Io::split(&src, &mut dst)).unwrap();
            assert_eq!(dst, src, "{verb:?}, split");
            solo.run(&cx, verb, Io::in_place(&mut dst)).unwrap();
            assert_eq!(dst, src, "{verb:?}, in place");
            solo.run(&cx, verb, Io::split(&[], &mut [])).unwrap();
        }
    }
}
