//! The lanes of one engine: all ranks of the group, the ranks of this host, and the hosts' first ranks.

use std::sync::Arc;

use super::group::Group;
use super::lane::{Lane, Options};
use crate::codec::{Codec, Exchange};
use crate::collective::{Collective, Hier};
use crate::error::{Error, Result};
use crate::memory::{Device, DeviceRef};
use crate::recorder::Ticket;
use crate::request::{Operands, Verb};
use crate::types::{DType, ReduceOp, flags};

/// The lanes of one engine. The collectives by host are connected by the first operation that needs them.
pub struct Lanes {
    /// The lane of all ranks.
    pub global: Lane,
    /// Connects the collectives by host; `None` for a lane that belongs to no [`Group`].
    group: Option<Group>,
    hosts: Option<Hier>,
    /// Those of the buckets that are communicated on the lanes, which are notified of the end.
    devices: Vec<Arc<dyn Device>>,
}

impl From<Lane> for Lanes {
    /// The lanes of a lane without a group, as tests and benchmarks build it: without lanes by host.
    fn from(global: Lane) -> Lanes {
        Lanes { global, group: None, hosts: None, devices: Vec::new() }
    }
}

impl Lanes {
    /// Opens the global lane of a group. Collective.
    ///
    /// # Errors
    /// As [`Group::lane`].
    pub fn of(group: &Group) -> Result<Lanes> {
        Ok(Lanes { global: group.lane()?, group: Some(group.clone()), hosts: None, devices: Vec::new() })
    }

    /// The next operation is the one that was queued with this ticket; `None`: it was not queued.
    pub fn expect(&mut self, ticket: Option<Ticket>) {
        self.global.expect(ticket);
    }

    /// Connects the collectives by host, unless they are.
    ///
    /// # Errors
    /// `Mismatch` when another rank runs another operation; otherwise as [`Lane::run`] and [`Group::lane`].
    fn connect_hosts(&mut self) -> Result<()> {
        if self.hosts.is_some() {
            return Ok(());
        }
        let Some(group) = &self.group else {
            return Err(Error::InvalidArgument("this lane belongs to no group and has no lanes by host".to_owned()));
        };
        // A rank that runs another operation is a mismatch here, instead of a timeout while connecting.
        let options = Options { flags: flags::HIERARCHICAL, label: "lanes by host", ..Options::DEFAULT };
        let ticket = self.global.unused_ticket();
        self.global.barrier(&options)?;
        self.global.expect(ticket);
        self.hosts = Some(group.by_machine()?);
        Ok(())
    }

    /// The buckets that are communicated from now on are on these devices, which are made ready for that.
    ///
    /// # Errors
    /// Whatever a device reports.
    pub fn prepare(&mut self, devices: Vec<Arc<dyn Device>>) -> Result<()> {
        devices.iter().try_for_each(|device| device.prepare())?;
        self.devices = devices;
        Ok(())
    }

    /// See [`crate::collective::Collective::end`] and [`Device::end`].
    pub fn end(&mut self) {
        self.devices.drain(..).for_each(|device| device.end());
        self.global.end();
        if let Some(hosts) = &mut self.hosts {
            hosts.end();
        }
    }

    /// Whether an all_reduce works on memory of this device, as `hierarchical` says.
    pub fn reaches(&self, place: DeviceRef<'_>, hierarchical: bool) -> bool {
        self.global.reaches(place) && (place.is_none() || !hierarchical || self.route_is_hierarchical())
    }

    /// True when the collective of the global lane reduces inside hosts first, or no two ranks of the group share a host.
    fn route_is_hierarchical(&self) -> bool {
        let Some(group) = &self.group else { return true };
        self.global.collective() != "net" || group.machines().iter().all(|machine| machine.len() == 1)
    }

    /// How many hosts the ranks are on; 1 for a lane that belongs to no group.
    fn host_count(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.machines().len())
    }

    /// Whether a compressed all_reduce, and the compressed ring, leave the tensor on this device, and encode it there.
    ///
    /// # Errors
    /// As [`Collective::codec_on`].
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

    /// Runs a verb on all ranks. With [`flags::HIERARCHICAL`] ranks of one host combine first, also where the collective of the global lane is
    /// flat: the result of an all_reduce then equals that of a hierarchical collective bitwise, and that of a flat one within rounding. In the
    /// verbs over exchange each host is one member then, see [`crate::collective::ByHost`]; a compressed all_reduce on one host is the plain one,
    /// bitwise. The result is equal on all ranks.
    ///
    /// # Errors
    /// As [`Lane::run`].
    pub fn run<'a>(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        verb: Verb<'_>,
        operands: impl Into<Operands<'a>>,
    ) -> Result<()> {
        let (mut options, mut verb, mut operands) = (*options, verb, operands.into());
        if options.flags & flags::HIERARCHICAL == 0 {
            return self.global.run(&options, dtype, verb, operands);
        }
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
