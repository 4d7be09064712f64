//! The Python bindings of bagua-core: a table of contents, no logic.
//!
//! | file | what it binds or does |
//! |---|---|
//! | `bootstrap` | `Bootstrap`: a rank that is joining a group |
//! | `group` | `Communicator`: a group's verbs by address |
//! | `plain_tensor_verbs` | its blocking verbs on plain tensors in one call |
//! | `arena` | `Arena`: memory that the ranks of a host share |
//! | `engine` | `Engine`: a queue of buckets with a communication thread |
//! | `bucket` | `Bucket`: tensors that are communicated together, and their operations |
//! | `handle` | `Handle`: an operation that may still be running |
//! | `average` | `Averager`, `WeightLock`: asynchronous averaging of a model's weights |
//! | `config` | `GroupConfig`: the parameters of a group |
//! | `codec` | `Codec`: compression |
//! | `compressed` | `CompressedExchange`: a compressed all_reduce over another communication library |
//! | `cuda` | `CudaLibraries`: the libraries and devices of CUDA, and the compiler of kernels |
//! | `cuda_call` | `CudaDevice`, `CudaCall`: a device, and the device's side of one operation |
//! | `join_server` | `JoinServer`: the server by which processes join a running elastic job |
//! | `verb_arguments` | a verb's codes and addresses become one request |
//! | `recorder` | the flight recorder |
//! | `rendezvous` | exchanging addresses; the version of this build |
//! | `store` | `StoreServer`, `Store`: a key-value store for the processes of a job |
//! | `core_constants` | the tables of the core: codes by name, and names |
//! | `tls` | `Tls`: encrypted connections |
//! | `gil` | releasing the GIL around blocking operations and drops |
//! | `interrupt` | signals during waits |
//! | `user_callback` | calling a user's function on a thread that Python did not start |
//! | `address_to_region` | addresses become regions of memory, by unsafe functions |
//! | `tensor_reader` | address, size and type of a tensor or an array |
//! | `errors` | core errors become Python exceptions |

#![deny(unsafe_code)]

mod address_to_region;
mod arena;
mod average;
mod bootstrap;
mod bucket;
mod codec;
mod compressed;
mod config;
mod core_constants;
mod cuda;
mod cuda_call;
mod engine;
mod errors;
mod gil;
mod group;
mod handle;
mod interrupt;
mod join_server;
mod plain_tensor_verbs;
mod recorder;
mod rendezvous;
mod stats;
mod store;
mod tensor_reader;
mod tls;
mod user_callback;
mod verb_arguments;

/// The Rust core of Bagua. Import `bagua` instead: this module takes addresses and codes.
#[pyo3::pymodule]
mod _bagua {
    #[pymodule_export]
    use crate::arena::Arena;
    #[pymodule_export]
    use crate::average::{Averager, WeightLock};
    #[pymodule_export]
    use crate::bootstrap::Bootstrap;
    #[pymodule_export]
    use crate::bucket::{AsyncModelAverage, Bucket, check_peer_selection};
    #[pymodule_export]
    use crate::codec::Codec;
    #[pymodule_export]
    use crate::compressed::CompressedExchange;
    #[pymodule_export]
    use crate::config::GroupConfig;
    #[pymodule_export]
    use crate::core_constants::tables;
    #[pymodule_export]
    use crate::cuda::CudaLibraries;
    #[pymodule_export]
    use crate::cuda_call::{CudaCall, CudaDevice};
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::group::Communicator;
    #[pymodule_export]
    use crate::handle::{Handle, wait_for_callbacks};
    #[pymodule_export]
    #[pymodule_export]
    use crate::join_server::JoinServer;
    #[pymodule_export]
    use crate::recorder::flight_recorder;
    #[pymodule_export]
    use crate::rendezvous::{
        RendezvousServer, local_address_towards, rendezvous_at, rendezvous_file, rendezvous_tcp, version,
    };
    #[pymodule_export]
    use crate::store::{Store, StoreServer};
    #[pymodule_export]
    use crate::tensor_reader::{TensorReader, read_array};
    #[pymodule_export]
    use crate::tls::Tls;
}
