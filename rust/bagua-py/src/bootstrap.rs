//! `Bootstrap`: a rank that listens, and then connects to the other ranks of a group.

use std::sync::Mutex;

use bagua_core::engine as core;
use bagua_core::error::Error;
use bagua_core::group;
use bagua_core::wait::lock;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::config::GroupConfig;
use crate::errors;
use crate::gil::DropWithoutGil;
use crate::group::Communicator;
use crate::interrupt;

/// A rank that listens and has an address, but is not connected to any peer.
///
/// Raises BaguaError when the socket cannot be opened.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Bootstrap {
    address: Vec<u8>,
    world_size: usize,
    /// The rank that listens. `None` after `connect` and `close`.
    core: Mutex<Option<DropWithoutGil<group::Bootstrap>>>,
}

#[pymethods]
impl Bootstrap {
    #[new]
    fn new(py: Python<'_>, config: &GroupConfig) -> PyResult<Bootstrap> {
        let config = config.core();
        let world_size = config.world_size;
        let raise = |error| errors::raise(py, error);
        let core = py.detach(|| group::Bootstrap::bind(config)).map_err(raise)?;
        let address = core.address().to_vec();
        Ok(Bootstrap { address, world_size, core: Mutex::new(Some(DropWithoutGil::new(core))) })
    }

    /// This rank's address: opaque bytes that all ranks need for `connect`.
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.address)
    }

    /// Connects to all peers and opens the group's main lane. `addresses[r]` is the address of rank r. Only once.
    ///
    /// Every 50 to 200 ms, `waiting` is called with the ranks that this rank waits for. Raises BaguaTimeoutError, which
    /// names the ranks that did not connect within `connect_timeout`.
    #[pyo3(signature = (addresses, waiting=None))]
    fn connect(
        &self,
        py: Python<'_>,
        addresses: Vec<Vec<u8>>,
        waiting: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Communicator> {
        let raise = |error| errors::raise(py, error);
        if addresses.len() != self.world_size {
            let text = format!("{} addresses for a world of {} ranks", addresses.len(), self.world_size);
            return Err(raise(Error::InvalidArgument(text)));
        }
        let bootstrap = lock(&self.core).take();
        let bootstrap = bootstrap.ok_or_else(|| raise(Error::other("this rank has connected already")))?;
        let awaited = bootstrap.awaited();
        let waiting = waiting.as_ref().map(|function| (function, &awaited));
        let connect = move || core::Communicator::new(bootstrap.into_inner().connect(&addresses)?);
        let core = interrupt::run_and_report(py, waiting, connect)?;
        Ok(Communicator::of(core))
    }
    /// Stops listening and ends the control thread. Has no effect after `connect`.
    ///
    /// Without this call, both end with this object, which the traceback of an error may keep alive.
    fn close(&self) {
        let core = lock(&self.core).take();
        drop(core);
    }
}
