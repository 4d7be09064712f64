//! Memory: borrowed tensors on the host or a device, and memory that peers on this host map.
//!
//! One of the few rooms where `unsafe` is allowed: everything above works on slices and buffers of this module.

#![allow(unsafe_code)]

mod arena;
mod device;
mod host_memory;
mod mapping;
mod region;
mod shared_arena;
mod weight_lock;
mod weights;

pub use arena::Arena;
pub use device::{Buffer, BufferMut, Device, DeviceRef, Stamp, kind_of, name_of, same_place};
pub use host_memory::HostMemory;
pub use mapping::Mapping;
pub use region::Region;
pub use shared_arena::{Finder, KnownArena, LaneId, Mapped, MappedArenas, Registry, SharedArena};
pub use weight_lock::{Owner, Request, WeightGuard, WeightLock};
pub use weights::{ArenaBuffer, DeviceWeights, Locked, WeightStep, Weights};
