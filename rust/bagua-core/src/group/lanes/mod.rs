//! The lanes of one engine: all ranks of the group, the ranks of this host, and the hosts' first ranks.

mod exchanges;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub use exchanges::{CompressedAllReduce, CompressedRing};

use super::lane::{HostLanes, Lane, Options};
use super::membership::Group;
use crate::error::{Error, Result};
use crate::memory::{Device, DeviceRef};
use crate::recorder::Ticket;
use crate::reduce::divide;
use crate::request::{HostIo, Io, Verb};
use crate::types::{DType, Kind, ReduceOp, flags};

/// Bytes of one chunk, which passes through all phases of a hierarchical all_reduce before the next.
const CHUNK: usize = 512 << 10;

/// Rank of a host's first rank in the lane of that host.
const LEADER: usize = 0;

/// The lanes of one engine. The lanes by host are opened by the first operation that needs them.
pub struct Lanes {
    /// The lane of all ranks.
    pub global: Lane,
    /// Opens the lanes by host; `None` for a lane that belongs to no [`Group`].
    group: Option<Group>,
    hosts: Option<HostLanes>,
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

    /// The next operation is the one that was queued with this ticket, on whichever lane it is; `None`: it was not queued.
    pub(crate) fn expect(&mut self, ticket: Option<Ticket>) {
        self.global.expect(ticket);
        if let Some(hosts) = &mut self.hosts {
            hosts.intra.expect(None);
        }
    }

    /// The lanes by host. The first call opens them and is collective.
    ///
    /// # Errors
    /// `Mismatch` when another rank runs another operation; otherwise as [`Group::lane`].
    pub fn hosts(&mut self) -> Result<&mut HostLanes> {
        if self.hosts.is_none() {
            let Some(group) = &self.group else {
                return Err(Error::InvalidArgument(
                    "this lane belongs to no group and has no lanes by host".to_owned(),
                ));
            };
            // A rank that runs another operation is a mismatch here, instead of a timeout while opening lanes.
            let options = Options { flags: flags::HIERARCHICAL, label: "lanes by host", ..Options::DEFAULT };
            self.global.barrier(&options)?;
            self.hosts = Some(group.host_lanes()?);
        }
        let ticket = self.global.unused_ticket();
        let hosts = self.hosts.as_mut().ok_or_else(|| Error::other("the lanes by host were just opened"))?;
        hosts.intra.expect(ticket);
        Ok(hosts)
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
        op.check(dtype)?;
        let (size, payload) = (self.global.size(), io.len());
        let data = match io.into_host()? {
            HostIo::InPlace(data) => data,
            HostIo::Split { src, dst } if src.len() == dst.len() => {
                dst.copy_from_slice(src);
                dst
            }
            HostIo::Split { src, dst } => {
                let (src, dst) = (src.len() / dtype.size(), dst.len() / dtype.size());
                return Err(Error::InvalidArgument(format!("the source has {src} elements, the destination {dst}")));
            }
        };
        let sum = op.undivided();
        let HostLanes { intra, inter } = self.hosts()?;
        for chunk in data.chunks_mut(CHUNK) {
            intra.run(&options, dtype, Verb::Reduce { op: sum, root: LEADER }, Io::in_place(chunk))?;
            if let Some(inter) = inter {
                inter.run(&options, dtype, Verb::AllReduce(sum), Io::in_place(chunk))?;
                if op == ReduceOp::Avg {
                    divide(dtype, chunk, size);
                }
            }
            intra.run(&options, dtype, Verb::Broadcast { root: LEADER }, Io::in_place(chunk))?;
        }
        let stats = self.global.stats().of(Kind::AllReduce);
        stats.calls.fetch_add(1, Relaxed);
        stats.hierarchical.fetch_add(1, Relaxed);
        stats.payload_bytes.fetch_add(payload as u64, Relaxed);
        Ok(())
    }
}
