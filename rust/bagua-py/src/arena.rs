//! `Arena`: memory for tensors in which same-host peers work in place.

use bagua_core::memory::SharedArena;
use pyo3::prelude::*;

/// This rank's part of an arena: memory for tensors in which the ranks of a host work in place.
///
/// Whoever uses the address keeps this object: the memory goes with it. It may outlive the group.
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
    /// Of the first byte; a multiple of the page size.
    #[getter]
    fn address(&self) -> usize {
        self.core.address()
    }

    /// Bytes of this rank's part.
    #[getter]
    fn nbytes(&self) -> usize {
        self.core.len()
    }

    /// True when peers on this host see this memory; otherwise it is this process's alone.
    #[getter]
    fn shared(&self) -> bool {
        self.core.is_shared()
    }
}
