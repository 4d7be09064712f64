//! Operations that combine inside hosts first, for a lane whose collective does not know hosts: by a collective over
//! the ranks of this host, and one over the hosts' first ranks.

use super::{Lanes, Options};
use crate::codec::{Codec, Exchange};
use crate::collective::Collective;
use crate::error::{Error, Result};
use crate::memory::DeviceRef;
use crate::request::{Operands, Verb};
use crate::types::{DType, ReduceOp, flags};

impl Lanes {
    /// Connects the two collectives by host, unless they are connected already. Fails with `Mismatch` if another rank
    /// runs another operation. Also returns the errors of [`Lane::run`](super::Lane::run) and
    /// [`Group::lane`](crate::Group::lane).
    fn connect_hosts(&mut self) -> Result<()> {
        if self.hosts.is_some() {
            return Ok(());
        }
        let Some(group) = &self.group else {
            return Err(Error::InvalidArgument(
                "this channel belongs to no group and has no channels by host".to_owned(),
            ));
        };
        // With this barrier, a rank that runs another operation causes a mismatch instead of a timeout while
        // connecting.
        let options = Options { flags: flags::HIERARCHICAL, label: "channels by host", ..Options::DEFAULT };
        let ticket = self.global.queued.take();
        let met = self.global.barrier(&options);
        self.global.queued = ticket;
        met?;
        self.hosts = Some(group.by_machine()?);
        Ok(())
    }

    /// True if the collective of the global lane reduces inside hosts first, or if no two ranks of the group share a
    /// host.
    pub(super) fn route_is_hierarchical(&self) -> bool {
        let Some(group) = &self.group else { return true };
        self.global.collective() != "net" || group.machines().iter().all(|machine| machine.len() == 1)
    }

    /// Returns the number of hosts of the ranks, or 1 for a lane that belongs to no group.
    fn host_count(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.machines().len())
    }

    /// True if a compressed all_reduce or compressed ring encodes a tensor of this device on the device. Returns the
    /// errors of [`Collective::codec_on`].
    pub fn encodes_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
        hierarchical: bool,
    ) -> Result<bool> {
        let one_host = hierarchical && self.host_count() == 1;
        if place.is_none() || codec.exchange() != Exchange::TwoShot || !self.reaches(place, one_host) {
            return Ok(false);
        }
        self.global.codec_on(place, codec, dtype).map(|found| found.is_some())
    }

    /// Runs a verb as [`Lanes::run`] does with [`flags::HIERARCHICAL`].
    pub(super) fn run_by_host(
        &mut self,
        mut options: Options<'_>,
        dtype: DType,
        mut verb: Verb<'_>,
        mut operands: Operands<'_>,
    ) -> Result<()> {
        if let Verb::CompressedAllReduce(how) = verb
            && self.host_count() == 1
        {
            let print = self.global.print_of(&options, dtype, verb, &operands, 1)?;
            (options.tag, options.codec) = (print.tag, print.codec);
            verb = Verb::AllReduce(if how.divisor == 1 { ReduceOp::Sum } else { ReduceOp::Avg });
        }
        match verb {
            Verb::AllReduce(_) if !self.route_is_hierarchical() => operands.io = operands.io.into_host()?.into(),
            Verb::CompressedAllReduce(_) | Verb::NeighborAverage { .. } | Verb::CompressedRing { .. } => {}
            _ => return self.global.run(&options, dtype, verb, operands),
        }
        let print = self.global.print_of(&options, dtype, verb, &operands, self.host_count())?;
        self.connect_hosts()?;
        let hosts = self.hosts.as_mut().map(|hosts| hosts as &mut dyn Collective);
        self.global.perform(hosts, &options, print, verb, operands)
    }
}
