//! Tensor memory: borrowed tensors on the host or on a device, and memory that peers on this host can map.
//!
//! One of the few modules that may use `unsafe`. All other code works on the slices and buffers of this module.

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
