//! `Arena`: memory for tensors that the ranks of a host access directly.

use bagua_core::memory::SharedArena;
use pyo3::prelude::*;

/// Memory for tensors that the other ranks of the host can map, to access them directly.
///
/// Users of the address must keep this object, which owns the memory. It may outlive the group.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Arena {
    core: SharedArena,
}

impl Arena {
    pub fn of(core: SharedArena) -> Arena {
        Arena { core }
    }
}

#[pymethods]
impl Arena {
    /// Address of the first byte; a multiple of the page size.
    #[getter]
    fn address(&self) -> usize {
        self.core.address()
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.core.len()
    }

    /// True if peers on this host can map this memory; otherwise the memory is private.
    #[getter]
    fn shared(&self) -> bool {
        self.core.is_shared()
    }
}
