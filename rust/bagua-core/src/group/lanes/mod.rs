//! The lanes of one engine: all ranks of the group, the ranks of this host, and the hosts' first ranks.

mod exchanges;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub use exchanges::{CompressedAllReduce, CompressedRing};

use super::builder::HostCollectives;
use super::lane::{Lane, Options};
use super::membership::Group;
use crate::collective::{Collective, hier};
use crate::error::{Error, Result};
use crate::memory::{Device, DeviceRef};
use crate::recorder::Ticket;
use crate::request::{Io, OpContext, Verb};
use crate::types::{DType, Fingerprint, ReduceOp, flags};

/// Rank of a host's first rank in the lane of that host.
const LEADER: usize = 0;

/// The lanes of one engine. The collectives by host are connected by the first operation that needs them.
pub struct Lanes {
    /// The lane of all ranks.
    pub global: Lane,
    /// Connects the collectives by host; `None` for a lane that belongs to no [`Group`].
    group: Option<Group>,
    hosts: Option<HostCollectives>,
    /// Those of the buckets that are communicated on the lanes, which hear of the end.
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
    pub(crate) fn expect(&mut self, ticket: Option<Ticket>) {
        self.global.expect(ticket);
    }

    /// Runs an operation inside hosts and between them, as one of the global lane: one number, deadline, count and record. The first such
    /// call connects the collectives by host. `print` is of checked arguments.
    ///
    /// # Errors
    /// `Mismatch` when another rank runs another operation; otherwise as [`Lane::run`] and [`Group::lane`].
    fn by_host(
        &mut self,
        options: &Options<'_>,
        print: Fingerprint,
        payload: usize,
        body: impl FnOnce(&mut HostCollectives, &OpContext<'_>) -> Result<()>,
    ) -> Result<()> {
        let hosts = match &mut self.hosts {
            Some(hosts) => hosts,
            none => {
                let Some(group) = &self.group else {
                    return Err(Error::InvalidArgument(
                        "this lane belongs to no group and has no lanes by host".to_owned(),
                    ));
                };
                // A rank that runs another operation is a mismatch here, instead of a timeout while connecting.
                let options = Options { flags: flags::HIERARCHICAL, label: "lanes by host", ..Options::DEFAULT };
                let ticket = self.global.unused_ticket();
                self.global.barrier(&options)?;
                self.global.expect(ticket);
                none.insert(group.host_collectives()?)
            }
        };
        self.global.run_by(options, print, payload, |cx| {
            cx.stats.hierarchical.fetch_add(1, Relaxed);
            body(hosts, cx)
        })
    }

    /// The buckets that are communicated from now on are on these devices, which are made ready for that.
    ///
    /// # Errors
    /// Whatever a device reports.
    pub(crate) fn prepare(&mut self, devices: Vec<Arc<dyn Device>>) -> Result<()> {
        devices.iter().try_for_each(|device| device.prepare())?;
        self.devices = devices;
        Ok(())
    }

    /// See [`crate::collective::Collective::end`] and [`Device::end`].
    pub(crate) fn end(&mut self) {
        self.devices.drain(..).for_each(|device| device.end());
        self.global.end();
        if let Some(hosts) = &mut self.hosts {
            hosts.intra.end();
            if let Some(inter) = &mut hosts.inter {
                inter.end();
            }
        }
    }

    /// Whether [`Lanes::all_reduce`] works on memory of this device, as `hierarchical` says.
    pub fn reaches(&self, place: DeviceRef<'_>, hierarchical: bool) -> bool {
        self.global.reaches(place) && (place.is_none() || !hierarchical || self.route_is_hierarchical())
    }

    /// True when the collective of the global lane reduces inside hosts first, or no two ranks of the group share a host.
    fn route_is_hierarchical(&self) -> bool {
        let Some(group) = &self.group else { return true };
        self.global.collective() != "net" || group.machines().iter().all(|machine| machine.len() == 1)
    }

    /// All_reduce on all ranks. `hierarchical` reduces inside hosts first, also where the collective of the global lane is flat; the result
    /// then equals that of a hierarchical collective bitwise, and that of a flat one within rounding. Equal on all ranks.
    ///
    /// # Errors
    /// As [`Lane::run`].
    pub fn all_reduce(
        &mut self,
        options: &Options<'_>,
        dtype: DType,
        io: Io<'_>,
        op: ReduceOp,
        hierarchical: bool,
    ) -> Result<()> {
        if !hierarchical {
            return self.global.run(options, dtype, Verb::AllReduce(op), io);
        }
        let options = Options { flags: options.flags | flags::HIERARCHICAL, ..*options };
        if self.route_is_hierarchical() {
            return self.global.run(&options, dtype, Verb::AllReduce(op), io);
        }
        let print = self.global.print_of(&options, dtype, Verb::AllReduce(op), &io)?;
        let (size, payload) = (self.global.size(), io.len());
        let io = io.into_host()?;
        self.by_host(&options, print, payload, |HostCollectives { intra, inter }, cx| {
            let inter = inter.as_mut().map(|inter| &mut **inter as &mut dyn Collective);
            hier::all_reduce(&mut **intra, inter, size, cx, io, op)
        })
    }
}
