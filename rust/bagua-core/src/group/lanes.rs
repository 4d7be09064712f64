//! The lanes of one engine: all ranks of the group, the ranks of this host, and the hosts' first ranks.

use std::sync::atomic::Ordering::Relaxed;

use super::lane::{Lane, Options};
use super::membership::Group;
use crate::error::{Error, Result};
use crate::reduce::divide;
use crate::request::{HostIo, Io, Verb};
use crate::types::{DType, Kind, ReduceOp, flags};

/// Bytes that go through all phases of a hierarchical all_reduce at a time.
const CHUNK: usize = 512 << 10;

/// Index of a host's first rank in its lane.
const LEADER: usize = 0;

/// The lanes by host.
pub struct HostLanes {
    /// The ranks of this host; ranks in it are indices on the host.
    pub intra: Lane,
    /// The hosts' first ranks, on those only; ranks in it are indices of hosts.
    pub inter: Option<Lane>,
}

/// See the module. The lanes by host are opened by the first operation that asks for them.
pub struct Lanes {
    /// All ranks.
    pub global: Lane,
    /// Opens the lanes by host; `None` for a lane that belongs to no [`Group`].
    group: Option<Group>,
    hosts: Option<HostLanes>,
}

impl From<Lane> for Lanes {
    /// A lane without a group, as tests and benchmarks build it: it has no lanes by host.
    fn from(global: Lane) -> Lanes {
        Lanes { global, group: None, hosts: None }
    }
}

impl Lanes {
    /// The lanes of a group; opens the global one. Collective.
    ///
    /// # Errors
    /// As [`Group::lane`].
    pub fn of(group: &Group) -> Result<Lanes> {
        Ok(Lanes { global: group.lane()?, group: Some(group.clone()), hosts: None })
    }

    /// The lanes by host. The first call opens them: all ranks of the group make it at the same place of their program.
    ///
    /// # Errors
    /// `Mismatch` when another rank does something else; otherwise as [`Group::lane`].
    pub fn hosts(&mut self) -> Result<&mut HostLanes> {
        if self.hosts.is_none() {
            let Some(group) = &self.group else {
                return Err(Error::InvalidArgument(
                    "this lane belongs to no group and has no lanes by host".to_owned(),
                ));
            };
            // A rank that does not open them is found here and not by a deadline.
            let options = Options { flags: flags::HIERARCHICAL, label: "lanes by host", ..Options::DEFAULT };
            self.global.barrier(&options)?;
            self.hosts = Some(group.host_lanes()?);
        }
        self.hosts.as_mut().ok_or_else(|| Error::other("the lanes by host were just opened"))
    }

    /// True when the group's own route combines inside hosts first, or no two ranks of it share a host.
    fn route_is_hierarchical(&self) -> bool {
        let Some(group) = &self.group else { return true };
        self.global.collective() != "net" || group.machines().iter().all(|machine| machine.len() == 1)
    }

    /// All_reduce on all ranks. `hierarchical` combines inside hosts first, also where the group would go flat; the result then
    /// equals that of a group that goes by host bit for bit, and the flat one within rounding. All ranks must ask for the same.
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
